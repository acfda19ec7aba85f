//! Formats checked by the programs that read them. A program that is not installed is skipped, loudly.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{WriteOptions, by_name};
use crate::profile::model::Profile;
use crate::profile::output::Output;
use crate::profile::testing;
use crate::profile::value::Value;

/// A folder with the profile in it, in the format.
fn written(profile: &Profile, file: &str, format: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join(file);
    let format = by_name(format).expect("known");
    Output::new(&path, format, false).write(profile, &WriteOptions::default()).expect("written");
    (folder, path)
}

/// Whether the program is there; says loudly if not.
fn installed(program: &str, argument: &str, package: &str) -> bool {
    let found = Command::new(program).arg(argument).output().is_ok_and(|output| output.status.success());
    if !found {
        println!("skipped: {program} is not installed (Debian package {package})");
    }
    found
}

fn run(command: &mut Command) -> String {
    let output = command.output().expect("started");
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {error}");
    out.into_owned()
}

fn go_pprof(arguments: &[&str], file: &Path) -> String {
    // No look-ups of binaries: paths of the profile are not of this host.
    let mut command = Command::new("go");
    run(command.args(["tool", "pprof", "-symbolize=none"]).args(arguments).arg(file).env("PPROF_BINARY_PATH", "/"))
}

#[test]
fn go_tool_pprof_reads_pprof() {
    if !installed("go", "version", "golang-go") {
        return;
    }
    let profile = testing::small();
    let (_folder, file) = written(&profile, "x.pb.gz", "pprof");
    let top = go_pprof(&["-top", "-unit=B", "-nodecount=50"], &file);
    print!("{top}");
    assert!(top.contains("Type: inuse_space"), "{top}");
    let total = profile.rows.iter().map(|row| row.inuse.bytes).sum::<f64>().round();
    assert!(top.contains(&format!("100% of {total}B total")) || top.contains(&format!("{total}B")), "{top}");
    for function in ["grow", "parse_value", "handle", "main"] {
        assert!(top.lines().any(|line| line.contains(function)), "{function} in {top}");
    }
    let raw = go_pprof(&["-raw"], &file);
    print!("{raw}");
    for expected in [
        "PeriodType: space bytes",
        "Period: 524288",
        "alloc_objects/count alloc_space/bytes inuse_objects/count inuse_space/bytes[dflt]",
        "/usr/lib/libjson.so 0102030405060708",
        "interval=524288",
        "pid:[4242",
        "thread:[worker]",
    ] {
        assert!(raw.contains(expected), "{expected} in {raw}");
    }
    let tags = go_pprof(&["-tags", "-unit=B"], &file);
    print!("{tags}");
    assert!(tags.contains("4242") && tags.contains("server"), "{tags}");
    let focused = go_pprof(&["-top", "-tagfocus=pid=4300:4300", "-unit=B", "-sample_index=alloc_space"], &file);
    print!("{focused}");
}

/// What pprof writes of what it read is what it reads again: the same stacks, values, labels, mappings.
#[test]
fn go_tool_pprof_round_trip_changes_nothing() {
    if !installed("go", "version", "golang-go") {
        return;
    }
    let (folder, file) = written(&testing::small(), "x.pb.gz", "pprof");
    let again = folder.path().join("again.pb.gz");
    go_pprof(&["-proto", &format!("-output={}", again.display())], &file);
    assert_eq!(go_pprof(&["-raw"], &file), go_pprof(&["-raw"], &again));
}

#[test]
fn go_tool_pprof_subtracts_a_profile_from_itself() {
    if !installed("go", "version", "golang-go") {
        return;
    }
    let (_folder, file) = written(&testing::large(200, 12), "x.pb.gz", "pprof");
    let base = format!("-diff_base={}", file.display());
    for value in Value::ALL {
        let top = go_pprof(&["-top", &base, &format!("-sample_index={}", value.name())], &file);
        assert!(top.contains("Showing nodes accounting for 0"), "{top}");
    }
}
