//! Finds CPython's object allocator: the functions in the interpreter's table of allocators.
//!
//! The table has a structure for each domain, `{ctx, malloc, calloc, realloc, free}` (`PyMemAllocatorEx`): separate
//! variables up to 3.11, members of `_PyRuntime` since 3.12. No symbol exports them. But `PyObject_Malloc` reads the
//! second word of one, `PyObject_Calloc` the third, and so on. So the addresses are taken from their code, and exactly
//! one structure agrees with all of it.
//!
//! Compilers with profile-guided optimisation copy the object allocator into its callers: where the table's pointer
//! equals the function's address, a copy of the function runs instead. Then the function itself is rarely called
//! ([`ObjectTable::has_copies`]), unless the table has another pointer that leads there.

use std::collections::{BTreeSet, HashMap};

use heapbpf_audit::Missing;
use heapbpf_elf::{Image, Segment, read_range};
use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

use crate::elf::{CodeSection, FileImage};
use crate::object_table::{FUNCTIONS, JUMP_BYTES, MARKER, NoObjectTable, ObjectTable};
use crate::table::Table;

/// Most bytes of a function that are decoded.
const MOST_CODE_BYTES: u64 = 4096;
/// Bytes of a word.
const WORD: u64 = 8;
/// Most segments with variables that are kept. Linkers make one.
const MOST_SEGMENTS: usize = 4;
/// Bytes behind the code that are left free for the instructions with which a command waits at its entry point
/// (`heapbpf-remote`).
const WAITING_BYTES: u64 = 128;
/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;

/// For each member of a domain's structure, the functions that read it.
const OBJECT: [&str; FUNCTIONS] = [MARKER, "PyObject_Calloc", "PyObject_Realloc", "PyObject_Free"];
const MEMORY: [&str; FUNCTIONS] = ["PyMem_Malloc", "PyMem_Calloc", "PyMem_Realloc", "PyMem_Free"];
const RAW: [&str; FUNCTIONS] = ["PyMem_RawMalloc", "PyMem_RawCalloc", "PyMem_RawRealloc", "PyMem_RawFree"];

/// Finds an interpreter's object allocator in a file; `None` if the file has no interpreter, or cannot be read.
#[must_use]
pub fn object_table(file: &dyn Image, path: &str) -> Option<Result<ObjectTable, NoObjectTable>> {
    let image = FileImage::read_if(file, path, FileImage::has_objects).ok()?;
    image.has_objects().then(|| find(&image, file))
}

/// Finds an interpreter's object allocator.
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
        let is_code = |function: &u64| image.is_executable(*function) && image.has_code(*function);
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
    let code = image.code.iter().map(CodeSection::addresses).collect();
    let data = image.segments().iter().filter(|segment| segment.is_writable()).map(Segment::addresses);
    let data = data.take(MOST_SEGMENTS).collect();
    Ok(ObjectTable { domains, functions: found, has_copies, raw, code, data, unused: unused(image) })
}

/// Unused bytes behind the code, at the end of the last page of an executable segment, which the kernel maps with it.
/// Directly behind the code a command may wait at its entry point ([`WAITING_BYTES`]).
fn unused(image: &FileImage) -> Option<u64> {
    let ends = image.segments().iter().filter(|segment| segment.is_executable() && !segment.is_writable());
    let mut ends = ends.filter_map(|segment| segment.address.checked_add(segment.file_bytes));
    ends.find_map(|end| {
        let start = end.checked_next_multiple_of(PAGE_BYTES)?.checked_sub(FUNCTIONS as u64 * JUMP_BYTES)?;
        (end.checked_add(WAITING_BYTES)? <= start).then_some(start)
    })
}

/// Addresses of structures to whose members these functions refer, each to its own.
fn agreeing(references: &[BTreeSet<u64>; FUNCTIONS]) -> BTreeSet<u64> {
    let [first, others @ ..] = references;
    let tables = first.iter().filter_map(|reference| reference.checked_sub(WORD));
    let agree = |table: &u64| {
        others.iter().zip(2..).all(|(all, at)| table.checked_add(at * WORD).is_some_and(|word| all.contains(&word)))
    };
    tables.filter(agree).collect()
}

/// The addresses to which the code of a function refers as data.
fn references_of(image: &FileImage, name: &str) -> BTreeSet<u64> {
    let Some((_, symbol)) = image.functions().find(|(known, _)| *known == name) else { return BTreeSet::new() };
    let bytes = if symbol.size > 0 { symbol.size.min(MOST_CODE_BYTES) } else { MOST_CODE_BYTES };
    let code = image.code_between(symbol.address, symbol.address.saturating_add(bytes));
    references(symbol.address, &code, &|slot| image.own_address_at(slot))
}

/// The same for code at an address. `slot` returns the address that the loader writes to a slot of the global offset
/// table.
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

/// The address of a memory operand, if it follows from the code.
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

/// The consequence of copies of an interpreter's object allocator, if it has some.
pub fn copies(image: &FileImage, table: &Table) -> Option<Missing> {
    let objects = image.objects.as_ref().filter(|_| table.has_objects())?.as_ref().ok()?;
    let why = match objects.detours() {
        Some(_) => {
            "the compiler inlined these functions into callers: during a recording, heapbpf redirects pointers in \
             the process so that calls avoid the copies"
        }
        None => {
            "the compiler inlined these functions into callers, and there is no space to redirect calls: most \
             objects are not counted"
        }
    };
    objects.has_copies.then(|| Missing::new("Python objects", why))
}

/// Why an interpreter's objects are not counted, if they should be.
pub fn missing_objects(image: &FileImage, table: &Table) -> Option<Missing> {
    let why = image.objects.as_ref().filter(|_| table.has_objects())?.as_ref().err()?;
    Some(Missing::new("Python's object allocator", why.to_string()))
}

#[cfg(test)]
#[path = "object_search_tests.rs"]
mod tests;
