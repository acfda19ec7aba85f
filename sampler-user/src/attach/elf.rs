//! What attaching needs to know of an ELF file: symbols, code, function bounds, identity; all bounded and checked.
//!
//! A target may truncate or rewrite its files at any time, so they are read, never mapped.

use std::collections::HashMap;
use std::io::{Read, Seek};

use object::LittleEndian;
use object::elf::{self, FileHeader64};
use object::read::ReadRef;
use object::read::elf::{FileHeader as _, ProgramHeader as _, Rela as _, SectionHeader as _, SectionTable, Sym as _};

use super::AttachError;
use super::arch::Machine;
use super::bounded::{Pieces, function_bounds, read_once};
use super::debugdata;

/// Code beyond this is not scanned: branches into a function are then only looked for in the function itself.
const CODE_MAX_BYTES: u64 = 64 << 20;
/// Code beyond this is not read: no program has as much, but a hostile file may say so.
const CODE_READ_MAX_BYTES: u64 = 512 << 20;
/// Read-only data that is searched for version strings.
const READ_ONLY_MAX_BYTES: u64 = 8 << 20;

type Header = FileHeader64<LittleEndian>;
const LE: LittleEndian = LittleEndian;

/// A loadable segment.
#[derive(Clone, Copy, Debug)]
struct Segment {
    address: u64,
    file_offset: u64,
    file_bytes: u64,
    executable: bool,
}

/// A defined function.
#[derive(Clone, Copy, Debug)]
pub struct Symbol {
    /// Virtual address in the file.
    pub address: u64,
    /// Bytes; 0 where the symbol table does not say.
    pub size: u64,
    /// In the dynamic symbol table, so callable from other files.
    pub exported: bool,
    /// Resolved at run time by a function at `address` (`STT_GNU_IFUNC`).
    pub indirect: bool,
    table: u8,
    name: u32,
}

/// Executable bytes of the file.
#[derive(Clone, Debug)]
pub struct Code {
    /// Virtual address of the first byte.
    pub address: u64,
    /// The instructions.
    pub bytes: Vec<u8>,
}

/// Where a file has code.
struct CodeSection {
    address: u64,
    offset: u64,
    size: u64,
}

/// How a file comes into a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileKind {
    /// A shared library.
    Library,
    /// An executable that loads shared libraries.
    Executable,
    /// An executable that loads nothing.
    StaticExecutable,
}

/// An ELF file, as far as attaching needs it.
#[derive(Clone, Debug)]
pub struct FileImage {
    /// Where the file was found, for custom allocators that name it; empty if not known.
    pub path: String,
    /// Instruction set.
    pub machine: Machine,
    /// Library or executable.
    pub kind: FileKind,
    /// GNU build ID; empty if the file has none.
    pub build_id: Vec<u8>,
    /// `DT_SONAME`.
    pub soname: Option<String>,
    /// The dynamic loader that an executable asks for; musl's is its C library as well.
    pub interpreter: Option<String>,
    /// `DT_NEEDED`.
    pub needed: Vec<String>,
    /// Made by the Go toolchain: its heap is Go's own.
    pub is_go: bool,
    /// Names of version definitions (`GLIBC_2.36`), in file order.
    pub versions: Vec<String>,
    /// False if the code is too large to be scanned as a whole.
    pub code_is_whole: bool,
    /// Start and end of functions that the unwind tables know, sorted.
    pub bounds: Vec<(u64, u64)>,
    /// Parts of the file that could not be read, for the audit.
    pub damaged: Vec<&'static str>,
    code: Vec<Code>,
    symbols: Vec<Symbol>,
    names: Vec<Vec<u8>>,
    read_only: Vec<Vec<u8>>,
    segments: Vec<Segment>,
    imports: HashMap<u64, String>,
}

/// A symbol table on its own.
#[derive(Debug, Default)]
pub(super) struct Symbols {
    pub(super) symbols: Vec<Symbol>,
    pub(super) names: Vec<Vec<u8>>,
}

