//! The identity of a row, from the sampled block to the finished profile.

use std::sync::Arc;

/// Identity of a row: process, thread name, allocator function, sampling interval and call stack. Each stage from
/// sampling to the profile uses its own types for the process `P`, the function `F` and the stack `S`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RowKey<P, F, S> {
    /// Process.
    pub process: P,
    /// Thread name.
    pub thread: Arc<str>,
    /// Allocator function that was called.
    pub function: F,
    /// Sampling interval R of the samples, in trials.
    pub interval: u64,
    /// Call stack.
    pub stack: S,
}

impl<P, F, S> RowKey<P, F, S> {
    /// The same key with its stack converted.
    pub fn map_stack<T>(self, convert: impl FnOnce(S) -> T) -> RowKey<P, F, T> {
        let Self { process, thread, function, interval, stack } = self;
        RowKey { process, thread, function, interval, stack: convert(stack) }
    }
}

impl<P, F: Clone, S> RowKey<P, F, S> {
    /// A copy of the key with another process and another stack.
    pub fn with<Q, T>(&self, process: Q, stack: T) -> RowKey<Q, F, T> {
        let Self { thread, function, interval, .. } = self;
        RowKey { process, thread: Arc::clone(thread), function: function.clone(), interval: *interval, stack }
    }
}

impl<P, S> RowKey<P, Arc<str>, S> {
    /// The key of a row with the totals over all threads and functions of a process.
    pub fn total(process: P, interval: u64, stack: S) -> Self {
        Self { process, thread: "".into(), function: "".into(), interval, stack }
    }
}
