//! Delivers profiles while the recording runs: an HTTP server for scrapers, and senders that push to stores.
//!
//! The server has a thread and a runtime of its own. It requests snapshots from the recording through
//! [`RecordingHandle`](heapbpf_record::requests::RecordingHandle). Each snapshot answers every client that asked
//! before it was taken, so many scrapers cost the event path no more than one.

// They panic if nobody reads what they print.
#![warn(clippy::print_stderr, clippy::print_stdout)]

mod admission;
mod connections;
mod delta;
pub mod listen;
pub mod metrics;
mod moments;
mod page;
mod places;
pub mod push;
mod routes;
mod server;
mod services;
mod source;
pub mod tls;

pub use services::{ServePlan, Services};
