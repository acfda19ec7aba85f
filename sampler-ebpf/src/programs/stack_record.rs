//! The header of a stack copy.

use sampler_ebpf::abi::{Registers, StackRecord};

use crate::memory::copy_words;
use crate::thread::ThreadState;

/// Size of the header, bytes.
pub const HEADER: u64 = size_of::<StackRecord>() as u64;

/// The result of capturing a stack, for the allocation's record.
pub struct Taken {
    /// One of [`sampler_ebpf::abi::stack_kind`].
    pub kind: u32,
    /// Key in the kernel's stack map.
    pub id: i32,
}

impl Taken {
    /// The result for a stack that is not in the kernel's stack map.
    pub const fn of_kind(kind: u32) -> Self {
        Self { kind, id: -1 }
    }
}

/// The data for the header of a copy. The header itself would take a third of the BPF stack.
pub struct Source<'a> {
    pub registers: &'a Registers,
    pub state: &'a ThreadState,
    pub sample: u64,
    pub time_ns: u64,
}

impl Source<'_> {
    /// Writes the header of a copy that has no bytes yet.
    ///
    /// # Safety
    /// `record` points to space for a header.
    #[inline(always)]
    pub unsafe fn begin(&self, record: *mut StackRecord) {
        write_header(record, self.registers, self.state, self.sample, self.time_ns);
    }
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn write_header(
    record: *mut StackRecord,
    registers: *const Registers,
    state: *const ThreadState,
    sample: u64,
    time_ns: u64,
) -> u32 {
    // SAFETY: `begin` passes references, and space for the header.
    unsafe {
        let (false, Some(registers), Some(state)) = (record.is_null(), registers.as_ref(), state.as_ref()) else {
            return 0;
        };
        (*record).sample = sample;
        (*record).time_ns = time_ns;
        copy_words(&raw const state.space, &raw mut (*record).space);
        copy_words(registers, &raw mut (*record).registers);
        (*record).copied_bytes = 0;
        (*record).missing_pages = 0;
        (*record).pieces = 0;
        state.write_in_flight_calls((&raw mut (*record).in_flight).cast());
    }
    0
}

/// Returns the same value, but hides what the compiler knows about it. The compiler omits checks that it can prove, and
/// verifiers before Linux 6.8 forget a bound that was checked on another copy of a value.
#[inline(always)]
pub fn unknown(value: u64) -> u64 {
    // SAFETY: the pointer is to a local.
    unsafe { (&raw const value).read_volatile() }
}
