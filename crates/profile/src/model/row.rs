//! A row: the sums of one stack.

use std::sync::Arc;

use heapbpf_statistics::growth::Growth;
use heapbpf_statistics::sums::SampleSums;
use heapbpf_statistics::survival::Lifetimes;
use serde::{Deserialize, Serialize};

use super::row_key::RowKey;
use super::stack::Stack;

/// Where the bytes of blocks in use are. In each sum, a block contributes the bytes that are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct InMemory {
    /// In memory; this excludes pages that were never written to.
    pub resident: SampleSums,
    /// Swapped out.
    #[serde(default, skip_serializing_if = "is_of_none")]
    pub swapped: SampleSums,
    /// The most bytes that an unexamined block could contribute, if not all blocks were examined.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub most_bytes: f64,
    /// Of mappings (`--mmap`): their address space. What is in use of them is what is in memory or swapped out.
    #[serde(default, skip_serializing_if = "is_of_none")]
    pub reserved: SampleSums,
}

/// Functions that do not belong to an allocator: mappings that a program made itself.
const MAPPING_FUNCTIONS: [&str; 4] = ["mmap", "mremap", "brk", "otel_memory:mmap"];

fn is_of_none(sums: &SampleSums) -> bool {
    sums.samples == 0
}

fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

impl InMemory {
    /// The sums of no blocks.
    pub const NONE: Self =
        Self { resident: SampleSums::NONE, swapped: SampleSums::NONE, most_bytes: 0.0, reserved: SampleSums::NONE };

    /// Adds the sums of other blocks with the same sampling interval.
    pub fn add(&mut self, other: &Self) {
        self.resident.add(&other.resident);
        self.swapped.add(&other.swapped);
        self.most_bytes = self.most_bytes.max(other.most_bytes);
        self.reserved.add(&other.reserved);
    }
}

/// Sums of the samples of one process, thread name, allocator function and stack under one sampling interval.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Identity of the row. The process is an index into [`Profile::processes`](super::Profile::processes).
    pub key: RowKey<usize, Arc<str>, Arc<Stack>>,
    /// Sums of all samples.
    pub alloc: SampleSums,
    /// Sums of the samples in use at [`Header::time`](super::Header::time), or at exit of their process unless those
    /// are separate.
    pub inuse: SampleSums,
    /// Where the blocks in use are, if that was read.
    pub in_memory: Option<Box<InMemory>>,
    /// Sums of the samples that their process held at exit, if they are separate from what is in use.
    pub at_exit: SampleSums,
    /// Sums of the samples in use when the estimated total in use was highest, if they were recorded.
    pub peak: Option<SampleSums>,
    /// Lifetimes of the sampled blocks, if they were followed.
    pub lifetimes: Option<Lifetimes>,
    /// How memory in use changed over the last [`Header::growth_over`](super::Header::growth_over); `None` if it did
    /// not change or that is unknown.
    pub growth: Option<Growth>,
    /// Index of the process member that the row belongs to, if rows of several processes were merged and the row
    /// belongs to just one.
    pub member: Option<usize>,
}

impl Row {
    /// A row without samples.
    pub fn new(key: RowKey<usize, Arc<str>, Arc<Stack>>) -> Self {
        let none = SampleSums::default();
        Self {
            key,
            alloc: none,
            inuse: none,
            in_memory: None,
            at_exit: none,
            peak: None,
            lifetimes: None,
            growth: None,
            member: None,
        }
    }

    /// Whether the row stands for lost samples ([`crate::lost_samples`]): it has estimates of allocation but no
    /// samples.
    pub fn is_of_lost_samples(&self) -> bool {
        self.alloc.samples == 0 && (self.alloc.bytes != 0.0 || self.alloc.objects != 0.0)
    }

    /// Adds what another row has in use.
    pub fn add_inuse(&mut self, other: &Self) {
        match (&mut self.in_memory, &other.in_memory) {
            (Some(sum), Some(more)) => sum.add(more),
            (sum @ None, Some(_)) if self.inuse.samples == 0 => *sum = other.in_memory.clone(),
            (sum, None) if other.inuse.samples > 0 => *sum = None,
            _ => {}
        }
        self.inuse.add(&other.inuse);
    }

    /// Whether it consists of mappings of which only a part counts as in use.
    pub fn is_of_mappings(&self) -> bool {
        self.in_memory.as_ref().is_some_and(|it| it.reserved.samples > 0)
    }

    /// Whether it consists of mappings, however much of each counts as in use.
    pub fn is_mapped(&self) -> bool {
        self.is_of_mappings() || MAPPING_FUNCTIONS.contains(&&*self.key.function)
    }

    /// Whether Go's runtime took the samples ([`Stack::source`]).
    pub fn is_of_go_runtime(&self) -> bool {
        self.key.stack.source().is_some()
    }

    /// The row with another process index.
    #[must_use]
    pub fn with_process(mut self, process: usize) -> Self {
        self.key.process = process;
        self
    }
}
