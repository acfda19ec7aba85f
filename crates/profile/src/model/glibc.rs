//! The state of a heap according to glibc's arenas.

use heapbpf_statistics::estimate::Estimate;
use serde::{Deserialize, Serialize};

/// A process's memory according to glibc's own records, read from outside, in bytes. A block's size includes its header
/// and is rounded up as glibc does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Glibc {
    /// Number of arenas.
    pub arenas: u64,
    /// Blocks in use.
    pub blocks: u64,
    /// Of these, large blocks that have their own mappings.
    #[serde(rename = "large")]
    pub large_blocks: u64,
    /// Sizes of all blocks in use.
    #[serde(rename = "in_use")]
    pub inuse_bytes: u64,
    /// Of these bytes, the part that is not in memory: never written to, or swapped out.
    #[serde(rename = "in_use_absent")]
    pub absent_bytes: u64,
    /// Free memory that the program may be given again.
    #[serde(rename = "free")]
    pub free_bytes: u64,
    /// Of the free bytes, the part in memory.
    #[serde(rename = "free_resident")]
    pub free_resident_bytes: u64,
    /// Of the free bytes, blocks in thread caches and fast bins.
    #[serde(rename = "cached")]
    pub cached_bytes: u64,
    /// Of the free bytes in memory, pages that `malloc_trim(0)` would give back.
    #[serde(rename = "trimmable")]
    pub trimmable_bytes: u64,
    /// Resident memory of the arenas and of large blocks.
    #[serde(rename = "resident")]
    pub resident_bytes: u64,
    /// Upper bound of the bytes counted as in use that may really be in a cache.
    #[serde(rename = "doubtful")]
    pub doubtful_bytes: u64,
    /// Bytes that were not read because they are swapped out or would have taken too long to read.
    #[serde(rename = "unread")]
    pub unread_bytes: u64,
    /// Bytes that were not read because the records there are inconsistent.
    #[serde(rename = "inconsistent")]
    pub inconsistent_bytes: u64,
    /// Whether all figures are exact rather than bounds: everything was read, and the number of large blocks matches
    /// glibc's count.
    pub exact: bool,
    /// Blocks that were in use when the recording attached to the process; `None` if that was not read.
    #[serde(rename = "at_attach_blocks")]
    pub at_attach_blocks: Option<u64>,
    /// Sizes of those blocks, or an upper bound.
    #[serde(rename = "at_attach")]
    pub at_attach_bytes: Option<u64>,
}

/// Memory in use according to the recording: estimates, with the ends of their intervals where there are any.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Recorded {
    /// Requested bytes.
    pub bytes: Estimate,
    /// Blocks.
    pub blocks: Estimate,
}

/// An estimate and its bounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Before {
    /// The estimate.
    pub estimate: f64,
    /// The lower bound; `None` if nothing bounds the recorded amount.
    pub low: Option<f64>,
    /// The upper bound.
    pub high: f64,
}

/// The minor version of glibc 2 among the given allocators, if it is there.
pub fn glibc_version<'n>(allocators: impl IntoIterator<Item = &'n str>) -> Option<u32> {
    allocators.into_iter().find_map(|name| name.strip_prefix("glibc 2.")?.parse().ok())
}

/// A block's header plus rounding, in bytes: minimum, average, and maximum.
const ROUNDED: [f64; 3] = [8.0, 16.0, 32.0];
/// Large blocks are rounded up to pages.
const PAGE: f64 = 4096.0;

impl Glibc {
    /// An empty heap, to which others are added.
    pub fn nothing() -> Self {
        Self { exact: true, at_attach_blocks: Some(0), at_attach_bytes: Some(0), ..Self::default() }
    }

    /// Adds the heap of another process.
    #[must_use]
    pub fn with(self, other: &Self) -> Self {
        let sum = |a: u64, b: u64| a.saturating_add(b);
        let both = |a: Option<u64>, b: Option<u64>| a.zip(b).map(|(a, b)| sum(a, b));
        Self {
            arenas: sum(self.arenas, other.arenas),
            blocks: sum(self.blocks, other.blocks),
            large_blocks: sum(self.large_blocks, other.large_blocks),
            inuse_bytes: sum(self.inuse_bytes, other.inuse_bytes),
            absent_bytes: sum(self.absent_bytes, other.absent_bytes),
            free_bytes: sum(self.free_bytes, other.free_bytes),
            free_resident_bytes: sum(self.free_resident_bytes, other.free_resident_bytes),
            cached_bytes: sum(self.cached_bytes, other.cached_bytes),
            trimmable_bytes: sum(self.trimmable_bytes, other.trimmable_bytes),
            resident_bytes: sum(self.resident_bytes, other.resident_bytes),
            doubtful_bytes: sum(self.doubtful_bytes, other.doubtful_bytes),
            unread_bytes: sum(self.unread_bytes, other.unread_bytes),
            inconsistent_bytes: sum(self.inconsistent_bytes, other.inconsistent_bytes),
            exact: self.exact && other.exact,
            at_attach_blocks: both(self.at_attach_blocks, other.at_attach_blocks),
            at_attach_bytes: both(self.at_attach_bytes, other.at_attach_bytes),
        }
    }

