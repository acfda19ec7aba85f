//! The semantics of allocator functions, and everything that can happen to a call, a thread or a process, each with
//! known truth. At interval 1 the figures must equal it. (The ring holds the stacks of 15,000 samples, even if heapbpf
//! gets no CPU meanwhile.)

use std::path::Path;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::held;
use heapbpf_tests::inline::is_hooked;
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::{library, program};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use heapbpf_tests::truth::Truth;

/// Bytes requested by the calls in window.c that never return.
const ABANDONED_BYTES: u64 = 5000;

/// Records a program at interval 1, from READY to its report.
fn record(program: &Path, arguments: &[&str]) -> (Profile, Stats, Truth) {
    record_by("auto", program, arguments)
}

/// Like [`record`], with `--hook` set to `hook`.
fn record_by(hook: &str, program: &Path, arguments: &[&str]) -> (Profile, Stats, Truth) {
    let mut target = Target::start(program, arguments);
    Recorder::of(target.pid(), 1).option("--hook", hook).results_of(&mut target)
}

/// Records family.c. The second process starts and waits until it has its own probes. Inline hooks need none.
fn record_family(mode: &str, hook: &str) -> (Profile, Stats, Truth) {
    let mut target = Target::start(&program("family"), [mode]);
    let mut recording = Recorder::of(target.pid(), 1).option("--hook", hook).start();
    assert_eq!(is_hooked(target.pid()), hook == "inline", "{}", recording.said());
    target.go();
    target.step();
    if hook == "probe" {
        recording.await_more_links();
    }
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    (profile, stats, truth)
}

/// Checks that all figures equal the truth, and that every call is counted under its name.
fn exact(case: &str, name: &str, arguments: &[&str]) {
    exact_by("auto", case, name, arguments);
}

/// Like [`exact`], with `--hook` set to `hook`.
fn exact_by(hook: &str, case: &str, name: &str, arguments: &[&str]) {
    let Some(_turn) = turn(case) else { return };
    let (profile, stats, truth) = record_by(hook, &program(name), arguments);
    checks::sites(&profile, &truth, 1, Compare::All);
    assert_eq!(stats.failed, truth.failed, "{stats:?}");
    assert_eq!(stats.lost(), truth.abandoned, "{stats:?}");
    assert_eq!(stats.submitted, truth.allocs(), "{stats:?}");
    // A call that never returned may or may not have allocated, so the totals may include it, in both figures. A
    // thread's last such call may still be in flight.
    let counted = stats.exact_alloc_objects - truth.allocs();
    assert!(counted <= truth.abandoned, "{counted} more than returned: {stats:?}");
    assert_eq!(stats.exact_alloc_bytes, truth.bytes() + counted * ABANDONED_BYTES, "{stats:?}");
}

/// Another profiler traps on every return (as perf links do), so the kernel replaces return addresses. A realloc that
/// ends with a tail call of malloc is still one call.
#[test]
fn beside_another_recording_calls_count_once() {
    let Some(_turn) = turn("beside_another_recording_calls_count_once") else { return };
    let mut target = Target::start(&program("reallocs"), ["200"]);
    let probes = || Recorder::of(target.pid(), 1).option("--hook", "probe");
    let other = probes().option("--link", "perf").start();
    let (profile, stats, truth) = probes().results_of(&mut target);
    let (_, beside) = other.stop().results();
    checks::sites(&profile, &truth, 1, Compare::All);
    for stats in [&stats, &beside] {
        assert_eq!((stats.exact_alloc_objects, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()), "{stats:?}");
    }
}

/// reallocarray detects an overflow before it allocates, possibly before the probe, so such calls may not be seen. All
/// other failures are counted.
#[test]
fn realloc_in_every_way() {
    const ROUNDS: u64 = 400;
    let Some(_turn) = turn("realloc_in_every_way") else { return };
    let (profile, stats, truth) = record(&program("reallocs"), &[&ROUNDS.to_string()]);
    checks::sites(&profile, &truth, 1, Compare::All);
    assert!([truth.failed, truth.failed - ROUNDS].contains(&stats.failed), "{stats:?}");
    assert_eq!((stats.submitted, stats.lost()), (truth.allocs(), 0), "{stats:?}");
    assert_eq!((stats.exact_alloc_objects, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()), "{stats:?}");
}

#[test]
fn aligned_allocations_and_their_failures() {
    exact("aligned_allocations_and_their_failures", "aligned", &["300"]);
}

#[test]
fn failed_calls_are_no_allocations_and_empty_ones_are() {
    exact("failed_calls_are_no_allocations_and_empty_ones_are", "refused", &["400"]);
}

