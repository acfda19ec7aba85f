//! Copies of stacks without most of their outer frames.
//!
//! Some programs have large variables in `main` or where their threads begin, and these frames are there all the time. Walks read a
//! few words of them. The daemon notes which, and which return addresses lead there ([`OuterFrames`]). As long as these are in
//! their places, only these words are copied. If they are there by chance, among the variables of another frame, a walk misses
//! words: it ends there, and says so.

use core::ffi::c_void;

use aya_ebpf::bindings::BPF_RB_NO_WAKEUP;
use aya_ebpf::helpers::generated::{bpf_probe_read_user, bpf_ringbuf_discard, bpf_ringbuf_submit};
use sampler_ebpf::abi::{
    OUTER_PIECE_BYTES, OUTER_PIECES, OuterCopy, OuterFrames, StackKey, StackPiece, StackRecord, StackSlot, copy_end,
};

use crate::maps::OUTER_FRAMES;
use crate::memory::read_user;
use crate::output;
use crate::ring_array::Ring;
use crate::stack_record::{HEADER, Source, unknown};

/// Bytes before the inner frames.
const OUTER: u64 = HEADER + size_of::<OuterCopy>() as u64;
const WORD: u64 = 8;

/// Copies the stack without what is not read of its outer frames. Returns whether it could: they are known, and they are there.
#[inline(always)]
pub fn copy(ring: Ring, source: &Source<'_>) -> bool {
    let key = StackKey { space: source.state.space, top: source.top };
    // SAFETY: the value is used in this run only. If another CPU replaces it meanwhile, it may be a mixture of both, but it consists
    // of integers, each of which is read once and checked.
    let Some(outer) = (unsafe { OUTER_FRAMES.get(key) }) else { return false };
    let inner = outer.slots[0].address.wrapping_sub(source.registers.sp).wrapping_add(WORD);
    if inner.wrapping_sub(WORD) > (64 << 10) - WORD || outer.slots.iter().any(|slot| !is_there(slot)) {
        return false;
    }
    if inner <= 4 << 10 {
        return copy_into::<{ 4 << 10 }>(ring, source, outer, inner);
    }
    if inner <= 16 << 10 {
        return copy_into::<{ 16 << 10 }>(ring, source, outer, inner);
    }
    copy_into::<{ 64 << 10 }>(ring, source, outer, inner)
}

/// Whether the return address is in its place.
#[inline(always)]
fn is_there(slot: &StackSlot) -> bool {
    read_user::<u64>(slot.address) == Some(slot.return_address)
}

#[inline(always)]
fn copy_into<const CLASS: u64>(ring: Ring, source: &Source<'_>, outer: &OuterFrames, inner: u64) -> bool {
    let record = ring.reserve(OUTER + CLASS).cast::<StackRecord>();
    if record.is_null() {
        return false;
    }
    // SAFETY: the reservation begins with the header.
    unsafe { source.begin(record) };
    let mut bytes = unknown(inner);
    if bytes > CLASS {
        bytes = CLASS;
    }
    let sp = source.registers.sp;
    // SAFETY: the reservation has OUTER + CLASS bytes, and `bytes` is at most CLASS. The helper checks `sp` itself.
    let status = unsafe {
        bpf_probe_read_user(record.cast::<u8>().add(OUTER as usize).cast(), bytes as u32, sp as *const c_void)
    };
    let mut pieces = 0;
    let mut is_whole = status == 0;
    for index in 0..OUTER_PIECES {
        // SAFETY: the pointer is to a value of the map, and the index is within bounds.
        let StackPiece { start, bytes } = unsafe { (&raw const outer.pieces[index]).read_volatile() };
        if bytes == 0 {
            break;
        }
        // SAFETY: the reservation begins with the header and the outer copy.
        is_whole &= unsafe { copy_piece(record, index, start, bytes) };
        pieces = index as u32 + 1;
    }
    if !is_whole {
        // A page is not in memory.
        // SAFETY: the record is a reservation, and is not used afterwards.
        unsafe { bpf_ringbuf_discard(record.cast(), u64::from(BPF_RB_NO_WAKEUP)) };
        return false;
    }
    let flags = output::wake_up(ring, OUTER + CLASS);
    // SAFETY: the reservation begins with the header, and is submitted here and nowhere else.
    unsafe {
        (*record).ends_at = copy_end::TOP;
        (*record).copied_bytes = bytes as u32;
        (*record).pieces = pieces;
        bpf_ringbuf_submit(record.cast(), flags);
    }
    true
}

/// Copies one piece; `false` if it is not in memory.
///
/// # Safety
/// `record` points to room for a header and an [`OuterCopy`], and `index` is less than [`OUTER_PIECES`].
#[inline(always)]
unsafe fn copy_piece(record: *mut StackRecord, index: usize, start: u64, bytes: u64) -> bool {
    let mut bytes = unknown(bytes);
    if bytes > OUTER_PIECE_BYTES as u64 {
        bytes = OUTER_PIECE_BYTES as u64;
    }
    // SAFETY: the caller's promise; `bytes` is at most what the piece has room for. The helper checks `start` itself.
    unsafe {
        let copy = record.cast::<u8>().add(HEADER as usize).cast::<OuterCopy>();
        (*copy).pieces[index] = StackPiece { start, bytes };
        bpf_probe_read_user((&raw mut (*copy).bytes[index]).cast(), bytes as u32, start as *const c_void) == 0
    }
}
