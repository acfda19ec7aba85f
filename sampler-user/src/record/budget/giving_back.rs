//! When frees are tracked again after they were given up: once load has been low for some time, which grows if they have to
//! be given up again soon. Pure.

/// How long load must be low before frees are tracked again for the first time.
const FIRST_WAIT_NS: u64 = 10_000_000_000;
/// The longest such time.
const LONGEST_WAIT_NS: u64 = 600_000_000_000;
/// If frees are given up again within this many waits, the next wait is twice as long; otherwise it is half as long.
const WAITS_KEPT: u64 = 8;

/// Whether there is room in the budget for the frees that were given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// Not even without them.
    None,
    /// Not for all of them.
    ForSome,
    /// For all of them.
    ForAll,
}

/// What is to be taken up again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TakeUp {
    /// All frees.
    All,
    /// Those that there is room for.
    Some,
}

/// Since when there has been room, and how long that must last.
#[derive(Debug)]
pub(super) struct GivingBack {
    wait_ns: u64,
    /// When load became low, and whether there has been room for all frees since then.
    calm: Option<(u64, bool)>,
    /// When frees were last taken up.
    taken_up_ns: Option<u64>,
}

impl Default for GivingBack {
    fn default() -> Self {
        Self { wait_ns: FIRST_WAIT_NS, calm: None, taken_up_ns: None }
    }
}

impl GivingBack {
    /// Notes that frees were given up.
    pub(super) fn gave_up(&mut self, now_ns: u64) {
        self.calm = None;
        let Some(taken_up_ns) = self.taken_up_ns.take() else { return };
        let soon = now_ns.saturating_sub(taken_up_ns) < WAITS_KEPT * self.wait_ns;
        self.wait_ns = if soon { 2 * self.wait_ns } else { self.wait_ns / 2 };
        self.wait_ns = self.wait_ns.clamp(FIRST_WAIT_NS, LONGEST_WAIT_NS);
    }

    /// Notes how much room there is at a look while frees are given up. Returns what is to be taken up again.
    pub(super) fn look(&mut self, room: Room, now_ns: u64) -> Option<TakeUp> {
        if room == Room::None {
            self.calm = None;
            return None;
        }
        let (since_ns, all) = self.calm.get_or_insert((now_ns, true));
        *all &= room == Room::ForAll;
        if now_ns.saturating_sub(*since_ns) < self.wait_ns {
            return None;
        }
        let what = if *all { TakeUp::All } else { TakeUp::Some };
        // If nothing comes of it, this is asked again after another wait.
        self.calm = None;
        Some(what)
    }

    /// Notes that frees were taken up.
    pub(super) fn took_up(&mut self, now_ns: u64) {
        self.taken_up_ns = Some(now_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// How many seconds of calm it takes, from `now_s` on.
    fn waits(giving: &mut GivingBack, now_s: u64) -> u64 {
        (0..).find(|s| giving.look(Room::ForAll, (now_s + s) * SECOND).is_some()).unwrap()
    }

    #[test]
    fn calm_must_last() {
        let mut giving = GivingBack::default();
        giving.gave_up(0);
        for second in 0..100 {
            let room = if second % 10 == 9 { Room::None } else { Room::ForAll };
            assert_eq!(giving.look(room, second * SECOND), None, "{second}");
        }
        assert_eq!(waits(&mut giving, 100), 10);
    }

    #[test]
    fn all_come_back_if_there_was_room_for_all_throughout() {
        let mut giving = GivingBack::default();
        for second in 0..10 {
            let room = if second == 4 { Room::ForSome } else { Room::ForAll };
            assert_eq!(giving.look(room, second * SECOND), None);
        }
        assert_eq!(giving.look(Room::ForAll, 10 * SECOND), Some(TakeUp::Some));
        assert_eq!(waits(&mut giving, 11), 10);
    }

    #[test]
    fn waits_grow_if_frees_are_given_up_again_soon_and_shrink_if_they_are_kept() {
        let mut giving = GivingBack::default();
        let (mut now_s, mut seen) = (0, Vec::new());
        for _ in 0..8 {
            giving.gave_up(now_s * SECOND);
            seen.push(waits(&mut giving, now_s));
            now_s += seen.last().unwrap();
            giving.took_up(now_s * SECOND);
            now_s += 5;
        }
        assert_eq!(seen, [10, 20, 40, 80, 160, 320, 600, 600]);
        giving.gave_up((now_s + 10_000) * SECOND);
        assert_eq!(waits(&mut giving, now_s + 10_000), 300);
    }
}
