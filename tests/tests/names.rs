//! Names of functions: what a stripped program's functions are called, and names from elsewhere.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use heapbpf_tests::environment::{heapbpf, skipped, tool, turn};
use heapbpf_tests::output::Profile;
use heapbpf_tests::pprof;
use heapbpf_tests::program::program_with;
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::Target;

/// A recording of every allocation of a program.
fn record(program: &Path) -> Outcome {
    let mut target = Target::start(program, ["40"]);
    let recording = Recorder::of(target.pid(), 1).start();
    target.run();
    recording.stop()
}

/// Samples by the functions of `module` on their stacks, with the names that `name` makes of those.
fn by_functions(profile: &Profile, module: &str, name: impl Fn(&str) -> String) -> BTreeMap<Vec<String>, u64> {
    let mut found = BTreeMap::new();
    for stack in &profile.stacks {
        let of_module = stack.frames.iter().filter(|it| it.module.as_ref().is_some_and(|path| path.ends_with(module)));
        let names = of_module.map(|frame| name(frame.function.as_deref().unwrap_or("?"))).collect();
        *found.entry(names).or_default() += stack.samples;
    }
    found
}

/// Functions of a stripped program are told apart by where they begin, so that all calls of one are together, in every
/// format. Why they have no names is said once.
#[test]
fn functions_of_a_stripped_program_are_known_by_where_they_begin() {
    let case = "functions_of_a_stripped_program_are_known_by_where_they_begin";
    let Some(_turn) = turn(case) else { return };
    let Some(nm) = tool("nm") else { return skipped(case, "no nm (Debian: binutils)") };
    let flags = ["-fomit-frame-pointer", "-g0", "-Wl,--build-id"];
    let plain = program_with("inlines", "inlines-plain", &flags);
    let stripped = program_with("inlines", "inlines-stripped", &[&flags[..], &["-s"]].concat());
    let listing = Command::new(nm).args(["--demangle"]).arg(&plain).output().expect("nm runs").stdout;
    let listing = String::from_utf8(listing).expect("text");
    let starts: BTreeMap<u64, &str> = listing
        .lines()
        .filter_map(|line| Some((u64::from_str_radix(line.get(..16)?, 16).ok()?, line.get(19..)?)))
        .collect();

    let (named, _) = record(&plain).results();
    let outcome = record(&stripped);
    let (unnamed, _) = outcome.results();
    let of_start = |function: &str| {
        let start = function.strip_prefix("inlines-stripped+0x").expect("where it begins");
        starts[&u64::from_str_radix(start, 16).expect("hexadecimal")].to_owned()
    };
    let expected = by_functions(&named, "/inlines-plain", str::to_owned);
    assert!(expected.len() == 2 && expected.keys().flatten().any(|name| name == "main"), "{expected:?}");
    assert_eq!(by_functions(&unnamed, "/inlines-stripped", of_start), expected);
    // Calls from different places in `main` are one function.
    let main = listing.lines().find(|line| line.ends_with(" T main")).expect("a program has it");
    let main = format!("inlines-stripped+{:#x}", u64::from_str_radix(&main[..16], 16).expect("hexadecimal"));
    let frames = unnamed.stacks.iter().flat_map(|stack| &stack.frames);
    assert!(
        frames
            .filter(|it| it.module.as_ref().is_some_and(|path| path.ends_with("/inlines-stripped")))
            .all(|it| it.reason.is_none())
    );

    for file in ["profile.json", "profile.pb.gz"] {
        let said =
            Command::new(heapbpf()).args(["report", "--functions"]).arg(outcome.file(file)).output().expect("runs");
        let text = String::from_utf8(said.stdout).expect("text");
        let functions = text.split("By function").nth(1).expect("the section");
        assert_eq!(functions.lines().filter(|line| line.contains(&main)).count(), 1, "{text}");
        assert!(!text.contains("[inlines-stripped+"), "{text}");
        let reason = "inlines-stripped is stripped: install its debug symbols, or set DEBUGINFOD_URLS";
        assert_eq!(text.matches(reason).count(), 1, "{text}");
    }
    let Some(top) = pprof::go_tool_pprof(&["-top", "-sample_index=alloc_space"], &outcome.file("profile.pb.gz")) else {
        return skipped(case, "the part with pprof: no go (Debian: golang-go)");
    };
    assert_eq!(top.lines().filter(|line| line.contains(&main)).count(), 1, "{top}");
}
