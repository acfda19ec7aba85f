//! Examined files: which of them have an allocator, and the plan of each, which is made once.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use heapbpf_host::open::{self, Beneath};
use heapbpf_host::own_memory::give_memory_back;
use heapbpf_host::priority::RaisedPriority;
use heapbpf_host::side_by_side::{Aside, Done, on_all_processors};
use heapbpf_probes::{
    AllocatorFile, AttachError, Examination, FileImage, KernelRules, ObjectTable, Runtime, Table, announced,
    examine_avoiding,
};

use crate::content::Content;

/// Files of at least this size are examined one at a time: a file of 150 MB takes a quarter of a second and 40 MiB.
const LARGE_BYTES: u64 = 8 << 20;

/// Maximum number of known files. Beyond that, files without anything to miss are forgotten, and examined again when
/// they are seen again.
const MOST_KNOWN: usize = 8192;

/// Maximum number of files with something to hook that are forgotten at once.
const MOST_FORGOTTEN: usize = 16;

/// Identifies a file by device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileKey {
    device: u64,
    inode: u64,
}

impl FileKey {
    /// The key of an open file.
    ///
    /// # Errors
    /// Errors of fstat(2).
    pub fn of(file: &File) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self { device: metadata.dev(), inode: metadata.ino() })
    }
}

/// A file cannot be examined.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {path}: {source}")]
pub struct UnreadableFile {
    /// Its path as the process sees it.
    pub path: String,
    /// The operating system's error.
    pub source: std::io::Error,
}

/// Where samples come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sources {
    /// Calls to allocators.
    #[default]
    Allocators,
    /// Programs' own announcements, in files without an allocator; otherwise calls to allocators.
    AllocatorsOrAnnouncements,
    /// Programs' own announcements only.
    Announcements,
}

/// An examined file.
pub struct ExaminedFile {
    /// Its path, as seen by the first process that was found to map it.
    pub path: String,
    /// Kept open, so that links can still reach the file whatever becomes of its path. `None` if there is nothing in it
    /// to hook.
    pub file: Option<Arc<File>>,
    /// Its state when it was examined. The inode of a file that is not open may be reused for another file, and a file
    /// can be overwritten in place.
    pub(super) content: Option<Content>,
    /// The plan, or the reason why nothing in the file can be hooked.
    pub plan: Result<AllocatorFile, Arc<AttachError>>,
    /// Whether the plan is for the program's announcements, not for an allocator.
    pub announces: bool,
    /// A language runtime with its own heap, if the file contains one.
    pub runtime: Option<Runtime>,
    /// The interpreter's object allocator, if it is in the plan.
    pub objects: Option<ObjectTable>,
}

impl ExaminedFile {
    /// Whether it has been written to since it was examined.
    pub(super) fn was_written(&self) -> bool {
        self.file.as_ref().is_some_and(|file| Content::was_written(self.content, file))
    }
}

