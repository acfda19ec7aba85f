//! A part: the samples of one sampling interval, in the form that estimates take.

use super::sums::SampleSums;

/// Samples of one sampling interval. A stack that was sampled with several intervals has several parts.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// R: the sampling interval in trials.
    pub interval: u64,
    /// The samples drawn with that interval.
    pub sums: &'a SampleSums,
    /// Further samples that may have been drawn and lost. The upper end of an interval is as far above the estimate as
    /// if they had been recorded; their weights are not included in the estimate.
    pub lost: u64,
    /// The most bytes that a block without a sample could contribute, if not all samples are examined. Matters only if
    /// it is larger than R.
    pub most_bytes: f64,
}

impl<'a> Part<'a> {
    /// A part without lost samples, all of whose samples count.
    pub const fn new(interval: u64, sums: &'a SampleSums) -> Self {
        Self { interval, sums, lost: 0, most_bytes: 0.0 }
    }
}
