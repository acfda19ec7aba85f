//! CPython's object allocator: the functions that the interpreter's table of allocators leads to.
//!
//! The table has a structure for each domain, `{ctx, malloc, calloc, realloc, free}` (`PyMemAllocatorEx`): variables of their own
//! up to 3.11, members of `_PyRuntime` since 3.12. Nothing exports them. But `PyObject_Malloc` reads the second word of one,
//! `PyObject_Calloc` the third, and so on: what they refer to is read off their code, and one structure alone agrees with all.
//!
//! Compilers that optimize by profiles put the object allocator into those who call it: where the table's pointer equals the
//! function's address, a copy of the function runs instead. Then the function itself is rarely called
//! ([`ObjectTable::has_copies`]), unless the table has another pointer that leads there.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use heapbpf_elf::{Image, Segment, read_range};
use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

use crate::elf::FileImage;

/// A function that every interpreter exports.
pub const MARKER: &str = "PyObject_Malloc";

/// Functions of a domain, in the order of the table.
pub const FUNCTIONS: usize = 4;
/// Most bytes of a function that are decoded.
const MOST_CODE_BYTES: u64 = 4096;
/// Bytes of a word.
const WORD: u64 = 8;
/// Most segments with variables that are kept. Linkers make one.
const MOST_SEGMENTS: usize = 4;
/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;
/// Distance between two jumps in the room behind the code.
const JUMP_BYTES: u64 = 16;

/// The functions that read each member of a domain's structure.
const OBJECT: [&str; FUNCTIONS] = [MARKER, "PyObject_Calloc", "PyObject_Realloc", "PyObject_Free"];
const MEMORY: [&str; FUNCTIONS] = ["PyMem_Malloc", "PyMem_Calloc", "PyMem_Realloc", "PyMem_Free"];
const RAW: [&str; FUNCTIONS] = ["PyMem_RawMalloc", "PyMem_RawCalloc", "PyMem_RawRealloc", "PyMem_RawFree"];

/// Why the object allocator of an interpreter is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoObjectTable {
    /// No structure, or several, agree with the code that reads them.
    #[error("its table of allocators is not found in its code")]
    NotFound,
    /// The table leads out of the file's code.
    #[error("its table of allocators does not lead to functions of the file")]
    Elsewhere,
    /// The interpreter was built without an allocator of its own.
    #[error("it was built to call malloc for every object")]
    CallsMalloc,
}

/// The object allocator of an interpreter. Addresses are those of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectTable {
    /// The first of the four pointers of each domain that the allocator serves: objects, and `PyMem_Malloc` (the same functions in
    /// every usual build).
    pub domains: Vec<u64>,
    /// `malloc`, `calloc`, `realloc`, `free`, as the file initializes the table.
    pub functions: [u64; FUNCTIONS],
    /// Whether copies of these functions run in place of them, where the table leads to them.
    pub has_copies: bool,
    /// The functions of the raw domain, which call malloc.
    pub raw: Option<[u64; FUNCTIONS]>,
    /// The addresses of the interpreter's code.
    pub code: Vec<Range<u64>>,
    /// The addresses of its variables.
    pub data: Vec<Range<u64>>,
    /// Unused executable bytes for a jump to each function.
    room: Option<u64>,
}

impl ObjectTable {
    /// Where a part of the interpreter's data, words from an address on, leads to the functions: the table itself, and copies of it
    /// that debug hooks and tracemalloc have. Indexes of the first of four pointers each. `bias`: address in the process less
    /// address in the file.
    pub fn pointers_in(&self, words: &[u64], bias: u64) -> impl Iterator<Item = usize> {
        let wanted = self.functions.map(|function| function.wrapping_add(bias));
        words.windows(FUNCTIONS).enumerate().filter(move |(_, four)| **four == wanted).map(|(at, _)| at)
    }

    /// Jumps in unused bytes behind the file's code: the address of each, and its code. They do what the functions do, and have
    /// other addresses. `None` if there is no room.
    #[must_use]
    pub fn detours(&self) -> Option<[(u64, [u8; 5]); FUNCTIONS]> {
        let mut room = self.room?;
        let mut detours = [(0, [0; 5]); FUNCTIONS];
        for (detour, function) in detours.iter_mut().zip(self.functions) {
            let distance = i32::try_from(function.wrapping_sub(room + 5).cast_signed()).ok()?.to_le_bytes();
            *detour = (room, [0xe9, distance[0], distance[1], distance[2], distance[3]]);
            room += JUMP_BYTES;
        }
        Some(detours)
    }
}

