//! A Go program: its version, its function table, and where its runtime stores the heap profile.

use heapbpf_elf::{Elf, ElfFile, Image, Pieces, Section, Segment, Symbol, read_range};
use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};
use object::elf::EM_X86_64;

use crate::functions::Functions;
use crate::version::{Layout, Unsupported, Version};

/// Largest build information that is read, bytes.
const MOST_BUILD_INFO_BYTES: u64 = 1 << 10;
/// Largest function that is disassembled, bytes.
const MOST_CODE_BYTES: u64 = 64 << 10;
/// Sections that may contain the runtime's description of the program.
const DATA_SECTIONS: [&str; 3] = [".go.module", ".noptrdata", ".data"];

/// A Go program.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its version of Go.
    pub version: Version,
    /// The memory layout of this version.
    pub layout: Layout,
    /// Its functions.
    pub functions: Functions,
    /// Addresses of variables as stated in the file.
    pub(crate) variables: Variables,
    segments: Vec<Segment>,
}

/// Addresses of the runtime's variables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Variables {
    /// `mbuckets`: the first bucket.
    pub buckets: u64,
    /// `mProfCycle`: the number of the profile's cycle.
    pub cycle: u64,
    /// `MemProfileRate`: the sampling rate.
    pub rate: u64,
    /// `disableMemoryProfiling`, if known.
    pub disabled: Option<u64>,
    /// Ranges of memory, one of which contains the program's `moduledata`: (address, bytes).
    pub module: Vec<(u64, u64)>,
}

impl Program {
    /// Finds the Go program in a file; `None` if it is not a Go program.
    ///
    /// # Errors
    /// [`Unsupported`] if it is one, but its heap profile cannot be read.
    pub fn find(image: &dyn Image) -> Result<Option<Self>, Unsupported> {
        let Ok(elf) = Elf::read(image) else { return Ok(None) };
        let table = [".gopclntab", ".data.rel.ro.gopclntab"].iter().find_map(|name| elf.section(name));
        let (Some(table), Some(info)) = (table, elf.section(".go.buildinfo")) else { return Ok(None) };
        let bytes = info.bytes.min(MOST_BUILD_INFO_BYTES);
        let info = read_range(image, "build information", info.offset, bytes, bytes).unwrap_or_default();
        let version = Version::of_build_info(&info).ok_or(Unsupported::NoVersion)?;
        let layout = Layout::of(version).ok_or(Unsupported::Version(version))?;
        let functions = Functions::parse(image, &elf, table, layout).ok_or(Unsupported::NoFunctions)?;
        let variables = by_symbols(image)
            .or_else(|| by_code(image, &elf, &functions))
            .map(
                |found| {
                    if found.module.is_empty() { Variables { module: module_ranges(&elf), ..found } } else { found }
                },
            )
            .ok_or(Unsupported::NoVariables)?;
        let segments = elf.segments.iter().filter(|segment| segment.is_executable()).copied().collect();
        Ok(Some(Self { version, layout, functions, variables, segments }))
    }

    /// Returns the difference between addresses in a process and those that the file states, if the process has
    /// `file_offset` of the file mapped at `start` as executable.
    #[must_use]
    pub fn bias(&self, start: u64, file_offset: u64) -> Option<u64> {
        self.segments.iter().find_map(|segment| segment.bias(start, file_offset, 0x1000))
    }
}

fn by_symbols(image: &dyn Image) -> Option<Variables> {
    let pieces = Pieces::of(image);
    let file = ElfFile::parse(&pieces).ok()?;
    let [mut buckets, mut cycle, mut rate, mut disabled] = [None; 4];
    let mut module = Vec::new();
    file.each_symbol([".symtab", ".strtab"], |name, Symbol { address, .. }| match name {
        b"runtime.mbuckets" => buckets = Some(address),
        b"runtime.mProfCycle" => cycle = Some(address),
        b"runtime.MemProfileRate" => rate = Some(address),
        b"runtime.disableMemoryProfiling" => disabled = Some(address),
        b"runtime.firstmoduledata" => module.push((address, 8)),
        _ => {}
    });
    Some(Variables { buckets: buckets?, cycle: cycle?, rate: rate?, disabled, module })
}

/// Finds the variables through the code of three functions, for programs without symbols: each function reads one of
/// them before any other variable of its size. The results are checked when they are used.
fn by_code(image: &dyn Image, elf: &Elf, functions: &Functions) -> Option<Variables> {
    if elf.machine != EM_X86_64.0 {
        return None;
    }
    // C code may precede the Go code. The table states where the Go code begins, but not in position-independent
    // programs.
    let text = functions.text.map_or_else(|| elf.section(".text").map(|section| section.address), Some)?;
    let names = ["runtime.mProf_FlushLocked", "runtime.mProf_Flush", "runtime.allocmcache"];
    let found = functions.named(image, names);
    let load = |which: usize, bytes: usize| {
        let (start, end) = found[which]?;
        let address = text.checked_add(u64::from(start))?;
        let at = elf.offset_of_address(address)?;
        let code = read_range(image, "a function", at, u64::from(end.checked_sub(start)?), MOST_CODE_BYTES).ok()?;
        first_load(&code, address, bytes)
    };
    Some(Variables { buckets: load(0, 8)?, cycle: load(1, 4)?, rate: load(2, 8)?, disabled: None, module: Vec::new() })
}

/// Returns ranges that may contain the runtime's description of the program.
fn module_ranges(elf: &Elf) -> Vec<(u64, u64)> {
    let range = |section: &Section| (section.address, section.bytes);
    DATA_SECTIONS.iter().filter_map(|name| elf.section(name)).map(range).collect()
}

/// Returns the address of the first variable of `bytes` bytes that a function loads into a register. `code`: the
/// function's code, which begins at `address`.
pub(crate) fn first_load(code: &[u8], address: u64, bytes: usize) -> Option<u64> {
    let decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    decoder.into_iter().take_while(|instruction| !instruction.is_invalid()).find_map(|it| load(&it, bytes))
}

fn load(instruction: &Instruction, bytes: usize) -> Option<u64> {
    let is_load = instruction.mnemonic() == Mnemonic::Mov
        && instruction.op0_kind() == OpKind::Register
        && instruction.op1_kind() == OpKind::Memory
        && instruction.memory_base() == Register::RIP
        && instruction.memory_index() == Register::None
        // Thread-local variables do not count.
        && instruction.segment_prefix() == Register::None;
    (is_load && instruction.op0_register().size() == bytes).then(|| instruction.memory_displacement64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_load_of_a_size_is_found() {
        // mov rcx, fs:[-8]; mov eax, [rip + 0x10]; lea rdx, [rip + 0x20]; mov rcx, [rip + 0x30]; ret
        let code = [
            &[0x64, 0x48, 0x8b, 0x0c, 0x25, 0xf8, 0xff, 0xff, 0xff][..],
            &[0x8b, 0x05, 0x10, 0, 0, 0],
            &[0x48, 0x8d, 0x15, 0x20, 0, 0, 0],
            &[0x48, 0x8b, 0x0d, 0x30, 0, 0, 0, 0xc3],
        ]
        .concat();
        assert_eq!(first_load(&code, 0x1000, 4), Some(0x1000 + 15 + 0x10));
        assert_eq!(first_load(&code, 0x1000, 8), Some(0x1000 + 29 + 0x30));
        assert_eq!(first_load(&code[..20], 0x1000, 8), None);
        assert_eq!(first_load(&[], 0, 8), None);
    }
}
