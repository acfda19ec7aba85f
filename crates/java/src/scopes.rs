//! Finds the methods that run at a place of compiled code: the compiled method, and the methods inlined into it.

use heapbpf_elf::Memory;

use crate::code::{Blob, Kind, reach};
use crate::layout::{Metadata, Vm};
use crate::memory::{self, Fields, ReadError, Stream};

/// Size of a place description, bytes: offset in the code, offset of the scope, two other numbers.
const PLACE_BYTES: u64 = 16;
/// Maximum number of places in a method.
const MOST_PLACES: u64 = 1 << 20;
/// Maximum depth of inlining.
const MOST_SCOPES: usize = 64;
/// Number of bytes of a scope description that are read: three numbers.
const SCOPE_BYTES: usize = 15;
/// Largest offset of a scope, and largest number of a method that a scope refers to.
const LARGEST_OFFSET: u32 = 1 << 28;

/// A method and its current bytecode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope {
    /// Address of the method.
    pub method: u64,
    /// Index of the bytecode; `None` before the first one.
    pub bytecode: Option<u32>,
}

/// Returns the methods that run at return address `pc` of compiled code, innermost first. If there is no description
/// for that address, returns only the compiled method.
///
/// # Errors
/// [`ReadError`]
pub fn scopes(memory: &dyn Memory, vm: &Vm, blob: &Blob, pc: u64) -> Result<Vec<Scope>, ReadError> {
    if blob.kind != Kind::Compiled {
        return Ok(Vec::new());
    }
    let alone = || vec![Scope { method: blob.method, bytecode: None }];
    let at = vm.layout.compiled;
    let fields = blob.fields();
    let base = match at.immutable_data {
        Some(data) => fields.u64(data)?,
        None => blob.start,
    };
    let (first, end) = (reach(base, &fields, at.places.0)?, reach(base, &fields, at.places.1)?);
    let count = end.checked_sub(first).ok_or(ReadError::Malformed)? / PLACE_BYTES;
    let Some(mut offset) = find_place(memory, (first, count), pc.wrapping_sub(blob.code))? else { return Ok(alone()) };
    let stream = reach(base, &fields, at.scopes)?;
    let methods = match at.metadata {
        Metadata::Inside(distance) => blob.start.wrapping_add(fields.u32(distance)?.into()),
        Metadata::Behind(data, bytes) => {
            let bytes = u64::from(fields.u32(bytes)?);
            fields.u64(data)?.wrapping_add(bytes.next_multiple_of(8))
        }
    };
    let mut found = Vec::new();
    while offset != 0 && found.len() < MOST_SCOPES {
        let (caller, scope) = read_scope(memory, vm, (stream, offset), methods)?;
        found.push(scope);
        offset = caller;
    }
    Ok(if found.is_empty() { alone() } else { found })
}

/// Returns the scope offset of the first place at or after a code offset. Places are sorted.
fn find_place(memory: &dyn Memory, (first, count): (u64, u64), offset: u64) -> Result<Option<u32>, ReadError> {
    if count > MOST_PLACES {
        return Err(ReadError::Malformed);
    }
    let place = |number: u64| {
        let bytes = memory::bytes(memory, first.wrapping_add(number * PLACE_BYTES), PLACE_BYTES as usize)?;
        let fields = Fields(&bytes);
        Ok((i64::from(fields.u32(0)?.cast_signed()), fields.u32(4)?))
    };
    let offset = i64::try_from(offset).map_err(|_| ReadError::Malformed)?;
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = u64::midpoint(low, high);
        if place(middle)?.0 < offset { low = middle + 1 } else { high = middle }
    }
    if low == count {
        return Ok(None);
    }
    let (_, scope) = place(low)?;
    Ok((scope != 0 && scope < LARGEST_OFFSET).then_some(scope))
}

/// Reads the scope at an offset of a stream. Also returns the offset of the scope that it is inlined into, or 0.
fn read_scope(
    memory: &dyn Memory,
    vm: &Vm,
    (stream, offset): (u64, u32),
    methods: u64,
) -> Result<(u32, Scope), ReadError> {
    let bytes = memory::bytes(memory, stream.wrapping_add(offset.into()), SCOPE_BYTES)?;
    let mut numbers = Stream::new(&bytes, vm.layout.without_zeros);
    let mut next = || numbers.number().ok_or(ReadError::Malformed);
    let (caller, method, bytecode) = (next()?, next()?, next()?);
    if caller >= LARGEST_OFFSET || method == 0 || method >= LARGEST_OFFSET {
        return Err(ReadError::Malformed);
    }
    let method = memory::word(memory, methods.wrapping_add(u64::from(method - 1) * 8))?;
    Ok((caller, Scope { method, bytecode: bytecode.checked_sub(1) }))
}
