//! Delivers profiles while the recording runs: an HTTP server for scrapers, and senders that push to stores.
//!
//! The server has a thread and a runtime of its own. It requests snapshots from the recording through
//! [`RecordingHandle`](crate::record::requests::RecordingHandle). Each snapshot answers every client that asked
//! before it was taken, so many scrapers cost the event path no more than one.

#[cfg(feature = "daemon")]
mod admission;
#[cfg(feature = "daemon")]
mod connections;
#[cfg(feature = "daemon")]
mod delta;
pub mod filter;
#[cfg(feature = "daemon")]
pub mod listen;
#[cfg(feature = "daemon")]
pub mod metrics;
#[cfg(feature = "daemon")]
mod moments;
#[cfg(feature = "daemon")]
mod page;
pub mod parameters;
#[cfg(feature = "daemon")]
mod places;
#[cfg(feature = "daemon")]
pub mod push;
#[cfg(feature = "daemon")]
mod routes;
#[cfg(feature = "daemon")]
mod server;
#[cfg(feature = "daemon")]
mod services;
#[cfg(feature = "daemon")]
mod source;
#[cfg(feature = "daemon")]
pub mod tls;
pub mod tokens;

#[cfg(feature = "daemon")]
pub use services::{ServePlan, Services};
