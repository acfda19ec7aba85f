//! What tests of all parts share, those of `tests` too.

use std::fmt::Display;
use std::io::Write as _;
use std::thread;

/// Tells the person who runs the tests that this one, or a part of it, did not run, and why.
pub fn skipped(why: impl Display) {
    let thread = thread::current();
    let test = thread.name().unwrap_or("a test");
    // Not eprintln!: the test runner hides that of a test which passes, and this must be seen.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}