impl Symbols {
    /// Adds the defined functions of a symbol table of type `kind`; false if the table is damaged.
    pub(super) fn add<'a, R: ReadRef<'a>>(
        &mut self,
        data: R,
        sections: &SectionTable<'a, Header, R>,
        kind: elf::SectionType,
    ) -> bool {
        let Some(header) = sections.iter().find(|s| s.sh_type(LE) == kind) else {
            return true;
        };
        let link = object::SectionIndex(header.sh_link(LE) as usize);
        let (Ok(entries), Ok(names)) = (
            header.data_as_array::<elf::Sym64<LittleEndian>, _>(LE, data),
            sections.section(link).and_then(|s| s.data(LE, data)),
        ) else {
            return false;
        };
        let Ok(table) = u8::try_from(self.names.len()) else {
            return false;
        };
        self.names.push(names.to_vec());
        let exported = kind == elf::SHT_DYNSYM;
        self.symbols.extend(entries.iter().filter(|s| s.st_shndx(LE) != elf::SHN_UNDEF).filter_map(|s| {
            let indirect = s.st_type() == elf::STT_GNU_IFUNC;
            (indirect || s.st_type() == elf::STT_FUNC).then(|| Symbol {
                address: s.st_value(LE),
                size: s.st_size(LE),
                exported,
                indirect,
                table,
                name: s.st_name(LE),
            })
        }));
        true
    }
}

impl FileImage {
    /// Reads an ELF file. Fails if it is not a 64-bit little-endian ELF file for a known machine.
    pub fn read<R: Read + Seek>(reader: R) -> Result<Self, AttachError> {
        Self::read_if(reader, |_| true)
    }

    /// Reads the file if `wanted` holds for a function that it defines, else its identity and symbols only: code is most
    /// of a file.
    pub fn read_if<R: Read + Seek>(reader: R, wanted: impl Fn(&str) -> bool) -> Result<Self, AttachError> {
        let pieces = Pieces::of(reader);
        let mut sections = Vec::new();
        let mut image = Self::parse(pieces.bounded(), wanted, &mut sections)?;
        // Most of a file: only once in memory, and when what else was read has gone.
        image.read_code(&mut pieces.into_inner(), &sections);
        Ok(image)
    }

    /// Says where the file was found.
    #[must_use]
    pub fn found_at(mut self, path: &str) -> Self {
        path.clone_into(&mut self.path);
        self
    }

