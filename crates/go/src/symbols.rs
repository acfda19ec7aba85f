//! The few symbols of a Go program that matter.

use heapbpf_elf::ElfFile;
use object::LittleEndian;
use object::elf::{SHN_UNDEF, Sym64};
use object::pod::slice_from_all_bytes;
use object::read::ReadRef;

const LE: LittleEndian = LittleEndian;
/// Maximum length of a name that is compared.
const LONGEST: usize = 48;

/// Calls `found` for each defined symbol that begins with `runtime.`, with its full name and its address.
pub(crate) fn each_of_runtime<'d, R: ReadRef<'d>>(file: &ElfFile<'d, R>, mut found: impl FnMut(&[u8], u64)) {
    let bytes = |name| file.headers.section(name).and_then(|section| file.section_bytes(section).ok());
    let (Some(table), Some(names)) = (bytes(".symtab"), bytes(".strtab")) else { return };
    let Ok(symbols) = slice_from_all_bytes::<Sym64<LittleEndian>>(table) else { return };
    for symbol in symbols.iter().filter(|symbol| symbol.st_shndx.get(LE) != SHN_UNDEF) {
        let Some(name) = names.get(symbol.st_name.get(LE) as usize..) else { continue };
        let name = &name[..name.len().min(LONGEST)];
        let Some(end) = name.iter().position(|byte| *byte == 0).filter(|_| name.starts_with(b"runtime.")) else {
            continue;
        };
        found(&name[..end], symbol.st_value.get(LE));
    }
}
