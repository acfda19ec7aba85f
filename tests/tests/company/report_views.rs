//! Views of a saved profile: tables by keys other than stacks, trees, filters as in pprof, and CSV.

use std::path::Path;
use std::process::Command;

use heapbpf_tests::environment::{heapbpf, programs_dir, turn};
use heapbpf_tests::program::program_with;
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::Target;

/// Records every allocation of a program whose functions and lines are known.
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
    // Source lines: the loop of `main` calls what allocates everything.
    let dir = programs_dir();
    let listing = report(&path, &["--value", "alloc_space", "--source", dir.to_str().expect("a plain path")]);
    let line = listing.lines().find(|line| line.contains("  for (uint64_t k = 0;")).expect("it is shown");
    assert!(line.contains("  1.56 KiB "), "20 times 32 and 20 times 48 bytes: {line}");
    assert!(listing.contains("· inlines.cc"), "where it was found: {listing}");
    let elsewhere = path.parent().and_then(Path::to_str).expect("a plain path");
    let elsewhere = report(&path, &["--value", "alloc_space", "--source", elsewhere]);
    assert!(elsewhere.contains("no such file in the directory"), "{elsewhere}");
}