    fn parse<'a, R: ReadRef<'a>>(
        data: R,
        wanted: impl Fn(&str) -> bool,
        code: &mut Vec<CodeSection>,
    ) -> Result<Self, AttachError> {
        let ident: &[u8] = data.read_bytes_at(0, 16).map_err(|()| AttachError::NotElf)?;
        if !ident.starts_with(b"\x7fELF") {
            return Err(AttachError::NotElf);
        }
        if ident[4] != 2 || ident[5] != 1 {
            return Err(AttachError::NotSixtyFourBit);
        }
        let header = Header::parse(data).map_err(|_| AttachError::NotElf)?;
        let machine = match header.e_machine(LE) {
            elf::EM_X86_64 => Machine::X86_64,
            elf::EM_AARCH64 => Machine::Aarch64,
            other => return Err(AttachError::UnknownMachine(other.0)),
        };
        let programs = header.program_headers(LE, data).map_err(|_| AttachError::Damaged("program headers"))?;
        let mut damaged = Vec::new();
        let sections = header.sections(LE, data).unwrap_or_else(|_| {
            damaged.push("section headers");
            SectionTable::default()
        });
        let segments = programs
            .iter()
            .filter(|p| p.p_type(LE) == elf::PT_LOAD)
            .map(|p| Segment {
                address: p.p_vaddr(LE),
                file_offset: p.p_offset(LE),
                file_bytes: p.p_filesz(LE),
                executable: p.p_flags(LE).contains(elf::PF_X),
            })
            .collect();
        let mut image = Self {
            path: String::new(),
            machine,
            kind: FileKind::Library,
            build_id: Vec::new(),
            soname: None,
            interpreter: None,
            needed: Vec::new(),
            is_go: false,
            versions: Vec::new(),
            code_is_whole: true,
            bounds: Vec::new(),
            damaged,
            code: Vec::new(),
            symbols: Vec::new(),
            names: Vec::new(),
            read_only: Vec::new(),
            segments,
            imports: HashMap::new(),
        };
        let interpreter = programs.iter().find_map(|p| p.interpreter(LE, data).ok().flatten());
        image.interpreter = interpreter.and_then(|path| std::str::from_utf8(path).ok()).map(str::to_owned);
        image.read_dynamic(data, programs);
        image.kind = match (
            image.interpreter.is_some(),
            header.e_entry(LE) != 0 && image.soname.is_none() && image.needed.is_empty(),
        ) {
            (true, _) => FileKind::Executable,
            (false, true) => FileKind::StaticExecutable,
            (false, false) => FileKind::Library,
        };
        // glibc can be run, so it names an interpreter; what has a name to be linked by is a library all the same.
        if image.soname.is_some() {
            image.kind = FileKind::Library;
        }
        image.read_symbol_sections(data, &sections);
        // musl has neither name nor dependencies, but others link to it.
        if image.kind == FileKind::StaticExecutable && image.symbols.iter().any(|s| s.exported) {
            image.kind = FileKind::Library;
        }
        if image.functions().any(|(name, _)| wanted(name)) {
            image.read_sections(data, &sections, code);
        }
        Ok(image)
    }

    fn read_dynamic<'a, R: ReadRef<'a>>(&mut self, data: R, programs: &[elf::ProgramHeader64<LittleEndian>]) {
        let entries = programs.iter().find_map(|p| p.dynamic(LE, data).transpose());
        let Some(Ok(entries)) = entries else { return };
        let value = |tag: elf::DynamicTag| entries.iter().find(|d| d.d_tag.get(LE) == tag).map(|d| d.d_val.get(LE));
        let (Some(address), Some(size)) = (value(elf::DT_STRTAB), value(elf::DT_STRSZ)) else {
            return;
        };
        let Some(offset) = self.file_offset(address) else {
            return;
        };
        let Ok(strings) = data.read_bytes_at(offset, size) else {
            self.damaged.push("dynamic strings");
            return;
        };
        let text = |at: u64| usize::try_from(at).ok().and_then(|at| text_at(strings, at)).map(str::to_owned);
        self.soname = value(elf::DT_SONAME).and_then(text);
        self.needed = entries
            .iter()
            .filter(|d| d.d_tag.get(LE) == elf::DT_NEEDED)
            .filter_map(|d| text(d.d_val.get(LE)))
            .collect();
    }

    fn read_symbol_sections<'a, R: ReadRef<'a>>(&mut self, data: R, sections: &SectionTable<'a, Header, R>) {
        let mut symbols = Symbols::default();
        if !symbols.add(data, sections, elf::SHT_DYNSYM) {
            self.damaged.push("dynamic symbol table");
        }
        if !symbols.add(data, sections, elf::SHT_SYMTAB) {
            self.damaged.push("symbol table");
        }
        if let Some((_, section)) = sections.section_by_name(LE, b".gnu_debugdata") {
            let read = section.data(LE, data).ok().and_then(|packed| debugdata::symbols(packed, &mut symbols));
            if read.is_none() {
                self.damaged.push("mini debug information (.gnu_debugdata)");
            }
        }
        self.symbols = symbols.symbols;
        self.names = symbols.names;
        let by_go = [b".go.buildinfo".as_slice(), b".gopclntab"];
        self.is_go = by_go.iter().any(|name| sections.section_by_name(LE, name).is_some());
    }

