//! The `heapbpf` command. It is a crate of its own so that the daemon's compiles while the BPF programs are built.

use std::process::ExitCode;

/// Bytes with the alignment that an ELF file's tables need.
#[repr(C, align(8))]
struct Aligned<T: ?Sized>(T);

/// The BPF programs as an ELF object; empty if they were not built before.
static OBJECT: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/heapbpf-probes")));

fn main() -> ExitCode {
    sampler_user::command::run(&OBJECT.0)
}
