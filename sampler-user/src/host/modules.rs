//! The files (and the rest) that processes have mapped executable, each once, kept open so that they can be read
//! after deletion, upgrade, or the process's end.

use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;

use super::build_id;
use super::mappings::ModuleId;
use super::open::{ChangeTime, Opened, RealFile, Stamp, Unreadable, change_time, open_mapped};
use super::record::{Device, MapEvent};
use super::vdso;

/// Most modules, and most file identities, that are told apart: what a hostile process can make us keep is bounded.
const MAX_MODULES: usize = 1 << 17;

/// What is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModuleKind {
    /// A file (also a deleted one, or one that lives in memory only).
    File,
    /// The kernel's code for user space, as 64-bit processes see it.
    Vdso,
    /// The legacy page of system calls.
    Vsyscall,
    /// Where the kernel steps over probed instructions.
    Uprobes,
    /// Memory without a file: JIT-compiled code.
    Anonymous,
    /// Another special mapping.
    Special,
}

/// A module's content, for whoever unwinds, symbolizes or attaches.
#[derive(Clone, Debug)]
pub enum ModuleSource {
    /// A file, open for reading; not moved by reads at offsets.
    File(Arc<File>),
    /// An image in memory.
    Memory(Arc<Vec<u8>>),
}

/// Where a module was last seen mapped: what is needed to open it again.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    pid: u32,
    address: u64,
    length: u64,
}

#[derive(Debug)]
enum Content {
    Open {
        file: Arc<File>,
        used: u64,
    },
    /// Closed to make room; can be opened again if `stamp` still agrees.
    Closed,
    Memory(Arc<Vec<u8>>),
    Unreadable(Unreadable),
}

/// Something mapped executable.
#[derive(Debug)]
pub struct Module {
    /// What it is.
    pub kind: ModuleKind,
    /// Path as the process that it was first seen in has it, without the mark of deletion; or the mapping's name.
    pub path: Arc<str>,
    /// Whether the path had gone when it was first seen.
    pub deleted: bool,
    /// GNU build ID, if it could be read.
    pub build_id: Option<Arc<[u8]>>,
    device: Device,
    inode: u64,
    generation: Option<u64>,
    /// The path's bytes, if they are not text.
    raw_path: Option<Box<[u8]>>,
    stamp: Option<Stamp>,
    /// Change time, if it is seen through an overlay mount.
    layered: Option<ChangeTime>,
    seen: Seen,
    content: Content,
}

impl Module {
    /// Process that it was last seen mapped in.
    #[must_use]
    pub fn seen_in(&self) -> u32 {
        self.seen.pid
    }

    /// Why it cannot be read, if so.
    #[must_use]
    pub fn unreadable(&self) -> Option<&Unreadable> {
        if let Content::Unreadable(reason) = &self.content { Some(reason) } else { None }
    }

    /// Device and inode, as the kernel reported them with the mapping.
    #[must_use]
    pub fn file_identity(&self) -> (Device, u64) {
        (self.device, self.inode)
    }
}

/// All modules seen. Ids stay valid.
#[derive(Debug)]
pub struct ModuleTable {
    modules: Vec<Module>,
    /// Modules by what mappings name; several if an inode number was used again.
    by_file: HashMap<(Device, u64), Vec<ModuleId>>,
    /// Those on overlay mounts, where one file has a device number in each container.
    by_real_file: HashMap<RealFile, ModuleId>,
    by_name: HashMap<Box<[u8]>, ModuleId>,
    open: usize,
    max_open: usize,
    clock: u64,
}

impl ModuleTable {
    /// A table that keeps at most `max_open` files open.
    #[must_use]
    pub fn new(max_open: usize) -> Self {
        Self {
            modules: Vec::new(),
            by_file: HashMap::new(),
            by_real_file: HashMap::new(),
            by_name: HashMap::new(),
            open: 0,
            max_open: max_open.max(1),
            clock: 0,
        }
    }

