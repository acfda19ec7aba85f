//! This very process as a source of modules and captured stacks, for tests and benchmarks: real code, nobody else's
//! memory, no privileges.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;

use super::image::{Image, ModuleFiles};
use super::raw::SpaceView;
use crate::host::mappings::{Mapping, ModuleId};
use sampler_ebpf::abi::{ProcessKey, Registers};

/// Executable mappings of this process and the files behind them.
#[derive(Clone)]
pub struct OwnProcess {
    mappings: Arc<Vec<Mapping>>,
    modules: Vec<OwnModule>,
}

#[derive(Clone)]
struct OwnModule {
    path: Arc<str>,
    image: Result<Arc<dyn Image>, String>,
    is_anonymous: bool,
}

impl OwnProcess {
    /// Reads `/proc/self/maps` and opens the files.
    ///
    /// # Errors
    /// If `/proc` is not there.
    pub fn read() -> std::io::Result<Self> {
        let maps = std::fs::read_to_string("/proc/self/maps")?;
        let (mut mappings, mut modules) = (Vec::new(), Vec::new());
        let mut known: HashMap<String, ModuleId> = HashMap::new();
        for line in maps.lines() {
            let Some((range, permissions, offset, path)) = parse_line(line) else { continue };
            if !permissions.contains('x') || path == "[vsyscall]" {
                continue;
            }
            let mut add = || {
                let id = ModuleId(u32::try_from(modules.len()).unwrap_or(u32::MAX));
                modules.push(OwnModule::open(path, &range));
                id
            };
            let module = if path.is_empty() { add() } else { *known.entry(path.to_owned()).or_insert_with(add) };
            mappings.push(Mapping { start: range.start, end: range.end, file_offset: offset, module, since_ns: 0 });
        }
        Ok(Self { mappings: Arc::new(mappings), modules })
    }

    /// Its executable mappings.
    pub fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    /// The mappings as an address space.
    pub fn space(&self) -> SpaceView<'_> {
        SpaceView {
            key: ProcessKey { tgid: std::process::id(), ..ProcessKey::default() },
            generation: Some(0),
            mappings: &*self.mappings,
        }
    }

    /// The module whose path contains `name`.
    pub fn module(&self, name: &str) -> Option<ModuleId> {
        let at = self.modules.iter().position(|module| module.path.contains(name))?;
        Some(ModuleId(u32::try_from(at).ok()?))
    }

    /// Adds a special mapping.
    pub fn add_mapping(&mut self, range: std::ops::Range<u64>, name: &str) {
        let module = ModuleId(u32::try_from(self.modules.len()).unwrap_or(u32::MAX));
        self.modules.push(OwnModule::open(name, &range));
        let mapping = Mapping { start: range.start, end: range.end, file_offset: 0, module, since_ns: 0 };
        let mappings = Arc::make_mut(&mut self.mappings);
        mappings.push(mapping);
        mappings.sort_by_key(|mapping| mapping.start);
    }

    /// Puts other bytes in the place of a module's.
    pub fn replace_image(&mut self, module: ModuleId, image: Arc<dyn Image>) {
        if let Some(module) = self.modules.get_mut(module.0 as usize) {
            module.image = Ok(image);
        }
    }
}

fn parse_line(line: &str) -> Option<(std::ops::Range<u64>, &str, u64, &str)> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let (permissions, offset) = (fields.next()?, fields.next()?);
    let path = fields.nth(2).unwrap_or_default().trim_start();
    let hex = |text| u64::from_str_radix(text, 16).ok();
    Some((hex(start)?..hex(end)?, permissions, hex(offset)?, path))
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

/// A copy of own memory that is mapped readable.
fn own_memory(range: &std::ops::Range<u64>) -> Vec<u8> {
    let length = (range.end - range.start) as usize;
    let mut copy = vec![0; length];
    // SAFETY: the kernel has just listed the range as a readable mapping of this process; the vDSO stays for ever.
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
        super::elf::Elf::read(&**image).ok()?.build_id(&**image)
    }

    fn is_anonymous(&self, module: ModuleId) -> bool {
        self.modules.get(module.0 as usize).is_some_and(|module| module.is_anonymous)
    }
}

/// A capture as the kernel side takes it: registers just after the return from the call, and the stack above.
#[derive(Clone, Debug, Default)]
pub struct OwnCapture {
    /// Registers.
    pub registers: Registers,
    /// Stack from `registers.sp` up.
    pub stack: Vec<u8>,
}

thread_local! {
    static CAPTURE: RefCell<Option<OwnCapture>> = const { RefCell::new(None) };
}

/// Most bytes of stack that [`capture_here`] copies.
const MAX_CAPTURE_BYTES: usize = 1 << 20;

unsafe extern "C" {
    /// Captures the caller's stack as if the call were one of an allocator; [`take_capture`] hands it out.
    #[link_name = "heapbpf_capture_here"]
    pub safe fn capture_here();
}

/// The last capture of this thread.
pub fn take_capture() -> Option<OwnCapture> {
    CAPTURE.take()
}

/// What the machine's `heapbpf_capture_here` calls with the registers of its own caller.
pub extern "C" fn keep_capture(ip: u64, sp: u64, fp: u64) {
    let registers = Registers { ip, sp, fp, lr: 0 };
    let Some(top) = stack_top(sp) else { return };
    let length = ((top - sp) as usize).min(MAX_CAPTURE_BYTES);
    let mut stack = vec![0; length];
    // SAFETY: the kernel lists the memory from `sp` to `top` as one readable mapping, the stack we are on.
    unsafe { std::ptr::copy_nonoverlapping(sp as *const u8, stack.as_mut_ptr(), length) };
    CAPTURE.replace(Some(OwnCapture { registers, stack }));
}

/// End of the mapping that holds `address`.
fn stack_top(address: u64) -> Option<u64> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let range = maps.lines().filter_map(parse_line).map(|(range, ..)| range).find(|range| range.contains(&address))?;
    Some(range.end)
}
