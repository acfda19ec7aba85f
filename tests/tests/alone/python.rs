//! Python frames on stacks equal what the programs themselves report, for each version of CPython on this machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::environment::{programs_dir, skipped, tool, turn};
use heapbpf_tests::output::{Frame, Profile, Stack};
use heapbpf_tests::python_stacks::{Named, Noted, has, is_python, truth_of};
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::Target;

fn script() -> PathBuf {
    programs_dir().join("python_truth.py")
}

/// The interpreter of this version, from the distribution or from pyenv.
fn interpreter(minor: u32) -> Option<PathBuf> {
    let name = format!("python3.{minor}");
    let usual = ["/usr/bin", "/usr/local/bin"].map(|dir| Path::new(dir).join(&name));
    let at_home = || std::env::home_dir().unwrap_or_default().join(".pyenv");
    let root = std::env::var_os("PYENV_ROOT").map_or_else(at_home, PathBuf::from);
    let versions = std::fs::read_dir(root.join("versions")).into_iter().flatten().flatten();
    let of_pyenv = versions
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&format!("3.{minor}.")))
        .map(|entry| entry.path().join("bin").join(&name));
    usual.into_iter().chain(of_pyenv).find(|path| path.exists())
}

/// Checks that every stack that the program noted is in the profile, with its bytes and all its Python frames.
fn check(what: &str, profile: &Profile, truth: &[Noted]) {
    let mut wanted: BTreeMap<&[Named], u64> = BTreeMap::new();
    truth.iter().for_each(|noted| *wanted.entry(&noted.frames).or_default() += noted.bytes);
    let mut wrong = Vec::new();
    for (frames, bytes) in &wanted {
        let same: Vec<&Stack> = profile.stacks.iter().filter(|stack| stack.sampled_bytes == *bytes).collect();
        if !same.iter().any(|stack| has(stack, frames)) {
            let found =
                same.first().map(|stack| stack.frames.iter().map(|it| (&it.function, &it.line)).collect::<Vec<_>>());
            wrong.push(format!("{bytes} bytes at {frames:?}\n  instead: {found:?}"));
        }
    }
    println!("{what}: {} of {} stacks equal the truth", wanted.len() - wrong.len(), wanted.len());
    assert!(!wanted.is_empty() && wrong.is_empty(), "{what}: {}\n{:?}", wrong.join("\n"), profile.notes);
}

/// Records a run of the program with these arguments. The program writes the truth to the file `truth`.
fn record(python: &Path, truth: &Path, parts: &[&str]) -> Outcome {
    let mut command = Command::new(python);
    let mut target = Target::start_command(command.arg(script()).arg(truth).args(parts));
    let recording = Recorder::of(target.pid(), 1).start();
    target.go();
    assert!(target.end().success(), "the program failed");
    recording.finish()
}

#[test]
fn python_stacks_equal_what_the_program_notes() {
    let case = "python_stacks_equal_what_the_program_notes";
    let Some(_turn) = turn(case) else { return };
    equal_what_they_note(case, &[11, 13]);
}

/// Compares the stacks for these minor versions of CPython 3.
fn equal_what_they_note(case: &str, minors: &[u32]) {
    for &minor in minors {
        let Some(python) = interpreter(minor) else {
            skipped(case, &format!("CPython 3.{minor} is not installed"));
            continue;
        };
        let dir = tempfile::tempdir().expect("a temporary directory");
        let truth = dir.path().join("truth");
        let (profile, stats) = record(&python, &truth, &[]).results();
        check(&python.display().to_string(), &profile, &truth_of(&truth));
        assert_eq!(stats.lost(), 0, "{stats:?}");
        let native = profile.notes.iter().find(|note| note.contains("native frames"));
        assert_eq!(native, None, "{}", python.display());
        // Native frames stay: the allocation itself, and the C library's function (qsort) between two of Python's.
        let is_around_the_c_library = |stack: &Stack| {
            let at = |name: &str| stack.frames.iter().position(|it| it.function.as_deref() == Some(name));
            let Some((inner, outer)) = at("compare").zip(at("extensions")) else { return false };
            let is_c_library = |it: &Frame| it.module.as_deref().is_some_and(|module| module.contains("/libc.so"));
            inner < outer && inner > 0 && stack.frames[inner..outer].iter().any(is_c_library)
        };
        assert!(profile.stacks.iter().any(is_around_the_c_library), "{}", python.display());
        assert!(!profile.stacks.iter().any(|stack| stack.has("leaf") && stack.has("_PyEval_EvalFrameDefault")));
    }
}