    /// The module that `map` maps; `generation_known` says whether its inode generation was reported. A file that is
    /// new is opened at once, while the process has it. `true`: seen for the first time.
    pub fn intern(&mut self, map: &MapEvent, generation_known: bool) -> (ModuleId, bool) {
        let (path, deleted) = strip_deleted(&map.path);
        let kind = kind_of(map, path);
        if kind != ModuleKind::File {
            return self.intern_special(kind, map, path);
        }
        let key = (map.device, map.inode);
        let generation = generation_known.then_some(map.inode_generation);
        if let Some(id) = self.known(key, generation).filter(|id| !self.may_be_copied_up(*id, map)) {
            self.seen_again(id, map, path);
            return (id, false);
        }
        let opened = open_mapped(map, path);
        if let Some(id) = opened.as_ref().ok().and_then(|opened| self.other_name_for(opened, map, path)) {
            self.alias(key, id);
            return (id, false);
        }
        if self.modules.len() >= MAX_MODULES {
            return self.intern_special(ModuleKind::Special, map, b"[too many files]");
        }
        let id = self.push(Module {
            kind,
            path: String::from_utf8_lossy(path).into(),
            deleted,
            build_id: None,
            device: map.device,
            inode: map.inode,
            generation,
            raw_path: std::str::from_utf8(path).is_err().then(|| path.into()),
            stamp: None,
            layered: None,
            seen: Seen { pid: map.pid, address: map.address, length: map.length },
            content: Content::Closed,
        });
        self.alias(key, id);
        self.fill(id, opened);
        (id, true)
    }

    /// A module.
    #[must_use]
    pub fn get(&self, id: ModuleId) -> Option<&Module> {
        self.modules.get(id.0 as usize)
    }

    /// All modules, with their ids.
    pub fn iter(&self) -> impl Iterator<Item = (ModuleId, &Module)> {
        (0..).map(ModuleId).zip(&self.modules)
    }

