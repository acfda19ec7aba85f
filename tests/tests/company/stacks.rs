//! Stacks are correct for call paths that are hard to unwind, and for programs built without frame pointers.

use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::output::{Profile, Stack};
use heapbpf_tests::program::{library, program_with};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, until};

/// Sites of frames.c and the functions that must be on the stack, innermost first. Only at "…" may others be in between
/// (libc's own, the kernel's signal trampoline).
const PATHS: &[(&str, &[&str])] = &[
    ("site_01", &["site_01", "with_alloca", "main"]),
    ("site_02", &["site_02", "jumped_to", "before_the_jump", "main"]),
    ("site_03", &["site_03", "on_signal", "…", "raises", "main"]),
    ("site_04", &["site_04", "in_coroutine", "coroutine"]),
    ("site_05", &["site_05", "compares", "…", "sorts", "main"]),
    ("site_06", &["site_06", "on_tick", "…", "reads_the_clock", "main"]),
    ("site_07", &["site_07", "in_thread", "thread_main"]),
];

/// Whether the innermost functions of the stack match `path`.
fn begins_with(stack: &Stack, path: &[&str]) -> bool {
    let mut names = stack.names().into_iter().skip_while(|name| *name != path[0]);
    let mut gap = false;
    for &expected in path {
        if expected == "…" {
            gap = true;
        } else if gap {
            if !names.any(|name| name == expected) {
                return false;
            }
            gap = false;
        } else if names.next() != Some(expected) {
            return false;
        }
    }
    true
}

fn record(program: &Path, unwind: &str) -> Profile {
    let mut target = Target::start(program, ["100"]);
    let (profile, stats, truth) = Recorder::of(target.pid(), 1).option("--unwind", unwind).results_of(&mut target);
    checks::sites(&profile, &truth, 1, Compare::All);
    assert_eq!(stats.lost(), 0, "{stats:?}");
    profile
}

/// Number of samples of a site whose stacks are correct and complete, and number of all its samples.
fn right(profile: &Profile, site: &str, path: &[&str]) -> (u64, u64) {
    let here = || profile.stacks.iter().filter(|stack| stack.site() == Some(site));
    for stack in here().filter(|stack| !(begins_with(stack, path) && stack.complete)).take(3) {
        println!("{site}: complete: {}, {:?}", stack.complete, stack.names());
    }
    let good = here().filter(|stack| begins_with(stack, path) && stack.complete).map(|stack| stack.samples).sum();
    (good, here().map(|stack| stack.samples).sum())
}

/// Builds frames.c with these flags.
fn frames(output: &str, flags: &[&str]) -> PathBuf {
    program_with("frames", output, &[&["-foptimize-sibling-calls"], flags].concat())
}

/// Checks all paths in frames.c built with these flags.
fn all_paths(case: &str, output: &str, flags: &[&str], unwind: &str) {
    let Some(_turn) = turn(case) else { return };
    assert_paths(&record(&frames(output, flags), unwind));
}

