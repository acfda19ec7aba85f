//! Symbolization after the recording: `heapbpf report --symbolize` by build IDs, when the program is no longer at its
//! path.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use heapbpf_tests::environment::{heapbpf, skipped, tool, turn};
use heapbpf_tests::output::{self, Frame, Profile, Shown};
use heapbpf_tests::program::{copy_of, program_with};
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::Target;
use tempfile::TempDir;

/// Builds the program with a build ID, without frame pointers and tail calls, whatever the compiler's defaults.
fn inlines() -> PathBuf {
    program_with("inlines", "inlines", &["-fomit-frame-pointer", "-Wl,--build-id"])
}

/// Records every allocation of a copy of the program, and then removes the copy.
fn record_and_remove(program: &Path, options: &[&str]) -> Outcome {
    let dir = TempDir::with_prefix("heapbpf-test-").expect("a temporary directory");
    let mut target = Target::start(&copy_of(program, dir.path(), "inlines"), ["40"]);
    Recorder::of(target.pid(), 1).flags(options).record(&mut target).0
}

fn report(arguments: &[&Path]) -> Output {
    Command::new(heapbpf()).arg("report").args(arguments).output().expect("the binary under test runs")
}

/// Symbolizes a profile, optionally with a debug directory.
fn symbolize(profile: &Path, output: &Path, debug: Option<&Path>) -> String {
    let mut arguments = vec![Path::new("--symbolize"), profile, Path::new("-o"), output, Path::new("--force")];
    arguments.extend(debug.into_iter().flat_map(|dir| [Path::new("--debug-dir"), dir]));
    let said = report(&arguments);
    let text = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.status.success(), "{text}");
    text
}

fn is_named(shown: &BTreeMap<Vec<Shown>, u64>) -> bool {
    // A static function has no mangled name, and therefore no namespace.
    let path = ["site_00(unsigned long)", "wraps", "shop::Box<long>::fills()", "shop::sells(int)", "main"];
    shown.keys().any(|frames| {
        let inlined = frames.iter().map(|(_, _, _, inlined)| *inlined);
        frames.iter().map(|(function, ..)| function.as_deref().unwrap_or("?")).take(5).eq(path)
            && inlined.take(5).eq([false, true, true, false, false])
            && frames[..5].iter().all(|(_, file, line, _)| {
                file.as_ref().is_some_and(|file| file.ends_with("inlines.cc")) && line.is_some()
            })
    })
}

/// Both formats get the same functions, files, lines and inlined frames as a recording that was symbolized at once,
/// from the program itself or from its debug file.
#[test]
fn offline_names_are_those_of_a_recording_with_names() {
    let case = "offline_names_are_those_of_a_recording_with_names";
    let Some(_turn) = turn(case) else { return };
    let program = inlines();
    let (online, _) = record_and_remove(&program, &[]).results();
    let expected = online.shown();
    assert!(is_named(&expected), "{expected:?}");

    let outcome = record_and_remove(&program, &["--no-symbolize"]);
    let (bare, _) = outcome.results();
    let names = bare.stacks.iter().flat_map(|stack| &stack.frames).filter(|frame| frame.function.is_some());
    assert_eq!(names.count(), 0);
    let build_id = bare.stacks.iter().flat_map(|stack| &stack.frames).find_map(|frame| {
        frame.module.as_ref().is_some_and(|module| module.ends_with("/inlines")).then(|| frame.build_id.clone())?
    });
    let build_id = build_id.expect("the program has a build ID");

    let dir = TempDir::with_prefix("heapbpf-test-").expect("a temporary directory");
    let (whole, debug) = (dir.path().join("whole"), dir.path().join("debug"));
    let by_id = debug.join(".build-id").join(&build_id[..2]);
    std::fs::create_dir_all(&whole).expect("our own directory");
    std::fs::create_dir_all(&by_id).expect("our own directory");
    std::fs::copy(&program, whole.join("inlines")).expect("our own directory");
    let mut dirs = vec![whole];
    match tool("objcopy") {
        Some(objcopy) => {
            let file = by_id.join(format!("{}.debug", &build_id[2..]));
            let status = Command::new(objcopy).arg("--only-keep-debug").arg(&program).arg(&file).status();
            assert!(status.expect("objcopy runs").success());
            dirs.push(debug);
        }
        None => skipped(case, "the part with a debug file: no objcopy (Debian: binutils)"),
    }
    let (json, pprof) = (dir.path().join("named.json"), dir.path().join("named.pb.gz"));
    for debug in &dirs {
        for recorded in ["profile.json", "profile.pb.gz"] {
            symbolize(&outcome.file(recorded), &json, Some(debug));
            let named: Profile = output::read(&json);
            if recorded == "profile.json" {
                assert_eq!(named.shown(), expected, "{recorded} with {}", debug.display());
                let (total, before) = (&named.totals.alloc_bytes, &bare.totals.alloc_bytes);
                assert_eq!((total.estimate, total.low), (before.estimate, before.low));
                assert!(named.stacks.iter().all(|stack| stack.complete));
            } else {
                // pprof has no sample counts, but the same stacks.
                assert!(named.shown().keys().eq(expected.keys()), "{recorded} with {}", debug.display());
            }
            // The same holds for what pprof keeps.
            symbolize(&outcome.file(recorded), &pprof, Some(debug));
            symbolize(&pprof, &json, None);
            assert!(output::read::<Profile>(&json).shown().keys().eq(expected.keys()), "{recorded} through pprof");
        }
    }
}

/// A frame whose file is not found keeps its address and says why. A file of that name with another build ID is
/// ignored.
#[test]
fn unknown_build_ids_keep_their_place_and_the_reason() {
    let Some(_turn) = turn("unknown_build_ids_keep_their_place_and_the_reason") else { return };
    let outcome = record_and_remove(&inlines(), &["--no-symbolize"]);
    let dir = TempDir::with_prefix("heapbpf-test-").expect("a temporary directory");
    let json = dir.path().join("named.json");
    let programs = |profile: &Profile| -> Vec<Frame> {
        let frames = profile.stacks.iter().flat_map(|stack| stack.frames.clone());
        frames.filter(|frame| frame.module.as_ref().is_some_and(|module| module.ends_with("/inlines"))).collect()
    };

    let said = symbolize(&outcome.file("profile.json"), &json, None);
    assert!(said.contains("no file with build ID"), "{said}");
    let frames = programs(&output::read(&json));
    assert!(!frames.is_empty());
    for frame in frames {
        assert!(frame.function.is_none() && frame.build_id.is_some(), "{frame:?}");
        assert!(frame.reason.as_ref().is_some_and(|why| why.contains("no file with build ID")), "{frame:?}");
    }
    let table = report(&[Path::new("--symbolize"), &outcome.file("profile.json")]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(table.contains("[inlines+0x"), "{table}");

    let other = program_with("inlines", "inlines", &["-O0", "-Wl,--build-id"]);
    std::fs::copy(other, dir.path().join("inlines")).expect("our own directory");
    symbolize(&outcome.file("profile.json"), &json, Some(dir.path()));
    for frame in programs(&output::read(&json)) {
        assert!(frame.function.is_none(), "{frame:?}");
        assert!(frame.reason.as_ref().is_some_and(|why| why.contains("a different build ID")), "{frame:?}");
    }
}
