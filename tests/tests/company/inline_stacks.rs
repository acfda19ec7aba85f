//! Stacks of processes with inline hooks equal those that probes see, also through replaced text pages.

use std::collections::BTreeMap;
use std::path::Path;

use heapbpf_tests::environment::turn;
use heapbpf_tests::inline::{Hook, record};
use heapbpf_tests::output::{Profile, Stack};
use heapbpf_tests::program::{program, program_with};

/// Which frames of a stack are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frames {
    All,
    /// The caller only. Frames beyond it depend on what code without frame pointers keeps in that register, which may
    /// be any data.
    First,
}

/// A stack as text: the called function, whether the stack is complete, and each frame with its module and build ID.
fn text(stack: &Stack, compared: Frames) -> String {
    let most = if compared == Frames::First { 1 } else { usize::MAX };
    let frames = stack.frames.iter().take(most).map(|frame| {
        let [function, module, build_id] =
            [&frame.function, &frame.module, &frame.build_id].map(|part| part.as_deref().unwrap_or("?"));
        format!("\n  {function} {module} {build_id} {}", frame.line.unwrap_or(0))
    });
    let is_whole = if compared == Frames::All { format!(" complete: {}", stack.complete) } else { String::new() };
    format!("{}{is_whole}{}", stack.function, frames.collect::<String>())
}

/// Samples, bytes and samples in use of each stack, except those of the site `without`.
fn stacks(profile: &Profile, compared: Frames, without: Option<&str>) -> BTreeMap<String, [u64; 3]> {
    let mut all = BTreeMap::new();
    for stack in profile.stacks.iter().filter(|stack| without.is_none() || stack.site() != without) {
        let sums: &mut [u64; 3] = all.entry(text(stack, compared)).or_default();
        let figures = [stack.samples, stack.sampled_bytes, stack.inuse_samples.unwrap_or_default()];
        sums.iter_mut().zip(figures).for_each(|(sum, figure)| *sum += figure);
    }
    all
}

/// Records a program hooked in both ways, and compares all stacks, or only their callers. `without` is a site whose
/// calls depend on time.
fn the_same(program: &Path, arguments: &[&str], unwind: &str, compared: Frames, without: Option<&str>) -> Profile {
    let options = [["--unwind", unwind]];
    let [probe, inline] = [Hook::Probe, Hook::Inline].map(|hook| record(program, arguments, hook, 1, &options).0);
    let [expected, found] = [&probe, &inline].map(|profile| stacks(profile, compared, without));
    assert!(!expected.is_empty());
    let differing = |one: &BTreeMap<String, [u64; 3]>, other: &BTreeMap<String, [u64; 3]>| {
        let differs = one.iter().filter(|(stack, figures)| other.get(*stack) != Some(*figures));
        differs.map(|(stack, figures)| format!("{figures:?} {stack}\n")).take(5).collect::<String>()
    };
    assert!(
        expected == found,
        "by probes:\n{}\ninline:\n{}",
        differing(&expected, &found),
        differing(&found, &expected)
    );
    inline
}

#[test]
fn callers_inside_libc_are_the_same() {
    let Some(_turn) = turn("callers_inside_libc_are_the_same") else { return };
    for (unwind, compared) in [("auto", Frames::All), ("fp", Frames::First)] {
        let profile = the_same(&program("libc_callers"), &["5"], unwind, compared, None);
        let ours = profile.stacks.iter().flat_map(|stack| &stack.frames);
        assert_eq!(ours.filter(|frame| frame.module.as_deref().is_some_and(|it| it.contains("memfd"))).count(), 0);
        if unwind != "fp" {
            assert!(profile.stacks.iter().all(|stack| stack.complete && stack.has("main")), "{unwind}");
        }
    }
}

#[test]
fn paths_that_are_hard_to_unwind_are_the_same() {
    let Some(_turn) = turn("paths_that_are_hard_to_unwind_are_the_same") else { return };
    // A timer triggers site 6.
    let tail_calls = ["-foptimize-sibling-calls"];
    for (output, flags, unwind) in [("frames-fp", vec![], "fp"), ("frames-nofp", vec!["-fomit-frame-pointer"], "auto")]
    {
        let flags = [&tail_calls[..], &flags].concat();
        the_same(&program_with("frames", output, &flags), &["50"], unwind, Frames::All, Some("site_06"));
    }
}
