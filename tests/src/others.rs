//! Other tools that watch a target while heapbpf does.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::environment::tool_or_install;
use crate::target::{file_of, mappings, until};

/// Time after which a tool is asked again to end.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Another tool that runs at the same time. Killed when dropped.
pub struct Beside(pub Child);

impl Beside {
    /// Starts the tool without input, and discards its output.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts"))
    }

    /// Ends the tool as Ctrl-C would, and asks again until it has ended: bpftrace 0.17 heeds a signal only if it comes
    /// while bpftrace waits for events, which on a busy machine is not all the time.
    ///
    /// # Panics
    /// If it does not end.
    pub fn stop(mut self, what: &str) {
        let mut signal = libc::SIGINT;
        let mut asked: Option<Instant> = None;
        until(&format!("the end of {what}"), || {
            let has_ended = self.0.try_wait().expect("our own child").is_some();
            if !has_ended && asked.is_none_or(|asked| asked.elapsed() >= ASK_AGAIN) {
                // SAFETY: `kill` takes plain integers; the child has not been waited for.
                assert_eq!(unsafe { libc::kill(self.0.id().cast_signed(), signal) }, 0, "{what} is ours");
                asked = Some(Instant::now());
                // While bpftrace prints its counts, SIGINT would end it, and SIGTERM does not.
                signal = libc::SIGTERM;
            }
            has_ended
        });
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Path of the C library that a process uses.
///
/// # Panics
/// If it has none.
pub fn libc_of(pid: u32) -> String {
    mappings(pid).iter().map(file_of).find(|path| path.contains("/libc.so")).expect("it has one").to_owned()
}

/// bpftrace with a uprobe on malloc that counts calls.
pub struct Bpftrace {
    beside: Beside,
    dir: TempDir,
}

impl Bpftrace {
    /// Path of bpftrace, if it is installed or can be installed.
    pub fn tool() -> Option<PathBuf> {
        tool_or_install("bpftrace", "bpftrace")
    }

    /// Starts counting the calls of a process, which takes some seconds.
    ///
    /// # Panics
    /// If it does not begin.
    pub fn start(tool: &Path, pid: u32) -> Self {
        let dir = TempDir::new().expect("a temporary directory");
        let said = dir.path().join("said");
        let filter = format!("uprobe:{}:malloc /pid == {pid}/ {{ @calls = count(); }}", libc_of(pid));
        let script = format!("{filter} BEGIN {{ printf(\"READY\\n\"); }}");
        let mut command = Command::new(tool);
        command.args(["-p", &pid.to_string(), "-e", &script]).stdin(Stdio::null());
        command.stdout(File::create(&said).expect("our own directory")).stderr(Stdio::null());
        let it = Self { beside: Beside(command.spawn().expect("it starts")), dir };
        until("bpftrace begins", || it.said().contains("READY"));
        it
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("said")).unwrap_or_default()
    }

    /// Ends it as Ctrl-C would. Returns how many calls it saw.
    ///
    /// # Panics
    /// If it does not end.
    pub fn stop(self) -> u64 {
        let Self { beside, dir } = self;
        beside.stop("bpftrace");
        let said = std::fs::read_to_string(dir.path().join("said")).unwrap_or_default();
        said.lines().find_map(|line| line.strip_prefix("@calls: ")?.trim().parse().ok()).unwrap_or(0)
    }
}
