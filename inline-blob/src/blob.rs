//! The blob's code for x86-64.
//!
//! Everything here follows from three facts. At a function's entry `rax`, `r10` and `r11` are free, and nothing lives
//! below the stack pointer. Signals do not split single instructions. A thread's slot is its own, but the thread's
//! signal handlers use it too. `heapbpf_inline::abi` describes the layout of memory, `sampler_ebpf::abi::inline` the
//! registers at the sites.

use core::arch::global_asm;
use core::mem::offset_of;
use core::slice;

use heapbpf_inline::abi::{
    CODE, CONTROL, CRITERION_BYTES, Control, DRAWS, FILTER, FILTER_BYTES, FUNCTION_OF_OBJECTS, FUNCTION_OUT,
    FUNCTION_REFERENCE_SECOND, FUNCTION_REFERENCE_THIRD, FUNCTION_SWAPPED, FUNCTION_THROWS, FUNCTION_ZERO_FREES,
    Function, HASH, HASH_SHIFT, HEADER, HEADER_RDRAND, Header, INSIDE_BYTES, LARGE_BYTES, NO_ARGUMENT, PAUSES_AT_ONCE,
    SET, SLOTS, SLOTS_OFFSET, STATE, Slot, TABLES, Totals, WINDOW_BYTES,
};
use heapbpf_inline::{Code, Entries, FRAME_BYTES};
use sampler_ebpf::abi::inline::flag;
use sampler_ebpf::geometric::{DrawConstants, ENTRIES, INVERSE_LN_2, ONE_THIRD};

// SAFETY: the assembler below defines these three with these types; none of them is written.
unsafe extern "C" {
    static heapbpf_inline_code: u8;
    static heapbpf_inline_code_end: u8;
    static heapbpf_inline_entries: Entries;
}

/// See [`crate::code`].
pub(crate) fn code() -> Code<'static> {
    // SAFETY: the assembler below defines the three symbols, in read-only data. The code lies between the first two,
    // and the third has one `u32` per field of the plain structure.
    unsafe {
        let start = &raw const heapbpf_inline_code;
        let length = (&raw const heapbpf_inline_code_end).offset_from_unsigned(start);
        Code { bytes: slice::from_raw_parts(start, length), entries: heapbpf_inline_entries }
    }
}

const SLOT_BYTES: u64 = size_of::<Slot>() as u64;
const _: () = assert!(SLOT_BYTES == 128 && size_of::<Function>() == 32 && size_of::<DrawConstants>() == 24);

global_asm!(
    include_str!("blob.s"),
    CODE = const CODE,
    HEADER = const HEADER,
    FUNCTIONS = const HEADER + size_of::<Header>() as u64,
    TABLES = const TABLES,
    RECIPROCALS = const TABLES + 8 * ENTRIES as u64,
    CONTROL = const CONTROL,
    STATE = const STATE,
    SLOTS = const SLOTS_OFFSET,
    SLOTS_BYTES = const SLOTS as u64 * SLOT_BYTES,
    SLOT_BYTES = const SLOT_BYTES,
    HASH = const HASH,
    HASH_SHIFT = const HASH_SHIFT,
    SHARED = const STATE + offset_of!(Totals, shared) as u64,
    FILTER = const FILTER,
    FILTER_MASK = const FILTER_BYTES - 1,
    SET = const SET,
    WINDOW = const WINDOW_BYTES / 8,
    FRAME = const FRAME_BYTES,
    H_CRITERION = const offset_of!(Header, criterion),
    H_SET_MASK = const offset_of!(Header, set_mask),
    H_FLAGS = const offset_of!(Header, flags),
    CRITERION_BYTES = const CRITERION_BYTES,
    HEADER_RDRAND = const HEADER_RDRAND,
    C_DRAW = const offset_of!(Control, draw),
    C_SEED = const offset_of!(Control, seed),
    C_PAUSED = const offset_of!(Control, paused),
    C_DRAWS = const offset_of!(Control, draws),
    C_GRANTED = const offset_of!(Control, granted),
    C_MOST_PAUSES = const offset_of!(Control, most_pauses),
    C_PAUSES_END = const offset_of!(Control, pauses_end),
    C_PASSED = const offset_of!(Control, passed),
    C_GIVEN_UP = const offset_of!(Control, given_up),
    C_PAUSES = const offset_of!(Control, pauses),
    C_DRAWN = const offset_of!(Control, drawn),
    DRAWS_MASK = const DRAWS - 1,
    D_MULTIPLIER = const offset_of!(DrawConstants, multiplier),
    D_SHIFT = const offset_of!(DrawConstants, shift),
    S_COUNTDOWN = const offset_of!(Slot, countdown),
    S_CALLS = const offset_of!(Slot, calls),
    S_BYTES = const offset_of!(Slot, bytes),
    S_SAMPLED = const offset_of!(Slot, sampled),
    S_SAMPLED_CALL = const offset_of!(Slot, sampled_call),
    S_SAMPLED_BYTES = const offset_of!(Slot, sampled_bytes),
    S_REPORTED = const offset_of!(Slot, reported),
    S_FAILED = const offset_of!(Slot, failed),
    S_UNSAMPLED_FAILED = const offset_of!(Slot, unsampled_failed),
    S_INTERVAL = const offset_of!(Slot, interval),
    S_RANDOM = const offset_of!(Slot, random),
    S_FREES_MATCHED = const offset_of!(Slot, frees_matched),
    S_INSIDE = const offset_of!(Slot, inside),
    S_ZERO_REALLOCS = const offset_of!(Slot, zero_reallocs),
    T_THREADS = const offset_of!(Totals, threads),
    T_SLOTS_FULL = const offset_of!(Totals, slots_full),
    T_SET_FULL = const offset_of!(Totals, set_full),
    T_MAY_WAIT = const offset_of!(Totals, may_wait),
    T_IS_ORIGINAL = const offset_of!(Totals, is_original),
    PAUSES_AT_ONCE = const PAUSES_AT_ONCE,
    F_NUMBER = const offset_of!(Function, number),
    F_FLAGS = const offset_of!(Function, flags),
    F_ORIGINAL = const offset_of!(Function, original),
    F_TWIN = const offset_of!(Function, twin),
    F_SIZE = const offset_of!(Function, size_argument),
    F_TIMES = const offset_of!(Function, times_argument),
    F_OLD = const offset_of!(Function, old_argument),
    NO_ARGUMENT = const NO_ARGUMENT,
    ZERO_FREES = const FUNCTION_ZERO_FREES,
    OUT = const FUNCTION_OUT,
    OF_OBJECTS = const FUNCTION_OF_OBJECTS,
    INSIDE_BYTES = const INSIDE_BYTES,
    THROWS = const FUNCTION_THROWS,
    REFERENCE_SECOND = const FUNCTION_REFERENCE_SECOND,
    REFERENCE_THIRD = const FUNCTION_REFERENCE_THIRD,
    SWAPPED = const FUNCTION_SWAPPED,
    LARGE_BYTES = const LARGE_BYTES,
    SAMPLED = const flag::SAMPLED,
    FAILED = const flag::FAILED,
    SHARED_SLOT = const flag::SHARED_SLOT,
    UNTRACKED = const flag::UNTRACKED,
    INVERSE_LN_2 = const INVERSE_LN_2,
    ONE_THIRD = const ONE_THIRD,
);
