//! Reports once what inline hooks would cost instead, where probes take much of a target's time. Pure.

use heapbpf_profile::units;

use crate::cost::measure::Measured;

/// Share of a target's CPU time above which it is reported.
const WORTH_A_WORD: f64 = 0.02;

/// What has been reported.
#[derive(Debug, Default)]
pub struct InlineAdvice {
    is_done: bool,
    refusals: u32,
    note: Option<String>,
}

/// Checks that may find a target refused before the advice is dropped: a process that forks, or loads a library, is
/// refused for a moment.
const MOST_REFUSALS: u32 = 20;

impl InlineAdvice {
    /// Whether there is something to report. `share`: probe time per time of the target's own work.
    pub fn is_due(&self, share: f64) -> bool {
        !self.is_done && of_all(share) > WORTH_A_WORD
    }

    /// Notes that the target could not be hooked inline at this check.
    pub fn refused(&mut self) {
        self.refusals += 1;
        self.is_done |= self.refusals >= MOST_REFUSALS;
    }

    /// Notes what inline hooks would take of this target, if their cost was measured. Returns the line to log at once.
    pub fn tell(&mut self, comm: &str, share: f64, measured: &Measured) -> Option<&str> {
        self.is_done = true;
        let probes = measured.costs.allocation_ns + measured.costs.free_ns;
        let inline = share * measured.inline_pair_ns? / probes;
        if !inline.is_finite() || inline >= share {
            return None;
        }
        let percent = |share| units::percent(of_all(share));
        self.note = Some(format!(
            "probes take {} of the CPU time of {comm}; --hook inline would take {}{} (docs/inline.md)",
            percent(share),
            if measured.inline_is_bound { "under " } else { "" },
            percent(inline)
        ));
        self.note.as_deref()
    }

    /// The note for the profile.
    pub fn note(&self) -> Option<String> {
        self.note.clone()
    }
}

/// Converts to a share of all CPU time, including that of probes.
fn of_all(share: f64) -> f64 {
    share / (1.0 + share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::budget::ProbeCosts;

    fn measured(inline_pair_ns: Option<f64>) -> Measured {
        Measured {
            identity: String::new(),
            allocator: String::new(),
            allocation_kind: String::new(),
            free_kind: String::new(),
            bare_pair_ns: 8.0,
            costs: ProbeCosts { allocation_ns: 500.0, free_ns: 500.0, sample_ns: 3000.0 },
            inline_pair_ns,
            inline_is_bound: false,
            no_ops: None,
            nothing_ns: std::collections::BTreeMap::new(),
        }
    }

    #[test]
    fn it_is_said_once_with_both_shares() {
        let mut advice = InlineAdvice::default();
        assert!(!advice.is_due(0.02));
        assert!(advice.is_due(0.45));
        let told = advice.tell("postgres", 0.45, &measured(Some(2.0))).map(str::to_owned);
        let line = "probes take 31 % of the CPU time of postgres; --hook inline would take 0.1 % (docs/inline.md)";
        assert_eq!(told.as_deref(), Some(line));
        assert_eq!(advice.note().as_deref(), Some(line));
        assert!(!advice.is_due(9.0));
        let bound = Measured { inline_is_bound: true, ..measured(Some(2.0)) };
        let told = InlineAdvice::default().tell("x", 0.45, &bound).map(str::to_owned);
        assert!(told.is_some_and(|told| told.contains("--hook inline would take under 0.1 %")));
    }

    #[test]
    fn without_a_measurement_or_a_gain_nothing_is_said() {
        for inline in [None, Some(2000.0)] {
            let mut advice = InlineAdvice::default();
            assert_eq!(advice.tell("x", 1.0, &measured(inline)), None);
            assert_eq!((advice.note(), advice.is_due(1.0)), (None, false));
        }
        let mut advice = InlineAdvice::default();
        for _ in 0..MOST_REFUSALS {
            assert!(advice.is_due(1.0), "a refusal may be for a moment");
            advice.refused();
        }
        assert!(!advice.is_due(1.0));
    }
}
