//! Facts of the architecture: register numbers, what a call leaves where, what a signal saves.
//!
//! One module per architecture, of which only that of the target is compiled.

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
/// bytes.
#[derive(Clone, Copy, Debug)]
pub struct SignalFrame {
    /// DWARF number and distance of each register.
    pub registers: &'static [(u16, u64)],
    /// Stack pointer.
    pub sp: u64,
    /// Instruction pointer.
    pub ip: u64,
}

/// Trampolines made at run time that save only their return address.
#[derive(Clone, Copy, Debug)]
pub struct BareTrampoline {
    /// Stack that they use below their return address, bytes.
    pub kept_bytes: u64,
    /// Whether a call instruction may end with these bytes.
    pub ends_in_call: fn(&[u8; LONGEST_CALL]) -> bool,
}