/// Takes a file with an allocator that was read while it had this content, and the table of allocators.
pub(crate) type ReadOn = Arc<dyn Fn(Content, &File, FileImage<'_>, &Table) + Send + Sync>;

/// All examined files.
pub struct ExaminedFiles {
    rules: KernelRules,
    /// The allocators to look for.
    pub table: Table,
    /// The sources of samples to look for.
    pub sources: Sources,
    by_key: HashMap<FileKey, ExaminedFile>,
    /// For every file on or beneath an overlay mount: the key that it was first seen under, and whether that was
    /// through the overlay. The kernel places probes on the inode beneath.
    beneath: HashMap<Beneath, (FileKey, bool)>,
    /// Keys of files that are known under another key.
    aliases: HashMap<FileKey, FileKey>,
    /// See [`take_outdated`](Self::take_outdated).
    outdated: Vec<FileKey>,
    /// Files that another thread is examining, one after another, so that only the memory for one is needed.
    aside: Aside<FileKey, ExaminedFile>,
    /// Large files, on a thread of their own: small ones do not wait for them.
    large_aside: Aside<FileKey, ExaminedFile>,
    /// Files that were examined aside, and that [`examine`](Self::examine) was not called for since.
    fresh: HashSet<FileKey>,
    /// What those threads do with a file that has an allocator, while it is in memory.
    pub(crate) read_on: Option<ReadOn>,
}

impl ExaminedFiles {
    /// Creates the set without any files. `table` lists the allocators to look for.
    pub fn new(rules: KernelRules, table: Table) -> Self {
        Self {
            rules,
            table,
            sources: Sources::default(),
            by_key: HashMap::new(),
            beneath: HashMap::new(),
            aliases: HashMap::new(),
            outdated: Vec::new(),
            aside: Aside::new("examine"),
            large_aside: Aside::new("examine-large"),
            fresh: HashSet::new(),
            read_on: None,
        }
    }

    /// Whether an examined file has no allocator, but contains a program that announces its samples.
    pub fn announces(&self, key: FileKey) -> bool {
        self.get(key).is_some_and(|file| file.announces && self.sources == Sources::AllocatorsOrAnnouncements)
    }

    /// Returns a file's key. A file that is seen both through an overlay mount and beneath it keeps the key of its
    /// first appearance. With two keys it would be hooked twice.
    fn key_of(&mut self, file: &File) -> std::io::Result<FileKey> {
        let key = FileKey::of(file)?;
        if self.is_known(key, file) {
            return Ok(key);
        }
        if let Some(first) = self.aliases.get(&key) {
            return Ok(*first);
        }
        let Some((beneath, overlay)) = open::beneath(file) else { return Ok(key) };
        let (first, first_overlay) = *self.beneath.entry(beneath).or_insert((key, overlay));
        // Files on two ordinary file systems may be copies of each other, with identical handles.
        if first == key || !(overlay || first_overlay) {
            return Ok(key);
        }
        self.aliases.insert(key, first);
        Ok(first)
    }

    /// Examines a file, unless that was done before. The flag says whether there is something to hook.
    ///
    /// # Errors
    /// The file's metadata cannot be read.
    pub fn examine(&mut self, path: &str, file: &Arc<File>) -> Result<(FileKey, bool), UnreadableFile> {
        let key = self.key_of(file).map_err(|source| UnreadableFile { path: path.to_owned(), source })?;
        for is_large in [false, true] {
            while self.aside(is_large).under_way().contains(&key) {
                let Some(examined) = self.aside(is_large).wait() else { break };
                self.take_in(examined);
            }
        }
        self.fresh.remove(&key);
        if self.is_known(key, file) {
            return Ok((key, self.plan(key).is_some()));
        }
        let examined = examined(path.to_owned(), Arc::clone(file), (&self.rules, &self.table, self.sources), None);
        let is_hookable = examined.plan.is_ok();
        self.insert(key, examined);
        Ok((key, is_hookable))
    }

    /// Whether a file was examined and has not changed since.
    fn is_known(&self, key: FileKey, file: &File) -> bool {
        let Some((known, now)) = self.by_key.get(&key).zip(Content::of(file).ok()) else { return false };
        let Some(then) = known.content else { return false };
        if known.file.is_some() { then.is_unwritten(&now) } else { then.is_unchanged(&now) }
    }

    fn insert(&mut self, key: FileKey, examined: ExaminedFile) {
        if self.by_key.len() >= MOST_KNOWN {
            let is_missed = |file: &ExaminedFile| file.plan.as_ref().err().is_none_or(|why| !why.misses_nothing());
            self.by_key.retain(|_, file| is_missed(file) || file.runtime.is_some());
        }
        if self.by_key.insert(key, examined).is_some_and(|before| before.plan.is_ok()) {
            self.outdated.push(key);
        }
    }

    /// Returns the files that had something to hook and were overwritten since the last call.
    pub(super) fn take_outdated(&mut self) -> Vec<FileKey> {
        std::mem::take(&mut self.outdated)
    }

    /// Forgets a file that is being overwritten. When a process maps it, it is examined again.
    pub(super) fn forget_written(&mut self, key: FileKey) {
        self.by_key.remove(&key);
        self.fresh.remove(&key);
    }

    /// Forgets and closes files for which `stays` returns false, given key and path. Returns those that had something
    /// to hook.
    pub fn forget(&mut self, stays: impl Fn(&FileKey, &str) -> bool) -> Vec<FileKey> {
        let mut gone = Vec::new();
        self.by_key.retain(|key, file| {
            let stays = stays(key, &file.path) || file.plan.is_ok() && gone.len() == MOST_FORGOTTEN;
            gone.extend((!stays && file.plan.is_ok()).then_some(*key));
            stays
        });
        let known = &self.by_key;
        self.beneath.retain(|_, (key, _)| known.contains_key(key));
        self.aliases.retain(|_, key| known.contains_key(key));
        self.fresh.retain(|key| known.contains_key(key));
        gone
    }

    /// The thread that examines files of a size.
    const fn aside(&mut self, is_large: bool) -> &mut Aside<FileKey, ExaminedFile> {
        if is_large { &mut self.large_aside } else { &mut self.aside }
    }

    /// Starts examining a file on another thread, unless it is known. Returns whether that is in progress.
    /// `is_awaited`: a program waits at its entry point for it, for a second at most.
    pub fn examine_aside(&mut self, path: &str, file: &Arc<File>, is_awaited: bool) -> bool {
        for is_large in [false, true] {
            while let Some(examined) = self.aside(is_large).next_done() {
                self.take_in(examined);
            }
        }
        let Ok(key) = self.key_of(file) else { return false };
        if self.is_examined(key) {
            return true;
        }
        // A file that changes all the time would be examined for ever.
        if self.fresh.contains(&key) || self.is_known(key, file) {
            return false;
        }
        let (rules, table, sources, is_large) = (self.rules, self.table.clone(), self.sources, is_large(file));
        let (path, file, read_on) = (path.to_owned(), Arc::clone(file), self.read_on.clone());
        self.aside(is_large).begin(key, move || {
            let _raised = is_awaited.then(RaisedPriority::begin);
            let examined = examined(path, file, (&rules, &table, sources), read_on.as_ref());
            if is_large {
                give_memory_back();
            }
            examined
        })
    }

    /// Whether a file is being examined.
    fn is_examined(&self, key: FileKey) -> bool {
        [&self.aside, &self.large_aside].iter().any(|aside| aside.under_way().contains(&key))
    }

    fn take_in(&mut self, (key, examined): Done<FileKey, ExaminedFile>) {
        if let Some(examined) = examined {
            self.fresh.insert(key);
            self.insert(key, examined);
        }
    }

    /// Examines many files on all CPUs, but large files one after another, because each takes a lot of memory. Files
    /// that cannot be read are skipped; [`examine`](Self::examine) reports them. Returns whether any was not known.
    pub fn examine_all(&mut self, files: Vec<(String, Arc<File>)>) -> bool {
        let mut new: HashMap<FileKey, (String, Arc<File>)> = HashMap::new();
        for (path, file) in files {
            if let Ok(key) = self.key_of(&file)
                && !self.is_known(key, &file)
            {
                new.entry(key).or_insert((path, file));
            }
        }
        if new.is_empty() {
            return false;
        }
        let (large, small): (Vec<_>, Vec<_>) = new.into_iter().partition(|(_, (_, file))| is_large(file));
        // All large files are one job, which begins first.
        let jobs = std::iter::once(large).chain(small.into_iter().map(|file| vec![file])).collect();
        let (how, done) = ((&self.rules, &self.table, self.sources), Mutex::new(Vec::new()));
        on_all_processors(jobs, |files: Vec<(FileKey, (String, Arc<File>))>| {
            for (key, (path, file)) in files {
                let examined = examined(path, file, how, None);
                done.lock().unwrap_or_else(PoisonError::into_inner).push((key, examined));
            }
        });
        let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        done.into_iter().for_each(|(key, examined)| self.insert(key, examined));
        true
    }

    /// Plans an examined file again, avoiding probes at these file offsets as far as possible.
    pub fn avoid(&mut self, key: FileKey, offsets: &BTreeSet<u64>) {
        if let Some(ExaminedFile { path, file: Some(file), plan, announces: false, .. }) = self.by_key.get_mut(&key) {
            *plan = examine_avoiding(&**file, path, &self.rules, &self.table, offsets).plan.map_err(Arc::new);
        }
    }

    /// Returns an examined file.
    pub fn get(&self, key: FileKey) -> Option<&ExaminedFile> {
        self.by_key.get(&key)
    }

    /// Path of an examined file.
    pub fn path(&self, key: FileKey) -> Option<&str> {
        self.get(key).map(|file| file.path.as_str())
    }

    /// The plan of an examined file. `None` if there is nothing to hook.
    pub fn plan(&self, key: FileKey) -> Option<&AllocatorFile> {
        self.get(key)?.plan.as_ref().ok()
    }

    /// A language runtime with its own heap in an examined file, unless that runtime is the reason why the file is not
    /// hooked.
    pub fn runtime(&self, key: FileKey) -> Option<Runtime> {
        self.get(key)?.runtime.filter(|_| self.refusal(key).is_none())
    }

    /// The object allocator of an interpreter in an examined file, if it is hooked.
    pub fn objects(&self, key: FileKey) -> Option<&ObjectTable> {
        self.get(key)?.objects.as_ref()
    }

    /// A language runtime in an examined file whose own heap is not observed.
    pub fn unseen_heap(&self, key: FileKey) -> Option<Runtime> {
        self.runtime(key).filter(|runtime| *runtime != Runtime::Python || self.objects(key).is_none())
    }

    /// Why a file that should be hooked cannot be. `None` if it can be hooked, or has no allocator that could be
    /// missed.
    pub fn refusal(&self, key: FileKey) -> Option<&AttachError> {
        let file = self.get(key)?;
        // A recognised Go program is not a failure: its runtime reports what is in use.
        let is_read = |reason: &AttachError| matches!(reason, AttachError::Go) && file.runtime == Some(Runtime::Go);
        let reason = file.plan.as_ref().err().map(AsRef::as_ref);
        reason.filter(|reason| !reason.misses_nothing() && !is_read(reason))
    }

    /// The first file found to lack a function that `--alloc` declares for it, as path and reason.
    pub fn misdescribed(&self) -> Option<String> {
        self.by_key.values().find_map(|file| match file.plan.as_ref().err().map(AsRef::as_ref) {
            Some(reason @ AttachError::NoSymbol { .. }) => Some(format!("{}: {reason}", file.path)),
            _ => None,
        })
    }

    /// Whether a file whose path `wanted` accepts was examined.
    pub fn has_seen(&self, wanted: impl Fn(&str) -> bool) -> bool {
        self.by_key.values().any(|file| wanted(&file.path))
    }
}

/// Whether examining a file takes a significant amount of time and memory.
fn is_large(file: &File) -> bool {
    file.metadata().is_ok_and(|metadata| metadata.len() >= LARGE_BYTES)
}

/// Reads and plans a file, and keeps it open if there is something to hook.
fn examined(
    path: String,
    file: Arc<File>,
    how: (&KernelRules, &Table, Sources),
    read_on: Option<&ReadOn>,
) -> ExaminedFile {
    // It may be written to while it is read.
    let content = Content::of(&file).ok();
    // Its reader should not panic, however hostile the file is. If it does, the file is not read again.
    let examined = catch_unwind(AssertUnwindSafe(|| planned(&path, &file, how)));
    let (examined, image) = examined.unwrap_or_else(|_| (nothing(&path, AttachError::Damaged("contents")), None));
    if let (Some(read_on), Some(content), Some(image)) = (read_on, content, image) {
        // What is wrong with a file there is reported when it is to be hooked.
        let _ = catch_unwind(AssertUnwindSafe(|| read_on(content, &file, image, how.1)));
    }
    ExaminedFile { content, file: examined.plan.is_ok().then_some(file), ..examined }
}

/// A file in which nothing can be hooked.
fn nothing(path: &str, why: AttachError) -> ExaminedFile {
    ExaminedFile {
        path: path.to_owned(),
        file: None,
        content: None,
        plan: Err(Arc::new(why)),
        announces: false,
        runtime: None,
        objects: None,
    }
}

/// The file, and how it was read if it has an allocator.
fn planned<'f>(
    path: &str,
    file: &'f File,
    how: (&KernelRules, &Table, Sources),
) -> (ExaminedFile, Option<FileImage<'f>>) {
    let (rules, table, sources) = how;
    let nothing = nothing(path, AttachError::NoAnnouncements);
    if sources == Sources::Announcements {
        let plan = announced(file, rules).and_then(|plan| plan.ok_or(AttachError::NoAnnouncements));
        return (ExaminedFile { announces: plan.is_ok(), plan: plan.map_err(Arc::new), ..nothing }, None);
    }
    let Examination { plan, runtime, objects, image } = examine_avoiding(file, path, rules, table, &BTreeSet::new());
    let has_none =
        matches!(plan, Err(AttachError::NoAllocator { .. } | AttachError::Alone { .. } | AttachError::StaticStripped));
    if has_none
        && sources == Sources::AllocatorsOrAnnouncements
        && let Ok(Some(announced)) = announced(file, rules)
    {
        return (ExaminedFile { plan: Ok(announced), announces: true, runtime, ..nothing }, None);
    }
    (ExaminedFile { plan: plan.map_err(Arc::new), runtime, objects, ..nothing }, image)
}

