//! Memory in use at one moment, divided by when it was allocated, so that a profile can be limited to what is younger
//! than a mark.

use std::time::Duration;

use heapbpf_heap::live::SumsByMark;
use heapbpf_profile::model::Profile;
use heapbpf_statistics::sums::SampleSums;

/// Sums in use, by the mark after which their blocks were allocated.
#[derive(Clone, Debug, Default)]
pub struct Recent {
    /// Moments, as times since the start of the recording; ascending.
    marks: Vec<Duration>,
    /// For the profile's first rows. Later rows belong to ended processes and to other runtimes.
    rows: Vec<SumsByMark>,
}

impl Recent {
    /// The sums of the first rows of a profile.
    pub fn new(marks: Vec<Duration>, rows: Vec<SumsByMark>) -> Self {
        Self { marks, rows }
    }

    /// Number of sums, for bounds on memory.
    pub fn count(&self) -> usize {
        self.rows.iter().map(Vec::len).sum()
    }

    /// The profile with only those blocks in use that were allocated after a mark. `None` if the profile has no such
    /// mark.
    ///
    /// Bounds on losses remain those of everything in use.
    pub fn since(&self, from: Duration, profile: &Profile) -> Option<Profile> {
        let first = self.marks.iter().position(|mark| *mark == from)?;
        let mut since = profile.clone();
        for (index, row) in since.rows.iter_mut().enumerate() {
            let known = profile.knows_inuse(row.key.process) && !row.is_of_go_runtime();
            let sums = self.rows.get(index).filter(|_| known);
            let mut inuse = SampleSums::default();
            let later = sums.into_iter().flatten().filter(|(mark, _)| *mark >= first);
            later.for_each(|(_, sums)| inuse.add(sums));
            row.inuse = inuse;
        }
        Some(since)
    }
}

#[cfg(test)]
mod tests {
    use heapbpf_profile::testing;

    use super::*;

    #[test]
    fn a_profile_is_limited_to_what_came_after_a_mark() {
        let profile = testing::small();
        let [early, late] = [1, 5].map(Duration::from_secs);
        let [old, new] = [100, 30].map(|bytes| testing::sums(1, bytes, 1));
        let recent = Recent::new(vec![early, late], vec![vec![(0, old), (1, new)], vec![(0, old)]]);
        assert_eq!(recent.count(), 3);
        let inuse = |from| -> Vec<f64> {
            recent.since(from, &profile).expect("a mark").rows.iter().map(|row| row.inuse.bytes).collect()
        };
        assert_eq!(inuse(early)[..3], [130.0, 100.0, 0.0]);
        assert_eq!(inuse(late)[..3], [30.0, 0.0, 0.0]);
        assert!(inuse(early)[2..].iter().all(|bytes| *bytes == 0.0), "nothing is known of other rows");
        assert!(recent.since(Duration::from_secs(2), &profile).is_none());
    }
}
