//! Sums over samples of one sampling interval: everything that an estimate and its error bar need.

use serde::{Deserialize, Serialize};

use crate::sampling::weight::{Inclusion, inclusion};

/// Sums over samples that were drawn with one sampling interval R.
///
/// Weights are applied to each sample before it is added (Horvitz–Thompson), so sums of sums are sums.
/// Symbols as in `docs/sampling.md`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SampleSums {
    /// Samples, those of zero bytes included.
    pub samples: u64,
    /// Samples of zero bytes: they count in `objects`, and take no part in byte intervals.
    pub zero_byte_samples: u64,
    /// S: bytes of the sampled allocations as they are, not weighted.
    pub sampled_bytes: u64,
    /// Σ offset: failed trials before the successful one, over samples of more than zero bytes.
    pub offset_sum: u64,
    /// T: Σ size × weight, unbiased bytes.
    pub bytes: f64,
    /// Unbiased estimate of the variance of T: Σ size² w (w − 1).
    pub bytes_variance: f64,
    /// C: Σ weight, unbiased number of allocations.
    pub objects: f64,
    /// Unbiased estimate of the variance of C: Σ w (w − 1).
    pub objects_variance: f64,
    /// Smallest sampled size; equal to `largest_bytes` for a stack of one size. 0 when there is no sample.
    pub smallest_bytes: u64,
    /// Largest sampled size.
    pub largest_bytes: u64,
    /// What another rule of estimation adds to T: calibration by exact totals, another estimator. Intervals leave it out.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_correction: f64,
    /// The same for C.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub objects_correction: f64,
}

fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

impl SampleSums {
    /// Adds one sample: an allocation of `size_bytes` that took `trials` trials, of which `offset` failed before the
    /// one that succeeded, under the sampling interval `interval` (R, in trials).
    ///
    /// A sample of no trials or under R = 0 cannot exist and is left out.
    pub fn record(&mut self, size_bytes: u64, trials: u64, offset: u64, interval: u64) {
        if let Some(inclusion) = inclusion(trials, interval) {
            self.record_included(size_bytes, offset, &inclusion);
        }
    }

    /// The same where the inclusion is known already.
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

    /// s: samples that take part in byte intervals.
    pub fn sized_samples(&self) -> u64 {
        self.samples.saturating_sub(self.zero_byte_samples)
    }

    /// u = Σ (size − offset): successful trials and those skipped after them.
    pub fn unskipped(&self) -> u64 {
        self.sampled_bytes.saturating_sub(self.offset_sum)
    }

    /// Adds the sums of other samples of the same interval.
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