#[cfg(test)]
impl ExaminedFiles {
    /// Adds a file with a given plan.
    pub(super) fn add(&mut self, path: &str, file: File, plan: Result<AllocatorFile, AttachError>) -> FileKey {
        let key = FileKey::of(&file).expect("stat of an open file");
        let nothing = nothing(path, AttachError::NoAnnouncements);
        let (content, file, plan) = (Content::of(&file).ok(), Some(Arc::new(file)), plan.map_err(Arc::new));
        self.by_key.insert(key, ExaminedFile { content, file, plan, ..nothing });
        key
    }
}

#[cfg(test)]
mod tests {
    use heapbpf_probes::Machine;

    use super::*;

    fn files() -> ExaminedFiles {
        ExaminedFiles::new(KernelRules::of(Machine::host().unwrap_or(Machine::X86_64), (6, 1)), Table::default())
    }

    fn text_file(dir: &std::path::Path, name: &str) -> (String, Arc<File>) {
        let path = dir.join(name);
        std::fs::write(&path, "not a program").expect("writes");
        (path.display().to_string(), Arc::new(File::open(path).expect("opens")))
    }

    #[test]
    fn a_file_is_examined_once_whatever_its_names() {
        let dir = tempfile::tempdir().expect("a directory");
        let (path, file) = text_file(dir.path(), "one");
        let link = dir.path().join("two");
        std::fs::hard_link(&path, &link).expect("links");
        let mut files = files();
        let (key, is_hookable) = files.examine(&path, &file).expect("readable");
        assert!(!is_hookable);
        let again = Arc::new(File::open(&link).expect("opens"));
        assert_eq!(files.examine(&link.display().to_string(), &again).expect("readable"), (key, false));
        assert_eq!((files.path(key), files.by_key.len()), (Some(&*path), 1));
        assert!(files.has_seen(|seen| seen == path) && !files.has_seen(|seen| seen == link.display().to_string()));
    }

