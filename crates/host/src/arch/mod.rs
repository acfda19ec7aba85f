//! The architecture of this machine: offsets in kernel structures, and one microbenchmark per kind of instruction.
//!
//! One module per architecture; only this machine's is compiled. What applies to *files* of every architecture
//! (instructions, and which of them can be probed) is in `heapbpf_probes`.

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
