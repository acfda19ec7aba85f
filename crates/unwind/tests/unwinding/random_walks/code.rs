//! Real programs and libraries as modules of a made-up process, for our unwinder and for framehop's.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use gimli::{BaseAddresses, CieOrFde, EhFrame, EndianSlice, LittleEndian, UnwindSection as _};
use heapbpf_elf::Elf;
use heapbpf_testing::own_process::Random;
use heapbpf_unwind::image::{Image, ModuleFiles};
use heapbpf_unwind::mapping::{Mapping, ModuleId};

/// Distance between modules: framehop uses 32-bit addresses within a module.
const APART: u64 = 1 << 32;
const FIRST: u64 = 0x7e00_0000_0000;
/// Maximum number of functions per module.
const MAX_FUNCTIONS: usize = 40_000;

/// framehop's unwinder.
pub type Theirs = framehop::UnwinderNative<Vec<u8>, framehop::MayAllocateDuringUnwind>;

type Bytes<'a> = EndianSlice<'a, LittleEndian>;

/// A function, as described by its call frame information entry.
#[derive(Clone, Debug)]
pub struct Function {
    /// Addresses as the file states them.
    pub code: Range<u64>,
    /// Offset of the entry in `.eh_frame`.
    entry: usize,
}

/// A file that is mapped at `bias` plus its stated addresses.
pub struct Module {
    pub path: Arc<str>,
    image: Arc<Vec<u8>>,
    elf: Elf,
    pub bias: u64,
    pub eh_frame: Vec<u8>,
    pub bases: BaseAddresses,
    /// Ascending.
    pub functions: Vec<Function>,
}

impl Module {
    fn read(path: &Path, index: usize) -> Option<Self> {
        let image = Arc::new(fs::read(path).ok()?);
        let elf = Elf::read(&*image).ok()?;
        let address = |name: &str| elf.section(name).map_or(0, |section| section.address);
        let bases = BaseAddresses::default()
            .set_eh_frame(address(".eh_frame"))
            .set_eh_frame_hdr(address(".eh_frame_hdr"))
            .set_text(address(".text"))
            .set_got(address(".got"));
        let eh_frame = elf.section(".eh_frame")?.read(&*image, 1 << 30).ok()?;
        let bias = FIRST + index as u64 * APART;
        let path = path.to_string_lossy().as_ref().into();
        let mut module = Self { path, image, elf, bias, eh_frame, bases, functions: Vec::new() };
        module.functions = module.read_functions();
        (!module.functions.is_empty()).then_some(module)
    }

    fn section(&self) -> EhFrame<Bytes<'_>> {
        EhFrame::new(&self.eh_frame, LittleEndian)
    }

    fn read_functions(&self) -> Vec<Function> {
        let section = self.section();
        let mut entries = section.entries(&self.bases);
        let mut functions = Vec::new();
        while let Ok(Some(entry)) = entries.next() {
            let CieOrFde::Fde(partial) = entry else { continue };
            let Ok(entry) = partial.parse(EhFrame::cie_from_offset) else { continue };
            let code = entry.initial_address()..entry.initial_address().saturating_add(entry.len());
            // Linkers leave entries of removed functions behind.
            if self.elf.segments.iter().any(|segment| segment.is_executable() && segment.holds(code.start)) {
                functions.push(Function { code, entry: entry.offset() });
            }
        }
        functions.sort_by_key(|function| function.code.start);
        let every = functions.len().div_ceil(MAX_FUNCTIONS);
        functions.into_iter().step_by(every.max(1)).collect()
    }

    /// Returns an address in a function, often at its beginning or its end, where rows are short.
    pub fn any_code(&self, random: &mut Random) -> u64 {
        let code = &self.functions[random.below(self.functions.len())].code;
        let bytes = (code.end - code.start) as usize;
        let at = match random.below(3) {
            0 => random.below(bytes.min(24)),
            1 => bytes - 1 - random.below(bytes.min(16)),
            _ => random.below(bytes),
        };
        self.bias + code.start + at as u64
    }

    /// Passes the row for `address` to `look`, and whether it is a signal frame's. `None` if there is no row.
    pub fn with_row<T>(&self, address: u64, look: impl FnOnce(&gimli::UnwindTableRow<usize>, bool) -> T) -> Option<T> {
        let stated = address - self.bias;
        let at = self.functions.partition_point(|function| function.code.start <= stated).checked_sub(1)?;
        let section = self.section();
        let entry = section.fde_from_offset(&self.bases, self.functions[at].entry.into(), EhFrame::cie_from_offset);
        let entry = entry.ok().filter(|entry| entry.contains(stated))?;
        let mut context = gimli::UnwindContext::new();
        let row = entry.unwind_info_for_address(&section, &self.bases, &mut context, stated).ok()?;
        Some(look(row, entry.is_signal_trampoline()))
    }
}

