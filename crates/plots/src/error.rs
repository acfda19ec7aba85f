//! Why there is nothing to draw.

use thiserror::Error;

/// Why there is nothing to draw.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PlotError {
    /// A curve over time needs several snapshots.
    #[error(
        "{0} needs at least two snapshots of a recording: write them with `heapbpf --every TIME -o x.json` and name them all"
    )]
    NeedsSnapshots(&'static str),
    /// The profile has no lifetimes.
    #[error(
        "no stack of this profile has lifetimes: survival curves need a .json file with samples, recorded without --no-live"
    )]
    NoLifetimes,
    /// The profiles do not say how much time the probes took.
    #[error("these profiles have no probe times: only .json has them, if they could be measured while recording")]
    NoProbeTimes,
    /// The value needs frees, which were not followed.
    #[error("{0} cannot be drawn: frees were not tracked (--no-live); choose alloc_space or alloc_objects")]
    NotFollowed(&'static str),
}
