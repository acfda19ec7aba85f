//! The functions in symbol tables, also in those that are packed into `.gnu_debugdata`.

use std::io::Read as _;

use object::elf;
use object::read::ReadRef;
use object::read::elf::Sym as _;

use crate::file::{LE, Sym};
use crate::{ElfError, ElfFile, Image, MAX_PIECE_BYTES, read_range, text_at};

/// Size of the part of a symbol table that is in memory at a time, bytes. The table of a large file takes as much
/// memory as the functions themselves.
const CHUNK_BYTES: u64 = (64 << 10) * size_of::<Sym>() as u64;

/// A defined function.
#[derive(Clone, Copy, Debug)]
pub struct Symbol {
    /// Virtual address in the file.
    pub address: u64,
    /// Size, bytes; 0 if the symbol table does not state it.
    pub size: u64,
    /// Whether it is in the dynamic symbol table, where other files can find it.
    pub exported: bool,
    /// Whether it is an indirect function (`STT_GNU_IFUNC`): `address` is then that of its resolver.
    pub indirect: bool,
    table: u8,
    name: u32,
}

impl Symbol {
    /// A function or variable without a name.
    #[must_use]
    pub const fn unnamed(address: u64, size: u64) -> Self {
        Self { address, size, exported: false, indirect: false, table: u8::MAX, name: 0 }
    }
}

/// The functions of a file, copied from its symbol tables.
#[derive(Clone, Debug, Default)]
pub struct Symbols {
    symbols: Vec<Symbol>,
    names: Vec<Vec<u8>>,
}

impl Symbols {
    /// Adds the functions that the dynamic symbol table of `image` defines; `file` has its headers. Returns whether the
    /// table is intact.
    pub fn add_dynamic<'d, R: ReadRef<'d>>(&mut self, image: &dyn Image, file: &ElfFile<'d, R>) -> bool {
        self.add(image, file, elf::SHT_DYNSYM).is_ok()
    }

    /// Same as [`Symbols::add_dynamic`], for the full symbol table.
    pub fn add_full<'d, R: ReadRef<'d>>(&mut self, image: &dyn Image, file: &ElfFile<'d, R>) -> bool {
        self.add(image, file, elf::SHT_SYMTAB).is_ok()
    }

    /// Adds the functions of a packed `.gnu_debugdata` section. Returns whether the section is intact.
    pub fn add_packed(&mut self, packed: &[u8]) -> bool {
        let Some(bytes) = unpack_debugdata(packed) else { return false };
        ElfFile::parse(bytes.as_slice())
            .is_ok_and(|file| !file.headers.sections_are_damaged && self.add_full(&bytes, &file))
    }

    /// Reads from `image` directly: what is read through `file` stays in memory, so the names would be there twice.
    fn add<'d, R: ReadRef<'d>>(
        &mut self,
        image: &dyn Image,
        file: &ElfFile<'d, R>,
        kind: elf::SectionType,
    ) -> Result<(), ElfError> {
        const WHAT: &str = "symbol table";
        let number = u8::try_from(self.names.len()).map_err(|_| ElfError::Malformed(WHAT))?;
        let Some([(start, bytes), (names, name_bytes)]) = file.symbol_table(kind)? else { return Ok(()) };
        if bytes > MAX_PIECE_BYTES {
            return Err(ElfError::TooLarge { what: WHAT.into(), bytes, limit: MAX_PIECE_BYTES });
        }
        self.names.push(read_range(image, WHAT, names, name_bytes, MAX_PIECE_BYTES)?);
        let known = self.symbols.len();
        let mut read = 0;
        while read < bytes {
            let chunk = CHUNK_BYTES.min(bytes - read);
            let functions = read_range(image, WHAT, start.saturating_add(read), chunk, CHUNK_BYTES)
                .and_then(|chunk| self.add_entries(&chunk, number, kind == elf::SHT_DYNSYM));
            if let Err(error) = functions {
                self.symbols.truncate(known);
                return Err(error);
            }
            read += chunk;
        }
        Ok(())
    }

