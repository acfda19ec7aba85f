//! Stacks are correct even if the file was deleted, replaced, or never on disk.

use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::descriptors::open_paths;
use heapbpf_tests::environment::{skipped, tool, turn};
use heapbpf_tests::output::{Profile, Stack};
use heapbpf_tests::program::{copy_file, library, program, program_with};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, children_of, until};
use heapbpf_tests::torture::Overlay;
use tempfile::TempDir;

/// One path of frames.c, innermost first.
const PATH: [&str; 4] = ["site_02", "jumped_to", "before_the_jump", "main"];
/// Number of rounds of frames.c.
const ROUNDS: &str = "50";

fn dir() -> TempDir {
    TempDir::with_prefix("heapbpf-test-").expect("a temporary directory")
}

/// Makes a copy of the program that the test may delete.
fn copy_to(dir: &Path) -> PathBuf {
    let copy = dir.join("copied");
    copy_file(frames(), &copy);
    copy
}

/// Builds frames.c with the tail call that [`PATH`] has.
fn frames() -> PathBuf {
    program_with("frames", "frames-fp", &["-foptimize-sibling-calls"])
}

/// Checks that the stacks of one site are complete and symbolized.
fn named_and_whole(profile: &Profile) {
    let stacks: Vec<_> = profile.stacks.iter().filter(|stack| stack.site() == Some(PATH[0])).collect();
    assert!(!stacks.is_empty(), "nothing was sampled at {}", PATH[0]);
    for stack in stacks {
        let names = stack.names();
        assert!(stack.complete && names.starts_with(&PATH), "complete: {}, {names:?}", stack.complete);
    }
}

/// Records every allocation of a running program; `meanwhile` runs once the probes are in place.
fn record(mut target: Target, pid: u32, meanwhile: impl FnOnce()) -> Profile {
    let recording = Recorder::of(pid, 1).start();
    meanwhile();
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    checks::sites(&profile, &truth, 1, Compare::All);
    assert_eq!(stats.lost(), 0, "{stats:?}");
    named_and_whole(&profile);
    profile
}

fn started(command: &mut Command) -> (Target, u32) {
    let target = Target::start_command(command);
    let pid = target.pid();
    (target, pid)
}

/// Deleted before the recording, or replaced meanwhile by an upgrade.
#[test]
fn an_executable_that_is_deleted_or_upgraded() {
    let Some(_turn) = turn("an_executable_that_is_deleted_or_upgraded") else { return };
    for is_upgraded in [false, true] {
        let dir = dir();
        let copy = copy_to(dir.path());
        let (target, pid) = started(Command::new(&copy).arg(ROUNDS));
        if !is_upgraded {
            std::fs::remove_file(&copy).expect("our own file");
        }
        record(target, pid, || {
            if is_upgraded {
                let newer = dir.path().join("newer");
                copy_file(program("leak"), &newer);
                std::fs::rename(&newer, &copy).expect("our own directory");
            }
        });
    }
}

/// Starts a program that loads a copy of each of two libraries, one after the other, and deletes the copy at once.
fn with_deleted_plugins(dir: &Path) -> Target {
    let plugins = [10, 11].map(|n| library("plugin", &format!("plugin{n}.so"), &[&format!("-DPLUGIN={n}")]));
    Target::start_command(Command::new(program("plugins")).arg("deleted").arg(dir).args(plugins))
}

/// Whether a process has a deleted file open that had this path. Other tests have plugins of the same name.
fn holds_deleted(pid: u32, path: &Path) -> bool {
    let deleted = format!("{} (deleted)", path.display());
    open_paths(pid).iter().any(|path| path.as_os_str() == deleted.as_str())
}

/// Plugins are loaded from temporary files and unloaded soon. What was seen while it was mapped keeps its names.
#[test]
fn deleted_plugins_keep_their_names() {
    let Some(_turn) = turn("deleted_plugins_keep_their_names") else { return };
    let dir = dir();
    let mut target = with_deleted_plugins(dir.path());
    let recording = Recorder::of(target.pid(), 1).start();
    target.go();
    for name in ["plugin10.so", "plugin11.so"] {
        target.step();
        until("its file is open", || holds_deleted(recording.pid(), &dir.path().join(name)));
        target.go();
    }
    let truth = target.truth();
    let (profile, _) = recording.stop().results();
    checks::sites(&profile, &truth, 1, Compare::All);
}

