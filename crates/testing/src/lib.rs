//! Shared by the tests of all crates: reporting that a test, or a part of it, did not run.
//!
//! ```
//! use heapbpf_testing::{is_emulated, skipped};
//!
//! fn the_compiler_s_library_is_unwound() {
//!     if is_emulated("no signal handlers") {
//!         return;
//!     }
//!     let Ok(library) = std::fs::read("/usr/lib/libexample.so") else {
//!         skipped("libexample.so is not installed");
//!         return;
//!     };
//!     assert!(!library.is_empty());
//! }
//! ```

#![deny(unsafe_code)]

#[cfg(feature = "grpc")]
pub mod grpc;
#[cfg(feature = "own-process")]
#[allow(unsafe_code)]
pub mod own_process;
mod random;
#[cfg(feature = "silent")]
#[allow(unsafe_code)]
pub mod silent;

use std::fmt::Display;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::thread;

pub use random::Random;

/// Reports that the running test, or a part of it, did not run, and why.
pub fn skipped(why: impl Display) {
    let thread = thread::current();
    skipped_case(thread.name().unwrap_or("a test"), why);
}

/// Does the same for a test with this name. Prints it, and appends a line (name, tab, reason) to the file that
/// `HEAPBPF_SKIPPED` names. `cargo xtask test` lists these lines.
pub fn skipped_case(test: &str, why: impl Display) {
    let why = why.to_string().replace(['\n', '\t'], " ");
    // Not eprintln!, because the test runner captures that and hides the output of tests that pass.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
    if let Some(path) = std::env::var_os("HEAPBPF_SKIPPED") {
        // One write, so that lines of concurrent tests do not mix.
        let line = format!("{test}\t{why}\n");
        let written = File::options().append(true).open(&path).and_then(|mut file| file.write_all(line.as_bytes()));
        written.unwrap_or_else(|error| panic!("a skip cannot be told in {}: {error}", path.display()));
    }
}

/// Whether this test runs under an emulator of another architecture. `cargo xtask test --target` names it in
/// `HEAPBPF_EMULATOR`. If so, reports that the test is skipped because of this `gap` in the emulator.
pub fn is_emulated(gap: &str) -> bool {
    let emulator = std::env::var("HEAPBPF_EMULATOR").unwrap_or_default();
    if !emulator.is_empty() {
        skipped(format_args!("{emulator}: {gap}"));
    }
    !emulator.is_empty()
}

/// Reads the BPF programs that `HEAPBPF_BPF_OBJECT` names, or else those that `cargo xtask build` made for this
/// machine.
///
/// # Errors
/// They cannot be read, mostly because they are not built.
pub fn bpf_object() -> std::io::Result<Vec<u8>> {
    let built =
        || concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/bpf/bpfel-unknown-none/bpf/heapbpf-probes").into();
    std::fs::read(std::env::var_os("HEAPBPF_BPF_OBJECT").unwrap_or_else(built))
}

/// Returns the BPF programs, if they can be loaded into the kernel from here. If not, reports why the test is skipped.
pub fn programs_to_load() -> Option<Vec<u8>> {
    if cannot_load_programs() {
        return None;
    }
    let object = bpf_object();
    if object.is_err() {
        skipped("the BPF object is not built");
    }
    object.ok()
}

/// Whether programs cannot be loaded into the kernel from here: under an emulator, or without root. If so, reports that
/// the test is skipped.
fn cannot_load_programs() -> bool {
    if is_emulated("no bpf(2)") {
        return true;
    }
    // The kernel reports a process's own directory as owned by its effective user.
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|dir| dir.uid() == 0);
    if !is_root {
        skipped("loading BPF programs needs root");
    }
    !is_root
}