    #[test]
    fn a_file_with_nothing_to_hook_is_not_kept_open_and_examined_again_once_it_has_changed() {
        let dir = tempfile::tempdir().expect("a directory");
        let (path, file) = text_file(dir.path(), "one");
        let mut files = files();
        let reason = |files: &ExaminedFiles, key| files.get(key).and_then(|it| it.plan.as_ref().err().cloned());
        let (key, _) = files.examine(&path, &file).expect("readable");
        assert_eq!(Arc::strong_count(&file), 1);
        let first = reason(&files, key).expect("no program");
        assert_eq!(files.examine(&path, &file).expect("readable"), (key, false));
        assert!(Arc::ptr_eq(&first, &reason(&files, key).expect("no program")), "once");
        let content = || Content::of(&file).expect("attributes");
        let before = content();
        while content() == before {
            std::fs::write(&path, "another").expect("writes");
        }
        assert_eq!(files.examine(&path, &file).expect("readable"), (key, false));
        assert!(!Arc::ptr_eq(&first, &reason(&files, key).expect("no program")), "again");
    }

    #[test]
    fn files_are_examined_aside_once_and_waited_for_where_needed() {
        let dir = tempfile::tempdir().expect("a directory");
        let (small, small_file) = text_file(dir.path(), "small");
        let (large, large_file) = text_file(dir.path(), "large");
        std::fs::OpenOptions::new()
            .write(true)
            .open(&large)
            .and_then(|file| file.set_len(LARGE_BYTES))
            .expect("a file with a hole");
        for (path, file) in [(&small, &small_file), (&large, &large_file)] {
            let mut files = files();
            assert!(files.examine_aside(path, file, true));
            // It stays in progress until its result is taken in.
            let key = FileKey::of(file).expect("stat of an open file");
            assert!(files.is_examined(key) && files.get(key).is_none());
            assert_eq!(files.examine(path, file).expect("readable"), (key, false));
            assert!(!files.is_examined(key) && files.get(key).is_some());
            assert!(!files.examine_aside(path, file, true), "once");
        }
    }

