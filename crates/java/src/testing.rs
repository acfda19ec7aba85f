//! Made-up memory for tests, of a JVM with the layout of Debian's OpenJDK 17.

use std::collections::HashMap;

use heapbpf_elf::Memory;

use crate::description::Tables;
use crate::layout::Vm;

const PAGE: u64 = 0x1000;

/// Memory in which only those pages exist that were written to.
#[derive(Default)]
pub struct Sparse(HashMap<u64, Vec<u8>>);

impl Sparse {
    /// Writes bytes to an address.
    pub fn put(&mut self, address: u64, bytes: &[u8]) {
        for (address, byte) in (address..).zip(bytes) {
            let page = self.0.entry(address / PAGE).or_insert_with(|| vec![0; PAGE as usize]);
            page[(address % PAGE) as usize] = *byte;
        }
    }

    /// Returns all nonzero bytes, in pieces of at most a page. A page of zeros is returned as one byte.
    pub fn runs(&self) -> Vec<(u64, Vec<u8>)> {
        let mut pages: Vec<_> = self.0.iter().collect();
        pages.sort();
        let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
        for (page, bytes) in pages {
            runs.push((page * PAGE, vec![bytes[0]]));
            for (address, byte) in (page * PAGE..).zip(bytes).filter(|(_, byte)| **byte != 0) {
                match runs.last_mut() {
                    // A few zeros take less space than another piece.
                    Some((start, run)) if address < *start + run.len() as u64 + 12 => {
                        run.resize((address - *start) as usize, 0);
                        run.push(*byte);
                    }
                    _ => runs.push((address, vec![*byte])),
                }
            }
        }
        runs
    }

    /// Writes a word to an address.
    pub fn word(&mut self, address: u64, word: u64) {
        self.put(address, &word.to_le_bytes());
    }

    /// Writes a 32-bit number to an address.
    pub fn int(&mut self, address: u64, int: u32) {
        self.put(address, &int.to_le_bytes());
    }

    /// Writes a 16-bit number to an address.
    pub fn short(&mut self, address: u64, short: u16) {
        self.put(address, &short.to_le_bytes());
    }
}

impl Memory for Sparse {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        for (at, byte) in buffer.iter_mut().enumerate() {
            let Some(address) = address.checked_add(at as u64) else { return false };
            let Some(page) = self.0.get(&(address / PAGE)) else { return false };
            *byte = page[(address % PAGE) as usize];
        }
        true
    }
}

/// Fields of objects: type, field, offset.
pub const FIELDS: &[(&str, &str, u64)] = &[
    ("CodeHeap", "_memory", 8),
    ("CodeHeap", "_segmap", 120),
    ("CodeHeap", "_log2_segment_size", 256),
    ("HeapBlock::Header", "_used", 8),
    ("VirtualSpace", "_low_boundary", 0),
    ("VirtualSpace", "_high_boundary", 8),
    ("VirtualSpace", "_low", 16),
    ("GrowableArrayBase", "_len", 0),
    ("GrowableArray<int>", "_data", 8),
    ("CodeBlob", "_name", 96),
    ("CodeBlob", "_size", 12),
    ("CodeBlob", "_frame_size", 28),
    ("CodeBlob", "_code_begin", 32),
    ("CompiledMethod", "_method", 112),
    ("CompiledMethod", "_scopes_data_begin", 120),
    ("CompiledMethod", "_deopt_handler_begin", 128),
    ("nmethod", "_orig_pc_offset", 300),
    ("nmethod", "_compile_id", 304),
    ("nmethod", "_scopes_pcs_offset", 268),
    ("nmethod", "_dependencies_offset", 272),
    ("nmethod", "_metadata_offset", 260),
    ("Method", "_constMethod", 8),
    ("ConstMethod", "_constants", 8),
    ("ConstMethod", "_constMethod_size", 24),
    ("ConstMethod", "_flags", 28),
    ("ConstMethod", "_code_size", 32),
    ("ConstMethod", "_name_index", 34),
    ("ConstantPool", "_pool_holder", 24),
    ("ConstantPool", "_length", 60),
    ("ConstantPool", "_source_file_name_index", 54),
    ("Klass", "_name", 24),
    ("Symbol", "_length", 4),
    ("Symbol", "_body", 6),
    // A type that is not needed.
    ("Universe", "_collectedHeap", 1),
];
/// Static fields: type, field, address.
pub const STATICS: &[(&str, &str, u64)] = &[
    ("CodeCache", "_heaps", 0x9000),
    ("StubRoutines", "_call_stub_return_address", 0x9008),
    ("Abstract_VM_Version", "_vm_major_version", 0x9010),
    ("Abstract_VM_Version", "_s_vm_release", 0x9018),
];
const SIZES: &[(&str, u64)] = &[("HeapBlock", 16), ("ConstMethod", 48), ("ConstantPool", 72)];

