//! heapbpf still writes its profile when standard error cannot be written to, because its reader is gone or the disk is
//! full.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use heapbpf_tests::environment::{heapbpf, turn};
use heapbpf_tests::program::program;
use heapbpf_tests::target::{Lines, Target, wait};
use heapbpf_tests::{checks, output};
use tempfile::TempDir;

/// Standard error streams that fail on every write.
fn deaf() -> [(&'static str, Stdio); 2] {
    let full = File::options().write(true).open("/dev/full").expect("every Linux has it");
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    [("a full disk", full.into()), ("a closed pipe", writer.into())]
}

/// Runs heapbpf in a directory, expects exit status 0, and returns its standard output.
fn run<'a>(dir: &Path, arguments: impl IntoIterator<Item = &'a str>, what: &str, stderr: Stdio) -> String {
    let mut command = Command::new(heapbpf());
    command.current_dir(dir).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr);
    let mut child = command.spawn().expect("the binary under test runs");
    let stdout = Lines::of(child.stdout.take().expect("piped"));
    let status = wait(&mut child, "heapbpf");
    assert_eq!(status.code(), Some(0), "{what}: {status}");
    stdout.rest().join("\n")
}

/// Records with these options, checks the files that were written, and returns standard output.
fn record(options: &[&str], what: &str, stderr: Stdio) -> String {
    let dir = TempDir::with_prefix("heapbpf-test-").expect("a temporary directory");
    // Make the log write something, too.
    let always = ["-vv", "-q", "--interval", "1", "--group-by", "pid", "-o", "profile.json", "--stats", "stats.json"];
    let shown = run(dir.path(), always.into_iter().chain(options.iter().copied()), what, stderr);
    let at = |name: &str| dir.path().join(name);
    checks::always(&output::read(&at("profile.json")), &output::read(&at("stats.json")));
    shown
}

#[test]
fn a_process_is_recorded() {
    let Some(_turn) = turn("a_process_is_recorded") else { return };
    let target = Target::start(&program("pairs"), ["500"]);
    let pid = target.pid().to_string();
    for (what, stderr) in deaf() {
        record(&["--pid", &pid, "--duration", "500ms", "--listen", "127.0.0.1:0"], what, stderr);
    }
}

#[test]
fn a_command_runs() {
    let Some(_turn) = turn("a_command_runs") else { return };
    for (what, stderr) in deaf() {
        assert_eq!(record(&["--", "sh", "-c", "echo ran"], what, stderr), "ran", "{what}");
    }
}

#[test]
fn a_profile_gets_its_names() {
    let Some(_turn) = turn("a_profile_gets_its_names") else { return };
    let dir = TempDir::with_prefix("heapbpf-test-").expect("a temporary directory");
    std::fs::write(dir.path().join("known.heap"), "heap_v2/524288\n  t*: 1: 100 [0: 0]\n").expect("our own directory");
    for (what, stderr) in deaf() {
        let shown = run(dir.path(), ["report", "known.heap", "--symbolize"], what, stderr);
        assert!(shown.contains("in use"), "{what}: {shown}");
    }
}
