//! The file that contains the JVM, and the tables in it that describe the JVM's structures.

use std::collections::HashMap;
use std::sync::Arc;

use heapbpf_elf::{ElfFile, Image, Pieces, Segment};
use object::elf::EM_X86_64;

use crate::unsupported::Unsupported;

/// Prefix of the names of the tables, and of their column offsets.
const PREFIX: &[u8] = b"gHotSpotVM";
/// A function that every JVM exports, whoever made it.
const OF_ANY_JVM: &[u8] = b"JVM_MaxMemory";
/// Maximum number of symbols that are stored. There are 23.
const MOST_SYMBOLS: usize = 64;

/// A file that contains HotSpot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Virtual addresses of the variables with the prefix `gHotSpotVM`.
    symbols: Arc<HashMap<String, u64>>,
    /// The loaded segments of the file.
    segments: Vec<Segment>,
}

/// A library in a process, with the addresses of its variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tables {
    symbols: Arc<HashMap<String, u64>>,
    /// Added to the addresses in the file.
    bias: u64,
}

impl Tables {
    /// Returns the address of the variable `gHotSpotVM<name>`.
    ///
    /// # Errors
    /// [`Unsupported::NotHotSpot`] if the library does not export it.
    pub fn address(&self, name: &str) -> Result<u64, Unsupported> {
        let address = self.symbols.get(name).ok_or(Unsupported::NotHotSpot)?;
        Ok(self.bias.wrapping_add(*address))
    }

    /// Creates tables from the addresses of their variables, by name without `gHotSpotVM`.
    #[must_use]
    pub fn of(symbols: &[(&str, u64)]) -> Self {
        let symbols = symbols.iter().map(|(name, address)| ((*name).into(), *address)).collect();
        Self { symbols: Arc::new(symbols), bias: 0 }
    }
}

impl Library {
    /// Finds HotSpot in a file; `None` if the file does not contain a JVM.
    ///
    /// # Errors
    /// [`Unsupported`] if the file contains a JVM that does not describe itself, or one for another machine.
    pub fn find(image: &dyn Image) -> Result<Option<Self>, Unsupported> {
        let pieces = Pieces::of(image);
        let Ok(file) = ElfFile::parse(&pieces) else { return Ok(None) };
        let mut symbols = HashMap::new();
        let mut is_jvm = false;
        file.each_symbol([".dynsym", ".dynstr"], |name, symbol| {
            is_jvm |= name == OF_ANY_JVM;
            if let Some(rest) = name.strip_prefix(PREFIX).filter(|_| symbols.len() < MOST_SYMBOLS) {
                symbols.insert(String::from_utf8_lossy(rest).into_owned(), symbol.address);
            }
        });
        if !symbols.contains_key("Structs") {
            return if is_jvm { Err(Unsupported::NotHotSpot) } else { Ok(None) };
        }
        if file.headers.machine != EM_X86_64.0 {
            return Err(Unsupported::Machine);
        }
        let segments = file.headers.segments.iter().filter(|segment| segment.is_loaded()).copied().collect();
        Ok(Some(Self { symbols: Arc::new(symbols), segments }))
    }

    /// Returns its tables in a process that has `file_offset` of the file mapped as executable at `start`.
    #[must_use]
    pub fn tables_in(&self, start: u64, file_offset: u64) -> Option<Tables> {
        let mut code = self.segments.iter().filter(|segment| segment.is_executable());
        let bias = code.find_map(|segment| segment.bias(start, file_offset, 0x1000))?;
        Some(Tables { symbols: Arc::clone(&self.symbols), bias })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn files_without_a_jvm_have_none() {
        assert_eq!(Library::find(&File::open("/proc/self/exe").expect("it is there")), Ok(None));
        assert_eq!(Library::find(&vec![0u8; 100]), Ok(None));
    }

    /// The JVM of this machine, if one is installed.
    #[test]
    fn an_installed_jvm_has_its_tables() {
        let Ok(file) = File::open("/usr/lib/jvm/java-17-openjdk-amd64/lib/server/libjvm.so") else { return };
        let library = Library::find(&file).expect("it is HotSpot").expect("it is a JVM");
        let code = *library.segments.iter().find(|segment| segment.is_executable()).expect("it has code");
        let at = |start: u64| library.tables_in(start, code.offset & !0xfff).expect("it is mapped").address("Structs");
        assert_eq!(at(0x20_0000).expect("it is there") - at(0x10_0000).expect("it is there"), 0x10_0000);
        assert_eq!(library.tables_in(0x1000, u64::MAX), None);
    }
}
