//! Views of a saved profile: tables by something else than stacks, trees, filters as in pprof, and CSV.

use std::io::Read;
use std::path::Path;
use std::process::Command;

use flate2::read::GzDecoder;
use heapbpf_tests::environment::{heapbpf, turn};
use heapbpf_tests::output::{self, Profile, Stack};
use heapbpf_tests::program::program_with;
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::Target;
use tempfile::TempDir;

/// A recording of every allocation of a program of which functions and lines are known.
fn recorded() -> Outcome {
    let program = program_with("inlines", "inlines", &["-fomit-frame-pointer", "-Wl,--build-id"]);
    let mut target = Target::start(&program, ["40"]);
    let recording = Recorder::of(target.pid(), 1).start();
    target.run();
    recording.stop()
}

/// Standard output of `heapbpf report`, which must succeed.
fn report(profile: &Path, arguments: &[&str]) -> String {
    let said = Command::new(heapbpf())
        .arg("report")
        .arg(profile)
        .args(arguments)
        .output()
        .expect("the binary under test runs");
    assert!(said.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&said.stderr));
    String::from_utf8(said.stdout).expect("text")
}

/// Bytes allocated on stacks through a function.
fn through(profile: &Profile, function: &str) -> f64 {
    let is_through = |stack: &&Stack| {
        stack.frames.iter().any(|frame| frame.function.as_deref().is_some_and(|name| name.contains(function)))
    };
    profile.stacks.iter().filter(is_through).filter_map(|stack| stack.figures.alloc_bytes.estimate).sum()
}

#[test]
fn a_profile_is_shown_by_function_by_module_and_as_trees() {
    let Some(_turn) = turn("a_profile_is_shown_by_function_by_module_and_as_trees") else { return };
    let outcome = recorded();
    let path = outcome.file("profile.json");
    let functions = report(&path, &["--by", "function"]);
    assert!(functions.contains("By function") && functions.contains("SELF"), "{functions}");
    assert!(functions.lines().any(|line| line.trim_end().ends_with("sells")), "{functions}");
    let modules = report(&path, &["--by", "module"]);
    assert!(modules.lines().any(|line| line.trim_end().ends_with("/inlines")), "{modules}");
    let files = report(&path, &["--by", "file"]);
    assert!(files.lines().any(|line| line.trim_end().ends_with("inlines.cc")), "{files}");
    let tree = report(&path, &["--tree"]);
    let place = |name: &str| tree.rfind(name).unwrap_or_else(|| panic!("{name}: {tree}"));
    assert!(place("main") < place("site_00"), "callers come first: {tree}");
    let callers = report(&path, &["--callers", "^site_00"]);
    let place = |name: &str| callers.rfind(name).unwrap_or_else(|| panic!("{name}: {callers}"));
    assert!(place("site_00") < place("main"), "callers come below: {callers}");
}

/// What is in focus and what is ignored add up, in the tables' data and in what is written.
#[test]
fn focus_and_ignore_split_a_profile() {
    let Some(_turn) = turn("focus_and_ignore_split_a_profile") else { return };
    let outcome = recorded();
    let path = outcome.file("profile.json");
    let (whole, _) = outcome.results();
    let folder = TempDir::with_prefix("heapbpf-test-").expect("a temporary folder");
    let part = |option: &str| {
        let file = folder.path().join(format!("{option}.json"));
        report(&path, &[&format!("--{option}"), "^site_00", "-o", file.to_str().expect("our own folder")]);
        output::read(&file)
    };
    let (focus, ignored) = (part("focus"), part("ignore"));
    let bytes = |profile: &Profile| -> f64 {
        profile.stacks.iter().filter_map(|stack| stack.figures.alloc_bytes.estimate).sum()
    };
    let of_site = through(&whole, "site_00");
    assert!(of_site > 0.0 && of_site < bytes(&whole), "{of_site} of {}", bytes(&whole));
    assert_eq!(bytes(&focus), of_site);
    assert_eq!(bytes(&focus) + bytes(&ignored), bytes(&whole));
    assert_eq!(through(&ignored, "site_00"), 0.0);
    let told = report(&path, &["--focus", "^site_00"]);
    assert!(told.contains("a part of the recording: stacks through /^site_00/"), "{told}");
    let hidden = report(&path, &["--hide", "^main$", "--format", "folded"]);
    assert!(hidden.contains("site_00") && !hidden.contains(";main;"), "{hidden}");
}

#[test]
fn csv_has_a_line_per_stack_and_the_sum_of_the_whole() {
    let Some(_turn) = turn("csv_has_a_line_per_stack_and_the_sum_of_the_whole") else { return };
    let outcome = recorded();
    let (whole, _) = outcome.results();
    let text = report(&outcome.file("profile.json"), &["--format", "csv"]);
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().expect("a header").split(',').collect();
    let column = header.iter().position(|name| *name == "alloc_space").expect("a column of bytes");
    // Names of C++ functions have commas, so that their cells are quoted; figures stand after them.
    let from_end = header.len() - column;
    let sum: f64 = lines
        .map(|line| line.rsplit(',').nth(from_end - 1).and_then(|cell| cell.parse().ok()).unwrap_or(f64::NAN))
        .sum();
    let expected: f64 = whole.stacks.iter().filter_map(|stack| stack.figures.alloc_bytes.estimate).sum();
    assert_eq!(sum, expected);
}

/// The sums of a file for the Firefox Profiler are those of the profile that it was made of.
#[test]
fn firefox_profiler_gets_what_is_in_use_and_what_was_allocated() {
    let Some(_turn) = turn("firefox_profiler_gets_what_is_in_use_and_what_was_allocated") else { return };
    let outcome = recorded();
    let (whole, _) = outcome.results();
    let path = outcome.file("x.firefox.json.gz");
    report(&outcome.file("profile.json"), &["-o", path.to_str().expect("our own folder")]);
    let mut text = String::new();
    let file = std::fs::File::open(&path).expect("written");
    GzDecoder::new(file).read_to_string(&mut text).expect("gzip");
    let file: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let weights = file["threads"].as_array().into_iter().flatten().flat_map(|thread| {
        thread["nativeAllocations"]["weight"].as_array().into_iter().flatten().filter_map(serde_json::Value::as_i64)
    });
    let (allocated, freed): (Vec<i64>, Vec<i64>) = weights.partition(|bytes| *bytes > 0);
    let (allocated, freed) = (allocated.iter().sum::<i64>(), freed.iter().sum::<i64>());
    let in_use = whole.totals.inuse_bytes.as_ref().expect("frees were followed").value();
    assert_eq!(allocated as f64, whole.totals.alloc_bytes.value());
    assert_eq!((allocated + freed) as f64, in_use);
    assert!(text.contains("site_00") && in_use > 0.0);
}
