//! Probes on the allocators of programs.
//!
//! [`files`] examines files and plans their probes, [`linker`] is the interface to the kernel, and [`hooks`] decides
//! which links to make for which processes. [`libraries`] predicts which files a command will allocate with, before it
//! runs. [`rules`] describes how this kernel runs probed instructions. [`detours`] redirects interpreters away from
//! copies of their object allocator. [`moved_text`] detects programs that move their code.

// These macros panic if nobody reads the output.
#![warn(clippy::print_stderr, clippy::print_stdout)]

mod audit;
pub mod closing;
mod content;
pub mod detours;
pub mod dropped;
pub mod files;
pub mod hooks;
pub mod inline;
pub mod libraries;
pub mod linker;
pub mod moved_text;
pub mod rules;

use std::sync::LazyLock;
use std::time::Duration;

/// How long a process may be stopped at a time: 20 ms. Tests that run in parallel on few CPUs set
/// `HEAPBPF_STOP_LIMIT_MS`, because a stop waits for a CPU most of the time.
pub fn stop_limit() -> Duration {
    static LIMIT: LazyLock<Duration> = LazyLock::new(|| {
        let configured = std::env::var("HEAPBPF_STOP_LIMIT_MS").ok().and_then(|milliseconds| milliseconds.parse().ok());
        configured.map_or(heapbpf_remote::STOP_LIMIT, Duration::from_millis)
    });
    *LIMIT
}
