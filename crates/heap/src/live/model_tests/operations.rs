//! The events that go to the heap and its model.

use std::ops::Range;

/// Processes, by thread group.
pub const PROCESSES: [u32; 3] = [1, 2, 3];
/// Sampling intervals.
pub const INTERVALS: [u64; 2] = [1, 64];
/// Number of stacks.
pub const STACKS: usize = 4;
/// Number of cells that mappings start in: few, so that mappings often replace each other.
const CELLS: u64 = 40;

/// A sampled allocation.
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    pub process: u32,
    /// The process itself; the parent for a vfork child.
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
    /// A mapping that begins at a cell. Its size is in cells.
    Map(Allocation, u64),
    /// The free of the live block with this index; with a space, the free of a sample that may be unknown.
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
    /// The end of a process. `freed` has a bit per page (modulo 8): whether the frees of the blocks at that page's
    /// addresses were lost.
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

/// Draws random events, the same ones for the same seed.
pub struct Draws(pub fastrand::Rng);

impl Draws {
    /// Whether this draw succeeds: once in `of` draws on average.
    pub fn one_in(&mut self, of: u32) -> bool {
        self.0.u32(..of) == 0
    }

    fn space(&mut self) -> u32 {
        PROCESSES[self.0.usize(..PROCESSES.len())]
    }

    fn allocation(&mut self, most_bytes: u64) -> Allocation {
        let process = self.space();
        Allocation {
            process,
            space: if self.one_in(10) { self.space() } else { process },
            interval: self.0.usize(..INTERVALS.len()),
            stack: self.0.usize(..STACKS),
            size_bytes: self.0.u64(1..=most_bytes),
            tracked: !self.one_in(20),
        }
    }

    fn cells(&mut self, least: u64) -> Range<u64> {
        let start = self.0.u64(..CELLS);
        start..start + self.0.u64(least..12)
    }

    /// Ranges that are not empty, in order of their starts. They may overlap.
    fn ranges(&mut self) -> Vec<Range<u64>> {
        let mut ranges: Vec<_> = (0..self.0.usize(..4)).map(|_| self.cells(1)).collect();
        ranges.sort_unstable_by_key(|cells| (cells.start, cells.end));
        ranges
    }

    /// How long before its record something happened: usually 0.
    fn late_ns(&mut self) -> u64 {
        if self.one_in(4) { self.0.u64(..100) } else { 0 }
    }

    /// A number with few bits set.
    fn few(&mut self) -> u64 {
        self.0.u64(..) & self.0.u64(..)
    }

    /// Any event; allocations and frees are the most frequent.
    pub fn operation(&mut self) -> Operation {
        match self.0.u32(..88) {
            0..30 => Operation::Allocate(self.allocation(3_000)),
            30..40 => Operation::Map(self.allocation(12), self.0.u64(..CELLS)),
            40..60 => Operation::Free {
                sample: self.0.usize(..30),
                space: if self.one_in(10) { self.space() } else { 0 },
                temporary: self.0.bool(),
            },
            60..66 => Operation::Unmap { space: self.space(), cells: self.cells(0), late_ns: self.late_ns() },
            66..69 => Operation::KeepMapped { space: self.space(), cells: self.ranges(), late_ns: self.late_ns() },
            69..71 => Operation::End { space: self.space(), freed: self.0.u8(..) },
            71 => Operation::Replace { space: self.space() },
            72 => Operation::StopTracking { space: self.space() },
            73..75 => Operation::TrackAgain { space: self.space(), late_ns: self.late_ns() },
            75..78 => Operation::Reconcile {
                missed: self.few(),
                outside_map: self.few(),
                unknown: (0..self.0.usize(..4)).map(|_| self.allocation(3_000)).collect(),
                late: self.0.usize(..3),
                behind: self.0.u64(..),
            },
            78..80 => Operation::Retire { process: self.space() },
            _ => Operation::Look,
        }
    }
}
