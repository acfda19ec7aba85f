//! What the tests of all crates share: saying that a test, or a part of it, did not run.
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
//! # the_compiler_s_library_is_unwound();
//! ```

#![forbid(unsafe_code)]

use std::fmt::Display;
use std::io::Write as _;
use std::thread;

/// Prints that the running test, or a part of it, did not run, and why.
pub fn skipped(why: impl Display) {
    let thread = thread::current();
    let test = thread.name().unwrap_or("a test");
    // Not eprintln!: the test runner captures it, and hides the output of tests that pass.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}

/// Whether this test runs under an emulator of another architecture: `cargo xtask test --target` names it in
/// `HEAPBPF_EMULATOR`. If so, prints that the test is skipped, because of this `gap` in what the emulator does.
pub fn is_emulated(gap: &str) -> bool {
    let emulator = std::env::var("HEAPBPF_EMULATOR").unwrap_or_default();
    if !emulator.is_empty() {
        skipped(format_args!("{emulator}: {gap}"));
    }
    !emulator.is_empty()
}
