//! The tables in which HotSpot describes itself: field locations, type sizes, constants.
//!
//! Every build has them, because debuggers such as `jhsdb` rely on them.

use std::collections::HashMap;

use heapbpf_elf::Memory;

use crate::library::Tables;
use crate::memory;
use crate::unsupported::Unsupported;

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
