//! Java frames on stacks of native memory: complete, named and in order, interpreted and compiled, without any flag of
//! the JVM.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::constant::numbers_of_snapshots;
use heapbpf_tests::doctor::doctor_of;
use heapbpf_tests::environment::{programs_dir, skipped, turn};
use heapbpf_tests::output::{Frame, Profile, Stack};
use heapbpf_tests::program::java_program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, until};

/// Minimum share of samples whose stacks are complete and named.
const SHARE: f64 = 0.95;

/// The distribution's Java, whose frames are known, and any other that is installed.
fn javas() -> Vec<PathBuf> {
    let dirs = std::fs::read_dir("/usr/lib/jvm").into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = dirs
        // Skip symlinks, which are the distribution's other names for the same Java.
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .filter(|path| path.join("bin/javac").exists())
        .collect();
    found.sort();
    found
}

/// Directory of the program's classes.
fn compiled(java: &Path) -> PathBuf {
    java_program("JavaTruth", &java.join("bin/javac"))
}

fn start(java: &Path, flags: &[&str], numbers: [u32; 3]) -> Target {
    let mut command = Command::new(java.join("bin/java"));
    command.args(["-Xmx512m"]).args(flags).arg("-cp").arg(compiled(java)).arg("JavaTruth");
    Target::start_command(command.args(numbers.map(|number| number.to_string())))
}

fn samples(stack: &Stack) -> f64 {
    stack.samples as f64
}

/// The share of samples whose stacks are complete and named in each frame, and the reasons for the others.
fn share(profile: &Profile) -> (f64, BTreeMap<String, u64>) {
    let mut others: BTreeMap<String, u64> = BTreeMap::new();
    let (mut good, mut all) = (0.0, 0.0);
    for stack in &profile.stacks {
        all += samples(stack);
        let unnamed = stack.frames.iter().find(|frame| frame.function.is_none());
        let why = stack.cut.clone().or_else(|| unnamed.map(|frame| format!("{:?} {:?}", frame.module, frame.reason)));
        match why {
            Some(why) => *others.entry(why).or_default() += stack.samples,
            None => good += samples(stack),
        }
    }
    assert!(all > 0.0, "nothing was sampled");
    (good / all, others)
}

/// Whether a frame is a Java method with this name, ignoring digits: `JavaTruth$$Lambda.getAsInt`.
fn is_named(frame: &Frame, name: &str) -> bool {
    let found = frame.function.as_deref().unwrap_or_default();
    found == name || frame.module.is_none() && found.replace(|letter: char| letter.is_ascii_digit(), "") == name
}

/// Whether a stack has these functions next to each other, innermost first.
fn has_path(stack: &Stack, path: &[&str]) -> bool {
    stack.frames.windows(path.len()).any(|frames| frames.iter().zip(path).all(|(frame, name)| is_named(frame, name)))
}

/// Known call paths, innermost first.
fn paths() -> Vec<Vec<&'static str>> {
    let mut recursion = vec!["JavaTruth.direct"];
    recursion.extend(["JavaTruth.recurse"; 21]);
    recursion.extend(["JavaTruth.work", "JavaTruth.run", "JavaTruth.main"]);
    vec![
        recursion,
        vec!["java.nio.ByteBuffer.allocateDirect", "JavaTruth.direct", "JavaTruth.work", "JavaTruth.run"],
        vec!["JavaTruth.direct", "JavaTruth$Square.allocate", "JavaTruth.shapes", "JavaTruth.work"],
        vec!["JavaTruth.direct", "JavaTruth$Circle.allocate", "JavaTruth.shapes", "JavaTruth.work"],
        vec!["java.util.zip.Deflater.init", "java.util.zip.Deflater.<init>"],
        vec!["JavaTruth.deflate", "JavaTruth.work", "JavaTruth.run", "JavaTruth.main"],
        vec!["JavaTruth.inflate", "JavaTruth.work", "JavaTruth.run"],
        vec!["JavaTruth.supplied", "JavaTruth.lambda", "JavaTruth.work", "JavaTruth.run"],
        vec!["JavaTruth.direct", "JavaTruth.run"],
    ]
}