/// The daemon need not be faster than the program: functions have names although the program ends after a moment.
#[test]
fn a_short_program_has_the_names_of_its_functions() {
    const SCRIPT: &str = "
def leaf(n): return bytearray(n)
def middle(n): return [leaf(3000 + i) for i in range(n)]
print(sum(len(middle(100)) for _ in range(20)))
";
    let case = "a_short_program_has_the_names_of_its_functions";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = tool("python3") else { return skipped(case, "python3 is not installed") };
    for round in 0..3 {
        let recorder = Recorder::new().interval(2048).flag("--python-objects=no");
        let outcome = recorder.command(&python, ["-c", SCRIPT]).start().finish();
        let (profile, _) = outcome.results();
        let unread = profile.notes.iter().find(|note| note.contains("could not be read"));
        assert_eq!(unread, None, "round {round}");
        let count = |holds: &dyn Fn(&Stack) -> bool| -> u64 {
            profile.stacks.iter().filter(|stack| holds(stack)).map(|stack| stack.samples).sum()
        };
        let leaf = count(&|stack| stack.has("leaf") && stack.has("middle"));
        // An array of n bytes is sampled with probability 1 − exp(−n/R). That gives 1,549 ± 18.7 (σ) of these. A
        // deviation of 6 σ happens by chance in one of 500 million runs.
        println!("{case}: {leaf} samples are in the script's function");
        assert!(leaf.abs_diff(1549) < 112, "{leaf}: {:?}", profile.notes);
    }
}

#[test]
fn python_in_a_virtual_environment_has_python_stacks() {
    let case = "python_in_a_virtual_environment_has_python_stacks";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = tool("python3") else { return skipped(case, "python3 is not installed") };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let environment = dir.path().join("environment");
    let made = Command::new(&python).args(["-m", "venv", "--without-pip"]).arg(&environment).status();
    if !made.is_ok_and(|status| status.success()) {
        return skipped(case, "python3 has no module venv");
    }
    let truth = dir.path().join("truth");
    let (profile, _) = record(&environment.join("bin/python"), &truth, &["generators"]).results();
    check("a virtual environment", &profile, &truth_of(&truth));
}

/// The interpreter's data belongs to the target. heapbpf follows a frame that names itself as its caller only for a
/// limited number of frames, and samples before and after have their true stacks.
#[test]
fn frames_in_a_circle_end() {
    const SCRIPT: &str = "
import ctypes, os, sys
print('READY', os.getpid(), flush=True)
sys.stdin.readline()
def circle():
    frame = ctypes.c_uint64.from_address(id(sys._getframe()) + 24).value
    caller = ctypes.c_uint64.from_address(frame + 48)
    was = caller.value
    caller.value = frame
    bytearray(300_000)
    caller.value = was
def straight(): bytearray(400_000)
straight(), circle(), straight()
print('DONE', flush=True)
sys.stdin.readline()
";
    let case = "frames_in_a_circle_end";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = interpreter(11) else {
        return skipped(case, "CPython 3.11, whose frames it changes, is not installed");
    };
    let mut target = Target::start_command(Command::new(python).args(["-c", SCRIPT]));
    let recording = Recorder::of(target.pid(), 1).start();
    target.go();
    assert_eq!(target.line(), "DONE");
    let (profile, stats) = recording.stop().results();
    assert!(target.end().success(), "its frames were put right");
    assert_eq!(stats.lost(), 0);
    let of = |bytes: u64| profile.stacks.iter().filter(move |stack| stack.sampled_bytes == bytes);
    let frames = of(300_001).next().expect("it was sampled").frames.len();
    println!("{case}: a stack of {frames} frames");
    assert!((1..=512).contains(&frames));
    assert!(
        of(2 * 400_001).all(|stack| stack.has("straight") && stack.has("<module>")) && of(2 * 400_001).count() == 1
    );
}

