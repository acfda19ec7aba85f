//! The events that the heap and its model are given.

use std::ops::Range;

use proptest::collection::vec;
use proptest::prelude::*;

/// Processes, by thread group.
pub const PROCESSES: [u32; 3] = [1, 2, 3];
/// Sampling intervals.
pub const INTERVALS: [u64; 2] = [1, 64];
/// Number of stacks.
pub const STACKS: usize = 4;
/// Cells in which mappings lie; so few that they often replace each other.
const CELLS: u64 = 40;

/// A sampled allocation.
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    pub process: u32,
    /// The process itself, or its parent for a vfork child.
    pub space: u32,
    pub interval: usize,
    pub stack: usize,
    pub size_bytes: u64,
    pub tracked: bool,
}

/// One event.
#[derive(Clone, Debug)]
pub enum Operation {
    Allocate(Allocation),
    /// A mapping from a cell on. Its size is in cells.
    Map(Allocation, u64),
    /// The free of the block with this index among the live ones; with a space, of a sample that may be unknown.
    Free {
        sample: usize,
        space: u32,
        temporary: bool,
    },
    Unmap {
        space: u32,
        cells: Range<u64>,
        late_ns: u64,
    },
    KeepMapped {
        space: u32,
        cells: Vec<Range<u64>>,
        late_ns: u64,
    },
    /// The end of a process. Bits: whose frees were lost, by the page of their address.
    End {
        space: u32,
        freed: u8,
    },
    Replace {
        space: u32,
    },
    StopTracking {
        space: u32,
    },
    TrackAgain {
        space: u32,
        late_ns: u64,
    },
    Reconcile {
        missed: u64,
        outside_map: u64,
        unknown: Vec<Allocation>,
        late: usize,
        behind: u64,
    },
    Retire {
        process: u32,
    },
    /// A snapshot.
    Look,
}

fn space() -> impl Strategy<Value = u32> {
    prop::sample::select(&PROCESSES[..])
}

fn allocation(most_bytes: u64) -> impl Strategy<Value = Allocation> {
    let is_tracked = prop::bool::weighted(0.95);
    let in_parent = prop::option::weighted(0.1, space());
    (space(), in_parent, 0..INTERVALS.len(), 0..STACKS, 1..=most_bytes, is_tracked).prop_map(
        |(process, parent, interval, stack, size_bytes, tracked)| Allocation {
            process,
            space: parent.unwrap_or(process),
            interval,
            stack,
            size_bytes,
            tracked,
        },
    )
}

fn cells() -> impl Strategy<Value = Range<u64>> {
    (0..CELLS, 0..12_u64).prop_map(|(start, length)| start..start + length)
}

/// Ranges that are not empty, in order of their starts; they may overlap.
fn ranges() -> impl Strategy<Value = Vec<Range<u64>>> {
    vec((0..CELLS, 1..12_u64), 0..4).prop_map(|mut ranges| {
        ranges.sort_unstable();
        ranges.into_iter().map(|(start, length)| start..start + length).collect()
    })
}

/// How long before its record something happened: 0 for most.
fn late_ns() -> impl Strategy<Value = u64> {
    prop_oneof![3 => Just(0), 1 => 0..100_u64]
}

/// Bits of which few are set.
fn few() -> impl Strategy<Value = u64> {
    (any::<u64>(), any::<u64>()).prop_map(|(a, b)| a & b)
}

/// Any event; allocations and frees are the most frequent.
pub fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        30 => allocation(3_000).prop_map(Operation::Allocate),
        10 => (allocation(12), 0..CELLS).prop_map(|(it, cell)| Operation::Map(it, cell)),
        20 => (0..30_usize, prop_oneof![9 => Just(0), 1 => space()], any::<bool>())
            .prop_map(|(sample, space, temporary)| Operation::Free { sample, space, temporary }),
        6 => (space(), cells(), late_ns())
            .prop_map(|(space, cells, late_ns)| Operation::Unmap { space, cells, late_ns }),
        3 => (space(), ranges(), late_ns())
            .prop_map(|(space, cells, late_ns)| Operation::KeepMapped { space, cells, late_ns }),
        2 => (space(), any::<u8>()).prop_map(|(space, freed)| Operation::End { space, freed }),
        1 => space().prop_map(|space| Operation::Replace { space }),
        1 => space().prop_map(|space| Operation::StopTracking { space }),
        2 => (space(), late_ns()).prop_map(|(space, late_ns)| Operation::TrackAgain { space, late_ns }),
        3 => (few(), few(), vec(allocation(3_000), 0..4), 0..3_usize, any::<u64>()).prop_map(
            |(missed, outside_map, unknown, late, behind)| Operation::Reconcile {
                missed,
                outside_map,
                unknown,
                late,
                behind,
            },
        ),
        2 => space().prop_map(|process| Operation::Retire { process }),
        8 => Just(Operation::Look),
    ]
}
