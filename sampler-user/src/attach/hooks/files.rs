//! Files that were looked at: what is known under which key, and the plan of each, which is made once.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::BufReader;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex};

use super::{HookError, Hooks};
use crate::attach::audit::{FileAudit, LinkKind};
use crate::attach::{AllocatorFile, AttachError, KernelRules, Missing, Table, examine};
use crate::host::open;

/// A file as the file system knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileKey {
    device: u64,
    inode: u64,
}

impl FileKey {
    /// Of an open file.
    ///
    /// # Errors
    /// The file system does not answer.
    pub fn of(file: &File) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self { device: metadata.dev(), inode: metadata.ino() })
    }
}

/// A file whose plan was made.
pub(super) struct Known {
    pub(super) path: String,
    /// Keeps the file reachable for later links.
    pub(super) file: Arc<File>,
    pub(super) plan: Result<Planned, Arc<AttachError>>,
}

pub(super) struct Planned {
    pub(super) allocator: AllocatorFile,
    /// Index of the first site in the kernel's map; given when the file is first linked.
    pub(super) first_site: Option<u32>,
    /// CLOCK_MONOTONIC when it was first linked.
    pub(super) since_ns: Option<u64>,
    /// What was hooked when it was last linked.
    pub(super) audit: Option<Arc<FileAudit>>,
    /// Instructions that the kernel takes no probe on (file offsets), and what it says.
    pub(super) refused: BTreeMap<u64, String>,
}

impl Hooks {
    /// A file's key: that of the first of its names, if it is seen both through an overlay mount and beneath it, where
    /// it would be hooked twice.
    fn key_of(&mut self, file: &File) -> std::io::Result<FileKey> {
        let key = FileKey::of(file)?;
        if self.known.contains_key(&key) {
            return Ok(key);
        }
        if let Some(first) = self.others.get(&key) {
            return Ok(*first);
        }
        let Some((beneath, overlay)) = open::beneath(file) else { return Ok(key) };
        let (first, first_overlay) = *self.beneath.entry(beneath).or_insert((key, overlay));
        // Files of two other file systems may be copies of one another, down to their handles.
        if first == key || !(overlay || first_overlay) {
            return Ok(key);
        }
        self.others.insert(key, first);
        Ok(first)
    }

    /// Plans a file, once. `Ok` says whether it has something to hook.
    pub fn look_at(&mut self, path: &str, file: &Arc<File>) -> Result<(FileKey, bool), HookError> {
        let unreadable = |source| HookError::Unreadable { path: path.to_owned(), source };
        let key = self.key_of(file).map_err(unreadable)?;
        if let Some(known) = self.known.get(&key) {
            return Ok((key, known.plan.is_ok()));
        }
        let plan = plan(path, file, &self.rules, &self.table).map_err(unreadable)?;
        let fit = plan.is_ok();
        self.known.insert(key, Known { path: path.to_owned(), file: Arc::clone(file), plan });
        Ok((key, fit))
    }

    /// Plans many files on all processors, so that [`Hooks::look_at`] finds them known. What cannot be read is left to it.
    pub fn look_at_all(&mut self, files: Vec<(String, Arc<File>)>) {
        let mut open: HashMap<FileKey, (String, Arc<File>)> = HashMap::new();
        for (path, file) in files {
            if let Ok(key) = self.key_of(&file)
                && !self.known.contains_key(&key)
            {
                open.entry(key).or_insert((path, file));
            }
        }
        let waiting = Mutex::new(open.into_iter().collect::<Vec<_>>());
        let (rules, table) = (&self.rules, &self.table);
        let work = || {
            let mut planned = Vec::new();
            // The lock is given back before the file is read.
            while let Some((key, (path, file))) = waiting.lock().ok().and_then(|mut waiting| waiting.pop()) {
                if let Ok(plan) = plan(&path, &file, rules, table) {
                    planned.push((key, Known { path, file, plan }));
                }
            }
            planned
        };
        let planned: Vec<(FileKey, Known)> = std::thread::scope(|scope| {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            workers.into_iter().filter_map(|worker| worker.join().ok()).flatten().collect()
        });
        self.known.extend(planned);
    }

    /// The plan of a file that was looked at, if it has something to hook.
    pub fn planned(&self, key: FileKey) -> Option<&AllocatorFile> {
        self.known.get(&key)?.plan.as_ref().ok().map(|planned| &planned.allocator)
    }

    /// What is missed because a file that was looked at has nothing to hook; `None`: nothing.
    pub fn refusal(&self, key: FileKey) -> Option<&AttachError> {
        self.known.get(&key)?.plan.as_ref().err().map(AsRef::as_ref).filter(|reason| !reason.misses_nothing())
    }

    /// A file that a custom allocator is for, and which lacks one of its functions: why, with the file's path.
    pub fn misdescribed(&self) -> Option<String> {
        self.known.values().find_map(|known| match known.plan.as_ref().err().map(AsRef::as_ref) {
            Some(reason @ AttachError::NoSymbol { .. }) => Some(format!("{}: {reason}", known.path)),
            _ => None,
        })
    }
}

/// Reads and plans a file. `Err`: it cannot be read.
fn plan(
    path: &str,
    file: &File,
    rules: &KernelRules,
    table: &Table,
) -> std::io::Result<Result<Planned, Arc<AttachError>>> {
    // A descriptor of its own: reading moves the position.
    let reader = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let plan = examine(BufReader::new(reader), path, rules, table);
    Ok(plan
        .map(|allocator| Planned { allocator, first_site: None, since_ns: None, audit: None, refused: BTreeMap::new() })
        .map_err(Arc::new))
}

impl Planned {
    /// `live`: frees are followed.
    pub(super) fn audit(&self, path: &str, link: LinkKind, live: bool) -> FileAudit {
        let mut audit = FileAudit::new(path, &self.allocator, link);
        for (entry, site) in audit.attach.iter_mut().zip(&self.allocator.sites) {
            // A free has no return to wait for, so it needs no session.
            if link == LinkKind::Session && !site.return_needed {
                entry.link = LinkKind::Multi;
            }
        }
        if !live {
            let mut frees = self.allocator.sites.iter().map(|site| !site.return_needed);
            audit.attach.retain(|_| !frees.next().unwrap_or(false));
        }
        audit.attach.retain(|entry| {
            let Some(error) = self.refused.get(&entry.offset) else { return true };
            let why = format!("the kernel takes no probe at {:#x} ({}): {error}", entry.offset, entry.reason);
            audit.missing.push(Missing::new(entry.function.clone(), why));
            false
        });
        audit
    }
}
