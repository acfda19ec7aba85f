//! Interpreters whose data is rewritten while heapbpf reads it: names are verified, native frames stay, nothing is
//! harmed.

use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{programs_dir, skipped, tool, turn};
use heapbpf_tests::output::{Frame, Profile, Stats};
use heapbpf_tests::program::{library, program};
use heapbpf_tests::python_stacks::is_python;
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::Target;
use heapbpf_tests::torture::readable;

/// Size of each block.
const SIZE: u64 = 4097;
/// Enough blocks for some seconds without a probe.
const MANY_BLOCKS: u64 = 60_000_000;
/// A profile of three functions needs a tenth of this.
const MOST_MEMORY_BYTES: u64 = 512 << 20;

fn start(python: &Path, blocks: u64) -> Target {
    let scribbler = library("scribbler", "scribbler.so", &[]);
    let script = programs_dir().join("python_scribbled.py");
    let numbers = [blocks, SIZE].map(|number| number.to_string());
    Target::start_command(Command::new(python).arg(script).arg(scribbler).args(numbers))
}

/// The interpreters on this machine that the script can rewrite.
fn interpreters() -> Vec<PathBuf> {
    let other = std::env::var_os("HEAPBPF_TEST_PYTHON").map(PathBuf::from).filter(|path| path.exists());
    tool("python3").into_iter().chain(other).collect()
}

/// Whether a Python frame has a name that really exists: of a function of the script or of a module of the standard
/// library.
fn is_real(frame: &Frame, script: &Path) -> bool {
    let Some(function) = frame.function.as_deref().filter(|_| frame.reason.is_none()) else { return true };
    let of_script =
        ["scribble", "outer", "tables", "address_of_frame", "<module>", "Allocator", "<genexpr>", "<listcomp>"];
    let function = function.rsplit(".<locals>.").next().unwrap_or_default();
    match frame.file.as_deref().map(Path::new) {
        Some(file) if file == script => of_script.contains(&function),
        Some(file) => file.exists() || file.to_string_lossy().starts_with('<'),
        None => true,
    }
}

/// Checks names and frames. `blocks` is the number of blocks, if all were recorded.
fn check(what: &str, outcome: &Outcome, pid: u32, blocks: Option<u64>) {
    let (profile, stats): (Profile, Stats) = outcome.results();
    readable(&outcome.stderr);
    let script = programs_dir().join("python_scribbled.py");
    let (mut bytes, mut rooted, mut lost, mut with_python) = (0.0, 0.0, 0.0, 0.0);
    for stack in profile.stacks.iter().filter(|stack| stack.pid == pid) {
        for frame in stack.frames.iter().filter(|frame| is_python(frame)) {
            assert!(is_real(frame, &script), "{what}: a name that nothing has: {frame:?}");
        }
        let native = |name: &str| stack.frames.iter().any(|it| !is_python(it) && it.function.as_deref() == Some(name));
        if native("scribble") && stack.sampled_bytes.is_multiple_of(SIZE) {
            let here = stack.figures.alloc_bytes.value();
            bytes += here;
            let of_libc = |it: &Frame| it.module.as_deref().is_some_and(|module| module.contains("/libc.so"));
            let is_rooted = native("_start") || stack.frames.iter().any(of_libc);
            rooted += if is_rooted { here } else { 0.0 };
            // The stack copy did not fit into its ring, so only the caller is known.
            lost += if !is_rooted && !stack.complete { here } else { 0.0 };
            with_python += if stack.frames.iter().any(is_python) { here } else { 0.0 };
        }
    }
    let share = |part: f64| 100.0 * part / bytes;
    println!(
        "{what}: {:.1} % of the bytes with native frames to the start, {:.1} % without a copy of the stack, {:.1} % with Python frames; daemon {:.2} s, {} MiB; {} lost",
        share(rooted),
        share(lost),
        share(with_python),
        stats.daemon_cpu_seconds,
        stats.daemon_peak_rss_bytes >> 20,
        stats.lost()
    );
    if let Some(blocks) = blocks.filter(|_| stats.lost() == 0) {
        assert_eq!(bytes, (blocks * SIZE) as f64, "{what}: native frames are missing: {stats:?}");
    }
    assert!(rooted > 0.0 && rooted + lost > 0.999 * bytes, "{what}: native frames are missing: {rooted} of {bytes}");
    assert!(stats.daemon_peak_rss_bytes < MOST_MEMORY_BYTES, "{what}: {stats:?}");
}

