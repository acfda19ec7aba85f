//! Third-party programs, checked by invariants, by `go tool pprof`, and by an independent count.

use std::ffi::OsString;
use std::path::Path;

use heapbpf_tests::counting::Counting;
use heapbpf_tests::environment::{fixtures_dir, skipped, tool, tool_or_install, turn};
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::{checks, held, pprof};

/// Checks what must hold for every recording, and that `go tool pprof` can read the file.
fn invariants(case: &str, outcome: &Outcome) -> (Profile, Stats) {
    let (profile, stats) = outcome.results();
    assert_eq!(stats.lost(), 0, "{stats:?}");
    assert!(stats.submitted > 100, "too few samples to say anything: {stats:?}");
    let z = checks::z(&profile.totals.alloc_bytes);
    assert!(z.abs() < 5.0, "z = {z}: {:?}", profile.totals.alloc_bytes);
    let in_use = profile.totals.inuse_bytes.as_ref().expect("live").value();
    assert!((0.0..=profile.totals.alloc_bytes.value()).contains(&in_use));
    let incomplete: u64 = profile.stacks.iter().filter(|stack| !stack.complete).map(|stack| stack.samples).sum();
    println!("{case}: {} samples, {incomplete} with incomplete stacks, z = {z:.2}", stats.submitted);
    assert!(100 * incomplete <= stats.submitted, "at least 99 % of the stacks are whole: {incomplete}, {stats:?}");
    let file = outcome.file("profile.pb.gz");
    match pprof::raw(&file) {
        Some(raw) => {
            assert_eq!(raw.sum(1), profile.totals.alloc_bytes.value().round() as i64);
            let top = pprof::go_tool_pprof(&["-top"], &file).expect("go is here");
            assert!(top.contains("inuse_space"), "{top}");
        }
        None => skipped(case, "the part with go tool pprof: no go (Debian: golang-go)"),
    }
    (profile, stats)
}

#[test]
fn sqlite_filling_a_table() {
    let case = "sqlite_filling_a_table";
    let Some(_turn) = turn(case) else { return };
    let Some(_sqlite) = tool_or_install("sqlite3", "sqlite3") else { return skipped(case, "no sqlite3") };
    let script = fixtures_dir().join("fill.sql");
    held::most_are_whole(case, || {
        let counting = Counting::new();
        let mut words: Vec<OsString> =
            counting.variables().into_iter().map(|(name, value)| join(name, &value)).collect();
        words.extend(["sqlite3".into(), ":memory:".into(), join(".read ", script.as_os_str()).to_owned()]);
        let recorder = Recorder::new().interval(16 << 10).command(Path::new("/usr/bin/env"), &words);
        let outcome = recorder.start().finish();
        let (profile, _) = outcome.results();
        // The last process generation of this pid. Before the exec it was env.
        let process = profile.processes.iter().rfind(|process| process.comm == "sqlite3");
        let [calls, bytes, processes] = counting.now();
        assert_eq!(processes, 1);
        let counted = process.and_then(|process| checks::exact(process).1).unwrap_or_default();
        if counted < calls {
            assert!(held::is_reported(&profile, process), "{:?}", profile.processes);
            return [0, 1];
        }
        let process = process.expect("sqlite3 ran");
        assert_eq!(checks::exact(process), (Some(bytes), Some(calls)), "bytes and calls, by the preloaded library");
        let (profile, _) = invariants(case, &outcome);
        assert!(profile.stacks.iter().any(|stack| stack.has("sqlite3_step")), "sqlite's own functions");
        [1, 1]
    });
}

fn join(name: &str, value: &std::ffi::OsStr) -> OsString {
    let mut word = OsString::from(name);
    if !name.ends_with(' ') {
        word.push("=");
    }
    word.push(value);
    word
}

#[test]
fn gcc_compiling_a_file() {
    let case = "gcc_compiling_a_file";
    let Some(_turn) = turn(case) else { return };
    let Some(gcc) = tool("gcc") else { return skipped(case, "no gcc (Debian: gcc)") };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (source, object) = (dir.path().join("big.c"), dir.path().join("big.o"));
    let functions = (0..400).map(|i| {
        format!("int f{i}(int *a, int n) {{ int s = {i}; for (int k = 0; k < n; k++) s += a[k] * {i} + (a[n - k] ^ s); return s; }}\n")
    });
    std::fs::write(&source, functions.collect::<String>()).expect("our own directory");
    let arguments: [&std::ffi::OsStr; 5] =
        ["-O1".as_ref(), "-c".as_ref(), source.as_ref(), "-o".as_ref(), object.as_ref()];
    let outcome = Recorder::new().interval(64 << 10).command(&gcc, arguments).start().finish();
    let (profile, _) = invariants(case, &outcome);
    assert!(object.exists(), "the compiler did its work");
    // The compiler proper is a child that runs long enough to be hooked. A shorter one may cause a gap, which is
    // reported.
    let named = |name: &str| profile.processes.iter().find(|process| process.comm == name);
    assert!(named("cc1").is_some_and(|process| process.ended), "cc1 is a child of gcc: {:?}", profile.processes);
    assert!(named("as").is_some() || !profile.notes.is_empty(), "no assembler, and not a word about it");
}
