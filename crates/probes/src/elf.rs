//! The parts of an ELF file that planning needs: symbols, code, function bounds, identity; all bounded and checked.
//!
//! A target may truncate or rewrite its files at any time, so they are read, never mapped.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;

use heapbpf_audit::FileKind;
pub use heapbpf_elf::Symbol;
use heapbpf_elf::{Dynamic, Elf, ElfFile, Image, Pieces, Segment, Symbols, build_id, read_range};
use object::elf;
use object::read::ReadRef;

use crate::allocators::LOADERS;
use crate::error::AttachError;
use crate::object_table::{MARKER, NoObjectTable, ObjectTable};
use crate::placement::Machine;
use crate::runtimes::Runtime;

/// Most code that is scanned as a whole and kept in memory, bytes. In a larger file, only functions with the names of
/// allocation functions are read, and what these lead to.
pub(crate) const CODE_MAX_BYTES: u64 = 64 << 20;
/// Most code that is read, bytes. No program has that much, but a hostile file may claim to.
const CODE_READ_MAX_BYTES: u64 = 512 << 20;
/// Most bytes that are read of code that is not kept, counting each time. Its functions may be read several times.
const CODE_READS_MAX_BYTES: u64 = 1 << 30;
/// Largest section of read-only data that is searched for version strings, bytes.
const READ_ONLY_MAX_BYTES: u64 = 8 << 20;
/// Most words that the loader fills with an interpreter's own addresses. CPython 3.13 has 60,000.
const OWN_ADDRESSES_MAX: usize = 1 << 20;
/// Most bytes of import names.
const IMPORT_NAMES_MAX_BYTES: usize = 64 << 20;

/// A piece of code.
#[derive(Clone, Debug)]
pub struct Code {
    /// Virtual address of the first byte.
    pub address: u64,
    /// The instructions.
    pub bytes: Vec<u8>,
}

/// An executable section.
#[derive(Clone, Debug)]
pub struct CodeSection {
    /// Virtual address of the first byte.
    pub address: u64,
    offset: u64,
    length: u64,
    /// The instructions; `None` if there is too much code to keep. They are then read when they are needed.
    pub bytes: Option<Vec<u8>>,
}

impl CodeSection {
    fn holds(&self, address: u64) -> bool {
        address.checked_sub(self.address).is_some_and(|past| past < self.length)
    }

    /// Its addresses.
    pub const fn addresses(&self) -> std::ops::Range<u64> {
        self.address..self.address.saturating_add(self.length)
    }
}

/// The file that is read.
#[derive(Clone, Copy)]
struct Source<'f>(&'f dyn Image);

impl fmt::Debug for Source<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a file")
    }
}

/// The parts of an ELF file that planning needs.
#[derive(Clone, Debug)]
pub struct FileImage<'f> {
    /// Where the file was found, for custom allocators that name it; empty if unknown.
    pub path: String,
    /// Instruction set.
    pub machine: Machine,
    /// Library or executable.
    pub kind: FileKind,
    /// GNU build ID; empty if the file has none.
    pub build_id: Vec<u8>,
    /// `DT_SONAME`.
    pub soname: Option<String>,
    /// The dynamic loader that an executable asks for; musl's is also its C library.
    pub interpreter: Option<String>,
    /// `DT_NEEDED`.
    pub needed: Vec<String>,
    /// Names of version definitions (`GLIBC_2.36`), in file order.
    pub versions: Vec<String>,
    /// Whether there is little enough code to be scanned as a whole.
    pub code_is_whole: bool,
    /// Start and end of the functions in the unwind tables, sorted.
    pub bounds: Vec<(u64, u64)>,
    /// Parts of the file that could not be read, for the audit.
    pub damaged: Vec<&'static str>,
    /// The file's executable sections, by address.
    pub code: Vec<CodeSection>,
    source: Source<'f>,
    /// How much more may be read of code that is not kept, bytes.
    left_bytes: Cell<u64>,
    symbols: Symbols,
    read_only: Vec<Vec<u8>>,
    segments: Vec<Segment>,
    imports: HashMap<u64, String>,
    /// The language runtime that a section shows.
    pub(crate) runtime_by_section: Option<Runtime>,
    /// For a Python interpreter: words of its data that the loader fills with the file's own addresses, and these.
    own_addresses: HashMap<u64, u64>,
    /// For a Python interpreter, once it was searched for: its object allocator, or why it is not known.
    pub(crate) objects: Option<Result<ObjectTable, NoObjectTable>>,
}

