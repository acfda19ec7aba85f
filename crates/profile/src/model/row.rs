//! A row: the sums of one stack.

use std::sync::Arc;

use heapbpf_statistics::growth::Growth;
use heapbpf_statistics::sums::SampleSums;
use heapbpf_statistics::survival::Lifetimes;

use super::row_key::RowKey;
use super::stack::Stack;

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
    /// Sums of the samples that their process held at exit, if those are separate from what is in use.
    pub at_exit: SampleSums,
    /// Sums of the samples in use when the estimated total in use was highest, if they were kept.
    pub peak: Option<SampleSums>,
    /// Lifetimes of the sampled blocks, if they were followed.
    pub lifetimes: Option<Lifetimes>,
    /// How what is in use changed over the last [`Header::growth_over`](super::Header::growth_over), if it did and that is known.
    pub growth: Option<Growth>,
    /// The only member of the row's process that it is of (by its index), if rows of several were put together.
    pub member: Option<usize>,
}

impl Row {
    /// A row without samples.
    pub fn new(key: RowKey<usize, Arc<str>, Arc<Stack>>) -> Self {
        let none = SampleSums::default();
        Self { key, alloc: none, inuse: none, at_exit: none, peak: None, lifetimes: None, growth: None, member: None }
    }

    /// Whether it stands for lost samples ([`crate::lost_samples`]): it has estimates of allocation, but no samples.
    pub fn is_of_lost_samples(&self) -> bool {
        self.alloc.samples == 0 && (self.alloc.bytes != 0.0 || self.alloc.objects != 0.0)
    }

    /// Whether Go's runtime has sampled it ([`Stack::source`]).
    pub fn is_of_go_runtime(&self) -> bool {
        self.key.stack.source().is_some()
    }

    /// The row with its process under another number.
    #[must_use]
    pub fn with_process(mut self, process: usize) -> Self {
        self.key.process = process;
        self
    }
}
