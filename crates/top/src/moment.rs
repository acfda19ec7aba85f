//! A profile with its rows grouped by leaf.

use std::sync::Arc;
use std::time::Duration;

use heapbpf_profile::estimates::intervals_used;
use heapbpf_profile::model::Resident;
use heapbpf_profile::{Pool, Profile, Row};
use heapbpf_statistics::survival::{Lifetimes, pooled};

use crate::leaves::Leaves;
use crate::sums::Sums;

/// A profile with its rows grouped by leaf.
#[derive(Debug)]
pub(crate) struct Moment {
    /// The profile.
    pub(crate) profile: Arc<Profile>,
    /// Length of the recording at this moment.
    pub(crate) at: Duration,
    /// Sums of each leaf.
    pub(crate) sums: Vec<Sums>,
    /// Sums over all leaves.
    pub(crate) total: Sums,
    /// Resident memory of each program that has any.
    pub(crate) resident: Vec<Option<Resident>>,
    /// Sampling intervals in force.
    pub(crate) intervals: Vec<u64>,
    /// Rows grouped by leaf, and where those of each leaf start.
    rows: Vec<u32>,
    starts: Vec<u32>,
}

impl Moment {
    /// Finds the leaves of a profile's rows.
    pub(crate) fn new(profile: Arc<Profile>, leaves: &mut Leaves) -> Self {
        let leaf_of_row = leaves.of_rows(&profile);
        let (count, resident) = (leaves.len(), leaves.resident_of_programs(&profile));
        let (mut sums, mut total) = (vec![Sums::default(); count], Sums::default());
        let mut starts = vec![0_u32; count + 1];
        for (row, &leaf) in profile.rows.iter().zip(&leaf_of_row) {
            let of_row = Sums::of(row);
            sums[leaf as usize].add(&of_row);
            total.add(&of_row);
            starts[leaf as usize + 1] += 1;
        }
        (0..count).for_each(|leaf| starts[leaf + 1] += starts[leaf]);
        let mut next = starts.clone();
        let mut rows = vec![0; profile.rows.len()];
        for (row, &leaf) in (0..).zip(&leaf_of_row) {
            rows[next[leaf as usize] as usize] = row;
            next[leaf as usize] += 1;
        }
        let (at, intervals) = (profile.header.duration, intervals_used(&profile));
        Self { profile, at, sums, total, resident, intervals, rows, starts }
    }

    /// Whether the resident memory of any program is known.
    pub(crate) fn has_memory(&self) -> bool {
        self.resident.iter().any(Option::is_some)
    }

    /// The rows of some leaves.
    pub(crate) fn rows<'a>(&'a self, leaves: &'a [u32]) -> impl Iterator<Item = &'a Row> {
        let of_leaf = |leaf: &'a u32| {
            let leaf = *leaf as usize;
            let range = match (self.starts.get(leaf), self.starts.get(leaf + 1)) {
                (Some(&start), Some(&end)) => start as usize..end as usize,
                _ => 0..0,
            };
            self.rows[range].iter().map(|row| &self.profile.rows[*row as usize])
        };
        leaves.iter().flat_map(of_leaf)
    }

    /// The samples of some leaves.
    pub(crate) fn pool(&self, leaves: &[u32]) -> Pool {
        let mut pool = Pool::of(self.rows(leaves));
        pool.allow_for(&self.intervals);
        pool
    }

    /// Median lifetime in seconds of the blocks that some leaves allocated; `None` if more than half are still alive or
    /// if it is unknown.
    pub(crate) fn median_seconds(&self, leaves: &[u32]) -> Option<f64> {
        let parts: Vec<(&Lifetimes, f64)> =
            self.rows(leaves).filter_map(|row| Some((row.lifetimes.as_ref()?, row.alloc.objects))).collect();
        pooled(&parts)?.median_seconds
    }

    /// The sums of a leaf; zero if the leaf is newer than this moment.
    pub(crate) fn sums_of(&self, leaf: u32) -> Sums {
        self.sums.get(leaf as usize).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use heapbpf_profile::{Value, testing};

    #[test]
    fn leaves_have_their_rows_and_add_up() {
        let mut leaves = Leaves::default();
        let moment = Moment::new(Arc::new(testing::small()), &mut leaves);
        assert_eq!(moment.rows(&[0]).count(), 3);
        let all: Vec<u32> = (0..leaves.len() as u32).collect();
        assert_eq!(moment.rows(&all).count(), moment.profile.rows.len());
        let sum: f64 = all.iter().map(|leaf| moment.sums_of(*leaf).inuse_bytes).sum();
        assert!((sum - moment.total.inuse_bytes).abs() < 1e-6);
        assert!((moment.pool(&all).total(Value::InuseSpace) - sum).abs() < 1e-6);
        assert_eq!((moment.sums_of(99), moment.rows(&[99]).count()), (Sums::default(), 0));
    }
}
