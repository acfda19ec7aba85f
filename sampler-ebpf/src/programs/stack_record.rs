//! The header of a stack's copy.

use sampler_ebpf::abi::{Registers, StackRecord};

use crate::memory::copy_words;
use crate::thread::ThreadState;

/// Bytes of the header.
pub const HEADER: u64 = size_of::<StackRecord>() as u64;

/// The stack that was taken, for the allocation's record.
pub struct Taken {
    /// One of [`sampler_ebpf::abi::stack_kind`].
    pub kind: u32,
    /// Key in the kernel's stack map.
    pub id: i32,
}

impl Taken {
    /// A stack that was not taken by the kernel.
    pub const fn of_kind(kind: u32) -> Self {
        Self { kind, id: -1 }
    }
}

/// What the header of a copy is made of. The header itself would take a third of the stack that programs have.
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
    /// `record` points to room for a header.
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
    // SAFETY: `begin` passes references, and room for the header.
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

/// The same value, which the compiler knows nothing of. What it knows it leaves out, and verifiers before Linux 6.8 forget
/// a bound that was checked on another copy of a value.
#[inline(always)]
pub fn unknown(value: u64) -> u64 {
    // SAFETY: the pointer is to a local.
    unsafe { (&raw const value).read_volatile() }
}
