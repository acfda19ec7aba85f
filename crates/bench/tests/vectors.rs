//! The library against the numbers of an independent computation (50 digits), each within the tolerance that its file
//! states.

use std::path::Path;
use std::process::Command;

/// Runs the checker on a directory. Returns whether it succeeded, and its output.
fn check(dir: &Path) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_heapbpf-vectors")).arg(dir).output().expect("the checker runs");
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

fn vectors() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors"))
}

#[test]
fn all_agree() {
    let (success, printed) = check(vectors());
    assert!(success, "{printed}");
    let last = printed.lines().last().unwrap_or_default();
    let passed: u64 = last.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or_default();
    assert!(passed > 4_000 && last.ends_with("passed, 0 failed"), "{last}");
}
