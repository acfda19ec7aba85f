//! Names of code that processes make at run time: their perf maps are opened while they run, and read when names are
//! wanted, which may be after their end.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use sampler_ebpf::abi::ProcessKey;

use crate::symbols::perf_map::{Limits, PerfMap, PerfMapError};

/// Most processes whose maps are kept open.
const MOST_OPEN: usize = 512;

/// Where a process's map of its own code is looked for.
#[derive(Clone, Copy, Debug)]
pub struct OwnCode {
    /// Process id, for the way into its mount namespace.
    pub pid: u32,
    /// Process id as it sees it.
    pub namespace_pid: u32,
    /// User that must own the map.
    pub owner: u32,
    /// When the process started; `None` if that is unknown.
    pub started: Option<SystemTime>,
}

/// What is kept of a process for the time after its end.
enum Kept {
    /// Its map.
    Map(File),
    /// It had none yet: its root, to look again.
    Root(File),
}

/// Maps of processes, by process.
#[derive(Default)]
pub struct OwnCodeMaps(HashMap<ProcessKey, Kept>);

impl OwnCodeMaps {
    /// Opens the map of a process that has been seen to run code of its own making.
    pub fn open(&mut self, process: ProcessKey, own: OwnCode) {
        if self.0.contains_key(&process) || self.0.len() >= MOST_OPEN {
            return;
        }
        let root = root_of(own);
        let kept = match PerfMap::open(&root, own.namespace_pid, own.owner) {
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

    /// The names as they are now.
    ///
    /// # Errors
    /// Why there are none.
    pub fn read(&self, process: ProcessKey, own: OwnCode) -> Result<PerfMap, PerfMapError> {
        let find = |root: &Path| PerfMap::open(root, own.namespace_pid, own.owner);
        let opened;
        let file = match self.0.get(&process) {
            Some(Kept::Map(file)) => file,
            Some(Kept::Root(root)) => {
                opened = find(Path::new(&format!("/proc/self/fd/{}", root.as_raw_fd())))?;
                &opened
            }
            None => {
                opened = find(&root_of(own)).or_else(|error| left_behind(own).ok_or(error))?;
                &opened
            }
        };
        PerfMap::read(file, own.namespace_pid, Limits::default())
    }

    /// Closes what was kept of processes whose figures have been put with those of others.
    pub fn close<'a>(&mut self, processes: impl IntoIterator<Item = &'a ProcessKey>) {
        for process in processes {
            self.0.remove(process);
        }
    }
}

/// The map of a process that ended before it could be opened, if it is where we see it, too: same pid namespace, and
/// written to since the process started, as ids are used again.
fn left_behind(own: OwnCode) -> Option<File> {
    let started = own.started.filter(|_| own.pid == own.namespace_pid)?;
    let file = PerfMap::open(Path::new("/"), own.namespace_pid, own.owner).ok()?;
    let written = file.metadata().ok()?.modified().ok()?;
    (written >= started).then_some(file)
}

fn root_of(own: OwnCode) -> PathBuf {
    PathBuf::from(format!("/proc/{}/root", own.pid))
}
