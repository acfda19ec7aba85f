//! A 64-bit ELF file. Its tables are read on demand.

use object::LittleEndian;
use object::elf::{self, FileHeader64, ProgramHeader64, SectionHeader64, Sym64};
use object::read::ReadRef;
use object::read::elf::{FileHeader as _, ProgramHeader as _, Rela as _, SectionHeader as _, Sym as _};

use crate::headers::{name_at, program_headers, section_headers, section_names};
use crate::{Elf, ElfError, Image, MAX_NAMES, Pieces, SHT_NOBITS, Section, Segment, Symbol, text_at};

pub(crate) type Header = FileHeader64<LittleEndian>;
pub(crate) const LE: LittleEndian = LittleEndian;
pub(crate) type Sym = Sym64<LittleEndian>;
/// Limit of [`ElfFile::each_symbol`].
const SHORT_NAME_BYTES: usize = 64;
/// File ranges of a symbol table and of its strings: offset and length, bytes.
pub(crate) type SymbolTable = [(u64, u64); 2];

/// A 64-bit little-endian ELF file that is read from `R`: [`&Pieces`](crate::Pieces), or bytes in memory.
pub struct ElfFile<'d, R: ReadRef<'d>> {
    /// Its headers.
    pub headers: Elf,
    data: R,
    programs: &'d [ProgramHeader64<LittleEndian>],
    sections: &'d [SectionHeader64<LittleEndian>],
}

/// The names in the dynamic section: the file's own, and those of the libraries that it needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dynamic {
    /// `DT_SONAME`.
    pub soname: Option<String>,
    /// `DT_NEEDED`, at most [`MAX_NAMES`].
    pub needed: Vec<String>,
}

/// A relocation with an addend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relocation {
    /// Type of the relocation: `R_*` of the file's machine.
    pub kind: u32,
    /// Address that the loader writes to.
    pub address: u64,
    /// Addend; for an indirect function, the address of its resolver.
    pub addend: u64,
    /// Index in the dynamic symbol table, if the relocation refers to a symbol.
    pub symbol: Option<usize>,
}

/// The names of the dynamic symbols, by index.
pub struct DynamicNames<'d> {
    symbols: &'d [Sym],
    strings: &'d [u8],
}

impl<'d> DynamicNames<'d> {
    /// Returns the name of a symbol; `None` if there is no such symbol, or its name is malformed.
    #[must_use]
    pub fn get(&self, symbol: usize) -> Option<&'d str> {
        text_at(self.strings, self.symbols.get(symbol)?.st_name(LE) as usize)
    }

    /// Returns the virtual address of a symbol that the file defines.
    #[must_use]
    pub fn address(&self, symbol: usize) -> Option<u64> {
        let symbol = self.symbols.get(symbol).filter(|symbol| symbol.st_shndx(LE) != elf::SHN_UNDEF)?;
        Some(symbol.st_value(LE))
    }

    /// Returns the names of the symbols that the file does not define, as far as they are well-formed.
    pub fn undefined(&self) -> impl Iterator<Item = &'d str> {
        let strings = self.strings;
        let undefined = self.symbols.iter().filter(|symbol| symbol.st_shndx(LE) == elf::SHN_UNDEF);
        undefined.filter_map(move |symbol| text_at(strings, symbol.st_name(LE) as usize))
    }
}

impl Elf {
    /// Reads the headers.
    ///
    /// # Errors
    /// [`ElfError`] if the file is not a 64-bit little-endian ELF file, or its program headers cannot be read. Missing
    /// or malformed section headers are no error: programs run without them.
    pub fn read(image: &dyn Image) -> Result<Self, ElfError> {
        let pieces = Pieces::of(image);
        match ElfFile::parse(&pieces) {
            Ok(file) => Ok(file.headers),
            Err(error) => Err(pieces.explained(error)),
        }
    }
}

