//! The overhead budget and other tracers: what the budget turns off is reported, and conflicts are explained.

use std::path::Path;
use std::process::Command;

use heapbpf_tests::checks;
use heapbpf_tests::environment::{libc_file, skipped, turn};
use heapbpf_tests::kernel::UprobeEvent;
use heapbpf_tests::output::{self, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;

/// 50,000 allocations a second for six seconds take more than 1 % of the little that the program does, even without
/// frees. Tracking of frees stops at the second check (after 1.2 s), and the probes are removed two checks later.
/// Figures cover the time up to then.
#[test]
fn where_no_step_is_enough_the_probes_go_and_figures_cover_the_time_up_to_then() {
    let Some(_turn) = turn("where_no_step_is_enough_the_probes_go") else { return };
    let mut target = Target::start(&program("churn"), ["paced", "300000"]);
    let recording =
        Recorder::of(target.pid(), 16 << 10).option("--hook", "probe").option("--max-overhead", "1%").start();
    target.go();
    let bytes = target.churned_bytes();
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    let notes = profile.notes.join("\n");
    let (total, seen) = (&profile.totals.alloc_bytes, stats.exact_alloc_bytes as f64);
    println!("{bytes} bytes, {seen} counted, {total:?}\n{notes}\n{}", outcome.stdout);
    assert!(notes.contains("frees are no longer tracked") && notes.contains("the probes were detached"), "{notes}");
    assert!(seen > 0.0 && seen < 0.9 * bytes, "{seen} of {bytes}");
    // Figures are not extrapolated to the rest, and error bars are as always.
    assert_eq!(total.exact, Some(seen));
    assert!(checks::z(total).abs() < 5.0 && total.low.is_some() && total.high.is_some(), "{total:?}");
    assert!(profile.totals.inuse_bytes.as_ref().is_none_or(|inuse| inuse.estimate.is_none()), "in use, without frees");
    assert!(profile.stacks.iter().all(|stack| stack.lifetimes.is_none()), "lifetimes, without frees");
    let coverage = profile.process(target.pid()).coverage;
    assert!(coverage > 0.1 && coverage < 0.9, "{coverage}");
    assert!(outcome.stdout.contains("part of the time of 1 process"), "{}", outcome.stdout);
}

/// Frees take more than half of the CPU time, allocations almost nothing.
#[test]
fn frees_are_given_up_where_that_is_enough_and_allocations_go_on() {
    let Some(_turn) = turn("frees_are_given_up_where_that_is_enough") else { return };
    let mut target = Target::start(&program("calming"), ["200", "100000", "900", "3000"]);
    let recording =
        Recorder::of(target.pid(), 4 << 10).option("--hook", "probe").option("--max-overhead", "5%").start();
    target.go();
    target.step();
    target.go();
    target.step();
    target.go();
    let truth = target.truth();
    let (profile, _) = recording.stop().results();
    let notes = profile.notes.join("\n");
    println!("{notes}");
    assert!(notes.contains("frees are no longer tracked") && !notes.contains("the probes were detached"), "{notes}");
    let process = profile.process(target.pid());
    let (bytes, inuse) = (&process.figures.alloc_bytes, process.figures.inuse_bytes.clone().unwrap_or_default());
    assert_eq!((bytes.exact, process.coverage), (Some(truth.bytes() as f64), 1.0));
    assert!(bytes.low.is_some() && bytes.high.is_some(), "{bytes:?}");
    assert!(inuse.estimate.is_none() && inuse.reason.is_some_and(|why| why.contains("not tracked")), "{notes}");
}

/// Lines of a text that report a slowed target.
fn reported_lines(text: &str) -> Vec<&str> {
    text.lines().filter(|line| line.contains("probes take ")).collect()
}

/// A loop of only malloc and free becomes many times slower. heapbpf reports that once while the loop runs, and in the
/// profile. With `-q` it is only in the profile, and with a budget that bounds it, it is not reported at all.
#[test]
fn a_slowed_target_is_told_once_where_no_budget_bounds_it() {
    let Some(_turn) = turn("a_slowed_target_is_told_once_where_no_budget_bounds_it") else { return };
    let run = |more: &[&str]| {
        let mut target = Target::start(&program("calming"), ["1", "100", "3000", "0"]);
        let recording = Recorder::of(target.pid(), 512 << 10).option("--hook", "probe").flags(more).start();
        target.go();
        target.step();
        target.go();
        let line = more.is_empty().then(|| {
            let mut lines = std::iter::repeat_with(|| recording.next_line());
            lines.find(|line| line.contains("probes take ")).expect("there is always a next")
        });
        target.step();
        target.run();
        let outcome = recording.stop();
        let (profile, _) = outcome.results();
        (target.pid(), line, outcome.stderr, profile.notes.join("\n"))
    };
    let (pid, line, stderr, notes) = run(&[]);
    let line = line.expect("a line while the loop goes on");
    println!("{line}");
    assert!(line.starts_with(&format!("heapbpf: calming ({pid}) runs ")), "{line}");
    for part in ["× slower: ", "a larger -i does not help", "--no-live would take ", "--max-overhead 10% limits it"] {
        assert!(line.contains(part), "{part}: {line}");
    }
    assert!(reported_lines(&stderr).is_empty() && reported_lines(&notes).len() == 1, "{stderr}\n{notes}");
    let (_, _, stderr, notes) = run(&["-q"]);
    assert!(reported_lines(&stderr).is_empty() && reported_lines(&notes).len() == 1, "{stderr}\n{notes}");
    let (_, _, stderr, notes) = run(&["--max-overhead=10%"]);
    assert!(reported_lines(&stderr).is_empty() && reported_lines(&notes).is_empty(), "{stderr}\n{notes}");
}

/// Starts a program with a private copy of the C library, which no other test probes. Returns `None` if this host's
/// library is not found.
fn with_library(dir: &Path, name: &str, arguments: &[&str]) -> Option<Target> {
    let library = libc_file()?;
    let copy = dir.join("libc.so.6");
    if !copy.exists() {
        std::fs::copy(library, copy).expect("there is space for a copy");
    }
    Some(Target::start_command(Command::new(program(name)).args(arguments).env("LD_LIBRARY_PATH", dir)))
}

/// Once a tracer has registered the same instruction with a reference counter, as bcc 0.26 does, the kernel returns
/// EINVAL to all others.
#[test]
fn another_tools_reference_counter_is_explained_and_passes() {
    let case = "another_tools_reference_counter_is_explained_and_passes";
    let Some(_turn) = turn(case) else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let Some(mut target) = with_library(dir.path(), "pairs", &["1000", "1", "100"]) else {
        return skipped(case, "no libc.so.6 where it is known to be");
    };
    // Find the instruction that heapbpf itself would probe.
    let outcome = Recorder::of(target.pid(), 4096).option("--hook", "probe").start().stop();
    let stats: Stats = output::read(&outcome.file("stats.json"));
    let malloc = stats.attach.iter().find(|probe| probe.function == "malloc").expect("malloc is probed");
    let library = dir.path().join("libc.so.6");
    let event = match UprobeEvent::open(&library, malloc.offset, target.pid(), 8) {
        Ok(event) => event,
        Err(error) => return skipped(case, &format!("no uprobe with a reference counter: {error}")),
    };
    let refused = Recorder::of(target.pid(), 4096).option("--hook", "probe").refused();
    refused.check(1, &["another tool"]);
    assert!(refused.stderr.contains("reference counter") && refused.stderr.contains("libc.so.6"), "{}", refused.stderr);
    drop(event);
    let (_, stats, truth) = Recorder::of(target.pid(), 1).option("--hook", "probe").results_of(&mut target);
    assert_eq!(stats.submitted, truth.allocs());
}
