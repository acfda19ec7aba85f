//! Modules: the files and other objects that processes map executable. Each is kept once, and open, so that it can be
//! read after it was deleted or upgraded, or after the process exited.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use heapbpf_elf::{Image, build_id, is_elf};
use heapbpf_unwind::image::ModuleFiles;

use super::code_ranges::CodeRanges;
use super::mappings::{Kind, Mapping, ModuleId};
use super::open::{
    ChangeTime, Opened, RealFile, Stamp, Unreadable, open_mapped, space_if_deleted, stamp_now, stamp_of_mapped,
};
use super::record::{Device, MapEvent};
use super::vdso;

/// Maximum number of modules, and of file identities: a bound on what a hostile process can make heapbpf keep.
const MAX_MODULES: usize = 1 << 17;

/// Number of modules to keep although no process maps them, because programs come back. Their files stay open.
pub const KEPT_UNMAPPED: usize = 256;

/// When too many files are open, one of this many oldest ones is closed.
const OLDEST: usize = 16;

/// Kinds of modules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ModuleKind {
    /// A file, possibly deleted or in memory only (memfd).
    #[default]
    File,
    /// The vDSO of 64-bit processes.
    Vdso,
    /// The legacy vsyscall page.
    Vsyscall,
    /// The area in which the kernel single-steps probed instructions.
    Uprobes,
    /// Memory without a file: JIT code.
    Anonymous,
    /// Another special mapping of the kernel.
    Special,
}

/// A module's content.
#[derive(Clone, Debug)]
pub enum ModuleSource {
    /// A file, open for reading at offsets.
    File(Arc<File>),
    /// An image in memory.
    Memory(Arc<Vec<u8>>),
}

/// Where a module was last seen mapped. Needed to open it again.
#[derive(Clone, Copy, Debug, Default)]
struct MappedAt {
    pid: u32,
    address: u64,
    length: u64,
}

impl MappedAt {
    fn of(map: &MapEvent) -> Self {
        let (address, length) = map.file_mapping();
        Self { pid: map.pid, address, length }
    }
}

#[derive(Debug, Default)]
enum Content {
    Open {
        file: Arc<File>,
        used: u64,
    },
    /// Closed to stay within the limit on open files. Reopened if `stamp` still agrees.
    #[default]
    Closed,
    Memory(Arc<Vec<u8>>),
    Unreadable(Unreadable),
}

/// A module: something that is mapped executable.
#[derive(Debug, Default)]
pub struct Module {
    /// What it is.
    pub kind: ModuleKind,
    /// Path as seen by the process in which it first appeared, without ` (deleted)`; or the name of the mapping.
    pub path: Arc<str>,
    /// Whether the file had been deleted when it first appeared.
    pub deleted: bool,
    /// GNU build ID, if it could be read.
    pub build_id: Option<Arc<[u8]>>,
    /// Whether it was found to have an allocator. If so, its mappings are kept first.
    has_allocator: bool,
    code: CodeRanges,
    /// Checksum of parts of a file without a build ID ([`CodeRanges::checksum`]).
    checksum: Option<u64>,
    /// Device and inode, as the kernel reported them with the mapping.
    device: Device,
    pub(crate) inode: u64,
    generation: Option<u64>,
    /// The path's bytes, if they are not UTF-8.
    raw_path: Option<Box<[u8]>>,
    stamp: Option<Stamp>,
    /// Change time, if the file is seen through an overlay mount.
    layered: Option<ChangeTime>,
    seen: MappedAt,
    content: Content,
    /// The last [`ModuleTable::forget`] at which it was needed or had just been added.
    needed_at: u64,
}

impl Module {
    /// Why it cannot be read. `None` if it can.
    #[must_use]
    pub fn unreadable(&self) -> Option<&Unreadable> {
        if let Content::Unreadable(reason) = &self.content { Some(reason) } else { None }
    }

    /// Space that the file takes up, bytes, if it is open and was deleted.
    fn deleted_bytes(&self) -> Option<u64> {
        let Content::Open { file, .. } = &self.content else { return None };
        space_if_deleted(file)
    }

