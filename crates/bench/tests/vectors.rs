//! The library against the numbers of an independent computation (50 digits), each within the tolerance that its file
//! states.

use std::path::Path;
use std::process::Command;

/// Runs the checker on a folder. Returns whether it succeeded, and its output.
fn check(folder: &Path) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_heapbpf-vectors")).arg(folder).output().expect("the checker runs");
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

#[test]
fn a_wrong_number_is_found() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let text = std::fs::read_to_string(vectors().join("trials.json")).expect("in the repository");
    let wrong = text.replacen("377739", "377749", 1);
    assert_ne!(wrong, text);
    std::fs::write(folder.path().join("trials.json"), wrong).expect("writable");
    let (success, printed) = check(folder.path());
    assert!(!success && printed.trim_end().ends_with("1 failed"), "{printed}");
}