#[test]
fn free_in_another_thread() {
    exact("free_in_another_thread", "handover", &["7000"]);
}

#[test]
fn a_signal_handler_allocates_inside_an_allocation() {
    exact("a_signal_handler_allocates_inside_an_allocation", "window", &["handler", "300"]);
}

/// Probes count a call that never returns as lost.
#[test]
fn an_allocation_left_by_longjmp() {
    exact_by("probe", "an_allocation_left_by_longjmp", "window", &["jump", "300"]);
}

#[test]
fn a_thread_ends_inside_an_allocation() {
    exact("a_thread_ends_inside_an_allocation", "window", &["thread", "300"]);
}

#[test]
fn a_timer_interrupts_allocations() {
    exact("a_timer_interrupts_allocations", "window", &["timer", "500"]);
}

#[test]
fn libc_is_a_caller_like_any_other() {
    exact("libc_is_a_caller_like_any_other", "callers", &["100"]);
}

#[test]
fn libraries_that_come_and_go() {
    let Some(_turn) = turn("libraries_that_come_and_go") else { return };
    let plugins: Vec<_> =
        [10, 11, 12].map(|n| library("plugin", &format!("plugin{n}.so"), &[&format!("-DPLUGIN={n}")])).into();
    let mut arguments = vec!["6"];
    arguments.extend(plugins.iter().map(|path| path.to_str().expect("our own path")));
    let (profile, stats, truth) = record(&program("plugins"), &arguments);
    checks::sites(&profile, &truth, 1, Compare::All);
    // The loader allocates as well.
    assert!(stats.submitted >= truth.allocs(), "{stats:?}");
}

/// The blocks that a child inherits are its parent's allocations: in the child they count neither as allocated nor as
/// in use.
#[test]
fn a_forked_child_starts_empty() {
    let Some(_turn) = turn("a_forked_child_starts_empty") else { return };
    for hook in ["probe", "inline"] {
        let (profile, stats, truth) = record_family("fork", hook);
        for pid in truth.sites.iter().map(|site| site.pid) {
            checks::sites_of(&profile, pid, &truth, 1, Compare::All);
            let bytes = truth.sites.iter().filter(|site| site.pid == pid).map(|site| site.bytes).sum();
            assert_eq!(checks::exact(profile.process(pid)).0, Some(bytes), "{hook}: {pid} of {profile:?}");
        }
        assert_eq!((stats.submitted, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()), "{hook}: {stats:?}");
        assert!(profile.process(truth.site("site_02").pid).ended, "{hook}: the child has ended");
    }
}

/// A child of vfork or clone allocates in its parent's memory, and with inline hooks it adds to the counts there. Its
/// allocations are its own. The blocks stay in its parent's address space, also when the child calls exec.
#[test]
fn children_in_their_parents_memory_have_allocations_of_their_own() {
    let Some(_turn) = turn("children_in_their_parents_memory_have_allocations_of_their_own") else { return };
    for (mode, hook) in [("vfork", "probe"), ("clone", "probe"), ("vfork", "inline"), ("clone", "inline")] {
        let (profile, stats, truth) = record_family(mode, hook);
        checks::sites(&profile, &truth, 1, Compare::All);
        assert!(hook == "probe" || stats.lost() == 0, "{mode}: {stats:?}");
        for pid in truth.sites.iter().map(|site| site.pid) {
            checks::sites_of(&profile, pid, &truth, 1, Compare::Allocated);
        }
    }
}

/// exec ends the first process generation, whose memory in use is as of that moment. The second has the same pid.
#[test]
fn exec_ends_one_life_and_begins_another() {
    let Some(_turn) = turn("exec_ends_one_life_and_begins_another") else { return };
    held::most_are_whole("a program that was executed", || {
        let (profile, _, truth) = record(&program("family"), &["exec"]);
        let sums = checks::site_sums(&profile, None);
        let (first, second) = (truth.site("site_00"), truth.site("site_02"));
        if sums.get("site_02").is_none_or(|sum| sum.samples < second.allocs) {
            let executed = profile.processes.iter().rfind(|process| process.pid == second.pid);
            assert!(held::is_reported(&profile, executed), "{:?}", profile.processes);
            assert_eq!(sums["site_00"].samples, first.allocs, "the first generation");
            return [0, 1];
        }
        checks::sites(&profile, &truth, 1, Compare::Allocated);
        assert_eq!(sums["site_02"].figures[3], second.live_allocs as f64, "the second generation");
        let first = first.live_allocs as f64;
        assert!([0.0, first].contains(&sums["site_00"].figures[3]), "the first generation: {:?}", sums["site_00"]);
        [1, 1]
    });
}