    /// Compares `file`, whose attributes are `now`, with what was first mapped: by build ID, otherwise by size, time
    /// and a checksum.
    fn verify(&mut self, file: &File, now: Stamp) -> Result<(), Unreadable> {
        let Some(stamp) = self.stamp.filter(|stamp| *stamp != now) else { return Ok(()) };
        let is_same = match &self.build_id {
            Some(id) => build_id::of(file).as_deref() == Some(id),
            None => stamp.differs_in_change_time_only(now) && self.code.checksum(file) == self.checksum,
        };
        if is_same {
            self.stamp = Some(now);
        }
        is_same.then_some(()).ok_or(Unreadable::Overwritten)
    }
}

/// All modules seen, except those that no process has mapped for a long time. Ids are never reused.
#[derive(Debug, Default)]
pub struct ModuleTable {
    modules: BTreeMap<ModuleId, Module>,
    /// Id of the next module.
    next: u32,
    /// Number of calls to [`Self::forget`].
    sweeps: u64,
    /// Modules by the device and inode of their mappings. There are several if an inode number was reused.
    by_file: HashMap<(Device, u64), Vec<ModuleId>>,
    /// Modules on overlay mounts, where one file has a different device number in each container.
    by_real_file: HashMap<RealFile, ModuleId>,
    by_name: HashMap<Box<[u8]>, ModuleId>,
    /// Number of files kept open.
    pub open_files: usize,
    max_open: usize,
    clock: u64,
}

impl ModuleTable {
    /// Creates a table that keeps at most `max_open` files open.
    #[must_use]
    pub fn new(max_open: usize) -> Self {
        Self { max_open: max_open.max(1), ..Self::default() }
    }

    /// Returns the module that `map` maps, and whether it is new. `generation_known` says whether `map` contains the
    /// inode's generation. A new file is opened at once, while the process still maps it.
    pub fn intern(&mut self, map: &MapEvent, generation_known: bool) -> (ModuleId, bool) {
        let (path, deleted) = strip_deleted(&map.path);
        let kind = kind_of(map, path);
        if kind != ModuleKind::File {
            return self.intern_special(kind, map, path);
        }
        let key = (map.device, map.inode);
        let generation = generation_known.then_some(map.inode_generation);
        let known = self.known(key, generation).filter(|id| !self.may_be_copied_up(*id, map));
        if let Some(id) = known.filter(|id| !self.notice_overwritten(*id, Some(map))) {
            self.seen_again(id, map, path);
            return (id, false);
        }
        let opened = open_mapped(map, path);
        if let Some(id) = opened.as_ref().ok().and_then(|opened| self.other_name_for(opened, map, path)) {
            self.alias(key, id);
            return (id, false);
        }
        // The last id does not belong to a module.
        if self.modules.len() >= MAX_MODULES || self.next == u32::MAX {
            return self.intern_special(ModuleKind::Special, map, b"[too many files]");
        }
        let id = self.push(Module {
            kind,
            path: String::from_utf8_lossy(path).into(),
            deleted,
            device: map.device,
            inode: map.inode,
            generation,
            raw_path: std::str::from_utf8(path).is_err().then(|| path.into()),
            seen: MappedAt::of(map),
            needed_at: self.sweeps,
            ..Module::default()
        });
        self.alias(key, id);
        self.fill(id, opened);
        (id, true)
    }

    /// Notes that a file contains an allocator.
    pub fn note_allocator(&mut self, id: ModuleId) {
        if let Some(module) = self.modules.get_mut(&id) {
            module.has_allocator = true;
        }
    }

    /// Whether a file is known to contain an allocator.
    #[must_use]
    pub fn has_allocator(&self, id: ModuleId) -> bool {
        self.get(id).is_some_and(|module| module.has_allocator)
    }

    /// The kind of a module's mappings.
    #[must_use]
    pub fn kind_of_mappings(&self, id: ModuleId) -> Kind {
        match self.get(id) {
            Some(Module { kind: ModuleKind::Anonymous, .. }) => Kind::Anonymous,
            Some(Module { has_allocator: true, .. }) => Kind::Essential,
            Some(Module { kind: ModuleKind::Vdso | ModuleKind::Vsyscall | ModuleKind::Uprobes, .. }) => Kind::Essential,
            _ => Kind::File,
        }
    }

