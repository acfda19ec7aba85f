//! One attempt to deliver a batch: how long it may take, and what came of it.

use std::time::Duration;

/// Timeout of a request. A destination that takes longer counts as unavailable.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of a connection.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// What heapbpf calls itself.
pub(super) const NAME: &str = concat!("heapbpf/", env!("CARGO_PKG_VERSION"));

/// The outcome of an attempt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Delivered,
    /// The destination will never accept this batch.
    Rejected(String),
    /// The destination may accept it later.
    Failed(String),
}