impl<'d, R: ReadRef<'d>> ElfFile<'d, R> {
    /// Reads the headers.
    ///
    /// # Errors
    /// [`ElfError`] if the file is not a 64-bit little-endian ELF file, or its program headers cannot be read. Missing
    /// or malformed section headers are no error: programs run without them.
    pub fn parse(data: R) -> Result<Self, ElfError> {
        let start = data.read_bytes_at(0, size_of::<Header>() as u64);
        let start = start.map_err(|()| ElfError::Io(std::io::ErrorKind::UnexpectedEof.into()))?;
        if !start.starts_with(&elf::ELFMAG) {
            return Err(ElfError::NotElf);
        }
        if start[4] != elf::ELFCLASS64.0 || start[5] != elf::ELFDATA2LSB.0 {
            return Err(ElfError::NotSixtyFourBit);
        }
        let header = Header::parse(start).map_err(|_| ElfError::NotElf)?;
        let programs = program_headers(header, LE, data)?;
        let mut headers = Elf {
            entry: header.e_entry(LE),
            machine: header.e_machine(LE).0,
            segments: programs.iter().map(segment).collect(),
            sections: vec![],
            sections_are_damaged: false,
            tables: vec![(0, size_of::<Header>() as u64)],
            section_headers_at: None,
        };
        headers.tables.extend((!programs.is_empty()).then(|| (header.e_phoff(LE), size_of_val(programs) as u64)));
        let found = section_headers(header, LE, data)
            .and_then(|sections| Some((sections, section_names(header, LE, data, sections)?)));
        headers.sections_are_damaged = found.is_none();
        let (sections, names) = found.unwrap_or_default();
        if !sections.is_empty() {
            headers.sections = sections.iter().map(|header| section(header, names)).collect();
            headers.tables.push((header.e_shoff(LE), size_of_val(sections) as u64));
            headers.section_headers_at = Some(header.e_shoff(LE));
        }
        Ok(Self { headers, data, programs, sections })
    }

    /// Returns a section's bytes as stored in the file; empty if it has none there.
    ///
    /// # Errors
    /// [`ElfError`] if they lie past the end of the file, or exceed a limit.
    pub fn section_bytes(&self, section: &Section) -> Result<&'d [u8], ElfError> {
        if section.kind == SHT_NOBITS {
            return Ok(&[]);
        }
        let bytes = self.data.read_bytes_at(section.offset, section.bytes);
        bytes.map_err(|()| ElfError::Io(std::io::ErrorKind::UnexpectedEof.into()))
    }

    /// Calls `found` with the name of each symbol that a table defines: `.symtab` with `.strtab`, or `.dynsym` with
    /// `.dynstr`. Names of 64 bytes or more are left out.
    pub fn each_symbol(&self, [table, names]: [&str; 2], mut found: impl FnMut(&'d [u8], Symbol)) {
        let bytes = |name| self.headers.section(name).and_then(|section| self.section_bytes(section).ok());
        let (Some(table), Some(names)) = (bytes(table), bytes(names)) else { return };
        let Ok(symbols) = object::slice_from_all_bytes::<Sym>(table) else { return };
        for symbol in symbols.iter().filter(|symbol| symbol.st_shndx(LE) != elf::SHN_UNDEF) {
            let Some(name) = names.get(symbol.st_name(LE) as usize..) else { continue };
            let name = &name[..name.len().min(SHORT_NAME_BYTES)];
            let Some(end) = memchr::memchr(0, name) else { continue };
            found(&name[..end], Symbol::unnamed(symbol.st_value(LE), symbol.st_size(LE)));
        }
    }

    /// Returns the path of the dynamic loader that a program requests.
    #[must_use]
    pub fn interpreter(&self) -> Option<&'d str> {
        let segment = self.programs.iter().find(|program| program.p_type(LE) == elf::PT_INTERP)?;
        let (offset, bytes) = segment.file_range(LE);
        text_at(self.data.read_bytes_at(offset, bytes).ok()?, 0)
    }

    /// Returns the names in the dynamic section; none if there is no such section, or one without strings.
    ///
    /// # Errors
    /// [`ElfError`] if the strings cannot be read.
    pub fn dynamic(&self) -> Result<Dynamic, ElfError> {
        let entries = self.programs.iter().find_map(|program| program.dynamic(LE, self.data).transpose());
        let Some(Ok(entries)) = entries else { return Ok(Dynamic::default()) };
        let value = |tag: elf::DynamicTag| entries.iter().find(|d| d.d_tag.get(LE) == tag).map(|d| d.d_val.get(LE));
        let place = value(elf::DT_STRTAB).and_then(|address| self.headers.offset_of_address(address));
        let (Some(offset), Some(bytes)) = (place, value(elf::DT_STRSZ)) else { return Ok(Dynamic::default()) };
        let strings = self.data.read_bytes_at(offset, bytes).map_err(|()| ElfError::Malformed("dynamic strings"))?;
        let text = |at: u64| usize::try_from(at).ok().and_then(|at| text_at(strings, at)).map(str::to_owned);
        let needed = entries.iter().filter(|d| d.d_tag.get(LE) == elf::DT_NEEDED);
        Ok(Dynamic {
            soname: value(elf::DT_SONAME).and_then(text),
            needed: needed.filter_map(|d| text(d.d_val.get(LE))).take(MAX_NAMES).collect(),
        })
    }

    /// Names of the version definitions (`GLIBC_2.36`), in file order, at most [`MAX_NAMES`].
    #[must_use]
    pub fn versions(&self) -> Vec<String> {
        let mut versions = Vec::new();
        for section in self.sections {
            let Ok(Some((mut definitions, link))) = section.gnu_verdef(LE, self.data) else { continue };
            let strings = self.sections.get(link.0).and_then(|section| section.data(LE, self.data).ok());
            let strings = strings.unwrap_or_default();
            while let Ok(Some((_, mut names))) = definitions.next() {
                if versions.len() >= MAX_NAMES {
                    return versions;
                }
                let Ok(Some(name)) = names.next() else { continue };
                versions.extend(text_at(strings, name.vda_name.get(LE) as usize).map(str::to_owned));
            }
        }
        versions
    }

    /// Returns every relocation with an addend.
    pub fn relocations(&self) -> impl Iterator<Item = Relocation> {
        let tables = self.sections.iter().filter_map(|section| section.rela(LE, self.data).ok().flatten());
        tables.flat_map(|(relocations, _)| relocations).map(|relocation| Relocation {
            kind: relocation.r_type(LE, false).0,
            address: relocation.r_offset.get(LE),
            addend: relocation.r_addend.get(LE).cast_unsigned(),
            symbol: relocation.symbol(LE, false).map(|symbol| symbol.0),
        })
    }

    /// Returns the names of the dynamic symbols; none if the table is damaged.
    #[must_use]
    pub fn dynamic_names(&self) -> DynamicNames<'d> {
        let section = self.sections.iter().find(|section| section.sh_type(LE) == elf::SHT_DYNSYM);
        let symbols = section.and_then(|section| section.data_as_array(LE, self.data).ok());
        let strings = section.and_then(|section| self.linked(section)?.data(LE, self.data).ok());
        let (symbols, strings) = symbols.zip(strings).unwrap_or_default();
        DynamicNames { symbols, strings }
    }

    /// Returns the file ranges of a symbol table and its strings, if the file has one.
    pub(crate) fn symbol_table(&self, kind: elf::SectionType) -> Result<Option<SymbolTable>, ElfError> {
        let Some(section) = self.sections.iter().find(|section| section.sh_type(LE) == kind) else { return Ok(None) };
        let strings = self.linked(section).ok_or(ElfError::Malformed("symbol table"))?;
        // Sections without bytes in the file have no range.
        Ok(Some([section, strings].map(|section| section.file_range(LE).unwrap_or_default())))
    }

    /// Returns the section that another one links to, such as the strings of a symbol table.
    fn linked(&self, section: &SectionHeader64<LittleEndian>) -> Option<&'d SectionHeader64<LittleEndian>> {
        self.sections.get(section.sh_link(LE) as usize)
    }
}

fn segment(header: &ProgramHeader64<LittleEndian>) -> Segment {
    Segment {
        kind: header.p_type(LE).0,
        flags: header.p_flags(LE),
        offset: header.p_offset(LE),
        address: header.p_vaddr(LE),
        file_bytes: header.p_filesz(LE),
        memory_bytes: header.p_memsz(LE),
    }
}

fn section(header: &SectionHeader64<LittleEndian>, names: &[u8]) -> Section {
    Section {
        name: name_at(names, header.sh_name(LE)),
        kind: header.sh_type(LE).0,
        flags: header.sh_flags(LE),
        address: header.sh_addr(LE),
        offset: header.sh_offset(LE),
        bytes: header.sh_size(LE),
    }
}
