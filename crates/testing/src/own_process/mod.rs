//! The running process as something to unwind, for tests and benchmarks: its modules, and captures of its own stacks.
//!
//! ```
//! use heapbpf_testing::own_process::{OwnProcess, captured, unwind};
//! use heapbpf_unwind::raw::Completeness;
//!
//! let process = OwnProcess::read()?;
//! let (shallow, deep) = (unwind(&process, &captured(3)), unwind(&process, &captured(13)));
//! assert_eq!(deep.completeness, Completeness::Complete);
//! assert_eq!(deep.frames.len(), shallow.frames.len() + 10);
//! # Ok::<(), std::io::Error>(())
//! ```

use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;

mod arch;
mod capture;
mod library;
mod recursion;

use heapbpf_unwind::AddressBits;
use heapbpf_unwind::image::{Image, ModuleFiles};
use heapbpf_unwind::mapping::{Mapping, ModuleId};
use heapbpf_unwind::raw::SpaceView;
use procfs::process::{MMPermissions, MMapPath, MemoryMaps, Process};
use sampler_ebpf::abi::ProcessKey;

pub use crate::random::Random;
pub use capture::{OwnCapture, capture_here, take_capture};
pub use library::{Library, exported_name};
pub use recursion::{captured, descend, unwind};

/// The executable mappings of this process, and the files behind them.
#[derive(Clone)]
pub struct OwnProcess {
    mappings: Arc<Vec<Mapping>>,
    modules: Vec<OwnModule>,
    /// Highest mapped address.
    highest: u64,
}

#[derive(Clone)]
struct OwnModule {
    path: Arc<str>,
    image: Result<Arc<dyn Image>, String>,
    is_anonymous: bool,
}

impl OwnProcess {
    /// Reads the mappings from `/proc/self/maps` and opens the files.
    ///
    /// # Errors
    /// If `/proc` cannot be read. A file that cannot be opened is not an error here; its module then has no image.
    pub fn read() -> std::io::Result<Self> {
        let maps = own_maps().map_err(std::io::Error::other)?;
        let (mut mappings, mut modules) = (Vec::new(), Vec::new());
        let mut known: HashMap<String, ModuleId> = HashMap::new();
        let mut highest = 0;
        for map in maps {
            if map.pathname == MMapPath::Vsyscall {
                continue;
            }
            highest = highest.max(map.address.1.saturating_sub(1));
            if !map.perms.contains(MMPermissions::EXECUTE) {
                continue;
            }
            let ((start, end), path) = (map.address, name_of(&map.pathname));
            let mut add = || {
                let id = ModuleId(u32::try_from(modules.len()).unwrap_or(u32::MAX));
                modules.push(OwnModule::open(&path, &(start..end)));
                id
            };
            let module = if path.is_empty() { add() } else { *known.entry(path.clone()).or_insert_with(add) };
            mappings.push(Mapping { start, end, file_offset: map.offset, module, since_ns: 0 });
        }
        Ok(Self { mappings: Arc::new(mappings), modules, highest })
    }

    /// The executable mappings, ascending.
    pub fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    /// The mappings as an address space, in generation 0.
    pub fn space(&self) -> SpaceView<'_> {
        SpaceView {
            key: ProcessKey { tgid: std::process::id(), ..ProcessKey::default() },
            generation: Some(0),
            mappings: &*self.mappings,
        }
    }

    /// The address bits of saved return addresses, derived from the highest mapped address.
    pub fn address_bits(&self) -> AddressBits {
        AddressBits::of_user_space(self.highest, false)
    }

    /// Returns the module whose path contains `name`.
    pub fn module(&self, name: &str) -> Option<ModuleId> {
        let at = self.modules.iter().position(|module| module.path.contains(name))?;
        Some(ModuleId(u32::try_from(at).ok()?))
    }

    /// Adds an executable mapping with its own module: the file at `name`, or no file if that is a name like
    /// `[uprobes]`.
    pub fn add_mapping(&mut self, range: std::ops::Range<u64>, name: &str) {
        let module = ModuleId(u32::try_from(self.modules.len()).unwrap_or(u32::MAX));
        self.modules.push(OwnModule::open(name, &range));
        let mapping = Mapping { start: range.start, end: range.end, file_offset: 0, module, since_ns: 0 };
        let mappings = Arc::make_mut(&mut self.mappings);
        mappings.push(mapping);
        mappings.sort_by_key(|mapping| mapping.start);
    }

    /// Replaces the bytes of a module.
    pub fn replace_image(&mut self, module: ModuleId, image: Arc<dyn Image>) {
        if let Some(module) = self.modules.get_mut(module.0 as usize) {
            module.image = Ok(image);
        }
    }
}

fn own_maps() -> procfs::ProcResult<MemoryMaps> {
    Process::myself()?.maps()
}

/// Returns the name that the kernel gives a mapping. Empty if it is anonymous.
fn name_of(path: &MMapPath) -> String {
    match path {
        MMapPath::Path(path) => path.to_string_lossy().into_owned(),
        MMapPath::Anonymous => String::new(),
        MMapPath::Vdso => "[vdso]".into(),
        MMapPath::Heap => "[heap]".into(),
        MMapPath::Other(name) => format!("[{name}]"),
        other => format!("[{other:?}]"),
    }
}

impl OwnModule {
    fn open(path: &str, range: &std::ops::Range<u64>) -> Self {
        let image: Result<Arc<dyn Image>, String> = if path == "[vdso]" {
            Ok(Arc::new(own_memory(range)))
        } else if path.starts_with('/') {
            File::open(path).map(|file| Arc::new(file) as _).map_err(|error| error.to_string())
        } else {
            Err("no file".into())
        };
        Self { path: path.into(), image, is_anonymous: path.is_empty() }
    }
}

/// Copies the process's own memory at `range`, which must be mapped readable.
fn own_memory(range: &std::ops::Range<u64>) -> Vec<u8> {
    let length = (range.end - range.start) as usize;
    let mut copy = vec![0; length];
    // SAFETY: only called for the vDSO, which the kernel has just listed as a readable mapping of this process, and
    // which is never unmapped. `copy` is new and has this length.
    unsafe { std::ptr::copy_nonoverlapping(range.start as *const u8, copy.as_mut_ptr(), length) };
    copy
}

impl ModuleFiles for OwnProcess {
    fn image(&mut self, module: ModuleId) -> Result<Arc<dyn Image>, String> {
        self.modules.get(module.0 as usize).map_or_else(|| Err("no such module".into()), |module| module.image.clone())
    }

    fn path(&self, module: ModuleId) -> Arc<str> {
        self.modules.get(module.0 as usize).map_or_else(|| "?".into(), |module| module.path.clone())
    }

    fn build_id(&self, module: ModuleId) -> Option<Vec<u8>> {
        let image = self.modules.get(module.0 as usize)?.image.as_ref().ok()?;
        heapbpf_elf::build_id::of(&**image)
    }

    fn is_anonymous(&self, module: ModuleId) -> bool {
        self.modules.get(module.0 as usize).is_some_and(|module| module.is_anonymous)
    }
}