    /// Lower and upper bound of the bytes in use.
    pub fn inuse_bounds(&self) -> (f64, f64) {
        let most = self.inuse_bytes.saturating_add(self.unread_bytes).saturating_add(self.inconsistent_bytes);
        (self.inuse_bytes.saturating_sub(self.doubtful_bytes) as f64, most as f64)
    }

    /// The part of the bytes in use that is older than the recording: everything that was not recorded, but at most
    /// what was in use when the recording attached.
    pub fn before(&self, recorded: &Recorded) -> Before {
        let (bytes, blocks) = (recorded.bytes, recorded.blocks);
        let (least, most) = self.inuse_bounds();
        let at_first = self.at_attach_bytes.map_or(f64::INFINITY, |bytes| bytes as f64);
        let within = |value: f64| value.clamp(0.0, most.min(at_first));
        let least_recorded = bytes.low.unwrap_or(0.0) + ROUNDED[0] * blocks.low.unwrap_or(0.0);
        // At most as many blocks were recorded as exist.
        let most_blocks = blocks.high.unwrap_or(f64::INFINITY).min(self.blocks as f64);
        let rounded = ROUNDED[2] * most_blocks + PAGE * self.large_blocks as f64;
        let most_recorded = bytes.high.map(|bytes| bytes + rounded);
        Before {
            estimate: within(self.inuse_bytes as f64 - bytes.estimate - ROUNDED[1] * blocks.estimate),
            low: most_recorded.map(|recorded| within(least - recorded)),
            high: within(most - least_recorded),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_is_what_was_not_recorded() {
        let heap = Glibc { inuse_bytes: 1_000_000, blocks: 1000, exact: true, ..Glibc::default() };
        let nothing = heap.before(&Recorded::default());
        assert_eq!((nothing.estimate, nothing.low, nothing.high), (1e6, None, 1e6));
        let exact = |estimate| Estimate { estimate, low: Some(estimate), high: Some(estimate), ..Estimate::default() };
        let recorded = Recorded { bytes: exact(400_000.0), blocks: exact(100.0) };
        let before = heap.before(&recorded);
        assert_eq!((before.estimate, before.low, before.high), (598_400.0, Some(596_800.0), 599_200.0));
        let unknown = Recorded { blocks: Estimate { estimate: 100.0, ..Estimate::default() }, ..recorded };
        assert_eq!(heap.before(&unknown).low, Some(568_000.0), "not more blocks were recorded than there are");
        let with_large = Glibc { large_blocks: 2, ..heap };
        assert_eq!(with_large.before(&recorded).low, Some(596_800.0 - 8192.0), "they are rounded up to pages");
        // At most what there was at first, and at least nothing.
        let known = Glibc { at_attach_bytes: Some(500_000), ..heap };
        assert_eq!((known.before(&recorded).estimate, known.before(&recorded).high), (500_000.0, 500_000.0));
        let all = Recorded { bytes: exact(2e6), blocks: exact(1.0) };
        assert_eq!(heap.before(&all), Before { estimate: 0.0, low: Some(0.0), high: 0.0 });
        // Unread memory may be in use, and what may be in a cache may not be in use.
        let partly = Glibc { unread_bytes: 50, inconsistent_bytes: 7, doubtful_bytes: 10, ..heap };
        assert_eq!(partly.inuse_bounds(), (999_990.0, 1_000_057.0));
        assert_eq!(Glibc::nothing().with(&heap), heap, "an unknown start stays unknown");
        let hostile = Glibc { inuse_bytes: u64::MAX, unread_bytes: u64::MAX, blocks: u64::MAX, ..heap };
        assert!(hostile.with(&hostile).before(&recorded).high >= 0.0);
    }
}
