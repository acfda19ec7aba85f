//! Ages of freed sampled blocks, in a histogram with logarithmic bins: memory per stack is bounded for any number of frees.

use std::collections::BTreeMap;

use heapbpf_statistics::survival::Observation;

/// Bins per doubling of the age. The width of a bin is at most 1/8 of its lowest age.
const BINS_PER_DOUBLING: u32 = 8;

/// Weighted histogram of the ages of blocks: of freed ones at their free, and of the others when they were last known to be in
/// use. Both have the same bins, so that a block that is left behind never seems younger than one that was freed before.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ages {
    bins: BTreeMap<u16, Bin>,
    freed: f64,
    temporary: f64,
}

impl Ages {
    /// Adds a freed block. It is temporary if its own thread freed it without allocating in between.
    pub fn record(&mut self, age_ns: u64, weight: f64, temporary: bool) {
        self.bins.entry(bin_of(age_ns)).or_default().freed += weight;
        self.freed += weight;
        if temporary {
            self.temporary += weight;
        }
    }

    /// Adds a block that was not freed up to this age: it is in use, or its process ended.
    pub fn record_left(&mut self, age_ns: u64, weight: f64) {
        self.bins.entry(bin_of(age_ns)).or_default().left += weight;
    }

    /// Adds another histogram.
    pub fn add(&mut self, other: &Self) {
        for (bin, Bin { freed, left }) in &other.bins {
            let sum = self.bins.entry(*bin).or_default();
            sum.freed += freed;
            sum.left += left;
        }
        self.freed += other.freed;
        self.temporary += other.temporary;
    }

    /// Total weight of the freed blocks.
    pub const fn freed(&self) -> f64 {
        self.freed
    }

    /// Total weight of the temporary ones.
    pub const fn temporary(&self) -> f64 {
        self.temporary
    }

    /// The blocks of each bin as observations at its middle; ages ascend. Which of them were temporary is not kept.
    pub fn observations(&self) -> impl Iterator<Item = Observation> + '_ {
        self.bins.iter().flat_map(|(bin, Bin { freed, left })| {
            [(*freed, true), (*left, false)].into_iter().filter(|(weight, _)| *weight > 0.0).map(|(weight, freed)| {
                Observation { age_seconds: middle_seconds(*bin), weight, freed, temporary: false }
            })
        })
    }
}

/// Weights of the blocks whose ages are in a bin.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Bin {
    freed: f64,
    left: f64,
}

/// Ages in nanoseconds below this have a bin each.
const EXACT: u64 = BINS_PER_DOUBLING as u64;

fn bin_of(age_ns: u64) -> u16 {
    if age_ns < EXACT {
        return age_ns as u16;
    }
    let exponent = age_ns.ilog2();
    let place = exponent - BINS_PER_DOUBLING.ilog2();
    // Below 61 × 8 + 8.
    ((place + 1) * BINS_PER_DOUBLING + ((age_ns >> place) as u32 & (BINS_PER_DOUBLING - 1))) as u16
}

fn middle_seconds(bin: u16) -> f64 {
    let bin = u32::from(bin);
    let (start, width) = if bin < BINS_PER_DOUBLING {
        (f64::from(bin), 1.0)
    } else {
        let place = (bin / BINS_PER_DOUBLING - 1) as i32;
        let width = 2_f64.powi(place);
        (f64::from(BINS_PER_DOUBLING + bin % BINS_PER_DOUBLING) * width, width)
    };
    (start + width / 2.0) * 1e-9
}

#[cfg(test)]
mod tests {
    use heapbpf_statistics::survival::survival_curve;

    use super::*;

    #[test]
    fn a_bins_middle_is_near_every_age_in_it_and_bins_ascend() {
        let mut last = 0;
        for exponent in 0..62 {
            for step in 0..16_u64 {
                let age = (1_u64 << exponent) + (((1_u128 << exponent) * u128::from(step)) / 16) as u64;
                let bin = bin_of(age);
                assert!(bin >= last, "{age}");
                last = bin;
                let middle = middle_seconds(bin) * 1e9;
                assert!((middle - age as f64).abs() <= 0.5 + age as f64 / 8.0, "{age}: {middle}");
            }
        }
    }

    #[test]
    fn weights_add_up() {
        let mut ages = Ages::default();
        ages.record(10, 2.0, true);
        ages.record(1_000_000, 3.0, false);
        let mut sum = ages.clone();
        sum.add(&ages);
        assert_eq!((sum.freed(), sum.temporary()), (10.0, 4.0));
        let weights: Vec<_> = sum.observations().map(|it| (it.weight, it.freed)).collect();
        assert_eq!(weights, [(4.0, true), (6.0, true)]);
    }

    #[test]
    fn blocks_that_are_left_are_as_old_as_freed_ones_of_their_age() {
        // Both ages are in the lower half of one bin.
        let mut ages = Ages::default();
        ages.record(100_100_000, 20.0, false);
        ages.record_left(101_000_000, 40.0);
        let observations: Vec<_> = ages.observations().collect();
        assert_eq!(observations.len(), 2);
        let curve = survival_curve(&observations);
        assert!(matches!(curve[..], [(_, left)] if (left - 2.0 / 3.0).abs() < 1e-12), "{curve:?}");
    }
}