    fn read_code<R: Read + Seek>(&mut self, reader: &mut R, sections: &[CodeSection]) {
        let mut code_bytes = 0_u64;
        for CodeSection { address, offset, size } in sections {
            code_bytes = code_bytes.saturating_add(*size);
            let bytes = (code_bytes <= CODE_READ_MAX_BYTES).then(|| read_once(reader, *offset, *size)).flatten();
            match bytes {
                Some(bytes) => self.code.push(Code { address: *address, bytes }),
                None => self.damaged.push("code"),
            }
        }
        self.code_is_whole = code_bytes <= CODE_MAX_BYTES;
        self.code.sort_by_key(|code| code.address);
    }

    fn read_sections<'a, R: ReadRef<'a>>(
        &mut self,
        data: R,
        sections: &SectionTable<'a, Header, R>,
        code: &mut Vec<CodeSection>,
    ) {
        for section in sections.iter() {
            let name = sections.section_name(LE, section).unwrap_or_default();
            let (address, size) = (section.sh_addr(LE), section.sh_size(LE));
            if section.sh_flags(LE).contains(elf::SHF_EXECINSTR) && section.sh_type(LE) == elf::SHT_PROGBITS {
                code.push(CodeSection { address, offset: section.sh_offset(LE), size });
                continue;
            }
            match name {
                b".eh_frame" => match section.data(LE, data) {
                    Ok(bytes) => self.bounds = function_bounds(address, bytes),
                    Err(_) => self.damaged.push("unwind tables"),
                },
                b".rodata" if size <= READ_ONLY_MAX_BYTES => {
                    self.read_only.extend(section.data(LE, data).ok().map(<[u8]>::to_vec));
                }
                _ => {}
            }
            if let Ok(Some(mut notes)) = section.notes(LE, data) {
                while let Ok(Some(note)) = notes.next() {
                    if note.name() == elf::ELF_NOTE_GNU && note.n_type(LE) == elf::NT_GNU_BUILD_ID {
                        self.build_id = note.desc().to_vec();
                    }
                }
            }
            if let Ok(Some((mut definitions, link))) = section.gnu_verdef(LE, data) {
                let strings = sections.section(link).and_then(|s| s.data(LE, data)).unwrap_or_default();
                while let Ok(Some((_, mut names))) = definitions.next() {
                    let Ok(Some(name)) = names.next() else {
                        continue;
                    };
                    self.versions.extend(text_at(strings, name.vda_name.get(LE) as usize).map(str::to_owned));
                }
            }
        }
        self.read_imports(data, sections);
    }

    /// Slots of the global offset table that the loader fills with the address of a function: of another file, or one that
    /// a resolver of this file chooses.
    fn read_imports<'a, R: ReadRef<'a>>(&mut self, data: R, sections: &SectionTable<'a, Header, R>) {
        let dynamic = sections.symbols(LE, data, elf::SHT_DYNSYM).unwrap_or_default();
        let strings = sections.section(dynamic.string_section()).and_then(|s| s.data(LE, data)).unwrap_or_default();
        for section in sections.iter() {
            let Ok(Some((relocations, _))) = section.rela(LE, data) else {
                continue;
            };
            for relocation in relocations {
                let kind = relocation.r_type(LE, false);
                let (by_name, chosen) = match self.machine {
                    Machine::X86_64 => (
                        kind == elf::R_X86_64_JUMP_SLOT || kind == elf::R_X86_64_GLOB_DAT,
                        kind == elf::R_X86_64_IRELATIVE,
                    ),
                    Machine::Aarch64 => (
                        kind == elf::R_AARCH64_JUMP_SLOT || kind == elf::R_AARCH64_GLOB_DAT,
                        kind == elf::R_AARCH64_IRELATIVE,
                    ),
                };
                let name = if chosen {
                    let resolver = relocation.r_addend.get(LE) as u64;
                    self.functions().find(|(_, s)| s.indirect && s.address == resolver).map(|(name, _)| name)
                } else {
                    let symbol = by_name.then(|| relocation.symbol(LE, false)).flatten();
                    let symbol = symbol.and_then(|symbol| dynamic.symbol(symbol).ok());
                    symbol.and_then(|symbol| text_at(strings, symbol.st_name(LE) as usize))
                };
                if let Some(name) = name.map(str::to_owned) {
                    self.imports.insert(relocation.r_offset.get(LE), name);
                }
            }
        }
    }

