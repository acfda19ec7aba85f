//! Ages of sampled blocks, in a histogram with logarithmic bins: memory per stack is bounded for any number of frees.

use heapbpf_statistics::outliving::Octave;
use heapbpf_statistics::survival::Observation;

/// Bins per doubling of the age. The width of a bin is at most 1/8 of its lowest age.
const BINS_PER_DOUBLING: u32 = 8;

/// Weighted histogram of block ages: of freed blocks at their free, and of the others when they were last known to be
/// in use. Both kinds share the bins, so a block that is left never seems younger than one that was freed before it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ages {
    /// The bins that are not empty, in ascending order of their numbers.
    bins: Vec<(u16, Bin)>,
    freed: f64,
    temporary: f64,
    last_free_ns: Option<u64>,
}

impl Ages {
    /// Adds a block that was allocated at `begin_ns` and freed at `at_ns` (CLOCK_MONOTONIC). `temporary`: the
    /// allocating thread freed it without allocating in between.
    pub fn record(&mut self, begin_ns: u64, at_ns: u64, weight: f64, temporary: bool) {
        self.last_free_ns = self.last_free_ns.max(Some(at_ns));
        let bin = self.bin(bin_of(at_ns.saturating_sub(begin_ns)));
        bin.freed += weight;
        bin.freed_samples = bin.freed_samples.saturating_add(1);
        self.freed += weight;
        if temporary {
            self.temporary += weight;
        }
    }

    /// Adds a block that was allocated at `begin_ns` and not freed up to `at_ns`: it is in use, or its process ended.
    ///
    /// The sample counts with the age that the block had at `last_free_ns`, when a block of its kind was last freed.
    /// Staying in use while the program waits and nothing happens does not count as evidence.
    pub fn record_left(&mut self, begin_ns: u64, at_ns: u64, last_free_ns: Option<u64>, weight: f64) {
        let age = bin_of(at_ns.saturating_sub(begin_ns));
        let seen_ns = last_free_ns.map_or(at_ns, |last| last.min(at_ns)).saturating_sub(begin_ns);
        let bin = self.bin(age);
        bin.left += weight;
        if seen_ns > 0 {
            // Usually the same bin. This saves a lookup for each block of a profile with a million of them.
            let seen = bin_of(seen_ns);
            let bin = if seen == age { bin } else { self.bin(seen) };
            bin.left_samples = bin.left_samples.saturating_add(1);
        }
    }

    /// Returns the bin with this number, and adds it if needed. Blocks of one stack have few distinct ages, so the
    /// search takes few comparisons within one piece of memory.
    fn bin(&mut self, number: u16) -> &mut Bin {
        let at = match self.bins.binary_search_by_key(&number, |(number, _)| *number) {
            Ok(at) => at,
            Err(at) => {
                self.bins.insert(at, (number, Bin::default()));
                at
            }
        };
        &mut self.bins[at].1
    }

    /// Adds another histogram.
    pub fn add(&mut self, other: &Self) {
        for (bin, Bin { freed, left, freed_samples, left_samples }) in &other.bins {
            let sum = self.bin(*bin);
            sum.freed += freed;
            sum.left += left;
            sum.freed_samples = sum.freed_samples.saturating_add(*freed_samples);
            sum.left_samples = sum.left_samples.saturating_add(*left_samples);
        }
        self.freed += other.freed;
        self.temporary += other.temporary;
        self.last_free_ns = self.last_free_ns.max(other.last_free_ns);
    }

    /// When a block was last freed (CLOCK_MONOTONIC), if any was.
    pub const fn last_free_ns(&self) -> Option<u64> {
        self.last_free_ns
    }

    /// Total weight of the freed blocks.
    pub const fn freed(&self) -> f64 {
        self.freed
    }

    /// Total weight of the temporary blocks.
    pub const fn temporary(&self) -> f64 {
        self.temporary
    }

