//! How large the rings are: at first by how much a recording samples, later by how full they get.
//!
//! All memory of a ring is allocated at once, so a ring that is too large costs a service more than everything else
//! that it keeps.

use heapbpf_profile::model::Criterion;
use sampler_ebpf::abi::{FIRST_STACK_BYTES, LARGEST_STACK_COPY, STACK_SPACE_SHARE};

/// Ring sizes of a recording of every allocation, bytes. They, like all sizes here, were chosen by what is lost under
/// the hardest loads (docs/overhead.md).
const MOST_EVENTS_BYTES: u64 = 16 << 20;
const MOST_STACKS_BYTES: u64 = STACKS_PER_EVENTS * MOST_EVENTS_BYTES;
/// Bytes of the stacks ring per byte of the events ring, if the user gives the size of the latter.
const STACKS_PER_EVENTS: u64 = 4;
/// Smallest stacks ring, bytes: while it is at most half full, even the longest copy fits whole.
const LEAST_STACKS_BYTES: u64 = 2 * STACK_SPACE_SHARE * LARGEST_STACK_COPY;
/// A ring grows by this factor; if more than half was in use, by its square, because more may arrive while it is
/// replaced.
const FACTOR: u64 = 4;
/// A ring grows when one in this many of its bytes is in use. The daemon is woken at the same fill level.
pub const WAKE_SHARE: u64 = 4;
/// A ring shrinks only so far that no more than one in this many of its bytes would have been in use.
const QUIET_SHARE: u64 = 8;
/// A long stack copy counts as if this many of them were in the ring.
const COPIES_AT_ONCE: u64 = 16;
/// Time that a ring is watched before it shrinks. The time doubles whenever the ring grows again after it has shrunk,
/// so that loads that come and go do not resize it forever.
const FIRST_QUIET_NS: u64 = 15_000_000_000;
const LONGEST_QUIET_NS: u64 = 256 * FIRST_QUIET_NS;

/// Size of a typical allocation, for criteria whose trials are allocations, bytes.
const TYPICAL_BYTES: u64 = 64;

/// Smallest and largest size of a ring, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLimits {
    /// The size at first.
    pub first_bytes: u64,
    /// The largest size.
    pub most_bytes: u64,
}

/// The limits of both rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSizes {
    /// The ring of small records.
    pub events: RingLimits,
    /// The ring of stack copies.
    pub stacks: RingLimits,
}

impl RingSizes {
    /// Sizes that grow when needed. `interval`: in trials; 0 for no samples. `copies`: whether stacks are copied.
    pub fn of_interval(interval: u64, criterion: Criterion, copies: bool) -> Self {
        let (events_bytes, stacks_bytes) = first_bytes(interval, criterion);
        Self {
            events: RingLimits { first_bytes: events_bytes, most_bytes: MOST_EVENTS_BYTES },
            stacks: RingLimits { first_bytes: if copies { stacks_bytes } else { 0 }, most_bytes: MOST_STACKS_BYTES },
        }
    }

    /// Sizes that stay, for an events ring of this size. `largest_bytes`: the largest size that a ring can have.
    pub fn fixed(events_bytes: u64, largest_bytes: u64) -> Self {
        let fixed = |bytes| RingLimits { first_bytes: bytes, most_bytes: bytes };
        // The ring must hold several stack copies. Long ones are made only while there is space.
        let stacks_bytes = (STACKS_PER_EVENTS * events_bytes).clamp(4 * FIRST_STACK_BYTES, largest_bytes);
        Self { events: fixed(events_bytes), stacks: fixed(stacks_bytes) }
    }

    /// Whether the rings keep their initial size.
    pub const fn are_fixed(&self) -> bool {
        self.events.first_bytes == self.events.most_bytes
    }
}

/// Initial sizes of the events ring and of the stacks ring, bytes.
fn first_bytes(interval: u64, criterion: Criterion) -> (u64, u64) {
    let bytes = match criterion {
        Criterion::Bytes => interval,
        Criterion::Allocations | Criterion::SizeClass => interval.saturating_mul(TYPICAL_BYTES),
    };
    match bytes {
        0 => (128 << 10, 0),
        1..1024 => (MOST_EVENTS_BYTES, MOST_STACKS_BYTES),
        1024..16384 => (4 << 20, 32 << 20),
        16384..262_144 => (2 << 20, MOST_STACKS_BYTES),
        262_144.. => (512 << 10, LEAST_STACKS_BYTES),
    }
}