    /// Returns the part of a reported mapping that is code. The rest has been replaced by now
    /// ([`code_ranges`](super::code_ranges)).
    #[must_use]
    pub fn only_code(&self, mapping: Mapping) -> Mapping {
        let bytes = mapping.end - mapping.start;
        let code_bytes = self.get(mapping.module).map(|module| module.code.mapped_bytes(mapping.file_offset, bytes));
        Mapping { end: mapping.start + code_bytes.unwrap_or(bytes), ..mapping }
    }

    /// The module with this id.
    #[must_use]
    pub fn get(&self, id: ModuleId) -> Option<&Module> {
        self.modules.get(&id)
    }

    /// All modules, with their ids.
    pub fn iter(&self) -> impl Iterator<Item = (ModuleId, &Module)> {
        self.modules.iter().map(|(id, module)| (*id, module))
    }

    /// Returns a module's content. A file that was closed in the meantime is opened again if it is unchanged.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub fn source(&mut self, id: ModuleId) -> Result<ModuleSource, Unreadable> {
        self.notice_overwritten(id, None);
        self.clock += 1;
        let clock = self.clock;
        let module = self.modules.get_mut(&id).ok_or(Unreadable::NoFile)?;
        match &mut module.content {
            Content::Open { file, used } => {
                *used = clock;
                return Ok(ModuleSource::File(file.clone()));
            }
            Content::Memory(bytes) => return Ok(ModuleSource::Memory(bytes.clone())),
            // The holder of the lease may have returned it.
            Content::Unreadable(Unreadable::Leased) => {
                let opened = self.open_again(id)?;
                self.fill(id, Ok(opened));
                return self.source(id);
            }
            Content::Unreadable(reason) => return Err(reason.clone()),
            Content::Closed => {}
        }
        let opened = self.open_again(id)?;
        let file = Arc::new(opened.file);
        self.keep_open(id, file.clone());
        Ok(ModuleSource::File(file))
    }

    /// Number of modules.
    #[must_use]
    pub fn count(&self) -> usize {
        self.modules.len()
    }

    fn intern_special(&mut self, kind: ModuleKind, map: &MapEvent, path: &[u8]) -> (ModuleId, bool) {
        let name: &[u8] = if kind == ModuleKind::Anonymous { b"[anonymous]" } else { path };
        if let Some(id) = self.by_name.get(name) {
            return (*id, false);
        }
        let image = if kind == ModuleKind::Vdso { vdso::image() } else { None };
        let id = self.push(Module {
            kind,
            path: String::from_utf8_lossy(name).into(),
            build_id: image.as_deref().and_then(|image| build_id::of(image)).map(Arc::from),
            device: map.device,
            inode: map.inode,
            content: image.map_or(Content::Unreadable(Unreadable::NoFile), Content::Memory),
            needed_at: self.sweeps,
            ..Module::default()
        });
        self.by_name.insert(name.into(), id);
        (id, true)
    }

    /// Finds the latest module with this device and inode whose generation does not contradict `generation`.
    fn known(&mut self, key: (Device, u64), generation: Option<u64>) -> Option<ModuleId> {
        let candidates = self.by_file.get(&key)?;
        let modules = &mut self.modules;
        candidates.iter().rev().copied().find(|id| {
            let Some(Module { generation: known, .. }) = modules.get_mut(id) else { return false };
            *known = known.or(generation);
            generation.is_none() || *known == generation
        })
    }

    /// Records where a known module is mapped now. If it could not be opened before, this tries again.
    fn seen_again(&mut self, id: ModuleId, map: &MapEvent, path: &[u8]) {
        let Some(module) = self.modules.get_mut(&id) else { return };
        module.seen = MappedAt::of(map);
        let retry =
            matches!(module.content, Content::Unreadable(Unreadable::Gone | Unreadable::Replaced | Unreadable::Leased));
        if retry && let Ok(opened) = open_mapped(map, path) {
            self.fill(id, Ok(opened));
        }
    }

    /// Finds a known module that is the same file as `opened`, although its device or inode differs.
    fn other_name_for(&mut self, opened: &Opened, map: &MapEvent, path: &[u8]) -> Option<ModuleId> {
        // A JIT compiler's memory file contains nothing to read, and keeping it open would keep its memory in use.
        const MEMORY: [&[u8]; 3] = [b"/memfd:", b"/dev/zero", b"/SYSV"];
        if MEMORY.iter().any(|name| path.starts_with(name)) && !is_elf(&opened.file) {
            return Some(self.intern_special(ModuleKind::Anonymous, map, path).0);
        }
        let id = *self.by_real_file.get(opened.real.as_ref()?)?;
        self.modules.get_mut(&id)?.layered = Some(opened.stamp.changed);
        Some(id)
    }

    /// Whether a file on an overlay may have been replaced although its inode number is the same. A write or a change
    /// of owner copies it to the upper layer.
    fn may_be_copied_up(&self, id: ModuleId, map: &MapEvent) -> bool {
        let layered = self.get(id).and_then(|module| module.layered);
        layered.is_some_and(|known| stamp_of_mapped(map).is_some_and(|now| now.changed != known))
    }

    /// Compares a file with its state when it was first mapped. If its contents have changed, it is no longer
    /// read, because it would describe different code. Returns whether that is the case. `map` is where it is mapped
    /// now.
    fn notice_overwritten(&mut self, id: ModuleId, map: Option<&MapEvent>) -> bool {
        let Some(module) = self.modules.get_mut(&id) else { return false };
        let (file, now) = match &module.content {
            Content::Open { file, .. } => (Arc::clone(file), stamp_now(file)),
            Content::Closed => {
                let map = map.filter(|map| stamp_of_mapped(map).is_some_and(|now| module.stamp != Some(now)));
                let opened = map.and_then(|map| open_mapped(map, strip_deleted(&map.path).0).ok());
                let Some(opened) = opened else { return false };
                (Arc::new(opened.file), Some(opened.stamp))
            }
            Content::Unreadable(Unreadable::Overwritten) => return true,
            Content::Memory(_) | Content::Unreadable(_) => return false,
        };
        let Some(Err(reason)) = now.map(|now| module.verify(&file, now)) else { return false };
        self.open_files -= usize::from(matches!(module.content, Content::Open { .. }));
        module.content = Content::Unreadable(reason);
        true
    }

    fn alias(&mut self, key: (Device, u64), id: ModuleId) {
        if self.by_file.len() >= MAX_MODULES {
            return;
        }
        let ids = self.by_file.entry(key).or_default();
        ids.retain(|known| *known != id);
        ids.push(id);
    }

    fn fill(&mut self, id: ModuleId, opened: Result<Opened, Unreadable>) {
        let Some(module) = self.modules.get_mut(&id) else { return };
        let opened = match opened {
            Ok(opened) if !is_elf(&opened.file) => {
                module.content = Content::Unreadable(Unreadable::NotElf);
                return;
            }
            Ok(opened) => opened,
            Err(reason) => {
                module.content = Content::Unreadable(reason);
                return;
            }
        };
        module.build_id = build_id::of(&opened.file).map(Arc::from);
        module.code = CodeRanges::read(&opened.file, procfs::page_size());
        module.checksum = if module.build_id.is_none() { module.code.checksum(&opened.file) } else { None };
        module.stamp = Some(opened.stamp);
        module.generation = module.generation.or(opened.generation);
        if let Some(real) = opened.real {
            module.layered = Some(opened.stamp.changed);
            self.by_real_file.insert(real, id);
        }
        self.keep_open(id, Arc::new(opened.file));
    }

    /// Bytes of the deleted files that are kept open, on disk or in memory. Perhaps nobody else has them open.
    #[must_use]
    pub fn deleted_bytes(&self) -> u64 {
        self.modules.values().filter_map(Module::deleted_bytes).sum()
    }

    /// Forgets and closes the files that have gone unneeded for longest, except the last [`KEPT_UNMAPPED`], and all
    /// unneeded files that were deleted. `needed` are the modules still in use.
    pub fn forget(&mut self, needed: &HashSet<ModuleId>) {
        self.sweeps += 1;
        let mut unneeded = Vec::new();
        for (id, module) in &mut self.modules {
            if needed.contains(id) || module.kind != ModuleKind::File {
                module.needed_at = self.sweeps;
            } else {
                unneeded.push((module.deleted_bytes().is_none(), module.needed_at, *id));
            }
        }
        unneeded.sort_unstable();
        let deleted = unneeded.partition_point(|(is_there, ..)| !is_there);
        let gone = unneeded.len().saturating_sub(KEPT_UNMAPPED).max(deleted);
        for (.., id) in &unneeded[..gone] {
            let gone = self.modules.remove(id);
            self.open_files -= usize::from(gone.is_some_and(|module| matches!(module.content, Content::Open { .. })));
        }
        let modules = &self.modules;
        // Other names are found again when needed: those of exited containers and of memory files.
        let has_it_first = |key, id: &ModuleId| modules.get(id).is_some_and(|it| (it.device, it.inode) == key);
        self.by_file.retain(|key, ids| {
            ids.retain(|id| has_it_first(*key, id));
            !ids.is_empty()
        });
        self.by_real_file.retain(|_, id| modules.contains_key(id));
    }

    /// Closes a module's file. It is opened again when it is needed.
    pub fn close(&mut self, id: ModuleId) {
        if let Some(module) = self.modules.get_mut(&id)
            && matches!(module.content, Content::Open { .. })
        {
            module.content = Content::Closed;
            self.open_files -= 1;
        }
    }

    fn open_again(&mut self, id: ModuleId) -> Result<Opened, Unreadable> {
        let module = self.get(id).ok_or(Unreadable::NoFile)?;
        let MappedAt { pid, address, length } = module.seen;
        let (device, inode, inode_generation) = (module.device, module.inode, module.generation.unwrap_or(0));
        let map = MapEvent { pid, address, length, device, inode, inode_generation, ..MapEvent::default() };
        let opened = open_mapped(&map, module.raw_path.as_deref().unwrap_or(module.path.as_bytes()))?;
        let module = self.modules.get_mut(&id).ok_or(Unreadable::NoFile)?;
        module.verify(&opened.file, opened.stamp).map(|()| opened)
    }

    fn keep_open(&mut self, id: ModuleId, file: Arc<File>) {
        if self.open_files >= self.max_open {
            self.close_oldest();
        }
        self.clock += 1;
        let Some(module) = self.modules.get_mut(&id) else { return };
        module.content = Content::Open { file, used: self.clock };
        self.open_files += 1;
    }

    /// Closes the file that was not used for longest. Among the oldest few, those that were deleted stay open, because
    /// they could not be opened again.
    fn close_oldest(&mut self) {
        let age = |module: &Module| if let Content::Open { used, .. } = module.content { Some(used) } else { None };
        let ages = self.modules.iter().filter_map(|(id, module)| Some((age(module)?, *id)));
        let mut oldest: Vec<(u64, ModuleId)> = ages.collect();
        if oldest.len() > OLDEST {
            oldest.select_nth_unstable(OLDEST);
            oldest.truncate(OLDEST);
        }
        oldest.sort_unstable();
        let is_there = |id: &ModuleId| self.get(*id).is_some_and(|module| module.deleted_bytes().is_none());
        let mut ids = oldest.iter().map(|(_, id)| *id);
        let closed = ids.clone().find(is_there).or_else(|| ids.next());
        if let Some(id) = closed {
            self.close(id);
        }
    }

    fn push(&mut self, module: Module) -> ModuleId {
        let id = ModuleId(self.next);
        self.next += 1;
        self.modules.insert(id, module);
        id
    }
}

