//! The few symbols of an interpreter that matter, from the symbol tables of its file.

use heapbpf_elf::ElfFile;
use object::LittleEndian;
use object::elf::{SHN_UNDEF, Sym64};
use object::pod::slice_from_all_bytes;
use object::read::ReadRef;

const LE: LittleEndian = LittleEndian;
/// Maximum length of a name that is compared.
const LONGEST: usize = 64;

/// A symbol that is defined in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DefinedSymbol {
    /// Virtual address.
    pub address: u64,
    /// Size, bytes.
    pub size: u64,
}

/// Calls `found` for each defined symbol of both tables, with its name.
pub fn each<'d, R: ReadRef<'d>>(file: &ElfFile<'d, R>, mut found: impl FnMut(&[u8], DefinedSymbol)) {
    for (table, names) in [(".dynsym", ".dynstr"), (".symtab", ".strtab")] {
        let bytes = |name| file.headers.section(name).and_then(|section| file.section_bytes(section).ok());
        let (Some(table), Some(names)) = (bytes(table), bytes(names)) else { continue };
        let Ok(symbols) = slice_from_all_bytes::<Sym64<LittleEndian>>(table) else { continue };
        for symbol in symbols.iter().filter(|symbol| symbol.st_shndx.get(LE) != SHN_UNDEF) {
            let Some(name) = names.get(symbol.st_name.get(LE) as usize..) else { continue };
            let name = &name[..name.len().min(LONGEST)];
            let Some(end) = name.iter().position(|byte| *byte == 0) else { continue };
            found(&name[..end], DefinedSymbol { address: symbol.st_value.get(LE), size: symbol.st_size.get(LE) });
        }
    }
}
