//! Python's own objects: what is in use by line equals what tracemalloc counts in another run of the same program, on each version
//! of CPython that this machine has, whether or not its compiler put copies of the object allocator into its callers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::doctor::doctor;
use heapbpf_tests::environment::{programs_folder, skipped, tool, turn};
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;

/// Bytes and blocks in use, by line of the program.
type Lines = BTreeMap<u32, [u64; 2]>;

fn script() -> PathBuf {
    programs_folder().join("python_objects.py")
}

/// The interpreters of this machine from 3.8 on: of the distribution, and pyenv's.
fn interpreters() -> Vec<PathBuf> {
    let at_home = || std::env::home_dir().unwrap_or_default().join(".pyenv");
    let root = std::env::var_os("PYENV_ROOT").map_or_else(at_home, PathBuf::from);
    let mut found: Vec<PathBuf> = tool("python3").into_iter().collect();
    for minor in 8..=13 {
        let versions = std::fs::read_dir(root.join("versions")).into_iter().flatten().flatten();
        let of_minor = versions.map(|it| it.path().join("bin").join(format!("python3.{minor}")));
        found.extend(of_minor.filter(|path| path.exists()).take(1));
    }
    found
}

/// What tracemalloc counts.
fn counted_by_tracemalloc(python: &Path, parts: &[&str]) -> Lines {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let truth = folder.path().join("truth");
    let mut command = Command::new(python);
    let mut target = Target::start_command(command.arg(script()).arg("--truth").arg(&truth).args(parts));
    target.go();
    assert_eq!(target.line(), "DONE");
    assert!(target.end().success());
    serde_json::from_str(&std::fs::read_to_string(&truth).expect("it was written")).expect("lines")
}

/// The same by the profile of a process.
fn counted_by_heapbpf(profile: &Profile, pid: u32) -> Lines {
    let script = script();
    let mut lines = Lines::new();
    for stack in profile.stacks.iter().filter(|stack| stack.pid == pid) {
        let Some(innermost) = stack.frames.iter().find(|frame| frame.module.is_none()) else { continue };
        if innermost.file.as_deref().map(Path::new) != Some(&script) {
            continue;
        }
        let value = |figure: &Option<heapbpf_tests::output::Estimate>| {
            figure.as_ref().map_or(0.0, heapbpf_tests::output::Estimate::value) as u64
        };
        let line = lines.entry(innermost.line.expect("a line")).or_default();
        line[0] += value(&stack.figures.inuse_bytes);
        line[1] += value(&stack.figures.inuse_objects);
    }
    lines.retain(|_, counted| *counted != [0, 0]);
    lines
}

/// Lines of a function of the program.
fn lines_of(function: &str) -> std::ops::Range<u32> {
    let text = std::fs::read_to_string(script()).expect("our own program");
    let start = text.lines().position(|line| line.starts_with(&format!("def {function}("))).expect("a part") as u32 + 1;
    let rest = text.lines().skip(start as usize).position(|line| !line.is_empty() && !line.starts_with(' '));
    start..start + 1 + rest.expect("it is not the last") as u32
}

/// Records a run of these parts at interval 1.
fn record(python: &Path, parts: &[&str], options: &[&str]) -> (Profile, Stats, u32) {
    let mut target = Target::start_command(Command::new(python).arg(script()).args(parts));
    let pid = target.pid();
    let recorder = options.iter().fold(Recorder::of(pid, 1), |recorder, option| recorder.flag(option));
    let recording = recorder.option("--ring-bytes", "256MiB").start();
    target.go();
    assert_eq!(target.line(), "DONE");
    let (profile, stats) = recording.stop().results();
    assert!(target.end().success());
    (profile, stats, pid)
}

#[test]
fn objects_in_use_by_line_equal_tracemalloc_s() {
    let case = "objects_in_use_by_line_equal_tracemalloc_s";
    let parts = ["small", "freed", "large", "grows", "shrinks", "nothing"];
    let Some(_turn) = turn(case) else { return };
    let found = interpreters();
    if found.is_empty() {
        return skipped(case, "there is no CPython");
    }
    let mut wrong = Vec::new();
    for python in found {
        let truth = counted_by_tracemalloc(&python, &parts);
        let (profile, stats, pid) = record(&python, &parts, &["--python-objects"]);
        let counted = counted_by_heapbpf(&profile, pid);
        assert_eq!(stats.lost(), 0, "{stats:?}");
        let lines = parts.iter().flat_map(|part| lines_of(part));
        let all: Vec<(u32, Option<&[u64; 2]>, Option<&[u64; 2]>)> =
            lines.map(|line| (line, truth.get(&line), counted.get(&line))).filter(|it| it.1.or(it.2).is_some()).collect();
        let bytes: u64 = all.iter().filter_map(|it| it.1).map(|counted| counted[0]).sum();
        let differ: Vec<_> = all.iter().filter(|it| it.1 != it.2).collect();
        println!("{}: {} of {} lines equal, {bytes} bytes", python.display(), all.len() - differ.len(), all.len());
        assert!(all.len() >= 15, "{all:?}");
        if !differ.is_empty() {
            wrong.push(format!("{}: (line, tracemalloc, heapbpf): {differ:?} {:?}", python.display(), profile.notes));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
