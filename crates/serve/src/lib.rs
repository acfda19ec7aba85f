//! Delivers profiles while the recording runs: an HTTP server for scrapers, and senders that push to stores.
//!
//! The server has its own thread and runtime. It requests snapshots from the recording through
//! [`RecordingHandle`](heapbpf_record::requests::RecordingHandle). Each snapshot answers every client that asked before
//! it was taken, so many scrapers cost the event path no more than one. It also takes some on its own, for the history.

// These macros panic if their reader has closed the pipe.
#![warn(clippy::print_stderr, clippy::print_stdout)]

mod admission;
mod connections;
mod delta;
mod history;
pub mod listen;
pub mod metrics;
mod moments;
mod page;
mod places;
pub mod push;
mod routes;
mod services;
mod source;
pub mod tls;

pub use history::KeptHistory;
pub use services::{ServePlan, Services};
