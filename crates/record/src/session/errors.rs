//! Errors of a running recording: counted, reported once, and retried after growing pauses. None of them ends the
//! recording at once.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Duration;

/// Pause before the second attempt; it doubles up to the longest.
const FIRST_PAUSE_NS: u64 = 50_000_000;
const LONGEST_PAUSE_NS: u64 = 5_000_000_000;

/// What a running recording does repeatedly, and what may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    /// Read the counters of all threads and processes.
    Counters,
    /// Read how many records were lost.
    Losses,
    /// Read the live map.
    LiveMap,
    /// Tell the BPF programs whether the daemon sleeps.
    Sleep,
    /// Set the sampling interval.
    Interval,
    /// Set the intervals of size classes.
    Classes,
    /// Take over the counters of processes that ended.
    Ended,
    /// Follow the processes of the host.
    Host,
    /// Wait for events.
    Wake,
    /// Have threads checked again that belonged to no target.
    Targets,
    /// List the processes that live.
    Census,
    /// Resize a ring.
    Rings,
}

impl Step {
    /// What failed, and what it means for the user.
    const fn description(self) -> (&'static str, &'static str) {
        match self {
            Self::Counters => ("reading the kernel's counters", "profiles wait for them"),
            Self::Losses => ("reading how many records were lost", "reconciliation waits for it"),
            Self::LiveMap => ("reading the kernel's live map", "error bars allow for that"),
            Self::Sleep => ("telling the BPF programs when to wake heapbpf", "heapbpf checks more often until then"),
            Self::Interval => ("setting the sampling interval", "the earlier one stays until then"),
            Self::Classes => ("setting the intervals of size classes", "the earlier ones stay until then"),
            Self::Ended => ("taking over the counters of exited processes", "they stay in the kernel until then"),
            Self::Host => ("following the host's processes", "new processes may be found later"),
            Self::Targets => ("rechecking processes that were not targets", "those that became targets are missed"),
            Self::Census => ("listing the host's processes", "exits without a record are found later"),
            Self::Rings => ("resizing a ring", "it keeps its size until then"),
            Self::Wake => ("waiting for events", "heapbpf checks periodically until then"),
        }
    }
}

/// What is known about one step's errors. Times are CLOCK_MONOTONIC.
#[derive(Clone, Debug, Default)]
struct State {
    count: u64,
    /// Since when it has failed every time.
    failing_since_ns: Option<u64>,
    pause_ns: u64,
    not_before_ns: u64,
    last: String,
}

/// The errors of a recording, by the step that failed.
#[derive(Debug, Default)]
pub(super) struct Errors(BTreeMap<Step, State>);

impl Errors {
    /// Whether a step may be tried now: it did not fail, or its pause is over.
    pub(super) fn may_try(&self, step: Step, now_ns: u64) -> bool {
        self.0.get(&step).is_none_or(|state| now_ns >= state.not_before_ns)
    }

    /// Notes the outcome of a step. Returns its value if it worked.
    pub(super) fn note<T, E: Display>(&mut self, step: Step, outcome: Result<T, E>, now_ns: u64) -> Option<T> {
        let state = self.0.entry(step).or_default();
        let (what, meanwhile) = step.description();
        match outcome {
            Ok(value) => {
                if state.failing_since_ns.take().is_some() {
                    log::info!("{what} works again");
                }
                (state.pause_ns, state.not_before_ns) = (0, 0);
                Some(value)
            }
            Err(error) => {
                state.count += 1;
                state.failing_since_ns.get_or_insert(now_ns);
                state.pause_ns = (2 * state.pause_ns).clamp(FIRST_PAUSE_NS, LONGEST_PAUSE_NS);
                state.not_before_ns = now_ns.saturating_add(state.pause_ns);
                state.last = error.to_string();
                if state.count == 1 {
                    log::warn!("{what} failed: {error}; retrying ({meanwhile})");
                } else {
                    log::debug!("{what} failed for the {}th time: {error}", state.count);
                }
                None
            }
        }
    }

    /// Time until a step may be tried again.
    pub(super) fn until_retry(&self, step: Step, now_ns: u64) -> Duration {
        let not_before_ns = self.0.get(&step).map_or(0, |state| state.not_before_ns);
        Duration::from_nanos(not_before_ns.saturating_sub(now_ns))
    }

    /// For how long a step has failed every time.
    pub(super) fn failing_for(&self, step: Step, now_ns: u64) -> Duration {
        let since_ns = self.0.get(&step).and_then(|state| state.failing_since_ns);
        since_ns.map_or(Duration::ZERO, |since_ns| Duration::from_nanos(now_ns.saturating_sub(since_ns)))
    }

    /// The last error of a step.
    pub(super) fn last(&self, step: Step) -> &str {
        self.0.get(&step).map_or("", |state| state.last.as_str())
    }

    /// How many errors there were.
    pub(super) fn count(&self) -> u64 {
        self.0.values().map(|state| state.count).sum()
    }

    /// For the profile: what failed, how often, and the last reason.
    pub(super) fn notes(&self) -> impl Iterator<Item = String> {
        let failed = self.0.iter().filter(|(_, state)| state.count > 0);
        failed.map(|(step, State { count, last, .. })| {
            let times = if *count == 1 { "once".to_owned() } else { format!("{count} times") };
            format!("{} failed {times} and was retried ({last})", step.description().0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAILED: Result<(), &str> = Err("out of memory");

    #[test]
    fn what_fails_is_tried_again_after_growing_pauses_that_end_when_it_works() {
        let mut errors = Errors::default();
        let (mut now_ns, mut pauses) = (1_000, Vec::new());
        for _ in 0..10 {
            assert!(errors.may_try(Step::Counters, now_ns));
            errors.note(Step::Counters, FAILED, now_ns);
            assert!(!errors.may_try(Step::Counters, now_ns), "not at once");
            assert!(errors.may_try(Step::Sleep, now_ns), "others are not concerned");
            let pause = errors.until_retry(Step::Counters, now_ns);
            pauses.push(pause.as_millis());
            now_ns += pause.as_nanos() as u64;
        }
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000]);
        assert_eq!(errors.failing_for(Step::Counters, now_ns).as_millis(), pauses.iter().sum());
        assert_eq!(errors.note(Step::Counters, Ok::<_, &str>(7), now_ns), Some(7));
        assert_eq!(errors.failing_for(Step::Counters, now_ns + 1), Duration::ZERO);
        errors.note(Step::Counters, FAILED, now_ns);
        assert_eq!(errors.until_retry(Step::Counters, now_ns).as_millis(), 50, "from the beginning");
        assert_eq!((errors.count(), errors.last(Step::Counters)), (11, "out of memory"));
    }

    #[test]
    fn a_profile_says_what_failed_and_how_often() {
        let mut errors = Errors::default();
        assert_eq!(errors.notes().count(), 0);
        errors.note(Step::Sleep, FAILED, 1);
        errors.note(Step::LiveMap, FAILED, 2);
        errors.note(Step::LiveMap, Err::<(), _>("try later"), 3);
        let notes: Vec<_> = errors.notes().collect();
        assert_eq!(
            notes,
            [
                "reading the kernel's live map failed 2 times and was retried (try later)",
                "telling the BPF programs when to wake heapbpf failed once and was retried (out of memory)",
            ]
        );
    }
}