    /// The name of a symbol; empty if it is damaged.
    #[must_use]
    pub fn name(&self, symbol: &Symbol) -> &str {
        self.names.get(usize::from(symbol.table)).and_then(|n| text_at(n, symbol.name as usize)).unwrap_or_default()
    }

    /// Every defined function, with its name.
    pub fn functions(&self) -> impl Iterator<Item = (&str, &Symbol)> {
        self.symbols.iter().map(|s| (self.name(s), s))
    }

    /// File offset of a virtual address that the file itself provides.
    #[must_use]
    pub fn file_offset(&self, address: u64) -> Option<u64> {
        self.segments
            .iter()
            .find(|s| address.checked_sub(s.address).is_some_and(|d| d < s.file_bytes))
            .and_then(|s| s.file_offset.checked_add(address - s.address))
    }

    /// True if `address` is in a segment that is mapped for execution.
    #[must_use]
    pub fn is_executable(&self, address: u64) -> bool {
        self.segments.iter().any(|s| s.executable && address.checked_sub(s.address).is_some_and(|d| d < s.file_bytes))
    }

    /// The code in `[start, end)`, cut at the end of its section; empty if there is none.
    #[must_use]
    pub fn code_between(&self, start: u64, end: u64) -> &[u8] {
        let Some(code) =
            self.code.iter().find(|c| start.checked_sub(c.address).is_some_and(|d| d < c.bytes.len() as u64))
        else {
            return &[];
        };
        let from = (start - code.address) as usize;
        let to = end.saturating_sub(code.address).min(code.bytes.len() as u64) as usize;
        code.bytes.get(from..to).unwrap_or_default()
    }

    /// The file's executable sections, by address.
    #[must_use]
    pub fn code(&self) -> &[Code] {
        &self.code
    }

    /// The name of the function whose address the loader writes to `slot`.
    #[must_use]
    pub fn import_at(&self, slot: u64) -> Option<&str> {
        self.imports.get(&slot).map(String::as_str)
    }

    /// Text in the read-only data that follows `marker`, up to `most` bytes of printable ASCII.
    #[must_use]
    pub fn text_after(&self, marker: &[u8], most: usize) -> Option<&str> {
        self.read_only.iter().find_map(|bytes| {
            let at = memchr_find(bytes, marker)?.checked_add(marker.len())?;
            let rest = bytes.get(at..)?;
            let end = rest.iter().take(most).position(|b| !(0x20..0x7f).contains(b)).unwrap_or(most.min(rest.len()));
            std::str::from_utf8(&rest[..end]).ok()
        })
    }

    /// Every NUL-terminated text in the read-only data for which `wanted` holds; the first one.
    pub fn text_where(&self, wanted: impl Fn(&str) -> bool) -> Option<&str> {
        self.read_only
            .iter()
            .flat_map(|bytes| bytes.split(|b| *b == 0))
            .filter_map(|text| std::str::from_utf8(text).ok())
            .find(|text| wanted(text))
    }
}

fn memchr_find(bytes: &[u8], marker: &[u8]) -> Option<usize> {
    bytes.windows(marker.len().max(1)).position(|w| w == marker)
}

/// The NUL-terminated text at `at`.
fn text_at(strings: &[u8], at: usize) -> Option<&str> {
    let rest = strings.get(at..)?;
    let end = rest.iter().position(|b| *b == 0)?;
    std::str::from_utf8(&rest[..end]).ok()
}

#[cfg(test)]
#[path = "elf_tests.rs"]
mod tests;
