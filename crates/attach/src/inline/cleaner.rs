//! The *cleaner*: a process that takes inline hooks out if heapbpf is killed. Until then it does nothing.

use std::io::Write as _;
use std::process::{ChildStdin, Stdio};

use heapbpf_host::helper::Helper;

/// Name of its process in lists of processes.
const NAME: &str = "heapbpf-cleaner";
/// Argument that makes heapbpf run as the cleaner. The pid of the daemon follows.
pub const WORD: &str = "take-out-hooks";

/// The daemon's end. Dropping it, when no hook is left, ends the cleaner.
#[derive(Debug, Default)]
pub struct Cleaner {
    pipe: Option<ChildStdin>,
    /// Dropped after the pipe: it ends when that is closed.
    process: Option<Helper>,
}

impl Cleaner {
    /// Starts its process. Without it, hooks that a SIGKILL leaves stay until the next recording, which is no reason not to record.
    #[must_use]
    pub fn started() -> Self {
        match Helper::start(NAME, WORD, None, [Stdio::piped(), Stdio::null()]) {
            Ok(mut process) => Self { pipe: process.take_pipes().0, process: Some(process) },
            Err(error) => {
                log::warn!("no process takes inline hooks out if heapbpf is killed (SIGKILL): {error}");
                Self::default()
            }
        }
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        // Without the word that all is well, it looks for what a panic may have left, once we are gone.
        if std::thread::panicking() {
            std::mem::forget(self.process.take());
        } else if let Some(mut pipe) = self.pipe.take() {
            let _ = pipe.write_all(&[0]);
        }
    }
}