/// Finds the object allocator of an interpreter.
///
/// # Errors
/// [`NoObjectTable`].
pub fn find(image: &FileImage, file: &dyn Image) -> Result<ObjectTable, NoObjectTable> {
    let references = |names: &[&str; FUNCTIONS]| names.map(|name| references_of(image, name));
    let (objects, memory, raw) = (references(&OBJECT), references(&MEMORY), references(&RAW));
    // A copy of a function in its caller may read the raw domain for large requests.
    let raw_tables = agreeing(&raw);
    let only = |all: BTreeSet<u64>| {
        let mut all = all.into_iter().filter(|table| !raw_tables.contains(table));
        all.next().filter(|_| all.next().is_none())
    };
    let word = |address: u64| {
        image.own_address_at(address).or_else(|| {
            let offset = image.file_offset(address)?;
            let bytes = read_range(file, "a pointer", offset, WORD, WORD).ok()?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        })
    };
    let functions = |table: u64| {
        let mut functions = [0; FUNCTIONS];
        for (function, at) in functions.iter_mut().zip(1..) {
            *function = word(table.checked_add(at * WORD)?)?;
        }
        let is_code =
            |function: &u64| image.is_executable(*function) && !image.code_between(*function, function + 1).is_empty();
        functions.iter().all(is_code).then_some(functions)
    };
    let table = only(agreeing(&objects)).ok_or(NoObjectTable::NotFound)?;
    let found = functions(table).ok_or(NoObjectTable::Elsewhere)?;
    let raw = raw_tables.iter().find_map(|raw| functions(*raw));
    if raw == Some(found) {
        return Err(NoObjectTable::CallsMalloc);
    }
    let mut domains = vec![table + WORD];
    domains.extend(only(agreeing(&memory)).filter(|other| functions(*other) == Some(found)).map(|other| other + WORD));
    let has_copies = objects.iter().chain(&memory).any(|all| found.iter().any(|function| all.contains(function)));
    let code =
        image.code().iter().map(|code| code.address..code.address.saturating_add(code.bytes.len() as u64)).collect();
    let data = image.segments().iter().filter(|segment| segment.is_writable()).map(Segment::addresses);
    let data = data.take(MOST_SEGMENTS).collect();
    Ok(ObjectTable { domains, functions: found, has_copies, raw, code, data, room: room(image) })
}

/// Unused bytes behind the code: the rest of the last page of an executable segment, which the kernel maps with it.
fn room(image: &FileImage) -> Option<u64> {
    let ends = image.segments().iter().filter(|segment| segment.is_executable() && !segment.is_writable());
    let mut ends = ends.filter_map(|segment| segment.address.checked_add(segment.file_bytes));
    ends.find_map(|end| {
        let start = end.checked_next_multiple_of(JUMP_BYTES)?;
        let needed = start.checked_add(FUNCTIONS as u64 * JUMP_BYTES)?;
        (needed <= end.checked_next_multiple_of(PAGE_BYTES)?).then_some(start)
    })
}

/// Addresses of structures whose members these functions refer to, each to its own.
fn agreeing(references: &[BTreeSet<u64>; FUNCTIONS]) -> BTreeSet<u64> {
    let [first, others @ ..] = references;
    let tables = first.iter().filter_map(|reference| reference.checked_sub(WORD));
    let agree = |table: &u64| {
        others.iter().zip(2..).all(|(all, at)| table.checked_add(at * WORD).is_some_and(|word| all.contains(&word)))
    };
    tables.filter(agree).collect()
}

/// The addresses that the code of a function refers to as data.
fn references_of(image: &FileImage, name: &str) -> BTreeSet<u64> {
    let Some((_, symbol)) = image.functions().find(|(known, _)| *known == name) else { return BTreeSet::new() };
    let bytes = if symbol.size > 0 { symbol.size.min(MOST_CODE_BYTES) } else { MOST_CODE_BYTES };
    let code = image.code_between(symbol.address, symbol.address.saturating_add(bytes));
    references(symbol.address, code, &|slot| image.own_address_at(slot))
}

/// The same of code at an address. `slot`: the address that the loader writes to a slot of the global offset table.
fn references(address: u64, code: &[u8], slot: &dyn Fn(u64) -> Option<u64>) -> BTreeSet<u64> {
    let mut found = BTreeSet::new();
    let mut registers: HashMap<Register, u64> = HashMap::new();
    for instruction in Decoder::with_ip(64, code, address, DecoderOptions::NONE) {
        let memory = memory_address(&instruction, &registers);
        found.extend(memory);
        found.extend(immediate(&instruction));
        if instruction.op0_kind() != OpKind::Register {
            continue;
        }
        let register = instruction.op0_register().full_register();
        let value = match instruction.mnemonic() {
            Mnemonic::Lea => memory,
            Mnemonic::Mov if instruction.op1_kind() == OpKind::Memory => {
                memory.filter(|_| instruction.is_ip_rel_memory_operand()).and_then(slot)
            }
            Mnemonic::Mov => immediate(&instruction),
            Mnemonic::Cmp | Mnemonic::Test | Mnemonic::Push => continue,
            _ => None,
        };
        registers.remove(&register);
        registers.extend(value.map(|value| (register, value)));
    }
    found
}

/// The address of a memory operand, if the code alone tells it.
fn memory_address(instruction: &Instruction, registers: &HashMap<Register, u64>) -> Option<u64> {
    if !(0..instruction.op_count()).any(|operand| instruction.op_kind(operand) == OpKind::Memory) {
        return None;
    }
    if instruction.is_ip_rel_memory_operand() {
        return Some(instruction.ip_rel_memory_address());
    }
    if instruction.memory_index() != Register::None {
        return None;
    }
    let displacement = instruction.memory_displacement64();
    match instruction.memory_base() {
        Register::None => Some(displacement),
        base => Some(registers.get(&base.full_register())?.wrapping_add(displacement)),
    }
}

/// An immediate operand of the width of an address.
fn immediate(instruction: &Instruction) -> Option<u64> {
    let operand = (0..instruction.op_count()).find(|operand| {
        let wide = [OpKind::Immediate32, OpKind::Immediate32to64, OpKind::Immediate64];
        wide.contains(&instruction.op_kind(*operand))
    })?;
    Some(instruction.immediate(operand))
}

#[cfg(test)]
#[path = "object_table_tests.rs"]
mod tests;