/// Checks that every known path is there, down to its thread's entry, with the lines of the source.
fn check(what: &str, profile: &Profile) {
    let (share, others) = share(profile);
    println!("{what}: {:.2} % of the samples have stacks that are whole and named; others: {others:?}", share * 100.0);
    assert!(share >= SHARE, "{what}: {share} {others:?} {:?}", profile.notes);
    for path in paths() {
        assert!(profile.stacks.iter().any(|stack| has_path(stack, &path)), "{what}: no stack has {path:?}");
    }
    let of_thread = |stack: &&Stack| stack.frames.iter().any(|frame| is_named(frame, "java.lang.Thread.run"));
    let from_thread =
        profile.stacks.iter().filter(of_thread).filter(|stack| has_path(stack, &["JavaTruth.direct", "JavaTruth.run"]));
    assert!(from_thread.count() > 0, "{what}: no stack of a thread");
    let source = std::fs::read_to_string(programs_dir().join("JavaTruth.java")).expect("it is ours");
    let line =
        1 + source.lines().position(|line| line.contains("ByteBuffer.allocateDirect(size)")).expect("it is there");
    let direct: Vec<(Option<&str>, Option<u32>)> = profile
        .stacks
        .iter()
        .filter(|stack| stack.cut.is_none())
        .flat_map(|stack| stack.frames.windows(2))
        .filter(|pair| is_named(&pair[0], "java.nio.ByteBuffer.allocateDirect"))
        .map(|pair| (pair[1].file.as_deref(), pair[1].line))
        .collect();
    let expected = (Some("JavaTruth.java"), Some(line as u32));
    assert!(!direct.is_empty() && direct.iter().all(|found| *found == expected), "{what}: {direct:?}");
}

#[test]
fn stacks_of_native_memory_show_java_methods() {
    show_methods("stacks_of_native_memory_show_java_methods", javas().into_iter().take(1).collect());
}

/// Checks the program under each of these Javas.
fn show_methods(case: &str, javas: Vec<PathBuf>) {
    let Some(_turn) = turn(case) else { return };
    if javas.is_empty() {
        return skipped(case, "there is no JDK in /usr/lib/jvm (Debian: openjdk-17-jdk-headless), or no other one");
    }
    for java in javas {
        // Interpreted, compiled by the first compiler, and compiled by both after a warm-up.
        for (flags, warm_up) in [(&["-Xint"][..], 1), (&["-XX:TieredStopAtLevel=1"], 1000), (&[], 3000)] {
            let mut target = start(&java, flags, [100, 2, warm_up]);
            let (_, found) = doctor_of(target.pid());
            let version = found["java"].as_str().unwrap_or_default();
            assert!(version.starts_with(|letter: char| letter.is_ascii_digit()), "{found}");
            let recording = Recorder::of(target.pid(), 1024).start();
            target.go();
            assert_eq!(target.line(), "DONE");
            let (profile, _) = recording.stop().results();
            check(&format!("{} {flags:?}", java.display()), &profile);
            assert!(target.end().success(), "it was harmed");
        }
    }
}

/// For a JVM that heapbpf starts, frames are read as soon as there are any.
#[test]
fn a_jvm_is_followed_from_its_start() {
    let case = "a_jvm_is_followed_from_its_start";
    let Some(_turn) = turn(case) else { return };
    let Some(java) = javas().into_iter().next() else { return skipped(case, "there is no JDK in /usr/lib/jvm") };
    let arguments = ["-cp", &compiled(&java).display().to_string(), "JavaTruth", "200", "2", "1"].map(str::to_owned);
    // The program gets lines from heapbpf's standard input, and waits at its end: frames are read from its memory.
    let dir = tempfile::tempdir().expect("a temporary directory");
    let input = dir.path().join("input");
    assert!(Command::new("mkfifo").arg(&input).status().expect("mkfifo runs").success());
    let exec = format!("exec \"$0\" \"$@\" 0<> {}", input.display());
    let recorder = Recorder::new().interval(1024).option("--every", "300ms");
    let recorder = recorder.through(&["/bin/sh", "-c", exec.as_str()].map(OsStr::new));
    let recording = recorder.command(&java.join("bin/java"), arguments).start();
    assert!(recording.line().starts_with("READY "));
    std::fs::write(&input, "go\n").expect("our own FIFO");
    assert_eq!(recording.line(), "DONE");
    let last = || numbers_of_snapshots(&recording.dir()).last().copied().unwrap_or(0);
    let before = last();
    // The next one may have been begun before.
    until("a snapshot of all that it did", || last() >= before + 2);
    recording.signal(libc::SIGTERM);
    let outcome = recording.ends();
    assert_eq!(outcome.status.code(), Some(128 + libc::SIGTERM), "{}", outcome.stderr);
    let (profile, _) = outcome.results();
    let (share, others) = share(&profile);
    println!("from the start: {:.2} % whole and named; others: {others:?}", share * 100.0);
    assert!(share >= SHARE, "{share} {others:?} {:?}", profile.notes);
    assert!(profile.stacks.iter().any(|stack| has_path(stack, &["JavaTruth.run", "JavaTruth.main"])));
}

/// Tests of the long set.
mod long {
    use super::*;

    #[test]
    fn stacks_in_other_versions_show_java_methods() {
        show_methods("stacks_in_other_versions_show_java_methods", javas().into_iter().skip(1).collect());
    }
}
