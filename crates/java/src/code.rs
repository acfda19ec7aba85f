//! The code at an address: which blob of which code heap contains it, and what kind of code it is.

use heapbpf_elf::Memory;

use crate::layout::{CodeHeap, Reach, Vm};
use crate::memory::{self, Fields, ReadError, digest};

/// A byte of the segment map that marks an unused segment.
const FREE: u8 = 0xff;
/// Number of map bytes per read, and maximum number of reads: enough for the interpreter, the largest blob.
const MAP_PIECE: u64 = 4096;
const MOST_PIECES: usize = 64;
/// Maximum size of a blob's head, bytes.
const LARGEST_HEAD: u32 = 1024;
/// Largest frame, words.
const LARGEST_FRAME: u32 = 1 << 17;
/// Maximum length of a blob's name, bytes.
const LONGEST_NAME: usize = 96;

/// The kind of code in a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The interpreter.
    Interpreter,
    /// A compiled method, or the transition from Java to a native method.
    Compiled,
    /// Anything else: adapters, stubs, calls into the runtime.
    Stub,
}

/// A piece of code that is allocated and freed as a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// Its address.
    pub start: u64,
    /// Its end.
    pub end: u64,
    /// Address of its first instruction.
    pub code: u64,
    /// The kind of code.
    pub kind: Kind,
    /// Frame size of its code, bytes; 0 if it varies.
    pub frame_bytes: u64,
    /// HotSpot's name for it.
    pub name: String,
    /// The method that it was compiled from; 0 if it is not a compiled method.
    pub method: u64,
    /// A checksum that almost certainly changes if something else is at its address.
    pub check: u64,
    head: Box<[u8]>,
}

impl Blob {
    /// Finds the blob at an address of a code heap; `None` if there is none, or it has been freed.
    ///
    /// # Errors
    /// [`ReadError`]
    pub fn find(memory: &dyn Memory, vm: &Vm, address: u64) -> Result<Option<Self>, ReadError> {
        let Some(heap) = vm.heap(address) else { return Ok(None) };
        let Some(segment) = first_segment(memory, heap, address)? else { return Ok(None) };
        let block = heap.start + (segment << heap.shift);
        let mut used = [0];
        if !memory.read(block.wrapping_add(vm.layout.heap.used.into()), &mut used) {
            return Err(ReadError::Unreadable);
        }
        if used == [0] {
            return Ok(None);
        }
        let blob = Self::read(memory, vm, block.wrapping_add(vm.layout.heap.block_head.into()))?;
        let is_inside = (blob.start..blob.end).contains(&address) && blob.end <= heap.end;
        if is_inside { Ok(Some(blob)) } else { Err(ReadError::Malformed) }
    }

    /// Reads the blob that begins at an address.
    ///
    /// # Errors
    /// [`ReadError`]
    pub fn read(memory: &dyn Memory, vm: &Vm, start: u64) -> Result<Self, ReadError> {
        let layout = vm.layout;
        let head = memory::bytes(memory, start, head_bytes(vm))?.into_boxed_slice();
        let fields = Fields(&head);
        let size = fields.u32(layout.blob.size)?;
        let frame_size = fields.u32(layout.blob.frame_size)?;
        let name_at = fields.u64(layout.blob.name)?;
        let code = reach(start, &fields, layout.blob.code)?;
        let end = start.checked_add(size.into()).ok_or(ReadError::Malformed)?;
        if !(start..=end).contains(&code) {
            return Err(ReadError::Malformed);
        }
        let name = memory::text(memory, name_at, LONGEST_NAME)?;
        let kind = match name.as_str() {
            "Interpreter" => Kind::Interpreter,
            "nmethod" | "native nmethod" => Kind::Compiled,
            _ => Kind::Stub,
        };
        let (method, compile_id) = match kind {
            Kind::Compiled => (fields.u64(layout.compiled.method)?, fields.u32(layout.compiled.compile_id)?),
            _ => (0, 0),
        };
        let frame_bytes = if frame_size <= LARGEST_FRAME { u64::from(frame_size) * 8 } else { 0 };
        let check = digest(&[start, size.into(), frame_size.into(), name_at, code, method, compile_id.into()]);
        Ok(Self { start, end, code, kind, frame_bytes, name, method, check, head })
    }

    /// Whether an address is in the blob.
    #[must_use]
    pub fn contains(&self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }

    pub(crate) fn fields(&self) -> Fields<'_> {
        Fields(&self.head)
    }

    /// Returns where frames that return to `address` keep their real return address, if their compiled code is no
    /// longer valid: its distance from the frame's stack pointer, bytes.
    #[must_use]
    pub fn original_pc(&self, vm: &Vm, address: u64) -> Option<u64> {
        if self.kind != Kind::Compiled {
            return None;
        }
        let handler = reach(self.start, &self.fields(), vm.layout.compiled.deopt_handler?).ok()?;
        // It is followed by another handler, for method handle calls.
        let is_handler = address >= handler && self.contains(handler);
        let distance = u64::from(self.fields().u32(vm.layout.compiled.original_pc).ok()?);
        (is_handler && distance < self.frame_bytes).then_some(distance)
    }
}

/// Resolves a reference from an object, which begins at `start` and has these `fields`.
pub(crate) fn reach(start: u64, fields: &Fields, to: Reach) -> Result<u64, ReadError> {
    match to {
        Reach::Pointer(at) => fields.u64(at),
        Reach::Distance(at) => Ok(start.wrapping_add(fields.u32(at)?.into())),
    }
}

/// Returns the size of the head that contains all fields that are read, bytes. After a smaller blob, this reads into
/// the next one.
fn head_bytes(vm: &Vm) -> usize {
    let of = |to: Reach| match to {
        Reach::Pointer(at) | Reach::Distance(at) => at,
    };
    let (blob, compiled) = (vm.layout.blob, vm.layout.compiled);
    let fields = [blob.name, blob.size, blob.frame_size, of(blob.code), compiled.method, compiled.compile_id];
    let others = [compiled.original_pc, of(compiled.places.0), of(compiled.places.1), of(compiled.scopes)];
    let rest = [compiled.deopt_handler.map_or(0, of), compiled.immutable_data.unwrap_or(0)];
    let metadata = match compiled.metadata {
        crate::layout::Metadata::Inside(at) => [at, at],
        crate::layout::Metadata::Behind(at, bytes) => [at, bytes],
    };
    let last = fields.into_iter().chain(others).chain(rest).chain(metadata).max().unwrap_or(0);
    (last + 8).min(LARGEST_HEAD) as usize
}

/// Returns the first segment of the block that contains an address. Each byte of the map says how many segments to go
/// back, at most.
fn first_segment(memory: &dyn Memory, heap: &CodeHeap, address: u64) -> Result<Option<u64>, ReadError> {
    let mut segment = (address - heap.start) >> heap.shift;
    for _ in 0..MOST_PIECES {
        let first = segment.saturating_sub(MAP_PIECE - 1);
        let map = memory::bytes(memory, heap.map.wrapping_add(first), (segment - first + 1) as usize)?;
        loop {
            match map[(segment - first) as usize] {
                FREE => return Ok(None),
                0 => return Ok(Some(segment)),
                back => segment = segment.checked_sub(back.into()).ok_or(ReadError::Malformed)?,
            }
            if segment < first {
                break;
            }
        }
    }
    Err(ReadError::Malformed)
}
