//! Why there is nothing to draw.

use thiserror::Error;

/// Why there is nothing to draw.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PlotError {
    /// A curve over time needs several snapshots.
    #[error(
        "{0} needs two snapshots of a recording or more: `heapbpf --every TIME -o x.json` writes them; give all of them"
    )]
    NeedsSnapshots(&'static str),
    /// The profile has no lifetimes.
    #[error(
        "no stack of this profile has lifetimes: survival curves need a .json of a recording that followed frees (no --no-live), \
         with samples of blocks"
    )]
    NoLifetimes,
    /// The profiles do not say how much time the probes took.
    #[error(
        "these profiles do not say what probes took: only .json has it, of a recording on whose machine that could be measured"
    )]
    NoProbeTimes,
    /// The value needs frees, which were not followed.
    #[error("{0} cannot be drawn: frees were not followed (--no-live); choose alloc_space or alloc_objects")]
    NotFollowed(&'static str),
}