impl<'f> FileImage<'f> {
    /// Reads the file that was found at `path`. Its code, which is most of the file, is only read if `wanted` accepts
    /// what the tables say.
    ///
    /// # Errors
    /// [`AttachError`] if it is not a 64-bit little-endian ELF file for a known machine. Damaged parts are not an
    /// error: they are listed in [`damaged`](Self::damaged).
    pub fn read_if(file: &'f dyn Image, path: &str, wanted: impl Fn(&Self) -> bool) -> Result<Self, AttachError> {
        let pieces = Pieces::of(file);
        let tables = ElfFile::parse(&pieces)?;
        let mut image = Self::of_tables(file, path, &tables)?;
        if wanted(&image) {
            image.build_id = build_id::of(file).unwrap_or_default();
            image.read_sections(&tables);
            let headers = tables.headers;
            // The code is most of the file. Other parts that were read are dropped first, so that it is in memory only
            // once.
            drop(pieces);
            image.read_code(&headers);
        }
        Ok(image)
    }

    fn of_tables<'a, R: ReadRef<'a>>(
        bytes: &'f dyn Image,
        path: &str,
        file: &ElfFile<'a, R>,
    ) -> Result<Self, AttachError> {
        let headers = &file.headers;
        let machine = match elf::Machine(headers.machine) {
            elf::EM_X86_64 => Machine::X86_64,
            elf::EM_AARCH64 => Machine::Aarch64,
            other => return Err(AttachError::UnknownMachine(other.0)),
        };
        let mut damaged = Vec::new();
        if headers.sections_are_damaged {
            damaged.push("section headers");
        }
        let dynamic = file.dynamic().unwrap_or_else(|_| {
            damaged.push("dynamic strings");
            Dynamic::default()
        });
        let mut image = Self {
            path: path.to_owned(),
            machine,
            kind: FileKind::Library,
            build_id: Vec::new(),
            soname: dynamic.soname,
            interpreter: file.interpreter().map(str::to_owned),
            needed: dynamic.needed,
            versions: Vec::new(),
            code_is_whole: true,
            bounds: Vec::new(),
            damaged,
            code: Vec::new(),
            source: Source(bytes),
            left_bytes: Cell::new(CODE_READS_MAX_BYTES),
            symbols: Symbols::default(),
            read_only: Vec::new(),
            segments: segments_in(bytes, headers),
            imports: HashMap::new(),
            runtime_by_section: headers.sections.iter().find_map(|section| Runtime::of_section(&section.name)),
            own_addresses: HashMap::new(),
            objects: None,
        };
        image.read_symbols(bytes, file);
        image.kind = image.kind_by(headers.entry);
        Ok(image)
    }

    fn kind_by(&self, entry: u64) -> FileKind {
        // glibc can be executed and names an interpreter, but a file with a soname is a library.
        if self.soname.is_some() {
            return FileKind::Library;
        }
        // musl has neither a name nor dependencies, but exports functions.
        let starts_alone = || entry != 0 && self.needed.is_empty() && !self.functions().any(|(_, s)| s.exported);
        match self.interpreter {
            Some(_) => FileKind::Executable,
            None if starts_alone() => FileKind::StaticExecutable,
            None => FileKind::Library,
        }
    }

    fn read_symbols<'a, R: ReadRef<'a>>(&mut self, bytes: &dyn Image, file: &ElfFile<'a, R>) {
        if !self.symbols.add_dynamic(bytes, file) {
            self.damaged.push("dynamic symbol table");
        }
        if !self.symbols.add_full(bytes, file) {
            self.damaged.push("symbol table");
        }
        if let Some(section) = file.headers.section(".gnu_debugdata")
            && !file.section_bytes(section).is_ok_and(|packed| self.symbols.add_packed(packed))
        {
            self.damaged.push("mini debug information (.gnu_debugdata)");
        }
    }

    fn read_code(&mut self, headers: &Elf) {
        let Source(file) = self.source;
        let file_bytes = file.length_bytes().unwrap_or_default();
        let sections = || headers.sections.iter().filter(|section| section.is_code());
        self.code_is_whole = sections().fold(0, |sum: u64, it| sum.saturating_add(it.bytes)) <= CODE_MAX_BYTES;
        let mut code_bytes = 0_u64;
        for section in sections() {
            code_bytes = code_bytes.saturating_add(section.bytes);
            let (address, offset, length) = (section.address, section.offset, section.bytes);
            // The kernel maps segments. If a section disagrees with them, its bytes are not those that run.
            let is_mapped_so = length == 0 || headers.offset_of_address(address) == Some(offset);
            let is_there = is_mapped_so && offset.checked_add(length).is_some_and(|end| end <= file_bytes);
            let bytes = (is_there && self.code_is_whole).then(|| read_range(file, "code", offset, length, length).ok());
            if is_there && code_bytes <= CODE_READ_MAX_BYTES && bytes != Some(None) {
                self.code.push(CodeSection { address, offset, length, bytes: bytes.flatten() });
            } else {
                self.damaged.push("code");
            }
        }
        self.code.sort_by_key(|code| code.address);
    }

