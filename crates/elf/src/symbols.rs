//! The functions in symbol tables.

use object::elf;
use object::read::ReadRef;
use object::read::elf::Sym as _;

use crate::file::LE;
use crate::{ElfFile, debugdata, text_at};

/// A defined function.
#[derive(Clone, Copy, Debug)]
pub struct Symbol {
    /// Virtual address in the file.
    pub address: u64,
    /// Size, bytes; 0 if the symbol table does not state it.
    pub size: u64,
    /// Whether it is in the dynamic symbol table, so that other files can call it.
    pub exported: bool,
    /// Whether it is an indirect function (`STT_GNU_IFUNC`), so that its resolver is at `address`.
    pub indirect: bool,
    table: u8,
    name: u32,
}

/// The functions of a file, copied from its symbol tables.
#[derive(Clone, Debug, Default)]
pub struct Symbols {
    symbols: Vec<Symbol>,
    names: Vec<Vec<u8>>,
}

impl Symbols {
    /// Adds the functions that the dynamic symbol table defines. Returns whether the table is intact.
    pub fn add_dynamic<'d, R: ReadRef<'d>>(&mut self, file: &ElfFile<'d, R>) -> bool {
        self.add(file, elf::SHT_DYNSYM)
    }

    /// Adds the functions that the full symbol table defines. Returns whether the table is intact.
    pub fn add_full<'d, R: ReadRef<'d>>(&mut self, file: &ElfFile<'d, R>) -> bool {
        self.add(file, elf::SHT_SYMTAB)
    }

    /// Adds the functions of a packed `.gnu_debugdata` section. Returns whether the section is intact.
    pub fn add_packed(&mut self, packed: &[u8]) -> bool {
        let Some(bytes) = debugdata::unpack(packed) else { return false };
        ElfFile::parse(bytes.as_slice()).is_ok_and(|file| !file.headers.sections_are_damaged && self.add_full(&file))
    }

    fn add<'d, R: ReadRef<'d>>(&mut self, file: &ElfFile<'d, R>, kind: elf::SectionType) -> bool {
        let (Ok(table), Ok(number)) = (file.symbol_table(kind), u8::try_from(self.names.len())) else {
            return false;
        };
        let Some((entries, names)) = table else { return true };
        self.names.push(names.to_vec());
        let exported = kind == elf::SHT_DYNSYM;
        self.symbols.extend(entries.iter().filter(|s| s.st_shndx(LE) != elf::SHN_UNDEF).filter_map(|s| {
            let indirect = s.st_type() == elf::STT_GNU_IFUNC;
            (indirect || s.st_type() == elf::STT_FUNC).then(|| Symbol {
                address: s.st_value(LE),
                size: s.st_size(LE),
                exported,
                indirect,
                table: number,
                name: s.st_name(LE),
            })
        }));
        true
    }

    /// The name of a symbol of this list; empty if it is damaged.
    #[must_use]
    pub fn name(&self, symbol: &Symbol) -> &str {
        self.names.get(usize::from(symbol.table)).and_then(|n| text_at(n, symbol.name as usize)).unwrap_or_default()
    }

    /// Every function, with its name, in the order of the tables.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Symbol)> {
        self.symbols.iter().map(|symbol| (self.name(symbol), symbol))
    }
}
