//! The header of a profile: facts about the recording as a whole.

use std::time::{Duration, SystemTime};

use heapbpf_statistics::criterion::Criterion;
use heapbpf_statistics::estimators::Estimator;

use super::losses::Unread;

/// Facts about a recording as a whole.
#[derive(Clone, Debug)]
pub struct Header {
    /// Version of heapbpf that made the recording.
    pub version: String,
    /// Sampling interval R in force at the end, in trials. Each row has its own.
    pub interval: u64,
    /// The sampling criterion: what counts as a trial.
    pub criterion: Criterion,
    /// The requested unwinder: `auto`, `dwarf` or `fp`.
    pub unwind: String,
    /// Wall-clock time at the start.
    pub started: SystemTime,
    /// Wall-clock time that figures in use refer to.
    pub time: SystemTime,
    /// Records from before `time` that were not read in time and are missing from the figures.
    pub unread: Option<Unread>,
    /// Length of the recording; the sum of lengths for a merged profile.
    pub duration: Duration,
    /// Length of the last part of the recording over which rows tell how they grew; `None` if they do not.
    pub growth_over: Option<Duration>,
    /// Number of recordings: 1, except for a merged profile.
    pub recordings: u32,
    /// Whether frees were followed. If not (`--no-live`), there are no figures in use.
    pub live: bool,
    /// Whether what ended processes held at exit is separate from what is in use
    /// ([`Row::at_exit`](super::Row::at_exit)), as it is unless the recording had named targets. Otherwise it counts as
    /// in use.
    pub ended_apart: bool,
    /// Whether rows have samples. They do in every recording, but not in a profile from a format that keeps estimates
    /// only (pprof), whose figures have no interval.
    pub samples_known: bool,
    /// Whether the `offset_sum` of sums is known. It is in every recording, but not for samples of other profilers.
    pub offsets_known: bool,
    /// The estimator of bytes: Horvitz–Thompson unless a report requested another.
    pub estimator: Estimator,
    /// Older recordings: whether probes were attached in time windows only during a part of it. Figures of allocation are
    /// corrected for that window by window. They have no interval, as it is unknown how windows differ from the rest,
    /// and exact counts are incomplete.
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
            estimator: Estimator::default(),
            time_windows: false,
            host: String::new(),
        }
    }
}
