//! One attempt to deliver a batch: its time limits and its outcome.

use std::time::Duration;

/// Timeout of a request. A slower destination counts as unavailable.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of a connection.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The user agent.
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