/// The modules.
pub struct Modules(pub Vec<Module>);

impl Modules {
    /// Reads those of `paths` that exist.
    pub fn read<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Self {
        let mut modules = Vec::new();
        for path in paths {
            modules.extend(Module::read(path, modules.len()));
        }
        Self(modules)
    }

    pub fn mappings(&self) -> Vec<Mapping> {
        let of = |(index, module): (usize, &Module)| {
            let (bias, id) = (module.bias, ModuleId(index as u32));
            let segments = module.elf.segments.iter().filter(|segment| segment.is_executable());
            segments
                .map(|segment| Mapping {
                    start: bias + segment.address,
                    end: bias + segment.address + segment.file_bytes,
                    file_offset: segment.offset,
                    module: id,
                    since_ns: 0,
                })
                .collect::<Vec<_>>()
        };
        let mut mappings: Vec<Mapping> = self.0.iter().enumerate().flat_map(of).collect();
        mappings.sort_by_key(|mapping| mapping.start);
        mappings
    }

    /// Returns framehop's unwinder with the same modules.
    pub fn framehop(&self) -> Theirs {
        use framehop::{ExplicitModuleSectionInfo, Unwinder as _};

        let mut unwinder = framehop::UnwinderNative::new();
        for mapping in self.mappings() {
            let Module { path, image, elf, bias, .. } = &self.0[mapping.module.0 as usize];
            let range = |name: &str| elf.section(name).map(|section| section.address..section.address + section.bytes);
            let bytes = |name: &str| elf.section(name).and_then(|section| section.read(&**image, 1 << 30).ok());
            let sections = ExplicitModuleSectionInfo {
                text_svma: range(".text"),
                got_svma: range(".got"),
                eh_frame_svma: range(".eh_frame"),
                eh_frame: bytes(".eh_frame"),
                eh_frame_hdr_svma: range(".eh_frame_hdr"),
                eh_frame_hdr: bytes(".eh_frame_hdr"),
                ..Default::default()
            };
            unwinder.add_module(framehop::Module::new(path.to_string(), mapping.start..mapping.end, *bias, sections));
        }
        unwinder
    }

    /// Returns the module whose address range contains `address`, if any.
    pub fn at(&self, address: u64) -> Option<&Module> {
        self.0.get(usize::try_from(address.checked_sub(FIRST)? / APART).ok()?)
    }

    pub fn any_code(&self, random: &mut Random) -> u64 {
        self.0[random.below(self.0.len())].any_code(random)
    }
}

impl ModuleFiles for Modules {
    fn image(&mut self, module: ModuleId) -> Result<Arc<dyn Image>, String> {
        Ok(self.0[module.0 as usize].image.clone())
    }

    fn path(&self, module: ModuleId) -> Arc<str> {
        self.0[module.0 as usize].path.clone()
    }

    fn build_id(&self, _: ModuleId) -> Option<Vec<u8>> {
        None
    }

    fn is_anonymous(&self, _: ModuleId) -> bool {
        false
    }
}