    fn add_entries(&mut self, bytes: &[u8], table: u8, exported: bool) -> Result<(), ElfError> {
        let entries = object::slice_from_all_bytes::<Sym>(bytes).map_err(|()| ElfError::Malformed("symbol table"))?;
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
        Ok(())
    }

    /// Returns the name of a symbol of this list; empty if it is damaged.
    #[must_use]
    pub fn name(&self, symbol: &Symbol) -> &str {
        self.names.get(usize::from(symbol.table)).and_then(|n| text_at(n, symbol.name as usize)).unwrap_or_default()
    }

    /// Iterates over all functions with their names, in table order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Symbol)> {
        self.symbols.iter().map(|symbol| (self.name(symbol), symbol))
    }
}

/// Largest unpacked file, bytes; libc's is under 1 MiB.
const UNPACKED_MAX_BYTES: u64 = 64 << 20;

/// Unpacks the ELF file in a `.gnu_debugdata` section; `None` if it is damaged or unreasonably large.
#[must_use]
pub fn unpack_debugdata(packed: &[u8]) -> Option<Vec<u8>> {
    if dictionary_bytes(packed)? > UNPACKED_MAX_BYTES {
        return None;
    }
    let mut bytes = Vec::new();
    lzma_rust2::XzReader::new(packed, false).take(UNPACKED_MAX_BYTES + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= UNPACKED_MAX_BYTES).then_some(bytes)
}

/// Returns the dictionary size of the first block, bytes (xz format 1.2.0, §3.1 and §5.3.1). The decoder allocates it
/// unchecked.
fn dictionary_bytes(packed: &[u8]) -> Option<u64> {
    // Stream header (12 bytes), block header size, block flags. The header is longer if the block states its sizes.
    let flags = *packed.get(13)?;
    let mut at = 14;
    for present in [flags & 0x40 != 0, flags & 0x80 != 0] {
        while present && *packed.get(at)? & 0x80 != 0 {
            at += 1;
        }
        at += usize::from(present);
    }
    // Flags of the last filter: LZMA2 has id 0x21 and one property byte. Filters before it are not supported; packagers
    // do not use any.
    let [0x21, 1, property] = *packed.get(at..at + 3)? else { return None };
    match property {
        0..=39 => Some((2 | u64::from(property & 1)) << (property / 2 + 11)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a stream header followed by `block`: the flags, sizes and filters of a block header.
    fn stream(block: &[u8]) -> Vec<u8> {
        [b"\xfd7zXZ\0\0\x04\0\0\0\0\x02".as_slice(), block].concat()
    }

    #[test]
    fn the_dictionary_s_size_is_read_before_it_is_allocated() {
        // LZMA2, 8 MiB: as `xz -6` writes.
        assert_eq!(dictionary_bytes(&stream(&[0x00, 0x21, 1, 22])), Some(8 << 20));
        // With both block sizes stated: two bytes and one byte.
        assert_eq!(dictionary_bytes(&stream(&[0xc0, 0x80, 0x01, 0x10, 0x21, 1, 0])), Some(4096));
        assert_eq!(dictionary_bytes(&stream(&[0x00, 0x21, 1, 39])), Some(3 << 30));
        assert_eq!(dictionary_bytes(&stream(&[0x00, 0x21, 1, 40])), None);
        assert_eq!(dictionary_bytes(&stream(&[0x00, 0x04, 0])), None);
        assert_eq!(dictionary_bytes(b""), None);
        let mut none = crate::Symbols::default();
        assert!(!none.add_packed(&stream(&[0x00, 0x21, 1, 39])));
        assert!(!none.add_packed(&stream(&[0x00, 0x21, 1, 22])));
        assert_eq!(none.iter().count(), 0);
    }
}
