//! Architecture-specific facts: register numbers, where a call leaves the return address, what a signal saves.
//!
//! There is one module per architecture; only the target's is compiled.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("an architecture needs a module of its own, beside x86_64.rs and aarch64.rs");

/// Where the kernel saves the registers of interrupted code: distances from the stack pointer at the signal trampoline,
/// in bytes.
#[derive(Clone, Copy, Debug)]
pub struct SignalFrame {
    /// DWARF number and distance of each register.
    pub registers: &'static [(u16, u64)],
    /// Stack pointer.
    pub sp: u64,
    /// Instruction pointer.
    pub ip: u64,
}

/// Trampolines generated at run time that save only their return address.
#[derive(Clone, Copy, Debug)]
pub struct BareTrampoline {
    /// Stack space that they use below their return address, bytes.
    pub kept_bytes: u64,
    /// Whether these bytes may end in a call instruction.
    pub ends_in_call: fn(&[u8; LONGEST_CALL]) -> bool,
}
