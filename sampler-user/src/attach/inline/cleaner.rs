//! The *cleaner*: a process that takes inline hooks out if heapbpf is killed. Until then it does nothing.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

/// Name of its process in lists of processes.
const NAME: &str = "heapbpf-cleaner";
/// Argument that makes heapbpf run as the cleaner. The pid of the daemon follows.
pub const WORD: &str = "take-out-hooks";

/// The daemon's end. Dropping it, when no hook is left, ends the cleaner.
#[derive(Debug, Default)]
pub struct Cleaner(Option<Child>);

impl Cleaner {
    /// Starts its process. Without it, hooks that a SIGKILL leaves stay until the next recording, which is no reason not to record.
    #[must_use]
    pub fn started() -> Self {
        let mut command = Command::new("/proc/self/exe");
        // It needs no variable, and some name libraries to load.
        command.arg0(NAME).arg(WORD).arg(std::process::id().to_string()).env_clear();
        let started = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let started = started.inspect_err(|error| {
            log::warn!("no process takes inline hooks out if heapbpf is killed (SIGKILL): {error}");
        });
        Self(started.ok())
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        let Some(process) = &mut self.0 else { return };
        // Without the word that all is well, it looks for what a panic may have left.
        if std::thread::panicking() {
            return;
        }
        if let Some(mut pipe) = process.stdin.take() {
            let _ = pipe.write_all(&[0]);
        }
        let _ = process.wait();
    }
}