    /// All code, in memory.
    pub(crate) fn into_code(self) -> Vec<Code> {
        let Source(file) = self.source;
        let read = |it: CodeSection| {
            let read = || read_range(file, "code", it.offset, it.length, it.length).ok();
            Some(Code { address: it.address, bytes: it.bytes.or_else(read)? })
        };
        self.code.into_iter().filter_map(read).collect()
    }

    fn read_sections<'a, R: ReadRef<'a>>(&mut self, file: &ElfFile<'a, R>) {
        for section in file.headers.sections.iter().filter(|section| !section.is_code()) {
            match &*section.name {
                ".eh_frame" => match file.section_bytes(section) {
                    Ok(bytes) => self.bounds = function_bounds(section.address, bytes),
                    Err(_) => self.damaged.push("unwind tables"),
                },
                ".rodata" if section.bytes <= READ_ONLY_MAX_BYTES => {
                    self.read_only.extend(file.section_bytes(section).ok().map(<[u8]>::to_vec));
                }
                _ => {}
            }
        }
        self.versions = file.versions();
        self.read_imports(file);
    }

    /// Reads the slots of the global offset table that the loader fills with the address of a function: one in another
    /// file, or one that a resolver of this file chooses.
    fn read_imports<'a, R: ReadRef<'a>>(&mut self, file: &ElfFile<'a, R>) {
        let names = file.dynamic_names();
        let mut chosen: HashMap<u64, &str> = HashMap::new();
        for (name, symbol) in self.symbols.iter().filter(|(_, symbol)| symbol.indirect) {
            chosen.entry(symbol.address).or_insert(name);
        }
        let (by_name, by_resolver) = match self.machine {
            Machine::X86_64 => ([elf::R_X86_64_JUMP_SLOT, elf::R_X86_64_GLOB_DAT], elf::R_X86_64_IRELATIVE),
            Machine::Aarch64 => ([elf::R_AARCH64_JUMP_SLOT, elf::R_AARCH64_GLOB_DAT], elf::R_AARCH64_IRELATIVE),
        };
        let mut left_bytes = IMPORT_NAMES_MAX_BYTES;
        let has_objects = self.has_objects();
        for relocation in file.relocations() {
            let kind = elf::RelocationType(relocation.kind);
            if has_objects && self.own_addresses.len() < OWN_ADDRESSES_MAX {
                let own = match kind {
                    elf::R_X86_64_RELATIVE => Some(relocation.addend),
                    elf::R_X86_64_GLOB_DAT => relocation.symbol.and_then(|symbol| names.address(symbol)),
                    _ => None,
                };
                self.own_addresses.extend(own.map(|own| (relocation.address, own)));
            }
            let name = match relocation.symbol {
                _ if kind == by_resolver => chosen.get(&relocation.addend).copied(),
                Some(symbol) if by_name.contains(&kind) => names.get(symbol),
                _ => None,
            };
            let Some(name) = name else { continue };
            let Some(left) = left_bytes.checked_sub(name.len()) else {
                self.damaged.push("relocations");
                break;
            };
            left_bytes = left;
            self.imports.insert(relocation.address, name.to_owned());
        }
    }

    /// Whether it is a dynamic loader.
    pub(crate) fn is_loader(&self) -> bool {
        self.soname.as_deref().is_some_and(|name| LOADERS.iter().any(|loader| name.starts_with(loader)))
    }

    /// The name of a symbol; empty if it is damaged.
    #[must_use]
    pub fn name(&self, symbol: &Symbol) -> &str {
        self.symbols.name(symbol)
    }

    /// Every function that the file defines, with its name.
    pub fn functions(&self) -> impl Iterator<Item = (&str, &Symbol)> {
        self.symbols.iter()
    }

    /// The file offset of a virtual address; `None` if the file has no bytes for it.
    #[must_use]
    pub fn file_offset(&self, address: u64) -> Option<u64> {
        self.segments.iter().find_map(|segment| segment.offset_of_address(address))
    }

