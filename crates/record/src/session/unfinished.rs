//! Work that an error has prevented, and that is tried again.

use std::collections::VecDeque;

use crate::profiles::requests::Request;

/// Work that is still to be done.
#[derive(Default)]
pub(super) struct Unfinished {
    /// Requests that wait for a snapshot, oldest first.
    pub(super) requests: VecDeque<Request>,
    /// The sampling interval to set.
    pub(super) interval: Option<u64>,
    /// Whether the intervals of size classes are to be set.
    pub(super) classes: bool,
    /// Whether the BPF programs were last told that the daemon sleeps.
    pub(super) is_sleeping_set: bool,
    /// Why the recording had to end.
    pub(super) ended_early: Option<String>,
    /// The signal that killed the command.
    pub(super) killed_by: Option<String>,
}