/// Decides when a ring is resized.
#[derive(Clone, Debug)]
pub struct RingGrowth {
    /// The smallest and largest size. They depend on the interval.
    pub limits: RingLimits,
    /// Most bytes in use at a time since `since_ns`.
    most_used_bytes: u64,
    since_ns: Option<u64>,
    quiet_ns: u64,
    /// Whether it has shrunk since it last grew.
    has_shrunk: bool,
}

impl RingGrowth {
    /// For a ring of the smallest of these sizes.
    pub const fn new(limits: RingLimits) -> Self {
        Self { limits, most_used_bytes: 0, since_ns: None, quiet_ns: FIRST_QUIET_NS, has_shrunk: false }
    }

    /// Checks the ring at a given moment (CLOCK_MONOTONIC). `fill_bytes`: its fill level. Returns the size that it
    /// should have, if that is a different one.
    pub fn look(&mut self, size_bytes: u64, fill_bytes: u64, now_ns: u64) -> Option<u64> {
        self.note_used(fill_bytes);
        if size_bytes < self.limits.first_bytes {
            self.begin(now_ns);
            return Some(self.limits.first_bytes);
        }
        if size_bytes < self.limits.most_bytes && self.most_used_bytes >= size_bytes / WAKE_SHARE {
            let factor = if self.most_used_bytes > size_bytes / 2 { FACTOR * FACTOR } else { FACTOR };
            if std::mem::replace(&mut self.has_shrunk, false) {
                self.quiet_ns = (2 * self.quiet_ns).min(LONGEST_QUIET_NS);
            }
            self.begin(now_ns);
            return Some((factor * size_bytes).min(self.limits.most_bytes));
        }
        if now_ns.saturating_sub(*self.since_ns.get_or_insert(now_ns)) < self.quiet_ns {
            return None;
        }
        let needed = (QUIET_SHARE * self.most_used_bytes).next_power_of_two().max(self.limits.first_bytes);
        self.begin(now_ns);
        let shrinks = needed <= size_bytes / FACTOR;
        self.has_shrunk |= shrinks;
        shrinks.then_some(needed)
    }

    /// Notes a long stack copy. A copy may take only a share of the space that is left, so long copies need a ring that
    /// is far larger than they are.
    pub fn note_copy(&mut self, copied_bytes: u64) {
        if copied_bytes > FIRST_STACK_BYTES {
            // Leaves space for many in a row, as a compiler makes.
            self.note_used(COPIES_AT_ONCE * copied_bytes);
        }
    }

    fn note_used(&mut self, bytes: u64) {
        self.most_used_bytes = self.most_used_bytes.max(bytes);
    }

    const fn begin(&mut self, now_ns: u64) {
        (self.since_ns, self.most_used_bytes) = (Some(now_ns), 0);
    }
}

/// Decides the sizes of both rings.
pub struct Growth {
    /// Of the events ring.
    pub events: RingGrowth,
    /// Of the stacks ring.
    pub stacks: RingGrowth,
    /// Whether a ring was replaced, or its new descriptor could not be watched yet, since this was last taken. If so,
    /// another descriptor signals its records.
    pub replaced: bool,
}

