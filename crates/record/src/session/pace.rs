//! Decisions of the loop, from figures alone: how long it waits, and when it ends.

use std::time::Duration;

/// Time between checks of the rings while events arrive. A check costs some 50 µs, whatever it finds. Rings that fill
/// up, forks and new mappings wake the loop earlier; the latter two at once, or soon if nothing depends on them.
const AWAKE_PAUSE: Duration = Duration::from_millis(40);
/// The same while targets may be waiting for their records to be taken in.
pub(super) const AWAITED_PAUSE: Duration = Duration::from_millis(2);
/// Time between checks while nothing happens; an event wakes the loop earlier.
const SLEEP_PAUSE: Duration = Duration::from_secs(1);

/// State of a recording after a turn of its loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Standing {
    /// Every named target has ended.
    pub(super) targets_ended: bool,
    /// The command that was started is still running.
    pub(super) command_runs: bool,
    /// The recording's time is over.
    pub(super) time_is_over: bool,
}

impl Standing {
    /// Whether the recording ends.
    pub(super) const fn is_over(&self) -> bool {
        self.targets_ended && !self.command_runs || self.time_is_over
    }
}

/// Time until the next turn, unless something wakes the loop earlier. `behind`: the last turn left records in the
/// rings; `active`: it found some; `deadlines`: time until work that must not wait longer.
pub(super) fn pause(behind: bool, active: bool, deadlines: impl IntoIterator<Item = Option<Duration>>) -> Duration {
    let pause = match (behind, active) {
        (true, _) => Duration::ZERO,
        (false, true) => AWAKE_PAUSE,
        (false, false) => SLEEP_PAUSE,
    };
    deadlines.into_iter().flatten().fold(pause, Duration::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_that_is_behind_does_not_wait_and_an_idle_one_sleeps() {
        assert_eq!(pause(true, false, []), Duration::ZERO);
        assert_eq!(pause(false, true, []), AWAKE_PAUSE);
        assert_eq!(pause(false, false, []), SLEEP_PAUSE);
    }

    #[test]
    fn the_nearest_deadline_shortens_the_pause_and_none_lengthens_it() {
        let ms = Duration::from_millis;
        assert_eq!(pause(false, false, [Some(ms(300)), None, Some(ms(20))]), ms(20));
        assert_eq!(pause(false, true, [Some(ms(300))]), AWAKE_PAUSE);
        assert_eq!(pause(false, false, [None, Some(Duration::ZERO)]), Duration::ZERO);
    }

    #[test]
    fn a_recording_ends_with_its_time_or_with_its_targets_and_command() {
        let over = |targets_ended, command_runs, time_is_over| {
            Standing { targets_ended, command_runs, time_is_over }.is_over()
        };
        assert!(!over(false, false, false));
        assert!(over(true, false, false));
        assert!(!over(true, true, false), "the command may start more");
        assert!(over(false, true, true) && over(true, true, true), "time is over for everybody");
    }
}