    /// The virtual address of code at a file offset; `None` if no segment has it.
    #[must_use]
    pub fn address(&self, offset: u64) -> Option<u64> {
        self.segments.iter().filter(|s| s.is_executable()).find_map(|s| {
            let past = offset.checked_sub(s.offset).filter(|past| *past < s.file_bytes)?;
            s.address.checked_add(past)
        })
    }

    /// Whether `address` is in a segment that is mapped executable.
    #[must_use]
    pub fn is_executable(&self, address: u64) -> bool {
        self.segments.iter().any(|segment| segment.is_executable() && segment.holds(address))
    }

    /// Whether there is code at `address`.
    #[must_use]
    pub fn has_code(&self, address: u64) -> bool {
        self.code.iter().any(|code| code.holds(address))
    }

    /// The code in `start..end`, up to the end of its section; empty if there is none, or if it cannot be read.
    #[must_use]
    pub fn code_between(&self, start: u64, end: u64) -> Cow<'_, [u8]> {
        let Some(code) = self.code.iter().find(|code| code.holds(start)) else { return Cow::default() };
        let from = start - code.address;
        let to = end.saturating_sub(code.address).min(code.length);
        if let Some(bytes) = &code.bytes {
            return bytes.get(from as usize..to as usize).unwrap_or_default().into();
        }
        let (length, limit) = (to.saturating_sub(from), self.left_bytes.get().min(CODE_MAX_BYTES));
        let read = read_range(self.source.0, "code", code.offset + from, length, limit).unwrap_or_default();
        self.left_bytes.set(self.left_bytes.get() - read.len() as u64);
        read.into()
    }

    /// Whether it has a Python interpreter, on a machine where its object allocator can be found from code.
    pub(crate) fn has_objects(&self) -> bool {
        self.machine == Machine::X86_64 && self.functions().any(|(name, _)| name == MARKER)
    }

    /// The file's own address that the loader writes to a word.
    pub(crate) fn own_address_at(&self, word: u64) -> Option<u64> {
        self.own_addresses.get(&word).copied()
    }

    /// The loaded parts of the file.
    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The name of the function whose address the loader writes to `slot`.
    #[must_use]
    pub fn import_at(&self, slot: u64) -> Option<&str> {
        self.imports.get(&slot).map(String::as_str)
    }

    /// The text after the first `marker` in the read-only data: at most `most` bytes of printable ASCII.
    #[must_use]
    pub fn text_after(&self, marker: &[u8], most: usize) -> Option<&str> {
        self.read_only.iter().find_map(|bytes| {
            let at = bytes.windows(marker.len().max(1)).position(|w| w == marker)?;
            let rest = bytes.get(at.checked_add(marker.len())?..)?;
            let end = rest.iter().take(most).position(|b| !(0x20..0x7f).contains(b)).unwrap_or(most.min(rest.len()));
            std::str::from_utf8(&rest[..end]).ok()
        })
    }

    /// The first NUL-terminated text in the read-only data for which `wanted` holds.
    pub fn text_where(&self, wanted: impl Fn(&str) -> bool) -> Option<&str> {
        self.read_only
            .iter()
            .flat_map(|bytes| bytes.split(|b| *b == 0))
            .filter_map(|text| std::str::from_utf8(text).ok())
            .find(|text| wanted(text))
    }
}

/// Start and end of every function that an `.eh_frame` section at `address` describes, sorted.
fn function_bounds(address: u64, bytes: &[u8]) -> Vec<(u64, u64)> {
    use gimli::UnwindSection as _;
    let section = gimli::EhFrame::new(bytes, gimli::LittleEndian);
    let bases = gimli::BaseAddresses::default().set_eh_frame(address);
    let mut entries = section.entries(&bases);
    let mut bounds = Vec::new();
    while let Ok(Some(entry)) = entries.next() {
        let gimli::CieOrFde::Fde(partial) = entry else { continue };
        let Ok(fde) = partial.parse(gimli::EhFrame::cie_from_offset) else { continue };
        let start = fde.initial_address();
        if let Some(end) = start.checked_add(fde.len()) {
            bounds.push((start, end));
        }
    }
    bounds.sort_unstable();
    bounds
}

/// The loaded segments, cut off at the end of the file, because the kernel refuses probes beyond it.
fn segments_in(file: &dyn Image, headers: &Elf) -> Vec<Segment> {
    let length_bytes = file.length_bytes().unwrap_or(u64::MAX);
    headers.segments.iter().filter(|segment| segment.is_loaded()).map(|segment| segment.within(length_bytes)).collect()
}

#[cfg(test)]
#[path = "elf_tests.rs"]
mod tests;
