//! Snapshots during a recording: on a signal, at a size, the last N of them, and before a real out-of-memory kill.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::constant::numbers_of_snapshots;
use heapbpf_tests::environment::{skipped, turn};
use heapbpf_tests::output::{self, Profile};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, until};
use heapbpf_tests::torture::Limited;

/// The snapshots in a directory, with their numbers.
fn snapshots(dir: &Path) -> Vec<(u32, PathBuf)> {
    let path = |number| (number, dir.join(format!("profile.{number:04}.json")));
    numbers_of_snapshots(dir).into_iter().map(path).collect()
}

fn inuse(path: &Path) -> f64 {
    let profile: Profile = output::read(path);
    profile.totals.inuse_bytes.expect("frees are followed").estimate.expect("an estimate")
}

#[test]
fn a_signal_asks_for_a_snapshot_and_the_last_ones_stay() {
    let Some(_turn) = turn("a_signal_asks_for_a_snapshot_and_the_last_ones_stay") else { return };
    let mut target = Target::start(&program("growing"), ["20000"]);
    let recording = Recorder::of(target.pid(), 1).option("--keep", "2").start();
    target.run();
    for number in 1..=4 {
        recording.signal(libc::SIGUSR1);
        until("the snapshot", || snapshots(&recording.dir()).last().is_some_and(|(last, _)| *last == number));
    }
    until("old ones are gone", || snapshots(&recording.dir()).len() == 2);
    let left = snapshots(&recording.dir());
    assert_eq!(left.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [3, 4]);
    let kept = inuse(&left[1].1);
    assert!((2_000_000.0..2_100_000.0).contains(&kept), "{kept}");
    recording.stop().results();
}

#[test]
fn passing_a_size_writes_one_snapshot() {
    let Some(_turn) = turn("passing_a_size_writes_one_snapshot") else { return };
    let mut target = Target::start(&program("growing"), ["40000", "20000"]);
    let recording = Recorder::of(target.pid(), 100).option("--snapshot", "1MB").start();
    target.run();
    until("a snapshot", || !snapshots(&recording.dir()).is_empty());
    let written = snapshots(&recording.dir());
    assert_eq!(written.len(), 1, "{written:?}");
    // One in ten blocks of 1,000 bytes is kept, and with R = 100 nearly all of them are sampled. heapbpf checks every
    // 10 ms, or later if it does not get to run.
    assert!(inuse(&written[0].1) >= 1_000_000.0);
    recording.stop().results();
}

#[test]
fn the_last_profile_before_a_kill_is_on_disk() {
    let Some(_turn) = turn("the_last_profile_before_a_kill_is_on_disk") else { return };
    const LIMIT: u64 = 64 << 20;
    let Some(group) = Limited::new(&format!("heapbpf-snapshots-{}", std::process::id())) else {
        return skipped("the_last_profile_before_a_kill_is_on_disk", "no memory cgroup can be made here");
    };
    group.leave_space(LIMIT);
    let words = group.words();
    let mut command = Command::new(&words[0]);
    // From the first mark to the limit it takes more than a second.
    command.args(&words[1..]).arg(program("growing")).args(["100000000", "50000"]);
    let mut target = Target::start_command(&mut command);
    let recording = Recorder::of(target.pid(), 16 << 10).flag("--at-limit").start();
    target.go();
    let outcome = recording.finish();
    // The kernel killed it; it did not exit by itself.
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(target.end().signal(), Some(libc::SIGKILL));
    let written = snapshots(outcome.file("profile.json").parent().expect("a directory"));
    let last = written.last().unwrap_or_else(|| panic!("no snapshot; heapbpf said:\n{}", outcome.stderr));
    let kept = inuse(&last.1);
    println!("{} snapshots; the last one has {kept} of {LIMIT} bytes in use", written.len());
    // The first mark is 90 % of the limit, which also covers kernel pages. A block of 1,000 bytes takes 1,008.
    assert!(kept > 0.75 * LIMIT as f64 && kept < 1.05 * LIMIT as f64, "{kept}");
    let text = fs::read_to_string(&last.1).expect("its own file");
    assert!(text.contains("site_00"), "its stacks are named");
    outcome.results();
}