    /// A module's content. A file that was closed to make room is opened again, if it is still the same.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub fn source(&mut self, id: ModuleId) -> Result<ModuleSource, Unreadable> {
        self.clock += 1;
        let clock = self.clock;
        let module = self.modules.get_mut(id.0 as usize).ok_or(Unreadable::NoFile)?;
        match &mut module.content {
            Content::Open { file, used } => {
                *used = clock;
                return Ok(ModuleSource::File(file.clone()));
            }
            Content::Memory(bytes) => return Ok(ModuleSource::Memory(bytes.clone())),
            Content::Unreadable(reason) => return Err(reason.clone()),
            Content::Closed => {}
        }
        let opened = self.open_again(id)?;
        let file = Arc::new(opened.file);
        self.keep_open(id, file.clone());
        Ok(ModuleSource::File(file))
    }

    /// Files kept open.
    #[must_use]
    pub fn open_files(&self) -> usize {
        self.open
    }

    /// Number of modules.
    #[must_use]
    pub fn len(&self) -> usize {
        self.modules.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.modules.is_empty()
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
            deleted: false,
            build_id: image.as_deref().and_then(|image| build_id::of_bytes(image)).map(Arc::from),
            device: map.device,
            inode: map.inode,
            generation: None,
            raw_path: None,
            stamp: None,
            layered: None,
            seen: Seen::default(),
            content: image.map_or(Content::Unreadable(Unreadable::NoFile), Content::Memory),
        });
        self.by_name.insert(name.into(), id);
        (id, true)
    }

    /// The youngest module of that name whose generation does not contradict.
    fn known(&mut self, key: (Device, u64), generation: Option<u64>) -> Option<ModuleId> {
        let candidates = self.by_file.get(&key)?;
        let modules = &mut self.modules;
        candidates.iter().rev().copied().find(|id| {
            let known = &mut modules[id.0 as usize].generation;
            *known = known.or(generation);
            generation.is_none() || *known == generation
        })
    }

    /// Notes where a known module is mapped now; one that could not be opened so far gets another chance.
    fn seen_again(&mut self, id: ModuleId, map: &MapEvent, path: &[u8]) {
        let module = &mut self.modules[id.0 as usize];
        module.seen = Seen { pid: map.pid, address: map.address, length: map.length };
        let retry = matches!(module.content, Content::Unreadable(Unreadable::Gone | Unreadable::Replaced));
        if retry && let Ok(opened) = open_mapped(map, path) {
            self.fill(id, Ok(opened));
        }
    }

    /// A module that `opened` belongs to although it was mapped under another identity.
    fn other_name_for(&mut self, opened: &Opened, map: &MapEvent, path: &[u8]) -> Option<ModuleId> {
        // A JIT compiler's memory file: nothing to read, and it must not outlive its process by being kept open.
        const MEMORY: [&[u8]; 3] = [b"/memfd:", b"/dev/zero", b"/SYSV"];
        if MEMORY.iter().any(|name| path.starts_with(name)) && !build_id::is_elf(&opened.file) {
            return Some(self.intern_special(ModuleKind::Anonymous, map, path).0);
        }
        let id = *self.by_real_file.get(opened.real.as_ref()?)?;
        self.modules[id.0 as usize].layered = Some(opened.changed);
        Some(id)
    }

    /// Whether a file on an overlay may be another one now, although it kept its inode number: a write or a change of
    /// its owner moves it to the upper layer.
    fn may_be_copied_up(&self, id: ModuleId, map: &MapEvent) -> bool {
        let layered = self.modules[id.0 as usize].layered;
        layered.is_some_and(|known| change_time(map).is_some_and(|now| now != known))
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
        let module = &mut self.modules[id.0 as usize];
        let opened = match opened {
            Ok(opened) if !build_id::is_elf(&opened.file) => {
                module.content = Content::Unreadable(Unreadable::NotElf);
                return;
            }
            Ok(opened) => opened,
            Err(reason) => {
                module.content = Content::Unreadable(reason);
                return;
            }
        };
        module.build_id = build_id::of_file(&opened.file).map(Arc::from);
        module.stamp = Some(opened.stamp);
        module.generation = module.generation.or(opened.generation);
        if let Some(real) = opened.real {
            module.layered = Some(opened.changed);
            self.by_real_file.insert(real, id);
        }
        self.keep_open(id, Arc::new(opened.file));
    }

    /// Closes a file that is no longer needed; a deleted one gives its space on the disk back.
    pub fn close(&mut self, id: ModuleId) {
        if let Some(module) = self.modules.get_mut(id.0 as usize)
            && matches!(module.content, Content::Open { .. })
        {
            module.content = Content::Closed;
            self.open -= 1;
        }
    }

    fn open_again(&mut self, id: ModuleId) -> Result<Opened, Unreadable> {
        let module = &self.modules[id.0 as usize];
        let Seen { pid, address, length } = module.seen;
        let map = MapEvent { pid, address, length, device: module.device, inode: module.inode, ..MapEvent::default() };
        let opened = open_mapped(&map, module.raw_path.as_deref().unwrap_or(module.path.as_bytes()))?;
        if module.stamp.is_some_and(|stamp| stamp != opened.stamp) { Err(Unreadable::Replaced) } else { Ok(opened) }
    }

    fn keep_open(&mut self, id: ModuleId, file: Arc<File>) {
        if self.open >= self.max_open {
            self.close_oldest();
        }
        self.clock += 1;
        self.modules[id.0 as usize].content = Content::Open { file, used: self.clock };
        self.open += 1;
    }

    fn close_oldest(&mut self) {
        let age = |module: &Module| if let Content::Open { used, .. } = module.content { Some(used) } else { None };
        let oldest =
            self.modules.iter_mut().filter_map(|module| Some((age(module)?, module))).min_by_key(|(used, _)| *used);
        if let Some((_, module)) = oldest {
            module.content = Content::Closed;
            self.open -= 1;
        }
    }

    fn push(&mut self, module: Module) -> ModuleId {
        // 2^32 modules would need more memory than the machine has.
        let id = ModuleId(self.modules.len() as u32);
        self.modules.push(module);
        id
    }
}

/// Takes the kernel's mark off the path of a file that was unlinked.
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