impl Growth {
    /// For rings of the smallest of these sizes.
    pub const fn new(sizes: &RingSizes) -> Self {
        Self { events: RingGrowth::new(sizes.events), stacks: RingGrowth::new(sizes.stacks), replaced: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    const SECOND: u64 = 1_000_000_000;

    fn first(interval: u64, criterion: Criterion) -> (u64, u64) {
        let sizes = RingSizes::of_interval(interval, criterion, true);
        assert_eq!((sizes.events.most_bytes, sizes.stacks.most_bytes), (16 * MIB, 64 * MIB));
        (sizes.events.first_bytes / KIB, sizes.stacks.first_bytes / KIB)
    }

    #[test]
    fn rings_begin_as_large_as_the_interval_needs() {
        assert_eq!(first(512 * KIB, Criterion::Bytes), (512, 16384));
        assert_eq!(first(256 * KIB, Criterion::Bytes), (512, 16384));
        assert_eq!(first(256 * KIB - 1, Criterion::Bytes), (2048, 65536));
        assert_eq!(first(16 * KIB, Criterion::Bytes), (2048, 65536));
        for interval in [KIB, 4 * KIB, 16 * KIB - 1] {
            assert_eq!(first(interval, Criterion::Bytes), (4096, 32768));
        }
        for interval in [1, KIB - 1] {
            assert_eq!(first(interval, Criterion::Bytes), (16384, 65536));
        }
        assert_eq!(first(0, Criterion::Bytes), (128, 0), "without samples there are no stacks");
        assert_eq!(first(10, Criterion::Allocations), (16384, 65536));
        assert_eq!(first(256, Criterion::SizeClass), (2048, 65536));
        assert_eq!(first(10_000, Criterion::Allocations), (512, 16384));
        assert_eq!(RingSizes::of_interval(1, Criterion::Bytes, false).stacks.first_bytes, 0, "none are copied");
    }

    #[test]
    fn sizes_that_were_given_stay() {
        let sizes = RingSizes::fixed(MIB, 1 << 30);
        assert!(sizes.are_fixed() && !RingSizes::of_interval(16 * KIB, Criterion::Bytes, true).are_fixed());
        let mut growth = RingGrowth::new(sizes.events);
        assert_eq!(growth.look(MIB, MIB, SECOND), None);
        assert_eq!(growth.look(MIB, 0, 1 << 60), None);
        assert_eq!(RingSizes::fixed(4 * KIB, 1 << 30).stacks.first_bytes, 4 * FIRST_STACK_BYTES, "several copies");
        assert_eq!(RingSizes::fixed(1 << 30, 1 << 30).stacks.first_bytes, 1 << 30);
    }

    fn stacks() -> RingGrowth {
        RingGrowth::new(RingLimits { first_bytes: 2 * MIB, most_bytes: 64 * MIB })
    }

    #[test]
    fn a_ring_grows_while_it_fills_up_to_its_limit() {
        let mut growth = stacks();
        assert_eq!(growth.look(2 * MIB, 512 * KIB - 1, 0), None);
        assert_eq!(growth.look(2 * MIB, 512 * KIB, 0), Some(8 * MIB));
        assert_eq!(growth.look(8 * MIB, 512 * KIB, 0), None, "there is space now");
        assert_eq!(growth.look(8 * MIB, 5 * MIB, 0), Some(64 * MIB), "more than half was in use");
        assert_eq!(growth.look(64 * MIB, 64 * MIB, 0), None);
    }

    #[test]
    fn long_copies_need_a_large_ring() {
        let mut growth = stacks();
        growth.note_copy(FIRST_STACK_BYTES);
        assert_eq!(growth.look(2 * MIB, 0, 0), None);
        growth.note_copy(128 * KIB - 1);
        assert_eq!(growth.look(8 * MIB, 0, 0), None);
        growth.note_copy(128 * KIB);
        assert_eq!(growth.look(8 * MIB, 0, 0), Some(32 * MIB), "before many of them come");
        growth.note_copy(MIB);
        assert_eq!(growth.look(32 * MIB, 0, 0), Some(64 * MIB));
    }

    #[test]
    fn a_ring_shrinks_after_a_quiet_time_that_becomes_longer() {
        let mut growth = stacks();
        assert_eq!(growth.look(2 * MIB, 0, 1000 * SECOND), None);
        assert_eq!(growth.look(2 * MIB, 2 * MIB, 1000 * SECOND), Some(32 * MIB));
        assert_eq!(growth.look(32 * MIB, 8 * MIB, 1010 * SECOND), Some(64 * MIB));
        assert_eq!(growth.look(64 * MIB, 0, 1024 * SECOND), None);
        assert_eq!(growth.look(64 * MIB, MIB, 1025 * SECOND), Some(8 * MIB), "a quarter of a minute later");
        // It was in use during this time.
        assert_eq!(growth.look(8 * MIB, MIB, 1030 * SECOND), None);
        assert_eq!(growth.look(8 * MIB, 0, 1040 * SECOND), None);
        assert_eq!(growth.look(8 * MIB, 0, 1055 * SECOND), Some(2 * MIB));
        assert_eq!(growth.look(2 * MIB, 0, 9999 * SECOND), None, "not below its first size");
        assert_eq!(growth.look(2 * MIB, 512 * KIB, 10_000 * SECOND), Some(8 * MIB));
        assert_eq!(growth.look(8 * MIB, 0, 10_029 * SECOND), None);
        assert_eq!(growth.look(8 * MIB, 0, 10_030 * SECOND), Some(2 * MIB), "after half a minute");
    }

    #[test]
    fn a_smaller_interval_makes_space_at_once() {
        let mut growth = stacks();
        growth.limits = RingSizes::of_interval(1000, Criterion::Bytes, true).stacks;
        assert_eq!(growth.look(2 * MIB, 0, 0), Some(64 * MIB));
    }
}
