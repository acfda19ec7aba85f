//! Point estimates of rows that were added up.

use heapbpf_profile::{Row, Value};

/// Point estimates that every row of the screen has.
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
}

impl Sums {
    /// Those of a row of a profile.
    pub(crate) fn of(row: &Row) -> Self {
        Self {
            inuse_bytes: Value::InuseSpace.of(row),
            inuse_blocks: Value::InuseObjects.of(row),
            alloc_bytes: Value::AllocSpace.of(row),
            allocations: Value::AllocObjects.of(row),
        }
    }

    /// Adds others.
    pub(crate) fn add(&mut self, other: &Self) {
        self.inuse_bytes += other.inuse_bytes;
        self.inuse_blocks += other.inuse_blocks;
        self.alloc_bytes += other.alloc_bytes;
        self.allocations += other.allocations;
    }
}

/// Figures of some leaves, now and before.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Tally {
    /// Now.
    pub(crate) sums: Sums,
    /// Bytes in use when growth is counted from.
    pub(crate) inuse_before: f64,
    /// Bytes allocated when the rate is counted from.
    pub(crate) alloc_before: f64,
    /// Bytes in use at the mark.
    pub(crate) inuse_marked: f64,
}

impl Tally {
    /// Adds other leaves.
    pub(crate) fn add(&mut self, other: &Self) {
        self.sums.add(&other.sums);
        self.inuse_before += other.inuse_before;
        self.alloc_before += other.alloc_before;
        self.inuse_marked += other.inuse_marked;
    }

    /// Whether there is and was nothing.
    pub(crate) fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}
