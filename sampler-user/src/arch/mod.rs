//! This machine: numbers of registers, what a call leaves where, what a signal saves, where the kernel keeps what.
//!
//! One module per architecture, of which only this machine's is compiled. What is known of the *files* of every
//! architecture (instructions, which of them can be probed) is in [`crate::attach::arch`].

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

/// What the kernel saves of the interrupted code, by distance from the stack pointer at the signal trampoline, bytes.
#[derive(Clone, Copy, Debug)]
pub struct SignalFrame {
    /// Registers by DWARF's numbers.
    pub registers: &'static [(u16, u64)],
    /// Stack pointer.
    pub sp: u64,
    /// Instruction pointer.
    pub ip: u64,
}

/// Trampolines made at run time that keep nothing but their return address.
#[derive(Clone, Copy, Debug)]
pub struct BareTrampoline {
    /// What they take of the stack below their return address, bytes.
    pub kept_bytes: u64,
    /// Whether a call instruction may end with these bytes.
    pub ends_in_call: fn(&[u8; LONGEST_CALL]) -> bool,
}

/// Whether this test runs in an emulator of programs, which `cargo xtask test --target` says: the kernel below is another
/// machine's, and what is emulated has gaps. A test that meets one says so and is skipped.
#[cfg(test)]
pub fn is_emulated(gap: &str) -> bool {
    let emulator = std::env::var("HEAPBPF_EMULATOR").unwrap_or_default();
    if !emulator.is_empty() {
        crate::testing::skipped(format_args!("{emulator}: {gap}"));
    }
    !emulator.is_empty()
}
