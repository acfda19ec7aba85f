//! The file that contains the JVM, and the tables in which HotSpot describes itself: field locations, type sizes,
//! constants.
//!
//! Every build has them, because debuggers such as `jhsdb` rely on them.

use std::collections::HashMap;
use std::sync::Arc;

use heapbpf_elf::{ElfFile, Image, Memory, Pieces, Segment};
use object::elf::EM_X86_64;

use crate::memory::{self, Unsupported};

/// Types whose fields and sizes are stored.
const TYPES: [&str; 20] = [
    "CodeCache",
    "CodeHeap",
    "HeapBlock",
    "HeapBlock::Header",
    "VirtualSpace",
    "GrowableArrayBase",
    "GenericGrowableArray",
    "GrowableArray<int>",
    "CodeBlob",
    "CompiledMethod",
    "nmethod",
    "PcDesc",
    "StubRoutines",
    "Method",
    "ConstMethod",
    "ConstantPool",
    "Klass",
    "Symbol",
    "InstanceKlass",
    "Abstract_VM_Version",
];
/// Prefixes of the constants that are stored.
const CONSTANTS: [&str; 2] = ["ConstMethod", "frame::"];
/// Maximum number of entries in a table. Real ones have one or two thousand.
const MOST_ENTRIES: u64 = 1 << 14;
/// Maximum size of an entry, bytes.
const LONGEST_ENTRY: u64 = 256;
/// Maximum length of a name, bytes.
const LONGEST_NAME: usize = 96;

/// The location of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In an object, at this offset.
    Offset(u64),
    /// A static field, at this address.
    Address(u64),
}

/// The parts of a JVM's description of itself that are needed.
#[derive(Clone, Debug, Default)]
pub struct Description {
    fields: HashMap<(String, String), Place>,
    sizes: HashMap<String, u64>,
    constants: HashMap<String, u64>,
}

/// A table of a JVM: its first entry, the size of an entry, and the offsets of its columns.
struct Table<const N: usize> {
    first: u64,
    stride: u64,
    columns: [u64; N],
}

impl<const N: usize> Table<N> {
    /// Finds the table `<name>s` with the columns `<name>Entry<column>Offset`.
    fn find(memory: &dyn Memory, tables: &Tables, name: &str, columns: [&str; N]) -> Result<Self, Unsupported> {
        let value = |name: &str| Ok::<_, Unsupported>(memory::word(memory, tables.address(name)?)?);
        let first = value(&format!("{name}s"))?;
        if first == 0 {
            return Err(Unsupported::NotReady);
        }
        let stride = value(&format!("{name}EntryArrayStride"))?;
        let mut places = [0; N];
        for (place, column) in places.iter_mut().zip(columns) {
            *place = value(&format!("{name}Entry{column}Offset"))?;
        }
        // The strides are set when the library is initialised.
        if stride == 0 {
            return Err(Unsupported::NotReady);
        }
        let is_inside = places.iter().all(|place| place.checked_add(8).is_some_and(|end| end <= stride));
        if stride > LONGEST_ENTRY || !is_inside {
            return Err(Unsupported::Malformed("tables"));
        }
        Ok(Self { first, stride, columns: places })
    }

    /// Calls `entry` with the columns of each entry, up to the entry whose first column is null.
    fn each(&self, memory: &dyn Memory, mut entry: impl FnMut([u64; N])) -> Result<(), Unsupported> {
        for number in 0..MOST_ENTRIES {
            let bytes = memory::bytes(memory, self.first.wrapping_add(number * self.stride), self.stride as usize)?;
            let fields = memory::Fields(&bytes);
            let mut columns = [0; N];
            for (column, place) in columns.iter_mut().zip(self.columns) {
                *column = fields.u64(place as u32)?;
            }
            if columns[0] == 0 {
                return Ok(());
            }
            entry(columns);
        }
        Err(Unsupported::Malformed("tables"))
    }
}

impl Description {
    /// Reads the tables.
    ///
    /// # Errors
    /// [`Unsupported`]
    pub fn read(memory: &dyn Memory, tables: &Tables) -> Result<Self, Unsupported> {
        let mut found = Self::default();
        // Many entries share the same string.
        let mut texts: HashMap<u64, String> = HashMap::new();
        let mut text = |address: u64| {
            let read = || memory::text(memory, address, LONGEST_NAME).unwrap_or_default();
            texts.entry(address).or_insert_with(read).clone()
        };
        let columns = ["TypeName", "FieldName", "IsStatic", "Offset", "Address"];
        let table = Table::find(memory, tables, "Struct", columns)?;
        table.each(memory, |[class, field, is_static, offset, address]| {
            let class = text(class);
            if TYPES.contains(&class.as_str()) {
                // The flag is an `int`.
                let place = if is_static as u32 == 0 { Place::Offset(offset) } else { Place::Address(address) };
                found.fields.insert((class, text(field)), place);
            }
        })?;
        let table = Table::find(memory, tables, "Type", ["TypeName", "Size"])?;
        table.each(memory, |[class, size]| {
            let class = text(class);
            if TYPES.contains(&class.as_str()) {
                found.sizes.insert(class, size);
            }
        })?;
        let table = Table::find(memory, tables, "IntConstant", ["Name", "Value"])?;
        table.each(memory, |[name, value]| {
            let name = text(name);
            if CONSTANTS.iter().any(|prefix| name.starts_with(prefix)) {
                found.constants.insert(name, u64::from(value as u32));
            }
        })?;
        Ok(found)
    }

    /// Returns the offset of a field in its object.
    #[must_use]
    pub fn offset(&self, class: &str, field: &str) -> Option<u32> {
        match self.fields.get(&(class.into(), field.into()))? {
            // Structures have a few hundred bytes.
            Place::Offset(offset) => u32::try_from(*offset).ok().filter(|offset| *offset < 1 << 16),
            Place::Address(_) => None,
        }
    }

    /// Returns the address of a static field.
    #[must_use]
    pub fn address(&self, class: &str, field: &str) -> Option<u64> {
        match self.fields.get(&(class.into(), field.into()))? {
            Place::Address(address) => Some(*address),
            Place::Offset(_) => None,
        }
    }

    /// Returns the size of a type, bytes.
    #[must_use]
    pub fn size(&self, class: &str) -> Option<u32> {
        self.sizes.get(class).and_then(|size| u32::try_from(*size).ok()).filter(|size| *size < 1 << 16)
    }

    /// Returns the value of a constant.
    #[must_use]
    pub fn constant(&self, name: &str) -> Option<u32> {
        self.constants.get(name).map(|value| *value as u32)
    }
}

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
