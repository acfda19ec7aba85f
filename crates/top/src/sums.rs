//! Point estimates, added up over rows.

use heapbpf_profile::{Row, SampleSums, Value};

/// The point estimates that every row on the screen has.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sums {
    /// Bytes in use.
    pub(crate) inuse_bytes: f64,
    /// Blocks in use.
    pub(crate) inuse_blocks: f64,
    /// Bytes allocated since the start.
    pub(crate) alloc_bytes: f64,
    /// Allocations since the start.
    pub(crate) allocations: f64,
    /// By how much the bytes in use have grown over the time that the profile's growth is of.
    pub(crate) grown_bytes: f64,
}

impl Sums {
    /// The estimates of a profile row.
    pub(crate) fn of(row: &Row) -> Self {
        let bytes = |sums: &SampleSums| Value::InuseSpace.estimate_of(sums);
        let grown = row.growth.as_ref().filter(|_| !row.is_of_go_runtime());
        Self {
            grown_bytes: grown.map_or(0.0, |growth| bytes(&growth.kept) - bytes(&growth.freed)),
            inuse_bytes: Value::InuseSpace.of(row),
            inuse_blocks: Value::InuseObjects.of(row),
            alloc_bytes: Value::AllocSpace.of(row),
            allocations: Value::AllocObjects.of(row),
        }
    }

    /// Adds other sums.
    pub(crate) fn add(&mut self, other: &Self) {
        self.inuse_bytes += other.inuse_bytes;
        self.inuse_blocks += other.inuse_blocks;
        self.alloc_bytes += other.alloc_bytes;
        self.allocations += other.allocations;
        self.grown_bytes += other.grown_bytes;
    }
}

/// Figures of some leaves, now and at earlier points.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Tally {
    /// Current sums.
    pub(crate) sums: Sums,
    /// Bytes allocated at the point from which the rate is measured.
    pub(crate) alloc_before: f64,
    /// Size at the mark: bytes in use, or bytes allocated if frees are not followed.
    pub(crate) inuse_marked: f64,
}

impl Tally {
    /// Adds the figures of other leaves.
    pub(crate) fn add(&mut self, other: &Self) {
        self.sums.add(&other.sums);
        self.alloc_before += other.alloc_before;
        self.inuse_marked += other.inuse_marked;
    }

    /// Whether all figures are zero.
    pub(crate) fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}