fn assert_paths(profile: &Profile) {
    let mut wrong = Vec::new();
    for (site, path) in PATHS {
        let (good, all) = right(profile, site, path);
        // A signal can arrive at any instruction. One in a hundred may hit an instruction with wrong unwind
        // information.
        if (good as f64) < 0.99 * all as f64 || all == 0 {
            wrong.push(format!("{site}: {good} of {all} stacks are {path:?}"));
        }
    }
    let recursions = profile.stacks.iter().filter(|stack| stack.site() == Some("site_00"));
    for stack in recursions {
        let depth = stack.names().iter().filter(|name| **name == "recursive").count();
        if depth != 201 || !stack.complete || !stack.has("main") {
            wrong.push(format!("site_00: {depth} of 201 calls of `recursive`, complete: {}", stack.complete));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn paths_with_frame_pointers() {
    all_paths("paths_with_frame_pointers", "frames-fp", &[], "auto");
}

#[test]
fn paths_without_frame_pointers() {
    all_paths("paths_without_frame_pointers", "frames-nofp", &["-fomit-frame-pointer"], "auto");
}

#[test]
fn paths_in_a_program_built_for_gprof() {
    all_paths("paths_in_a_program_built_for_gprof", "frames-pg", &["-pg"], "auto");
}

/// For such a program, the kernel maps the whole file executable and then maps data over it, which no event reports.
/// Beyond the outermost frame of a coroutine, a data address must not pass for a return address.
#[test]
fn paths_in_a_program_that_begins_with_code_and_is_started_meanwhile() {
    let Some(_turn) = turn("paths_in_a_program_that_begins_with_code_and_is_started_meanwhile") else { return };
    let program = frames("frames-noseparate", &["-fomit-frame-pointer", "-Wl,-z,noseparate-code"]);
    let recorder = Recorder::new().interval(1).variable("FREE_RUNNING", "1".as_ref());
    let (profile, stats) = recorder.command(&program, ["100"]).start().finish().results();
    assert_eq!(stats.lost(), 0, "{stats:?}");
    assert_paths(&profile);
}

/// Frame pointers give correct stacks where programs have them, including the immediate caller, which the kernel's walk
/// omits.
#[test]
fn frame_pointers_give_the_immediate_caller() {
    let Some(_turn) = turn("frame_pointers_give_the_immediate_caller") else { return };
    let profile = record(&frames("frames-fp", &[]), "fp");
    for (site, path) in PATHS.iter().filter(|(site, _)| ["site_01", "site_02", "site_07"].contains(site)) {
        let here = || profile.stacks.iter().filter(|stack| stack.site() == Some(*site));
        assert!(here().count() > 0, "{site}");
        for stack in here() {
            assert!(begins_with(stack, path), "{site}: {:?}", stack.names());
        }
    }
}

/// A preloaded library's malloc calls or tail-calls libc's. Each allocation counts once, with the true stack.
#[test]
fn stacks_through_an_interposer_are_whole() {
    let Some(_turn) = turn("stacks_through_an_interposer_are_whole") else { return };
    let program = frames("frames-nofp", &["-fomit-frame-pointer"]);
    for (output, flag) in [("calls.so", "-fno-optimize-sibling-calls"), ("jumps.so", "-foptimize-sibling-calls")] {
        let interposer = library("interposer", output, &[flag, "-fomit-frame-pointer", "-ldl"]);
        let mut command = Command::new(&program);
        let mut target = Target::start_command(command.arg("50").env("LD_PRELOAD", interposer));
        let (profile, stats, truth) = Recorder::of(target.pid(), 1).results_of(&mut target);
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!(stats.lost(), 0, "{stats:?}");
        for (site, path) in PATHS.iter().filter(|(site, _)| ["site_01", "site_02", "site_05", "site_07"].contains(site))
        {
            let (good, all) = right(&profile, site, path);
            assert!(good == all && all > 0, "{output}: {site}: {good} of {all} stacks are {path:?}");
        }
    }
}

/// A signal handler allocates during another allocation call whose return is probed, so the stack has the kernel's
/// trampoline in place of a return address. The frames are still those of the source.
#[test]
fn stacks_inside_another_sampled_call_are_whole() {
    let Some(_turn) = turn("stacks_inside_another_sampled_call_are_whole") else { return };
    for flags in [&[][..], &["-fomit-frame-pointer"]] {
        let output = if flags.is_empty() { "window" } else { "window-nofp" };
        let mut target = Target::start(&program_with("window", output, flags), ["handler", "100"]);
        let (profile, stats, truth) = Recorder::of(target.pid(), 1).results_of(&mut target);
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!(stats.lost(), 0, "{stats:?}");
        let path = ["site_01", "on_fault", "…", "posix", "site_00", "main"];
        let (good, all) = right(&profile, "site_01", &path);
        assert!(good == all && all >= 200, "{good} of {all} stacks are {path:?}");
    }
}

/// Parts of a stack that were never touched are not in memory, and unwinding continues above them. Where the top of a
/// stack is not known, copies get longer once heapbpf has seen truncated stacks.
#[test]
fn stacks_with_unused_parts_and_stacks_of_no_thread_are_whole() {
    let Some(_turn) = turn("stacks_with_unused_parts_and_stacks_of_no_thread_are_whole") else { return };
    let flags = ["-fomit-frame-pointer", "-fno-stack-clash-protection"];
    let mut target = Target::start(&program_with("gaps", "gaps", &flags), ["100"]);
    let recording = Recorder::of(target.pid(), 1).start();
    for step in 0..2 {
        target.go();
        target.step();
        // The snapshot is written only after the truncated stacks before it have been processed.
        let snapshot = recording.dir().join(format!("profile.{:04}.json", step + 1));
        recording.signal(libc::SIGUSR1);
        until("a snapshot", || snapshot.exists());
    }
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    checks::sites(&profile, &truth, 1, Compare::All);
    assert_eq!((stats.lost(), stats.other["stacks_lost"]), (0, 0), "{stats:?}");
    for (site, path) in [
        ("site_00", &["site_00", "allocate", "below_unused_space", "main"][..]),
        ("site_01", &["site_01", "allocate", "below_unused_space", "thread_main"]),
        ("site_03", &["site_03", "allocate", "below_used_space", "made_by_hand"]),
    ] {
        let (good, all) = right(&profile, site, path);
        assert_eq!((good, all), (100, 100), "{site}");
    }
    // Copies grow only after two that were too short. How many more were taken by then depends on the machine.
    let (good, all) = right(&profile, "site_02", &["site_02", "allocate", "below_used_space", "made_by_hand"]);
    let cut = profile.stacks.iter().filter(|stack| stack.has("site_02") && !stack.complete).map(|stack| stack.samples);
    assert_eq!((all, good + cut.sum::<u64>()), (200, 200), "all are counted, and what is not whole is cut");
}