/// The code heap, its map, and the structure of the heap.
pub const HEAP: u64 = 0x7000_0000_0000;
/// Its end.
pub const HEAP_END: u64 = HEAP + 0x10_0000;
/// Its map of segments of 128 bytes.
pub const MAP: u64 = 0x6000_0000;
const HEAP_OBJECT: u64 = 0xa000;
/// Return address of Java code that was called from native code.
pub const CALL_STUB_RETURN: u64 = HEAP + 0x1_0000 + 0x80;
/// First entry of the table of structures, and the size of an entry.
pub const STRUCTS: u64 = 0x2_0000;
/// Size of an entry.
pub const STRIDE: u64 = 48;

/// The variables of the library, and their values.
pub const VARIABLES: &[(&str, u64)] = &[
    ("Structs", STRUCTS),
    ("StructEntryArrayStride", STRIDE),
    ("StructEntryTypeNameOffset", 0),
    ("StructEntryFieldNameOffset", 8),
    ("StructEntryIsStaticOffset", 24),
    ("StructEntryOffsetOffset", 32),
    ("StructEntryAddressOffset", 40),
    ("Types", 0x3_0000),
    ("TypeEntryArrayStride", 40),
    ("TypeEntryTypeNameOffset", 0),
    ("TypeEntrySizeOffset", 32),
    ("IntConstants", 0x4_0000),
    ("IntConstantEntryArrayStride", 16),
    ("IntConstantEntryNameOffset", 0),
    ("IntConstantEntryValueOffset", 8),
];
/// Address of the first variable; each takes a word.
const FIRST_VARIABLE: u64 = 0x8000;

/// Address of a variable.
pub fn variable(name: &str) -> u64 {
    let at = VARIABLES.iter().position(|(variable, _)| *variable == name).expect("it is one of them");
    FIRST_VARIABLE + 8 * at as u64
}

/// Returns the tables of the library.
pub fn tables() -> Tables {
    let symbols: Vec<(&str, u64)> = VARIABLES.iter().map(|(name, _)| (*name, variable(name))).collect();
    Tables::of(&symbols)
}