/// Strips the kernel's mark ` (deleted)` from the path of an unlinked file.
fn strip_deleted(path: &[u8]) -> (&[u8], bool) {
    path.strip_suffix(b" (deleted)").map_or((path, false), |path| (path, true))
}

fn kind_of(map: &MapEvent, path: &[u8]) -> ModuleKind {
    const FOUR_GIB: u64 = 1 << 32;
    match path {
        _ if map.inode != 0 => ModuleKind::File,
        b"[vdso]" if map.address >= FOUR_GIB => ModuleKind::Vdso,
        b"[vsyscall]" => ModuleKind::Vsyscall,
        b"[uprobes]" => ModuleKind::Uprobes,
        b"" | b"//anon" | b"[heap]" | b"[stack]" => ModuleKind::Anonymous,
        _ if path.starts_with(b"[anon") => ModuleKind::Anonymous,
        _ => ModuleKind::Special,
    }
}

impl ModuleFiles for ModuleTable {
    fn image(&mut self, module: ModuleId) -> Result<Arc<dyn Image>, String> {
        match self.source(module) {
            Ok(ModuleSource::File(file)) => Ok(file),
            Ok(ModuleSource::Memory(bytes)) => Ok(bytes),
            Err(reason) => Err(reason.to_string()),
        }
    }

