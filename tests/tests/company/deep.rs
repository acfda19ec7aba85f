//! Deep stacks: up to 512 frames, through copies larger than 64 KiB.

use std::collections::BTreeSet;
use std::path::PathBuf;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::output::{Profile, Stack, Stats};
use heapbpf_tests::program::program_with;
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::Target;

/// Number of frames besides the recursive calls: `site_00` inside them, and `main`, two of libc's and `_start` outside.
const OTHERS: usize = 5;

/// Builds deep.c with this many bytes of locals per frame, without frame pointers.
fn deep(locals: usize) -> PathBuf {
    let flag = format!("-DROOM={locals}");
    program_with("deep", &format!("deep-{locals}"), &["-fomit-frame-pointer", &flag])
}

/// Records each of this many allocations, made below this many calls of `descend`.
fn record(locals: usize, calls: usize, allocations: u64, options: &[(&str, &str)]) -> (Profile, Stats, Outcome) {
    let depth = (calls - 1).to_string();
    let mut target = Target::start(&deep(locals), [&allocations.to_string(), &depth]);
    let recorder = options.iter().fold(Recorder::of(target.pid(), 1), |recorder, (a, b)| recorder.option(a, b));
    let (outcome, truth) = recorder.record(&mut target);
    let (profile, stats) = outcome.results();
    checks::sites(&profile, &truth, 1, Compare::All);
    assert_eq!((stats.lost(), stats.other["stacks_lost"]), (0, 0), "{stats:?}");
    (profile, stats, outcome)
}

fn stacks(profile: &Profile) -> impl Iterator<Item = &Stack> {
    profile.stacks.iter().filter(|stack| stack.site() == Some("site_00"))
}

/// Whether the stack is correct: the site, the recursion, and its callers.
fn is_true(stack: &Stack, calls: usize) -> bool {
    let names = stack.names();
    names.len() == calls + OTHERS
        && names[0] == "site_00"
        && names[1..=calls].iter().all(|name| *name == "descend")
        && names[calls + 1] == "main"
        && names[calls + OTHERS - 1] == "_start"
}

fn all_true(profile: &Profile, calls: usize) {
    assert!(stacks(profile).count() > 0);
    for stack in stacks(profile) {
        let ends = stack.frames.first().zip(stack.frames.last());
        assert!(stack.complete && is_true(stack, calls), "{} frames, from and to {ends:?}", stack.frames.len());
    }
}

/// 512 frames in copies of several size classes: 507 frames of 560 bytes are 284 KB (class of 384 KiB), 507 of 300 are
/// 152 KB (192 KiB), 507 of 1,900 nearly 1 MB. All copies of the run fit into the ring at once, and by default copies
/// are as long as the stack is deep.
#[test]
fn stacks_of_512_frames_are_the_truth() {
    let Some(_turn) = turn("stacks_of_512_frames_are_the_truth") else { return };
    let limited = |size| vec![("--stack-bytes", size)];
    for (locals, options) in [
        (1, limited("64KiB")),
        (260, limited("256KiB")),
        (520, limited("512KiB")),
        (1, vec![]),
        (260, vec![]),
        (520, vec![]),
        (1900, vec![]),
    ] {
        println!("locals of {locals} bytes, {options:?}");
        let (profile, stats, _) = record(locals, 512 - OTHERS, 40, &options);
        all_true(&profile, 512 - OTHERS);
        assert_eq!(stats.other["stacks_unwound"], stats.submitted);
    }
}

/// Stacks beyond a limit are cut there, and the reason names the option.
#[test]
fn deeper_stacks_are_cut_and_say_so() {
    let Some(_turn) = turn("deeper_stacks_are_cut_and_say_so") else { return };
    let folded = |stack: &Stack| stack.frames[1..].iter().all(|frame| frame.function.as_deref() == Some("descend"));
    let (profile, _, outcome) = record(1, 600, 40, &[]);
    for stack in stacks(&profile) {
        assert!(!stack.complete && stack.frames.len() == 512 && folded(stack), "{} frames", stack.frames.len());
    }
    let json = std::fs::read_to_string(outcome.file("profile.json")).expect("written");
    assert!(json.contains("depth limit (see --max-depth)"));
    let (profile, ..) = record(1, 600, 40, &[("--max-depth", "1024")]);
    all_true(&profile, 600);

    let (profile, _, outcome) = record(520, 507, 40, &[("--stack-bytes", "64KiB")]);
    for stack in stacks(&profile) {
        assert!(!stack.complete && folded(stack) && stack.frames.len() > 64, "{} frames", stack.frames.len());
    }
    let json = std::fs::read_to_string(outcome.file("profile.json")).expect("written");
    assert!(json.contains("stack copy too small (see --stack-bytes)"));
}

/// While the daemon does not read, long copies get shorter as the ring fills up, and are lost only when it is full.
/// Each case is reported as such, and no allocation is lost.
#[test]
fn copies_get_shorter_before_any_is_lost_and_both_are_told() {
    let Some(_turn) = turn("copies_get_shorter_before_any_is_lost_and_both_are_told") else { return };
    // The ring for stacks has 4 MiB. It takes five copies of 384 KiB (the stack has 284 KB), then copies get shorter.
    let mut reported = Vec::new();
    for allocations in [12, 400] {
        let mut target = Target::start(&deep(520), [allocations.to_string().as_str(), "506"]);
        let recording = Recorder::of(target.pid(), 1).option("--ring-bytes", "1MiB").start();
        recording.signal(libc::SIGSTOP);
        let truth = target.run();
        recording.signal(libc::SIGCONT);
        let outcome = recording.stop();
        let (profile, stats) = outcome.results();
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!(stats.lost(), 0, "{stats:?}");
        let whole: u64 = stacks(&profile).filter(|stack| is_true(stack, 507)).map(|stack| stack.samples).sum();
        let cuts = profile.cuts();
        println!("{allocations}: {whole} whole, {} lost, {cuts:?}", stats.other["stacks_lost"]);
        assert_eq!(whole + stats.other["stacks_shortened"] + stats.other["stacks_lost"], allocations, "{stats:?}");
        assert!(whole > 0 && whole < allocations, "{whole} of {allocations} are whole: {cuts:?}");
        reported.push((stats.other["stacks_lost"], cuts));
    }
    let shortened = "stack copy cut short: the stacks ring was filling up (see --lossless, or a larger -i)".to_owned();
    let lost = "its stack was lost: the stacks ring was full (see --lossless, or a larger -i)".to_owned();
    assert_eq!(reported[0], (0, BTreeSet::from([shortened.clone()])));
    assert!(reported[1].0 > 0);
    assert_eq!(reported[1].1, BTreeSet::from([shortened, lost]));
}
