//! Copies stacks without most of their outer frames.
//!
//! Some programs have large variables in `main` or in the functions where their threads begin. These frames stay there
//! all the time, and walks read only a few words of them. The daemon records these words, and the return addresses that
//! lead to the frames ([`OuterFrames`]). As long as these return addresses are in place, only these words are copied.
//! If they are there by chance, among the variables of another frame, a walk misses words: it ends there and reports
//! that.
//! words: it ends there, and says so.

use core::ffi::c_void;

use aya_ebpf::bindings::BPF_RB_NO_WAKEUP;
use aya_ebpf::helpers::generated::{bpf_loop, bpf_probe_read_user, bpf_ringbuf_discard, bpf_ringbuf_submit};
use sampler_ebpf::abi::{
    FEW_STACK_BYTES, OUTER_PIECE_BYTES, OUTER_PIECES, OuterCopy, OuterFrames, StackKey, StackPiece, StackRecord,
    StackSlot, copy_end, ring,
};

use crate::config::config;
use crate::maps::OUTER_FRAMES;
use crate::memory::read_user;
use crate::output;
use crate::ring_array::Ring;
use crate::stack_record::{HEADER, Source, unknown};
use crate::steps::{GO_ON, STOP};

/// Number of bytes before the inner frames.
const OUTER: u64 = HEADER + size_of::<OuterCopy>() as u64;
const WORD: u64 = 8;

/// Copies the stack, whose top is at this distance from the stack pointer, without the unread parts of its outer
/// frames. Returns whether that was possible: the outer frames are known and in place. (An unknown distance is larger
/// than all others.)
///
/// A separate function: when it returns, the verifier continues with one state, whatever path was taken.
#[inline(never)]
pub fn copy(ring: Ring, source: &Source<'_>, distance: u64) -> bool {
    if distance <= FEW_STACK_BYTES || distance > config!(stack_bytes) {
        return false;
    }
    let top = source.registers.sp + distance;
    let key = StackKey { space: source.state.space, top };
    // SAFETY: the value is only used in this run. If another CPU replaces it at the same time, it may be a mixture of
    // both, but it consists of integers, each of which is read once and checked.
    let Some(outer) = (unsafe { OUTER_FRAMES.get(key) }) else { return false };
    let inner = outer.slots[0].address.wrapping_sub(source.registers.sp).wrapping_add(WORD);
    if inner.wrapping_sub(WORD) > (64 << 10) - WORD || outer.slots.iter().any(|slot| !is_there(slot)) {
        return false;
    }
    if inner <= 8 << 10 {
        return copy_into::<{ 8 << 10 }>(ring, source, outer, (inner, top));
    }
    copy_into::<{ 64 << 10 }>(ring, source, outer, (inner, top))
}

/// Whether the return address is in place.
#[inline(always)]
fn is_there(slot: &StackSlot) -> bool {
    read_user::<u64>(slot.address) == Some(slot.return_address)
}

#[inline(always)]
fn copy_into<const CLASS: u64>(ring: Ring, source: &Source<'_>, outer: &OuterFrames, (inner, top): (u64, u64)) -> bool {
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
    let mut pieces = Pieces { record, outer, copied: 0, missing: 0 };
    // SAFETY: the function has the type that the helper calls, and gets this context, which outlives the call.
    unsafe { bpf_loop(OUTER_PIECES as u32, copy_piece as *mut c_void, (&raw mut pieces).cast(), 0) };
    if status != 0 || pieces.missing != 0 {
        // A page is not in memory.
        // SAFETY: the record is a reservation, and is not used afterwards.
        unsafe { bpf_ringbuf_discard(record.cast(), u64::from(BPF_RB_NO_WAKEUP)) };
        return false;
    }
    let flags = output::wake_up(ring::STACKS, OUTER + CLASS);
    // SAFETY: the reservation begins with the header, and is submitted here and nowhere else.
    unsafe {
        (*record).ends_at = copy_end::TOP;
        (*record).top = top;
        (*record).copied_bytes = bytes as u32;
        (*record).pieces = pieces.copied;
        bpf_ringbuf_submit(record.cast(), flags);
    }
    true
}

/// State of a copy in pieces.
struct Pieces<'a> {
    record: *mut StackRecord,
    outer: &'a OuterFrames,
    /// Number of pieces copied.
    copied: u32,
    /// 1 if a piece was not in memory.
    missing: u32,
}

/// Copies the piece with this index, if there is one. The verifier checks this function once instead of once per piece.
///
/// # Safety
/// `context` points to [`Pieces`], whose record has space for a header and an [`OuterCopy`].
unsafe extern "C" fn copy_piece(index: u64, context: *mut c_void) -> i64 {
    // SAFETY: `copy_into` passes `Pieces`, which outlive the loop.
    let pieces = unsafe { &mut *context.cast::<Pieces<'_>>() };
    let index = unknown(index);
    if index >= OUTER_PIECES as u64 {
        return STOP;
    }
    // SAFETY: the pointer is to a value of the map, and the index is within bounds.
    let StackPiece { start, bytes } =
        unsafe { (&raw const pieces.outer.pieces).cast::<StackPiece>().add(index as usize).read_volatile() };
    let mut bytes = unknown(bytes);
    if bytes == 0 {
        return STOP;
    }
    if bytes > OUTER_PIECE_BYTES as u64 {
        bytes = OUTER_PIECE_BYTES as u64;
    }
    // SAFETY: the index is within bounds, and `bytes` is at most the space of the piece. The helper checks `start`
    // itself.
    let status = unsafe {
        let copy = pieces.record.cast::<u8>().add(HEADER as usize).cast::<OuterCopy>();
        let place = (&raw mut (*copy).pieces).cast::<StackPiece>().add(index as usize);
        place.write(StackPiece { start, bytes });
        let to = (&raw mut (*copy).bytes).cast::<u8>().add(index as usize * OUTER_PIECE_BYTES);
        bpf_probe_read_user(to.cast(), bytes as u32, start as *const c_void)
    };
    if status != 0 {
        pieces.missing = 1;
        return STOP;
    }
    pieces.copied += 1;
    GO_ON
}
