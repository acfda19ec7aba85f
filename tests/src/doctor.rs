//! Output of `heapbpf doctor --json`.

use std::process::Command;

use serde_json::Value;

use crate::environment::heapbpf;

/// Runs doctor with these arguments. Returns its exit status and JSON.
///
/// # Panics
/// If it prints no JSON.
pub fn doctor(arguments: &[&str]) -> (Option<i32>, Value) {
    let output = Command::new(heapbpf()).args(["doctor", "--json"]).args(arguments).output().expect("the binary runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let json = serde_json::from_str(&text)
        .unwrap_or_else(|e| panic!("{e}: {text}{}", String::from_utf8_lossy(&output.stderr)));
    (output.status.code(), json)
}

/// doctor's exit status, and what it reports about one process.
///
/// # Panics
/// As [`doctor`].
pub fn doctor_of(pid: u32) -> (Option<i32>, Value) {
    let (status, found) = doctor(&["--pid", &pid.to_string()]);
    (status, found["processes"][0].clone())
}

/// What doctor prints about one process for people.
///
/// # Panics
/// If it does not run.
pub fn doctor_text_of(pid: u32) -> String {
    let output = Command::new(heapbpf()).args(["doctor", "--pid", &pid.to_string()]).output();
    String::from_utf8_lossy(&output.expect("the binary runs").stdout).into_owned()
}

/// Runs `doctor --clean` for one process. Returns what it printed, and its exit status.
///
/// # Panics
/// If it does not run.
pub fn clean(pid: u32) -> (String, Option<i32>) {
    let output = Command::new(heapbpf()).args(["doctor", "--clean", "--pid", &pid.to_string()]).output();
    let output = output.expect("the binary runs");
    let said = [output.stdout, output.stderr].concat();
    (String::from_utf8_lossy(&said).into_owned(), output.status.code())
}
