//! Copies Python code objects, which contain the function, file and lines of a frame.
//!
//! The daemon could read them itself, but only as long as the process lives and keeps them. Here they are certain to
//! exist, because the calling thread runs them. Each is copied once, when it first appears in a sampled stack.

use core::ffi::c_void;
use core::ptr::read_volatile;

use aya_ebpf::bindings::BPF_RB_NO_WAKEUP;
use aya_ebpf::helpers::generated::{bpf_probe_read_user, bpf_ringbuf_submit};
use sampler_ebpf::abi::{
    PYTHON_CODES, PYTHON_HEAD_BYTES, PYTHON_LINES_BYTES, PYTHON_TEXT_BYTES, ProcessKey, PythonCodeRecord, PythonCopy,
    PythonFrame, PythonProcess,
};

use crate::maps;

/// Size of a string's head: its length is the word at [`LENGTH`], and its kind is in the word at [`STATE`].
const TEXT_HEAD: u64 = 40;
const LENGTH: usize = 16;
const STATE: usize = 32;
/// Size of the largest head of a string. An ASCII string lacks the last part of it.
const COMPACT_HEAD: u64 = 72;
const ASCII_LACKS: u64 = 24;
const IS_ASCII: u64 = 1 << 6;
/// Size of the head of a bytes object, whose length is at [`LENGTH`].
const BYTES_HEAD: u64 = 32;

/// Reports the code object of a frame, if it has not appeared in a stack yet. There are few branches, because the
/// verifier follows each of them for every state that may precede it.
///
/// # Safety
/// `frame` must be valid for reads.
#[inline(never)]
pub unsafe fn report(layout: &PythonProcess, space: &ProcessKey, frame: *const PythonFrame) {
    // SAFETY: the caller promises it.
    let (code, check) = unsafe { (read_volatile(&raw const (*frame).code), read_volatile(&raw const (*frame).check)) };
    let mark = mark_of(space, code, check);
    let Some(known) = maps::PYTHON_CODES.get_ptr_mut((mark >> 32) as u32 % PYTHON_CODES) else { return };
    // SAFETY: the pointer is to the map's value, an aligned u64. If the object is new to two CPUs at once, both report
    // it.
    if unsafe { read_volatile(known) } == mark || check == 0 || layout.code_bytes == 0 {
        return;
    }
    let Some(ring) = maps::stacks() else { return };
    let record = ring.reserve(size_of::<PythonCodeRecord>() as u64).cast::<PythonCodeRecord>();
    if record.is_null() {
        // It is reported with the next stack that contains it, or the daemon reads it.
        return;
    }
    // SAFETY: the reservation has the record's size, and is submitted here and nowhere else. The pointers and words
    // that are read lie within the copies.
    unsafe {
        (*record).mark = PythonCodeRecord::MARK;
        (*record).space = *space;
        (*record).check = check;
        copy(&raw mut (*record).head, code, u64::from(layout.code_bytes));
        copy_text(&raw mut (*record).name, pointer(record, layout.code_name));
        copy_text(&raw mut (*record).file, pointer(record, layout.code_file));
        let lines = &raw mut (*record).lines;
        let address = pointer(record, layout.code_lines);
        copy(lines, address, BYTES_HEAD);
        let length = word(lines, LENGTH);
        let most = PYTHON_LINES_BYTES as u64 - 1 - BYTES_HEAD;
        copy(lines, address, BYTES_HEAD + if length > most { most } else { length });
        bpf_ringbuf_submit(record.cast(), u64::from(BPF_RB_NO_WAKEUP));
        known.write_volatile(mark);
    }
}

/// Returns a number that stands for a code object of a process.
#[inline(always)]
fn mark_of(space: &ProcessKey, code: u64, check: u64) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let process = space.start_ns.rotate_left(32) ^ u64::from(space.tgid) ^ u64::from(space.exec_id) << 40;
    let mixed = (process.wrapping_mul(FACTOR) ^ code).wrapping_mul(FACTOR) ^ check;
    let mixed = (mixed ^ mixed >> 29).wrapping_mul(FACTOR);
    // Elements of the map that have not been written yet are zero.
    mixed | 1
}

/// Reads a pointer in the code object.
///
/// # Safety
/// `record` must be valid for reads.
#[inline(always)]
unsafe fn pointer(record: *const PythonCodeRecord, offset: u32) -> u64 {
    // SAFETY: the caller promises it. The word lies within the copy of a code object, or extends into that of its name,
    // which follows it.
    unsafe { word(&raw const (*record).head, offset as usize & (PYTHON_HEAD_BYTES - 1)) }
}

/// Copies a string: first its head, which has the length, and then all of it. If the string is too long, only a part is
/// copied.
///
/// # Safety
/// As for [`copy`].
#[inline(always)]
unsafe fn copy_text(to: *mut PythonCopy<PYTHON_TEXT_BYTES>, address: u64) {
    // SAFETY: the caller promises it. The words that are read lie within the copy.
    unsafe {
        copy(to, address, TEXT_HEAD);
        let state = word(to, STATE);
        let head = COMPACT_HEAD - (state & IS_ASCII) / IS_ASCII * ASCII_LACKS;
        copy(to, address, head + word(to, LENGTH) * (state >> 2 & 7));
    }
}

/// Reads a word of a copy.
///
/// # Safety
/// The word must lie within the copy, which must be valid for reads.
#[inline(always)]
unsafe fn word<const BYTES: usize>(copy: *const PythonCopy<BYTES>, at: usize) -> u64 {
    // SAFETY: the caller promises it.
    unsafe { read_volatile((&raw const (*copy).bytes).cast::<u8>().add(at).cast::<u64>()) }
}

/// Copies bytes of the target's memory: `bytes` modulo `BYTES`, which is a power of two, so there is always space for
/// them.
///
/// # Safety
/// `to` must be valid for writes.
#[inline(always)]
unsafe fn copy<const BYTES: usize>(to: *mut PythonCopy<BYTES>, address: u64, bytes: u64) {
    let bytes = bytes as u32 & (BYTES as u32 - 1);
    // SAFETY: the caller promises it, and `bytes` is less than the space available. The helper checks the address
    // itself.
    unsafe {
        let status = bpf_probe_read_user((&raw mut (*to).bytes).cast(), bytes, address as *const c_void);
        (*to).address = address;
        (*to).asked = bytes;
        (*to).status = status as i32;
    }
}
