//! The header of a profile: facts about the recording as a whole.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use heapbpf_statistics::criterion::Criterion;

use super::losses::Unread;

/// Facts about a recording as a whole.
#[derive(Clone, Debug)]
pub struct Header {
    /// heapbpf version that made the recording.
    pub version: String,
    /// Sampling interval R in force at the end, in trials. Each row has its own.
    pub interval: u64,
    /// Other sampling intervals that were in force (before, or in a profile that was merged), in trials. Only JSON keeps
    /// them; other formats have those of rows.
    pub earlier_intervals: BTreeSet<u64>,
    /// The sampling criterion: what counts as a trial.
    pub criterion: Criterion,
    /// The requested unwinder: `auto`, `dwarf` or `fp`.
    pub unwind: String,
    /// Wall-clock time at the start.
    pub started: SystemTime,
    /// Wall-clock time to which figures in use refer.
    pub time: SystemTime,
    /// Records from before `time` that were not read in time and are missing from the figures.
    pub unread: Option<Unread>,
    /// Length of the recording; the sum of lengths for a merged profile.
    pub duration: Duration,
    /// Length of the last part of the recording for which rows have growth figures; `None` if they have none.
    pub growth_over: Option<Duration>,
    /// Number of recordings: 1, except for a merged profile.
    pub recordings: u32,
    /// Whether frees were followed. If not (`--no-live`), there are no figures in use.
    pub live: bool,
    /// Whether memory that ended processes held at exit is separate from memory in use
    /// ([`Row::at_exit`](super::Row::at_exit)). It is, unless the recording had named targets; then it counts as in
    /// use.
    pub ended_apart: bool,
    /// Whether rows have samples. They do in every recording, but not in a profile from a format that stores only
    /// estimates (pprof); its figures have no interval.
    pub samples_known: bool,
    /// Whether the `offset_sum` of sums is known. It is in every recording, but not for samples from other profilers.
    pub offsets_known: bool,
    /// Whether probes were attached only in time windows for a part of the recording (older recordings). Figures of
    /// allocation are corrected for that, window by window. They have no interval, because it is unknown how windows
    /// differ from the rest, and exact counts are incomplete.
    pub time_windows: bool,
    /// Host name.
    pub host: String,
}

impl Header {
    /// The header of one recording that followed frees and kept its samples, at an unknown time on an unknown host.
    pub fn new(interval: u64, criterion: Criterion) -> Self {
        Self {
            version: String::new(),
            interval,
            earlier_intervals: BTreeSet::new(),
            criterion,
            unwind: String::new(),
            started: SystemTime::UNIX_EPOCH,
            time: SystemTime::UNIX_EPOCH,
            unread: None,
            duration: Duration::ZERO,
            growth_over: None,
            recordings: 1,
            live: true,
            ended_apart: false,
            samples_known: true,
            offsets_known: true,
            time_windows: false,
            host: String::new(),
        }
    }

    /// Records that from now on, `interval` (in trials) is in force.
    pub fn set_interval(&mut self, interval: u64) {
        let earlier = std::mem::replace(&mut self.interval, interval);
        self.earlier_intervals.insert(earlier);
    }

    /// The sampling intervals that were in force, in trials, as far as they are known apart from rows.
    pub fn intervals(&self) -> impl Iterator<Item = u64> + '_ {
        self.earlier_intervals.iter().copied().chain([self.interval])
    }
}