    fn path(&self, module: ModuleId) -> Arc<str> {
        self.get(module).map_or_else(|| "?".into(), |module| module.path.clone())
    }

    fn build_id(&self, module: ModuleId) -> Option<Vec<u8>> {
        Some(self.get(module)?.build_id.as_ref()?.to_vec())
    }

    fn is_anonymous(&self, module: ModuleId) -> bool {
        self.get(module).is_some_and(|module| module.kind == ModuleKind::Anonymous)
    }

    fn root(&self, module: ModuleId) -> Option<PathBuf> {
        super::in_root::other_root(self.get(module)?.seen.pid)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs::Permissions;
    use std::io::Write as _;
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
    use std::time::SystemTime;

    use tempfile::NamedTempFile;

    use super::*;
    use crate::proc_maps;

    fn map(inode: u64) -> MapEvent {
        let path = format!("/nowhere/{inode}").into_bytes();
        MapEvent { inode, path: path.into(), ..MapEvent::default() }
    }

    /// The file as if this process had mapped it.
    fn mapped(file: &NamedTempFile) -> MapEvent {
        let metadata = file.as_file().metadata().expect("it is open");
        let device = Device { major: libc::major(metadata.dev()), minor: libc::minor(metadata.dev()) };
        let path = file.path().as_os_str().as_bytes().into();
        MapEvent { pid: std::process::id(), inode: metadata.ino(), device, path, ..MapEvent::default() }
    }

    /// Its inode stays the same, so the next process that maps it reports the same inode.
    #[test]
    fn a_file_that_is_overwritten_in_place_is_another_one() {
        let libc = proc_maps::read(std::process::id())
            .expect("it runs")
            .into_iter()
            .find(|map| map.path.ends_with(b"/libc.so.6"));
        let libc = std::fs::read(OsStr::from_bytes(&libc.expect("tests are dynamic programs").path)).expect("a file");
        let mut file = NamedTempFile::new().expect("a temporary file");
        file.write_all(&libc).expect("there is space");
        let map = mapped(&file);
        let mut modules = ModuleTable::new(8);
        let (first, is_new) = modules.intern(&map, false);
        assert!(is_new && modules.source(first).is_ok());
        let written = |bytes: &[u8]| {
            std::fs::write(file.path(), bytes).expect("there is space");
            file.as_file().set_modified(SystemTime::UNIX_EPOCH).expect("it is ours");
        };
        written(&[&libc[..], &[0; 16]].concat());
        assert_eq!(modules.intern(&map, false), (first, false), "its build ID is the same");
        assert!(modules.source(first).is_ok());
        written(&libc[..64]);
        assert_eq!(modules.source(first).err(), Some(Unreadable::Overwritten));
        let (second, is_new) = modules.intern(&map, false);
        assert!(is_new && second != first && modules.source(second).is_ok());
        assert_eq!(modules.open_files, 1);
        assert_eq!(modules.intern(&map, false), (second, false));
    }

    /// A copy in place can keep size and modification time (`cp -p`, `rsync --inplace -t`). A new version is usually a
    /// new file, and the old one gets another name.
    #[test]
    fn a_copy_that_keeps_size_and_time_is_another_file_and_a_new_name_is_not() {
        let exe = std::fs::read("/proc/self/exe").expect("it runs");
        let id = build_id::of(&exe).expect("linkers add one where these tests run");
        let at = exe.windows(id.len()).position(|bytes| bytes == id).expect("it was read from there");
        let changed = |range: std::ops::Range<usize>| {
            let mut changed = exe.clone();
            changed[range].iter_mut().for_each(|byte| *byte ^= 1);
            changed
        };
        // Without the note's name, there is none. Then parts of the code are compared.
        let variants = [
            (exe.clone(), changed(at..at + 1)),
            (changed(at - 4..at), changed(8192..exe.len())),
            (exe[..64].to_vec(), vec![0; 64]),
        ];
        for (first, second) in &variants {
            let mut file = NamedTempFile::new().expect("a temporary file");
            file.write_all(first).expect("there is space");
            let modified = file.as_file().metadata().and_then(|it| it.modified()).expect("it is open");
            let map = mapped(&file);
            // The second table closes its file before the change.
            let mut tables = [ModuleTable::new(8), ModuleTable::new(8)];
            let [open, closed] = tables.each_mut().map(|modules| modules.intern(&map, false).0);
            tables[1].close(closed);
            let mut until_changed = |change: &dyn Fn()| {
                let before = stamp_now(file.as_file());
                while stamp_now(file.as_file()) == before {
                    change();
                }
                [tables[0].source(open).err(), tables[1].source(closed).err()]
            };
            let other_name = file.path().with_extension("old");
            let link = || {
                std::fs::hard_link(file.path(), &other_name).expect("it is ours");
                std::fs::remove_file(&other_name).expect("it is ours");
            };
            let chmod = || std::fs::set_permissions(file.path(), Permissions::from_mode(0o700)).expect("it is ours");
            let copy = || {
                std::fs::write(file.path(), second).expect("there is space");
                file.as_file().set_modified(modified).expect("it is ours");
            };
            assert_eq!(until_changed(&chmod), [None, None], "its contents are the same");
            assert_eq!(until_changed(&link), [None, None], "so they are");
            assert_eq!(until_changed(&copy), [Some(Unreadable::Overwritten), Some(Unreadable::Overwritten)]);
        }
    }

    #[test]
    fn a_deleted_file_that_nobody_needs_is_closed() {
        let file = NamedTempFile::new().expect("a temporary file");
        std::fs::copy("/proc/self/exe", file.path()).expect("there is space");
        let map = mapped(&file);
        let mut modules = ModuleTable::new(8);
        let (id, _) = modules.intern(&map, false);
        modules.forget(&HashSet::new());
        assert!(modules.source(id).is_ok() && modules.deleted_bytes() == 0, "programs come back");
        file.close().expect("it is ours");
        assert!(modules.deleted_bytes() > 0);
        modules.forget(&HashSet::from([id]));
        assert!(modules.source(id).is_ok(), "it is needed");
        modules.forget(&HashSet::new());
        assert!(modules.get(id).is_none() && modules.open_files == 0);
    }

    /// A plugin's file is deleted while it is loaded, and others are mapped until the limit on open files is reached.
    #[test]
    fn a_deleted_file_stays_open_where_others_can_be_opened_again() {
        let mut header = [0; 64];
        File::open("/proc/self/exe").and_then(|exe| exe.read_exact_at(&mut header, 0)).expect("it runs");
        let new = || {
            let mut file = NamedTempFile::new().expect("a temporary file");
            file.write_all(&header).expect("there is space");
            file
        };
        let mut modules = ModuleTable::new(2);
        let plugin = new();
        let (deleted, _) = modules.intern(&mapped(&plugin), false);
        plugin.close().expect("it is ours");
        let others = [new(), new()];
        let others = others.each_ref().map(|file| modules.intern(&mapped(file), false).0);
        assert_eq!(modules.open_files, 2);
        let are_readable = [others[0], deleted, others[1], deleted].map(|id| modules.source(id).is_ok());
        assert_eq!((are_readable, modules.open_files), ([true; 4], 2));
    }

    #[test]
    fn what_nobody_has_mapped_for_long_is_forgotten_and_its_id_stays_its_own() {
        let mut modules = ModuleTable::new(8);
        let ids: Vec<ModuleId> = (1..=1000).map(|inode| modules.intern(&map(inode), true).0).collect();
        let vdso = modules.intern(&MapEvent { path: b"[uprobes]"[..].into(), ..MapEvent::default() }, true).0;
        let needed = HashSet::from([ids[3]]);
        modules.forget(&needed);
        assert_eq!(modules.count(), KEPT_UNMAPPED + 2, "the last ones, what is needed, and what is no file");
        assert!([ids[3], ids[999], vdso].iter().all(|id| modules.get(*id).is_some()));
        assert!(modules.get(ids[700]).is_none() && modules.by_file.len() == KEPT_UNMAPPED + 1);
        assert_eq!(modules.intern(&map(1000), true), (ids[999], false), "it was kept");
        let (again, is_new) = modules.intern(&map(1), true);
        assert!(is_new && again > vdso);
        modules.forget(&HashSet::new());
        assert!(modules.get(ids[3]).is_some() && modules.get(again).is_some(), "it was needed not long ago");
    }
}
