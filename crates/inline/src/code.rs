//! The blob's shared code, in the form that its crate provides.

/// The code that all hooked functions share, and the offsets of its entries.
#[derive(Clone, Copy, Debug)]
pub struct Code<'a> {
    /// The instructions.
    pub bytes: &'a [u8],
    /// Offsets into them.
    pub entries: Entries,
}

/// Offsets of entries into the shared code.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entries {
    /// A counted allocation whose countdown has ended: `rax` size, `r10` slot, `r11` its
    /// [`Function`](crate::abi::Function).
    pub allocation_ends_countdown: u32,
    /// An allocation of an unusual size, or without a slot of its own, not counted yet: registers as above.
    pub allocation: u32,
    /// A reallocation of a block that may be sampled: `r11` its function.
    pub reallocation: u32,
    /// A free of a block that may be sampled: `r11` its function.
    pub free: u32,
    /// A call whose size does not fit into 64 bits: `r10` slot, `r11` its function.
    pub refused: u32,
    /// A subroutine. In: `rax` thread pointer, `r10` its first slot, `r11` the slots. Out: `r10` the thread's slot, or
    /// the shared one and the carry flag.
    pub claim: u32,
    /// A function as in C: `fn(random: u64, constants: *const DrawConstants) -> u64`.
    pub draw: u32,
    /// Site [`SYMBOL_RESULT`](sampler_ebpf::abi::inline::SYMBOL_RESULT).
    pub site_result: u32,
    /// Site [`SYMBOL_FREEING`](sampler_ebpf::abi::inline::SYMBOL_FREEING).
    pub site_freeing: u32,
    /// Site [`SYMBOL_REALLOCATING`](sampler_ebpf::abi::inline::SYMBOL_REALLOCATING).
    pub site_reallocating: u32,
    /// Site [`SYMBOL_UNSEEN`](sampler_ebpf::abi::inline::SYMBOL_UNSEEN).
    pub site_unseen: u32,
    /// First instruction with a frame of [`FRAME_BYTES`] on the stack while the original function runs.
    pub framed: u32,
    /// First instruction without that frame again.
    pub framed_end: u32,
}

/// Bytes between the stack pointer and the return address while the shared code has a frame.
pub const FRAME_BYTES: u32 = 104;
