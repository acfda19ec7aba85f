//! Which processes are hot, and what it takes to hook them inline while they run.

use crate::kernel::handover::HandoverMap;
use crate::record::budget::heat::Heat;

/// Time between looks for hot processes.
const LOOK_NS: u64 = 1_000_000_000;
/// The same while new processes come: a program that runs for a second or two would be over before a look found it twice.
const LOOK_AT_NEW_NS: u64 = LOOK_NS / 4;
/// The least time between looks after a process had its first sample: it may be hot by now. Looks come less and less often then, each
/// when twice as much time has gone by, so that probes count a process at most for twice as long as it takes to get hot.
const LOOK_AT_SAMPLED_NS: u64 = LOOK_NS / 200;

/// Processes that are hooked inline once they are hot.
pub(super) struct Hot {
    pub(super) heat: Heat,
    pub(super) handover: HandoverMap,
    pub(super) looks: Looks,
}

impl Hot {
    /// None is known.
    pub(super) fn new(handover: HandoverMap) -> Self {
        Self { heat: Heat::default(), handover, looks: Looks::default() }
    }

    /// It was looked for hot processes.
    pub(super) fn looked(&mut self, now_ns: u64) {
        self.looks.looked(self.heat.has_new(), now_ns);
    }
}

/// When hot processes are looked for. Times are CLOCK_MONOTONIC.
#[derive(Debug, Default)]
pub(super) struct Looks {
    /// The next look.
    pub(super) next_ns: u64,
    last_ns: u64,
    /// When it was last known of a process that it has its first sample.
    sampled_ns: Option<u64>,
}

impl Looks {
    /// A process has its first sample, as is known now.
    pub(super) fn sampled(&mut self, now_ns: u64) {
        self.sampled_ns = Some(now_ns);
        self.next_ns = self.next_ns.min(self.last_ns + LOOK_AT_SAMPLED_NS);
    }

    /// A look found processes that the one before did not, or none.
    fn looked(&mut self, has_new: bool, now_ns: u64) {
        self.last_ns = now_ns;
        let longest_ns = if has_new { LOOK_AT_NEW_NS } else { LOOK_NS };
        let since_ns = self.sampled_ns.map_or(LOOK_NS, |sampled_ns| now_ns.saturating_sub(sampled_ns));
        self.next_ns = now_ns + since_ns.clamp(LOOK_AT_SAMPLED_NS, longest_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_come_often_after_a_first_sample_and_less_and_less_so() {
        let mut looks = Looks::default();
        looks.looked(false, 7 * LOOK_NS);
        assert_eq!(looks.next_ns, 8 * LOOK_NS);
        looks.looked(true, 8 * LOOK_NS);
        assert_eq!(looks.next_ns, 8 * LOOK_NS + LOOK_AT_NEW_NS);
        // Of one that is long over the next look is due at once, and then there are more.
        let sampled_ns = 8 * LOOK_NS + LOOK_AT_NEW_NS / 2;
        looks.sampled(sampled_ns);
        assert!(looks.next_ns < sampled_ns);
        let mut after_ms = Vec::new();
        looks.looked(false, sampled_ns);
        while looks.next_ns - looks.last_ns < LOOK_NS {
            after_ms.push((looks.next_ns - sampled_ns) / 1_000_000);
            looks.looked(false, looks.next_ns);
        }
        assert_eq!(after_ms, [5, 10, 20, 40, 80, 160, 320, 640, 1280]);
        // Another sample right after a look does not bring the next one at once.
        let last_ns = looks.last_ns;
        looks.sampled(last_ns + 1);
        assert_eq!(looks.next_ns, last_ns + LOOK_AT_SAMPLED_NS);
    }
}
