//! A recording at one moment. Sums are copied; stacks and files are shared.

use std::collections::HashSet;
use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant, SystemTime};

use heapbpf_heap::ages::Ages;
use heapbpf_heap::live::{LiveBlock, SumsByMark};
use heapbpf_profile::model::{InMemory, Process, Row, RowKey, Unread};
use heapbpf_statistics::growth::Growth;
use heapbpf_statistics::sums::SampleSums;
use heapbpf_symbols::go::GoProgram;
use heapbpf_unwind::mapping::Mapping;
use sampler_ebpf::abi::ProcessKey;

use super::symbolization::{Facts, UnsymbolizedStack};
use crate::attaching::arenas::AtAttach;
use crate::stats::Stats;

/// Level of detail of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Sums by process and interval, each in one row without a stack.
    Totals,
    /// A row for every stack.
    Stacks,
    /// A row for every stack, with lifetimes of blocks.
    Lifetimes,
}

/// A recording at one moment.
pub struct Snapshot {
    /// Level of detail.
    pub detail: Detail,
    /// Moments that divide the blocks in use by age, as times since the start of the recording; ascending.
    pub marks: Vec<Duration>,
    /// Whether blocks in use are known. They are unknown once tracking of frees has stopped.
    pub live: bool,
    /// Wall-clock time at which the recording started.
    pub started: SystemTime,
    /// Length of the recording so far.
    pub duration: Duration,
    /// Length of the last part of the recording over which the growth of rows is measured.
    pub growth_over: Option<Duration>,
    /// Records from before this moment that were not read in time.
    pub unread: Option<Unread>,
    /// Process generation of each entry of `processes`, in the same order.
    pub keys: Vec<ProcessKey>,
    /// Processes with at least one hit of a probe.
    pub processes: Vec<Process>,
    /// Targets in which nothing was counted.
    pub idle: Vec<Process>,
    /// Sums, by row.
    pub rows: Vec<SnapshotRow>,
    /// Processes whose memory is to be measured.
    pub measured: Vec<Measured>,
    /// Set for the last profile: the channel closes when the hooks have been removed. Memory is measured after that, so
    /// that it does not include their data.
    pub unhooked: Option<Receiver<()>>,
    /// Set for a client that does not need memory measured.
    pub often: Option<Often>,
    /// What symbolization needs to know about new stacks.
    pub facts: Facts,
    /// Go programs whose heaps belong in the profile.
    pub go: Vec<GoTarget>,
    /// The accounting.
    pub stats: Stats,
    /// Remarks that the user must see next to the figures.
    pub notes: Vec<String>,
    /// When taking the snapshot began.
    pub begun: Instant,
    /// How long taking it blocked the event path.
    pub cost: Duration,
    /// CPU time of taking it.
    pub cpu: Duration,
}

/// A request of a client that asks again and again. Memory is measured only with [`Detail::Lifetimes`]; the
/// client's other profiles have what was measured last.
#[derive(Default)]
pub struct Often {
    /// Rows that are no longer needed, whose memory is reused: fresh pages for thousands of rows cost more than filling
    /// them.
    pub rows: Vec<Row>,
}

/// A Go program whose heap belongs in a profile.
pub struct GoTarget {
    /// The process.
    pub process: ProcessKey,
    /// The program.
    pub program: Arc<GoProgram>,
    /// Where its code is mapped.
    pub mapping: Mapping,
    /// Its memory; `None` if it cannot be opened.
    pub memory: Option<Arc<File>>,
}

/// A row of the heap: its identity and its sums.
#[derive(Default)]
pub struct SnapshotRow {
    /// Identity of the row. The process is an index into [`Snapshot::processes`]; totals have no stack.
    pub key: RowKey<usize, Arc<str>, Option<UnsymbolizedStack>>,
    /// All sampled allocations.
    pub alloc: SampleSums,
    /// Samples in use.
    pub inuse: SampleSums,
    /// Whether its samples are mappings.
    pub mapped: bool,
    /// Where the blocks in use are, once that has been read.
    pub in_memory: Option<Box<InMemory>>,
    /// Samples held at exit by their process, if these are kept separate from those in use.
    pub at_exit: SampleSums,
    /// Samples in use at the peak.
    pub peak: SampleSums,
    /// Of the samples in use, those allocated after each mark.
    pub by_mark: SumsByMark,
    /// Ages of freed blocks and of the others; only with [`Detail::Lifetimes`].
    pub ages: Option<Ages>,
    /// Growth over [`Snapshot::growth_over`].
    pub growth: Option<Growth>,
}

/// A process whose resident memory is measured when the profile is made.
pub struct Measured {
    /// Index in [`Snapshot::processes`], or after these in [`Snapshot::idle`].
    pub process: usize,
    /// Its process generation.
    pub key: ProcessKey,
    /// All mappings in use, and sampled blocks in use; only some of these if there are very many. Their rows are
    /// indices in [`Snapshot::rows`].
    pub blocks: Vec<LiveBlock>,
    /// Probability with which a block that is no mapping is included.
    pub share: f64,
    /// What it had when it joined the recording.
    pub at_attach: AtAttach,
}

/// Exited processes with their allocations, on their way to the overflow bucket.
pub struct Retired {
    /// Process generation of each entry of `processes`, in the same order.
    pub keys: Vec<ProcessKey>,
    /// The exited processes.
    pub processes: Vec<Process>,
    /// Those that still have other rows. Their counts and losses are handed over with their last rows.
    pub held: HashSet<ProcessKey>,
    /// Their rows.
    pub rows: Vec<SnapshotRow>,
    /// What symbolization needs to know about new stacks.
    pub facts: Facts,
}

impl Retired {
    /// The same for totals.
    pub fn without_stacks(&self) -> Self {
        let row = |row: &SnapshotRow| SnapshotRow {
            key: row.key.with(row.key.process, None),
            in_memory: None,
            by_mark: Vec::new(),
            ages: None,
            ..*row
        };
        Self {
            keys: self.keys.clone(),
            processes: self.processes.clone(),
            held: self.held.clone(),
            rows: self.rows.iter().map(row).collect(),
            facts: Facts::default(),
        }
    }
}

/// Rows and processes of a snapshot, before its other fields are filled in.
pub struct Content {
    /// Process generation of each entry of `processes`, in the same order.
    pub keys: Vec<ProcessKey>,
    /// Processes.
    pub processes: Vec<Process>,
    /// Rows.
    pub rows: Vec<SnapshotRow>,
    /// Processes whose memory is to be measured.
    pub measured: Vec<Measured>,
    /// What symbolization needs to know about new stacks.
    pub facts: Facts,
}
