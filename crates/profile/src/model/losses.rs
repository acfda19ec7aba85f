//! Bounds on lost events and their effect on figures.

use serde::{Deserialize, Serialize};

/// An upper bound on a set of sampled allocations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct LossBound {
    /// Number of samples.
    pub samples: u64,
    /// Unweighted sum of the sizes in bytes.
    pub sampled_bytes: u64,
}

impl LossBound {
    /// Adds another bound.
    pub fn add(&mut self, other: &Self) {
        self.samples = self.samples.saturating_add(other.samples);
        self.sampled_bytes = self.sampled_bytes.saturating_add(other.sampled_bytes);
    }

    /// This bound minus another one.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self {
            samples: self.samples.saturating_sub(other.samples),
            sampled_bytes: self.sampled_bytes.saturating_sub(other.sampled_bytes),
        }
    }

    /// Whether the set is empty.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// The possible effect of lost events on figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Losses {
    /// Samples that are missing from figures of allocation.
    pub alloc: LossBound,
    /// Samples that may be in use but are missing from figures in use.
    pub inuse_missing: LossBound,
    /// Samples included in figures in use that may have been freed.
    pub inuse_stale: LossBound,
    /// Largest sampling interval R that may have been in force when the samples were lost, in trials; 0: the largest in
    /// the profile.
    pub interval: u64,
    /// Whether events were lost before the peak, so that figures at the peak have no valid interval.
    pub peak_unknown: bool,
    /// Whether figures in use have no bound, because they are taken at such a peak.
    pub inuse_unbounded: bool,
    /// Whether no bound is known at all.
    pub unbounded: bool,
    /// Whether the weights that the process itself reports for its samples do not belong to one sampling interval, so
    /// that nothing is known about their variance.
    pub weights_unproven: bool,
}

impl Losses {
    /// Adds the losses of another process or recording.
    pub fn add(&mut self, other: &Self) {
        self.alloc.add(&other.alloc);
        self.inuse_missing.add(&other.inuse_missing);
        self.inuse_stale.add(&other.inuse_stale);
        self.interval = self.interval.max(other.interval);
        self.peak_unknown |= other.peak_unknown;
        self.inuse_unbounded |= other.inuse_unbounded;
        self.unbounded |= other.unbounded;
        self.weights_unproven |= other.weights_unproven;
    }

    /// Whether nothing was lost.
    pub fn is_none(&self) -> bool {
        Self { interval: 0, ..*self } == Self::default()
    }
}

/// Records that the kernel had sent but that were not read in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unread {
    /// Number of records that were not read.
    pub records: u64,
    /// Number of records that had been sent.
    pub of: u64,
}

impl Unread {
    /// Share of records that were not read, 0 to 1.
    pub fn share(&self) -> f64 {
        if self.of == 0 { 0.0 } else { (self.records as f64 / self.of as f64).min(1.0) }
    }

    /// Adds the records of another recording.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self { records: self.records.saturating_add(other.records), of: self.of.saturating_add(other.of) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_add_and_subtract_without_overflow() {
        let bound = |samples, sampled_bytes| LossBound { samples, sampled_bytes };
        let mut sum = bound(3, 100);
        sum.add(&bound(2, u64::MAX));
        assert_eq!(sum, bound(5, u64::MAX));
        assert_eq!(bound(3, 100).without(&bound(1, 200)), bound(2, 0));
        assert!(bound(3, 100).without(&bound(3, 100)).is_none() && !bound(0, 1).is_none());
    }

    #[test]
    fn losses_keep_what_is_worse_of_two() {
        let one = Losses { interval: 64, peak_unknown: true, ..Losses::default() };
        let two = Losses { alloc: LossBound { samples: 1, sampled_bytes: 8 }, interval: 32, ..Losses::default() };
        let mut both = one;
        both.add(&two);
        assert_eq!(both, Losses { alloc: two.alloc, interval: 64, peak_unknown: true, ..Losses::default() });
        assert!(!both.is_none() && Losses { interval: 64, ..Losses::default() }.is_none());
    }

    #[test]
    fn the_share_of_unread_records_is_a_share() {
        let share = |records, of| Unread { records, of }.share();
        assert_eq!([share(0, 0), share(3, 12), share(9, 3)], [0.0, 0.25, 1.0]);
        let both = Unread { records: 1, of: 2 }.with(Unread { records: 3, of: 4 });
        assert_eq!(both, Unread { records: 4, of: 6 });
    }
}
