//! Where the resident memory of a process is, for a program that has some of every kind.

use std::process::Command;

use heapbpf_tests::environment::{heapbpf, turn};
use heapbpf_tests::output;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Resident memory of a process as the kernel counts it, bytes.
fn resident_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it has memory");
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib * 1024
}

#[test]
fn the_parts_of_resident_memory_add_up() {
    let Some(_turn) = turn("the_parts_of_resident_memory_add_up") else { return };
    let mut target = Target::start::<&str>(&program("resident"), []);
    let recording = Recorder::of(target.pid(), 4096).start();
    let truth = target.run();
    let outcome = recording.stop();
    let resident = resident_bytes(target.pid());

    outcome.results();
    let file = outcome.file("profile.json");
    let profile: Value = output::read(&file);
    let of = &profile["processes"][0]["resident"];
    let part = |name: &str| of[name].as_u64().unwrap_or_else(|| panic!("no {name} in {of}"));
    let parts = ["heap", "files", "stacks", "shared", "jit_code", "heapbpf", "other"];
    let sum: u64 = parts.iter().map(|name| part(name)).sum();
    // The kernel counts pages of each CPU together only from time to time: up to 64 a CPU and kind (Linux, mm/memory.c).
    assert!(sum.abs_diff(resident) <= 4 * MIB, "{sum} in parts, {resident} resident: {of}");

    let within = |name: &str, range: std::ops::Range<u64>| {
        assert!(range.contains(&part(name)), "{name}: {} MiB are not in {range:?} bytes", part(name) / MIB);
    };
    // Both heaps, with what was freed in them. What is older is one block, in a mapping of its own that nobody sampled.
    within("heap", 16 * MIB..18 * MIB);
    within("stacks", 4 * MIB..5 * MIB);
    within("shared", 12 * MIB..13 * MIB);
    within("jit_code", 2 * MIB..3 * MIB);
    assert!((1..=512 << 10).contains(&part("heapbpf")), "{of}");
    within("other", 30 * MIB..31 * MIB);
    within("at_attach", 24 * MIB..25 * MIB);

    let live: u64 = ["site_00", "site_01"].iter().map(|name| truth.site(name).live_bytes).sum();
    assert_eq!(live, 8 * MIB);
    let report =
        Command::new(heapbpf()).args(["report", "--details"]).arg(&file).output().expect("the binary under test runs");
    let text = String::from_utf8(report.stdout).expect("text");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for said in ["resident: ", " = heap 16", " + shared 12.", "older than the recording", "used by nobody"] {
        assert!(words.contains(said), "{said:?} is not in\n{text}");
    }
}