    #[test]
    fn a_file_that_changes_while_it_is_examined_aside_is_not_examined_aside_again_before_it_is_asked_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let (path, file) = text_file(dir.path(), "log");
        let mut files = files();
        assert!(files.examine_aside(&path, &file, false));
        let done = files.aside(false).wait().expect("it is under way");
        files.take_in(done);
        std::fs::write(&path, "not a program, and longer").expect("writes");
        let key = FileKey::of(&file).expect("stat of an open file");
        assert!(!files.is_known(key, &file) && !files.examine_aside(&path, &file, false));
        assert_eq!(files.examine(&path, &file).expect("readable"), (key, false));
        std::fs::write(&path, "not a program, and longer still").expect("writes");
        assert!(files.examine_aside(&path, &file, false), "it was asked for");
    }

    #[test]
    fn many_files_are_examined_as_one_by_one() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut all: Vec<_> = (0..20).map(|i| text_file(dir.path(), &i.to_string())).collect();
        all.extend(all.clone());
        let mut together = files();
        assert!(together.examine_all(all.clone()) && !together.examine_all(all.clone()), "once");
        assert_eq!(together.by_key.len(), 20);
        let mut one_by_one = files();
        for (path, file) in &all {
            let (key, _) = one_by_one.examine(path, file).expect("readable");
            assert_eq!(together.path(key), Some(path.as_str()));
            let reasons =
                [&together, &one_by_one].map(|files| files.get(key).map(|it| it.plan.as_ref().err().cloned()));
            let [together, alone] = reasons.map(|reason| reason.flatten().expect("no program").to_string());
            assert_eq!(together, alone);
        }
    }

    #[test]
    fn only_a_file_with_an_allocator_is_reported_as_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let (path, file) = text_file(dir.path(), "text");
        let mut files = files();
        let (key, _) = files.examine(&path, &file).expect("readable");
        assert!(files.refusal(key).is_none() && files.plan(key).is_none() && files.misdescribed().is_none());
        let (_, go) = text_file(dir.path(), "go");
        let key = files.add("/go", go.try_clone().expect("a descriptor"), Err(AttachError::Go));
        assert!(matches!(files.refusal(key), Some(AttachError::Go)));
        let (_, custom) = text_file(dir.path(), "custom");
        let absent = AttachError::NoSymbol { symbol: "my_alloc".into(), nearest: Vec::new() };
        let reason = format!("/custom: {absent}");
        files.add("/custom", custom.try_clone().expect("a descriptor"), Err(absent));
        assert_eq!(files.misdescribed(), Some(reason));
    }
}
