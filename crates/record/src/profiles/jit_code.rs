//! Names of JIT code. Perf maps are opened while their processes run, and read when names are needed, possibly after
//! the process has exited.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use heapbpf_host::reader_thread::{NoAnswer, ReaderThread};
use heapbpf_symbols::perf_map::{Limits, PerfMap, PerfMapError};
use sampler_ebpf::abi::ProcessKey;

/// Maximum number of processes whose perf maps are kept open.
const MOST_OPEN: usize = 512;
/// How long a perf map may take to be opened, and to be read: its file system may be served by a process that does not
/// answer.
const OPENED_WITHIN: Duration = Duration::from_secs(2);
const READ_WITHIN: Duration = Duration::from_secs(30);
/// How long a process's perf map is left alone after it could not be read in time.
const LEFT_ALONE: Duration = Duration::from_mins(5);

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

/// What is kept for a process.
#[derive(Clone)]
enum Kept {
    /// Its perf map, open for use after it exits.
    Map(Arc<File>),
    /// Its root directory, to search again, as there was no perf map yet.
    Root(Arc<File>),
}

/// Perf maps kept open, by process.
#[derive(Default)]
pub struct JitCodeMaps {
    kept: HashMap<ProcessKey, Kept>,
    /// Processes whose perf maps could not be read in time, and when to try again.
    silent_until: HashMap<ProcessKey, Instant>,
    reader: ReaderThread,
}

impl JitCodeMaps {
    /// Opens the perf map of a process that was seen to run JIT code.
    pub fn open(&mut self, process: ProcessKey, code: JitCode) {
        if self.kept.contains_key(&process) || self.kept.len() >= MOST_OPEN {
            return;
        }
        let open = move || {
            let root = root_of(code);
            match PerfMap::open(&root, code.namespace_pid, code.owner) {
                Ok(map) => Some(Kept::Map(Arc::new(map))),
                Err(PerfMapError::Refused { .. }) => None,
                Err(PerfMapError::Io { .. }) => {
                    let root = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(root);
                    root.map(|root| Kept::Root(Arc::new(root))).ok()
                }
            }
        };
        // If there is no answer, `read` tries again and waits longer.
        let kept = self.reader.ask("perf-map", OPENED_WITHIN, open).ok().flatten();
        self.kept.extend(kept.map(|kept| (process, kept)));
    }

    /// Keeps an open file as if it were the perf map found for a process.
    #[cfg(test)]
    pub(super) fn keep(&mut self, process: ProcessKey, map: File) {
        self.kept.insert(process, Kept::Map(Arc::new(map)));
    }

    /// Reads the current names of a process's JIT code.
    ///
    /// # Errors
    /// The map cannot be found or read, or is refused.
    pub fn read(&mut self, process: ProcessKey, code: JitCode) -> Result<PerfMap, PerfMapError> {
        self.read_within(READ_WITHIN, process, code)
    }

    fn read_within(&mut self, limit: Duration, process: ProcessKey, code: JitCode) -> Result<PerfMap, PerfMapError> {
        if self.silent_until.get(&process).is_some_and(|until| Instant::now() < *until) {
            return Err(PerfMapError::unanswered(code.namespace_pid));
        }
        let kept = self.kept.get(&process).cloned();
        let read = move || {
            let find = |root: &Path| PerfMap::open(root, code.namespace_pid, code.owner).map(Arc::new);
            let file = match kept {
                Some(Kept::Map(file)) => file,
                Some(Kept::Root(root)) => find(Path::new(&format!("/proc/self/fd/{}", root.as_raw_fd())))?,
                None => find(&root_of(code)).or_else(|error| left_behind(code).map(Arc::new).ok_or(error))?,
            };
            PerfMap::read(&file, code.namespace_pid, Limits::default())
        };
        self.reader.ask("perf-map", limit, read).unwrap_or_else(|why| {
            if why == NoAnswer::Late {
                self.silent_until.insert(process, Instant::now() + LEFT_ALONE);
            }
            Err(PerfMapError::unanswered(code.namespace_pid))
        })
    }

    /// Closes the files of processes whose figures have been moved to the overflow bucket.
    pub fn close<'a>(&mut self, processes: impl IntoIterator<Item = &'a ProcessKey>) {
        for process in processes {
            self.kept.remove(process);
            self.silent_until.remove(process);
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

#[cfg(test)]
mod tests {
    use heapbpf_testing::silent::mount_silent;
    use heapbpf_testing::skipped;

    use super::*;

    #[test]
    fn a_perf_map_whose_server_does_not_answer_is_left_alone_for_a_while() {
        // No other thread sees this.
        let server = match mount_silent(Path::new("/tmp")) {
            Ok(server) => server,
            Err(error) => return skipped(format_args!("no FUSE file system can be mounted: {error}")),
        };
        let pid = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        let code = JitCode { pid, namespace_pid: pid, owner: 0, started: None };
        let (mut maps, process) = (JitCodeMaps::default(), ProcessKey { tgid: pid, ..ProcessKey::default() });
        maps.open(process, code);
        assert!(maps.kept.is_empty() && maps.silent_until.is_empty(), "that may have been a slow moment");
        let unanswered = PerfMapError::unanswered(pid).to_string();
        let read = |maps: &mut JitCodeMaps, limit| maps.read_within(limit, process, code).map_err(|it| it.to_string());
        assert_eq!(read(&mut maps, Duration::from_millis(1)).err().as_ref(), Some(&unanswered));
        // The server ends, so everything gets an error at once.
        drop(server);
        assert_eq!(read(&mut maps, READ_WITHIN).err().as_ref(), Some(&unanswered), "nobody asks again so soon");
        maps.silent_until.insert(process, Instant::now());
        assert_ne!(read(&mut maps, READ_WITHIN).err(), Some(unanswered));
        // Nothing is asked where no thread can be had.
        (maps.reader, maps.silent_until) = (ReaderThread::that_does_not_answer().0, HashMap::new());
        assert!(maps.read_within(READ_WITHIN, process, code).is_err() && maps.silent_until.is_empty());
    }
}
