//! Names of JIT code. Perf maps are opened while their processes run, and read when names are needed, possibly after
//! the process has exited.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use heapbpf_symbols::perf_map::{Limits, PerfMap, PerfMapError};
use sampler_ebpf::abi::ProcessKey;

/// Maximum number of processes whose perf maps are kept open.
const MOST_OPEN: usize = 512;

/// Where to look for a process's perf map.
#[derive(Clone, Copy, Debug)]
pub struct JitCode {
    /// Process ID in our namespace, to reach its mount namespace.
    pub pid: u32,
    /// Process ID in its own pid namespace.
    pub namespace_pid: u32,
    /// User ID that must own the map.
    pub owner: u32,
    /// Start time of the process; `None` if unknown.
    pub started: Option<SystemTime>,
}

/// The file kept open for a process, for use after it exits.
enum Kept {
    /// Its perf map.
    Map(File),
    /// Its root directory, to search again, as there was no perf map yet.
    Root(File),
}

/// Perf maps kept open, by process.
#[derive(Default)]
pub struct JitCodeMaps(HashMap<ProcessKey, Kept>);

impl JitCodeMaps {
    /// Opens the perf map of a process that was seen to run JIT code.
    pub fn open(&mut self, process: ProcessKey, code: JitCode) {
        if self.0.contains_key(&process) || self.0.len() >= MOST_OPEN {
            return;
        }
        let root = root_of(code);
        let kept = match PerfMap::open(&root, code.namespace_pid, code.owner) {
            Ok(map) => Some(Kept::Map(map)),
            Err(PerfMapError::Refused { .. }) => None,
            Err(PerfMapError::Io { .. }) => {
                OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(root).map(Kept::Root).ok()
            }
        };
        if let Some(kept) = kept {
            self.0.insert(process, kept);
        }
    }

    /// Keeps an open file as if it were the perf map found for a process.
    #[cfg(test)]
    pub(super) fn keep(&mut self, process: ProcessKey, map: File) {
        self.0.insert(process, Kept::Map(map));
    }

    /// Reads the current names of a process's JIT code.
    ///
    /// # Errors
    /// The map cannot be found or read, or is refused.
    pub fn read(&self, process: ProcessKey, code: JitCode) -> Result<PerfMap, PerfMapError> {
        let find = |root: &Path| PerfMap::open(root, code.namespace_pid, code.owner);
        let opened;
        let file = match self.0.get(&process) {
            Some(Kept::Map(file)) => file,
            Some(Kept::Root(root)) => {
                opened = find(Path::new(&format!("/proc/self/fd/{}", root.as_raw_fd())))?;
                &opened
            }
            None => {
                opened = find(&root_of(code)).or_else(|error| left_behind(code).ok_or(error))?;
                &opened
            }
        };
        PerfMap::read(file, code.namespace_pid, Limits::default())
    }

    /// Closes the files of processes whose figures have been moved to the overflow bucket.
    pub fn close<'a>(&mut self, processes: impl IntoIterator<Item = &'a ProcessKey>) {
        for process in processes {
            self.0.remove(process);
        }
    }
}

/// The perf map of a process that exited before its map could be opened. It is found only if the process shared our pid
/// namespace and wrote the map under our root. The map must have been written since the process started, because
/// process IDs are reused.
fn left_behind(code: JitCode) -> Option<File> {
    let started = code.started.filter(|_| code.pid == code.namespace_pid)?;
    let file = PerfMap::open(Path::new("/"), code.namespace_pid, code.owner).ok()?;
    let written = file.metadata().ok()?.modified().ok()?;
    (written >= started).then_some(file)
}

fn root_of(code: JitCode) -> PathBuf {
    PathBuf::from(format!("/proc/{}/root", code.pid))
}
