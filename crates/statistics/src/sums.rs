//! Sums over the samples of one sampling interval: everything that an estimate and its confidence interval need.

use serde::{Deserialize, Serialize};

use crate::weight::{Inclusion, inclusion};

/// Sums over samples that were drawn with one sampling interval R.
///
/// Each sample is weighted before it is added (Horvitz–Thompson), so sums can be added to sums. The symbols are those
/// of `docs/sampling.md`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SampleSums {
    /// Number of samples, including those of zero bytes.
    pub samples: u64,
    /// Number of samples of zero bytes. They count in `objects` and do not matter for intervals of bytes.
    pub zero_byte_samples: u64,
    /// S: unweighted bytes of the sampled allocations.
    pub sampled_bytes: u64,
    /// Σ offset: failed trials before the successful one, over samples of more than zero bytes.
    /// [`Self::UNKNOWN_OFFSET`] if an offset is not known.
    #[serde(default = "unknown_offset")]
    pub offset_sum: u64,
    /// T: Σ size × weight, unbiased bytes.
    pub bytes: f64,
    /// Unbiased estimate of the variance of T: Σ size² w (w − 1).
    pub bytes_variance: f64,
    /// C: Σ weight, unbiased number of allocations.
    pub objects: f64,
    /// Unbiased estimate of the variance of C: Σ w (w − 1).
    pub objects_variance: f64,
    /// Smallest sampled size in bytes, equal to `largest_bytes` if all samples have one size. 0 without samples.
    pub smallest_bytes: u64,
    /// Largest sampled size in bytes.
    pub largest_bytes: u64,
    /// What calibration adds to T. Intervals do not include it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_correction: f64,
    /// What calibration adds to C. Intervals do not include it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub objects_correction: f64,
}

fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

const fn unknown_offset() -> u64 {
    SampleSums::UNKNOWN_OFFSET
}

impl SampleSums {
    /// The offset of a sample that has none. A sum with such an offset is this as well.
    pub const UNKNOWN_OFFSET: u64 = u64::MAX;

    /// The sums of no samples.
    pub const NONE: Self = Self {
        samples: 0,
        zero_byte_samples: 0,
        sampled_bytes: 0,
        offset_sum: 0,
        bytes: 0.0,
        bytes_variance: 0.0,
        objects: 0.0,
        objects_variance: 0.0,
        smallest_bytes: 0,
        largest_bytes: 0,
        bytes_correction: 0.0,
        objects_correction: 0.0,
    };

    /// Adds one sample: an allocation of `size_bytes` that took `trials` trials, of which `offset` failed before the
    /// one that succeeded, under the sampling interval `interval` (R, in trials). `offset` is
    /// [`Self::UNKNOWN_OFFSET`] if it is not known, or 0 if no estimate from offsets is needed.
    ///
    /// A sample without trials or with R = 0 is impossible and is ignored.
    pub fn record(&mut self, size_bytes: u64, trials: u64, offset: u64, interval: u64) {
        if let Some(inclusion) = inclusion(trials, interval) {
            self.record_included(size_bytes, offset, &inclusion);
        }
    }

    /// Adds one sample whose inclusion probability is known already. See [`Self::record`].
    pub fn record_included(&mut self, size_bytes: u64, offset: u64, inclusion: &Inclusion) {
        let size = size_bytes as f64;
        self.add(&Self {
            samples: 1,
            zero_byte_samples: u64::from(size_bytes == 0),
            sampled_bytes: size_bytes,
            offset_sum: if size_bytes == 0 { 0 } else { offset },
            bytes: size * inclusion.weight,
            bytes_variance: inclusion.estimated_variance(size),
            objects: inclusion.weight,
            objects_variance: inclusion.estimated_variance(1.0),
            smallest_bytes: size_bytes,
            largest_bytes: size_bytes,
            ..Self::default()
        });
    }

    /// s: number of samples of more than zero bytes.
    pub fn sized_samples(&self) -> u64 {
        self.samples.saturating_sub(self.zero_byte_samples)
    }

    /// Σ offset, if all offsets are known.
    pub fn known_offset_sum(&self) -> Option<u64> {
        Some(self.offset_sum).filter(|sum| *sum != Self::UNKNOWN_OFFSET)
    }

    /// Σ offset of `samples` samples from `known`: without samples, no offset is unknown.
    pub fn offset_sum_of(samples: u64, known: Option<u64>) -> u64 {
        known.unwrap_or(if samples > 0 { Self::UNKNOWN_OFFSET } else { 0 })
    }

    /// u = Σ (size − offset): the successful trial of each sample and the trials after it. `None` if an offset is not
    /// known.
    pub fn unskipped(&self) -> Option<u64> {
        self.known_offset_sum().map(|offsets| self.sampled_bytes.saturating_sub(offsets))
    }

    /// Adds the sums of other samples with the same sampling interval.
    pub fn add(&mut self, other: &Self) {
        if other.samples > 0 {
            self.smallest_bytes =
                if self.samples == 0 { other.smallest_bytes } else { self.smallest_bytes.min(other.smallest_bytes) };
        }
        self.largest_bytes = self.largest_bytes.max(other.largest_bytes);
        self.samples = self.samples.saturating_add(other.samples);
        self.zero_byte_samples = self.zero_byte_samples.saturating_add(other.zero_byte_samples);
        self.sampled_bytes = self.sampled_bytes.saturating_add(other.sampled_bytes);
        self.offset_sum = self.offset_sum.saturating_add(other.offset_sum);
        self.bytes += other.bytes;
        self.bytes_variance += other.bytes_variance;
        self.objects += other.objects;
        self.objects_variance += other.objects_variance;
        self.bytes_correction += other.bytes_correction;
        self.objects_correction += other.objects_correction;
    }
}