/// If it is not certain which interpreter a thread runs, native frames stay, and the profile says so.
#[test]
fn stacks_of_subinterpreters_stay_native() {
    const PROGRAM: &str = "import os\n\
        try:\n    import _interpreters as sub\nexcept ImportError:\n    import _xxsubinterpreters as sub\n\
        other = sub.create()\n\
        os.write(1, b'READY %d\\n' % os.getpid())\n\
        os.read(0, 1)\n\
        def main_interpreter():\n    return bytearray(300_000)\n\
        main_interpreter()\n\
        sub.run_string(other, 'def inside(): return bytearray(400_000)\\ninside()')\n\
        os._exit(0)\n";
    let case = "stacks_of_subinterpreters_stay_native";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = tool("python3") else { return skipped(case, "python3 is not installed") };
    let mut target = Target::start_command(Command::new(python).args(["-c", PROGRAM]));
    let recording = Recorder::of(target.pid(), 1).start();
    target.go();
    assert!(target.end().success());
    let (profile, _) = recording.finish().results();
    for bytes in [300_001, 400_001] {
        let stack = profile.stacks.iter().find(|stack| stack.sampled_bytes == bytes).expect("it was allocated");
        assert!(stack.has("_PyEval_EvalFrameDefault") && !stack.frames.iter().any(is_python), "{stack:?}");
    }
    assert!(profile.notes.iter().any(|note| note.contains("subinterpreters")), "{:?}", profile.notes);
}

/// gdb embeds an interpreter: gdb's own frames stay, and only the interpreter's become Python frames. (Names are read
/// while the process runs, so the program waits a moment.)
#[test]
fn an_embedded_interpreter_has_python_frames_among_its_programs_own() {
    const PROGRAM: &str = "python\ndef embedded():\n    return bytearray(7_000_003)\nembedded()\n\
        import time\ntime.sleep(1)\nend\n";
    let case = "an_embedded_interpreter_has_python_frames_among_its_programs_own";
    let Some(_turn) = turn(case) else { return };
    let Some(gdb) = tool("gdb") else { return skipped(case, "gdb is not installed") };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let script = dir.path().join("script.gdb");
    std::fs::write(&script, PROGRAM).expect("our own directory");
    let arguments = ["-nx".into(), "-batch".into(), "-x".into(), script.into_os_string()];
    let (profile, _) = Recorder::new().interval(65_536).command(&gdb, arguments).start().finish().results();
    let Some(stack) = profile.stacks.iter().find(|stack| stack.has("embedded")) else {
        let has_python = profile.stacks.iter().any(|stack| stack.has("_PyEval_EvalFrameDefault"));
        assert!(!has_python, "native frames stayed: {:?}", profile.notes);
        return skipped(case, "this gdb has no Python");
    };
    let at = |wanted: &dyn Fn(&Frame) -> bool| stack.frames.iter().position(wanted).expect("it is there");
    let embedded = at(&|frame| frame.function.as_deref() == Some("embedded"));
    let program = at(&|frame| frame.module.as_deref().is_some_and(|module| module.ends_with("gdb")));
    assert!(embedded < program, "{:?}", stack.frames);
    assert_eq!(stack.frames[embedded].line, Some(2));
}

/// Tests of the long set.
mod long {
    use super::*;

    #[test]
    fn python_stacks_of_other_versions_equal_what_the_program_notes() {
        let case = "python_stacks_of_other_versions_equal_what_the_program_notes";
        let Some(_turn) = turn(case) else { return };
        equal_what_they_note(case, &[8, 9, 10, 12]);
    }
}