    /// The blocks of each bin as observations at its middle, in ascending order of age. Which of them were temporary is
    /// not recorded.
    pub fn observations(&self) -> impl Iterator<Item = Observation> + '_ {
        self.bins.iter().flat_map(|(bin, Bin { freed, left, .. })| {
            [(*freed, true), (*left, false)].into_iter().filter(|(weight, _)| *weight > 0.0).map(|(weight, freed)| {
                Observation { age_seconds: middle_seconds(*bin), weight, freed, temporary: false }
            })
        })
    }

    /// Number of samples per octave of age, in ascending order of age.
    pub fn octaves(&self) -> Vec<Octave> {
        let mut octaves: Vec<Octave> = Vec::new();
        for (bin, counts) in &self.bins {
            let exponent = exponent_of(*bin);
            if octaves.last().is_none_or(|last| last.exponent != exponent) {
                octaves.push(Octave { exponent, ..Octave::default() });
            }
            if let Some(octave) = octaves.last_mut() {
                octave.freed += u64::from(counts.freed_samples);
                octave.left += u64::from(counts.left_samples);
            }
        }
        octaves.retain(|octave| octave.freed + octave.left > 0);
        octaves
    }
}

/// Weights and numbers of the blocks whose ages fall into a bin.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Bin {
    freed: f64,
    left: f64,
    freed_samples: u32,
    left_samples: u32,
}

/// Each age below this, in nanoseconds, has a bin of its own.
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

/// Binary logarithm of a bin's lowest age in nanoseconds.
fn exponent_of(bin: u16) -> u32 {
    let bin = u32::from(bin);
    if bin < BINS_PER_DOUBLING { bin.max(1).ilog2() } else { bin / BINS_PER_DOUBLING - 1 + BINS_PER_DOUBLING.ilog2() }
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
        ages.record(0, 10, 2.0, true);
        ages.record(0, 1_000_000, 3.0, false);
        let mut sum = ages.clone();
        sum.add(&ages);
        assert_eq!((sum.freed(), sum.temporary()), (10.0, 4.0));
        let weights: Vec<_> = sum.observations().map(|it| (it.weight, it.freed)).collect();
        assert_eq!(weights, [(4.0, true), (6.0, true)]);
    }

    #[test]
    fn octaves_count_samples_by_the_doublings_of_their_age() {
        let mut ages = Ages::default();
        for (age_ns, weight) in [(0, 9.0), (3, 1.0), (1024, 7.0), (2047, 1.0), (2048, 1.0)] {
            ages.record(0, age_ns, weight, false);
        }
        ages.record_left(0, 1500, None, 8.0);
        let mut twice = ages.clone();
        twice.add(&ages);
        let counted: Vec<_> = twice.octaves().iter().map(|it| (it.exponent, it.freed, it.left)).collect();
        assert_eq!(counted, [(0, 2, 0), (1, 2, 0), (10, 4, 2), (11, 2, 0)]);
        for exponent in 0..63 {
            assert_eq!(exponent_of(bin_of(1 << exponent)), exponent);
            assert_eq!(exponent_of(bin_of((2 << exponent) - 1)), exponent);
        }
    }

    #[test]
    fn a_block_that_is_left_while_nothing_is_freed_is_no_evidence() {
        let mut ages = Ages::default();
        ages.record(1_000, 2_000, 1.0, false);
        let last = ages.last_free_ns();
        assert_eq!(last, Some(2_000));
        // The first was observed for 1,900 ns while others were freed, although it is older by now. The second came
        // later.
        ages.record_left(100, 900_000, last, 1.0);
        ages.record_left(3_000, 900_000, last, 1.0);
        let counted: Vec<_> = ages.octaves().iter().map(|it| (it.exponent, it.freed, it.left)).collect();
        assert_eq!(counted, [(9, 1, 0), (10, 0, 1)]);
        let left: Vec<_> = ages.observations().filter(|it| !it.freed).map(|it| it.weight).collect();
        assert_eq!(left, [2.0], "the curve has them at their age");
    }

    #[test]
    fn blocks_that_are_left_are_as_old_as_freed_ones_of_their_age() {
        // Both ages are in the lower half of the same bin.
        let mut ages = Ages::default();
        ages.record(0, 100_100_000, 20.0, false);
        ages.record_left(0, 101_000_000, None, 40.0);
        let observations: Vec<_> = ages.observations().collect();
        assert_eq!(observations.len(), 2);
        let curve = survival_curve(&observations);
        assert!(matches!(curve[..], [(_, left)] if (left - 2.0 / 3.0).abs() < 1e-12), "{curve:?}");
    }
}