/// Returns the memory of a JVM whose code heap is empty.
pub fn jvm() -> Sparse {
    let mut memory = Sparse::default();
    let mut texts = 0x5_0000u64;
    let mut text = |memory: &mut Sparse, text: &str| {
        let at = texts;
        memory.put(at, text.as_bytes());
        memory.put(at + text.len() as u64, &[0]);
        texts += text.len() as u64 + 1;
        at
    };
    for (name, value) in VARIABLES {
        memory.word(variable(name), *value);
    }
    let mut entry = STRUCTS;
    for (is_static, (class, field, place)) in FIELDS.iter().map(|it| (0, it)).chain(STATICS.iter().map(|it| (1, it))) {
        let (class, field) = (text(&mut memory, class), text(&mut memory, field));
        memory.word(entry, class);
        memory.word(entry + 8, field);
        memory.int(entry + 24, is_static);
        memory.word(entry + 32 + 8 * u64::from(is_static), *place);
        entry += STRIDE;
    }
    memory.word(entry, 0);
    memory.put(entry + 8, &[0; 64]);
    for (number, (class, size)) in (0..).zip(SIZES) {
        let class = text(&mut memory, class);
        memory.word(0x3_0000 + number * 40, class);
        memory.word(0x3_0000 + number * 40 + 32, *size);
    }
    for (number, (name, value)) in
        (0..).zip([("ConstMethod::_has_linenumber_table", 1), ("frame::interpreter_frame_sender_sp_offset", u32::MAX)])
    {
        let name = text(&mut memory, name);
        memory.word(0x4_0000 + number * 16, name);
        memory.int(0x4_0000 + number * 16 + 8, value);
    }
    // One heap.
    memory.word(0x9000, 0x9100);
    memory.word(0x9008, CALL_STUB_RETURN);
    memory.int(0x9010, 17);
    let release = text(&mut memory, "17.0.15+6\x1b[31m");
    memory.word(0x9018, release);
    memory.int(0x9100, 1);
    memory.word(0x9108, 0x9200);
    memory.word(0x9200, HEAP_OBJECT);
    memory.word(HEAP_OBJECT + 8, HEAP);
    memory.word(HEAP_OBJECT + 16, HEAP_END);
    memory.word(HEAP_OBJECT + 120 + 16, MAP);
    memory.int(HEAP_OBJECT + 256, 7);
    memory.put(MAP, &[0xff; ((HEAP_END - HEAP) >> 7) as usize]);
    memory
}

/// Reads the JVM in some memory.
pub fn vm_in(memory: &Sparse) -> Vm {
    Vm::read(memory, &tables()).expect("it is understood")
}

/// Adds a blob of this size, in bytes, at a distance from the heap's start. Returns its address.
pub fn put_blob(memory: &mut Sparse, distance: u64, bytes: u64, frame_words: u32, name: &str) -> u64 {
    let block = HEAP + distance;
    let first = distance >> 7;
    memory.put(block, &vec![0; bytes as usize]);
    for (back, segment) in (first..=(distance + bytes - 1) >> 7).enumerate() {
        // Distant segments refer to nearer ones, because the distance does not fit into a byte.
        memory.put(MAP + segment, &[if back <= 200 { back as u8 } else { 200 }]);
    }
    memory.put(block + 8, &[1]);
    let start = block + 16;
    let name_at = 0x6_0000 + distance;
    memory.put(name_at, name.as_bytes());
    memory.put(name_at + name.len() as u64, &[0; 64]);
    memory.word(start + 96, name_at);
    memory.int(start + 12, (bytes - 16) as u32);
    memory.int(start + 28, frame_words);
    memory.word(start + 32, start + 0x170);
    start
}

/// Adds a method `first` of class `a/b/C` in file `C.java` at an address, with these bytes as line numbers.
pub fn put_method(memory: &mut Sparse, method: u64, lines: &[u8]) {
    let [constant, pool, class] = [method + 0x100, method + 0x400, method + 0x600];
    memory.put(method, &[0; 0x1000]);
    memory.word(method + 8, constant);
    memory.word(constant + 8, pool);
    memory.int(constant + 24, (48 + 20 + lines.len() as u32).div_ceil(8));
    memory.short(constant + 28, 1);
    memory.short(constant + 32, 20);
    memory.short(constant + 34, 1);
    memory.put(constant + 48 + 20, lines);
    memory.word(pool + 24, class);
    memory.int(pool + 60, 3);
    memory.short(pool + 54, 2);
    memory.word(class + 24, method + 0x700);
    memory.word(pool + 72 + 8, method + 0x740);
    memory.word(pool + 72 + 16, method + 0x780);
    for (symbol, text) in [(0x700, "a/b/C"), (0x740, "first"), (0x780, "C.java")] {
        memory.short(method + symbol + 4, text.len() as u16);
        memory.put(method + symbol + 6, text.as_bytes());
    }
}