/// heapbpf does not run until the first plugin is gone and the second is mapped, most likely at the same addresses and
/// with the same inode number. The first plugin has no names then, those of the second least of all.
#[test]
fn plugins_that_were_gone_before_they_were_seen_are_said_to_be_deleted() {
    let Some(_turn) = turn("plugins_that_were_gone_before_they_were_seen_are_said_to_be_deleted") else { return };
    let dir = dir();
    let mut target = with_deleted_plugins(dir.path());
    let recording = Recorder::of(target.pid(), 1).start();
    recording.signal(libc::SIGSTOP);
    target.go();
    target.step();
    target.go();
    target.step();
    recording.signal(libc::SIGCONT);
    until("the file of the second is open", || holds_deleted(recording.pid(), &dir.path().join("plugin11.so")));
    target.go();
    let truth = target.truth();
    let outcome = recording.stop();
    let (profile, _) = outcome.results();
    let sums = checks::site_sums(&profile, None);
    assert_eq!(sums.get("site_11").map(|sum| sum.samples), Some(truth.site("site_11").allocs), "{sums:?}");
    assert!(!sums.contains_key("site_10"), "{sums:?}");
    let is_gone = |stack: &&Stack| {
        let mut reasons = stack.frames.iter().filter_map(|frame| frame.reason.as_deref());
        reasons.any(|reason| reason.contains("plugin10.so: the file was deleted"))
    };
    let samples: u64 = profile.stacks.iter().filter(is_gone).map(|stack| stack.samples).sum();
    assert_eq!(samples, truth.site("site_10").allocs);
    // Neither a longer copy nor debug symbols would help.
    let missed = ["--stack-bytes", "--symbolize", "replaced by another"].map(|text| outcome.stdout.contains(text));
    assert_eq!(missed, [false; 3], "{}", outcome.stdout);
}

#[test]
fn an_executable_in_memory() {
    let case = "an_executable_in_memory";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = tool("python3") else { return skipped(case, "no python3, which makes the memfd") };
    let script = "import os, sys
file = os.memfd_create('program')
os.write(file, open(sys.argv[1], 'rb').read())
os.execve(file, sys.argv[1:], os.environ)";
    let (target, pid) = started(Command::new(python).args(["-c", script]).arg(frames()).arg(ROUNDS));
    record(target, pid, || ());
}

#[test]
fn a_process_in_a_pid_namespace_has_both_ids() {
    let case = "a_process_in_a_pid_namespace_has_both_ids";
    let Some(_turn) = turn(case) else { return };
    let Some(unshare) = tool("unshare") else { return skipped(case, "no unshare (Debian: util-linux)") };
    let mut command = Command::new(unshare);
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]).arg(frames()).arg(ROUNDS);
    let (target, parent) = started(&mut command);
    until("unshare's child", || !children_of(parent).is_empty());
    let pid = children_of(parent)[0];
    let profile = record(target, pid, || ());
    assert_eq!(profile.process(pid).namespace_pid, Some(1));
}

/// As in a container, the program is in the lower layer. Then it is changed through the mount, which copies the file
/// up. The running program is still the lower file.
#[test]
fn a_program_on_an_overlay() {
    let case = "a_program_on_an_overlay";
    let Some(_turn) = turn(case) else { return };
    for copied_up in [false, true] {
        let dir = dir();
        let lower = dir.path().join("lower");
        std::fs::create_dir(&lower).expect("our own directory");
        copy_file(frames(), lower.join("layered"));
        let Some(overlay) = Overlay::mount(dir.path(), "container", &lower) else {
            return skipped(case, "overlay file systems cannot be mounted here");
        };
        let layered = overlay.path("layered");
        let (target, pid) = started(Command::new(&layered).arg(ROUNDS));
        let profile = record(target, pid, || {
            if copied_up {
                std::fs::remove_file(&layered).expect("our own mount");
                std::fs::write(&layered, "another").expect("our own mount");
            }
        });
        let exe = &profile.process(pid).exe;
        assert!(exe.ends_with("/container-merged/layered"), "{exe}");
    }
}
