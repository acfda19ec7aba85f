//! Stacks that cannot be unwound say why, and everything else stays correct.

use std::path::{Path, PathBuf};

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::output::Profile;
use heapbpf_tests::program::program_with;
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::Target;

/// Builds deep.c without frame pointers.
fn deep() -> PathBuf {
    program_with("deep", "deep-bad", &["-fomit-frame-pointer"])
}

/// Records every allocation of deep.c below twenty calls.
fn record(program: &Path, unwind: &str) -> (Profile, Outcome) {
    let mut target = Target::start(program, ["100", "20"]);
    let (outcome, truth) = Recorder::of(target.pid(), 1).option("--unwind", unwind).record(&mut target);
    let (profile, stats) = outcome.results();
    assert_eq!(stats.lost(), 0, "{stats:?}");
    checks::sites(&profile, &truth, 1, Compare::All);
    (profile, outcome)
}

/// The table says once for how many stacks frame pointers were missing. Each such stack is marked incomplete.
#[test]
fn frame_pointers_that_are_not_there_are_told_once() {
    let Some(_turn) = turn("frame_pointers_that_are_not_there_are_told_once") else { return };
    let (profile, outcome) = record(&deep(), "fp");
    assert!(profile.stacks.iter().all(|stack| !stack.complete), "{:?}", profile.cuts());
    let said = format!("{}\n{}", outcome.stdout, outcome.stderr);
    assert_eq!(said.matches("of the samples have broken stacks").count(), 1, "{said}");
    assert!(said.contains("100.0 % of the samples have broken stacks") && said.contains("--unwind auto"), "{said}");
    // With stack copies there is no such note.
    let (profile, outcome) = record(&deep(), "auto");
    assert!(profile.stacks.iter().all(|stack| stack.complete), "{:?}", profile.cuts());
    assert!(!outcome.stdout.contains("broken stacks"), "{}", outcome.stdout);
}