/// Records an interpreter whose thread states, frames, code objects and the object allocator's table are overwritten
/// with noise, cycles and addresses of other objects while it allocates.
fn rewritten_while_recorded(python: &Path, hook: &[&str], blocks: u64) {
    let what = format!("{}, {hook:?}", python.display());
    let (mut target, mut other) = (start(python, blocks), Target::start(&program("mix"), ["2000"]));
    let recorder = Recorder::of(target.pid(), 1).pid(other.pid()).flag("--no-follow").flags(hook);
    let recording = recorder.option("--ring-bytes", "16MiB").start();
    target.go();
    let answer = target.line();
    assert!(answer.starts_with(&blocks.to_string()) && !answer.ends_with(" 0"), "{answer}");
    let truth = other.run();
    let outcome = recording.stop();
    check(&what, &outcome, target.pid(), Some(blocks));
    let (profile, _) = outcome.results();
    checks::sites_of(&profile, other.pid(), &truth, 1, Compare::All);
    assert!(target.end().success() && other.end().success(), "{what}: the target came to harm");
}

#[test]
fn an_interpreter_may_be_rewritten_while_it_is_recorded() {
    let name = "an_interpreter_may_be_rewritten_while_it_is_recorded";
    let Some(_turn) = turn(name) else { return };
    let Some(python) = tool("python3") else { return skipped(name, "python3 is not installed") };
    rewritten_while_recorded(&python, &[], 20_000);
}

/// The long set: more blocks, interpreters and ways to record.
mod long {
    use super::*;

    #[test]
    fn what_an_interpreter_keeps_may_be_rewritten_while_it_is_recorded() {
        let name = "what_an_interpreter_keeps_may_be_rewritten_while_it_is_recorded";
        let Some(_turn) = turn(name) else { return };
        let interpreters = interpreters();
        if interpreters.is_empty() {
            return skipped(name, "python3 is not installed");
        }
        for python in interpreters {
            for hook in [&["--hook", "probe"][..], &["--hook", "probe", "--python-objects"], &["--hook", "inline"]] {
                if !hook.contains(&"inline") || cfg!(target_arch = "x86_64") {
                    rewritten_while_recorded(&python, hook, 200_000);
                }
            }
        }
    }

    /// The recording begins and ends during the rewriting.
    #[test]
    fn a_recording_may_begin_while_an_interpreter_is_rewritten() {
        let name = "a_recording_may_begin_while_an_interpreter_is_rewritten";
        let Some(_turn) = turn(name) else { return };
        let Some(python) = interpreters().into_iter().next() else { return skipped(name, "python3 is not installed") };
        for hook in [&["--hook", "probe"][..], &["--hook", "inline"]] {
            if hook.contains(&"inline") && !cfg!(target_arch = "x86_64") {
                continue;
            }
            let mut target = start(&python, MANY_BLOCKS);
            target.go();
            let recording = Recorder::of(target.pid(), 1 << 16).flag("--no-follow").flags(hook).start();
            std::thread::sleep(std::time::Duration::from_secs(1));
            let outcome = recording.stop();
            let answer = target.line();
            check(&format!("in the middle, {hook:?}"), &outcome, target.pid(), None);
            assert!(answer.starts_with(&MANY_BLOCKS.to_string()), "{answer}");
            assert!(target.end().success(), "the target came to harm");
        }
    }
}
