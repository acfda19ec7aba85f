//! `--hook inline` with names of processes: what is hot goes over from probes to inline hooks while it runs.

use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{skipped, turn};
use heapbpf_tests::inline::{counted_exactly, is_hooked};
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::{program, program_with};
use heapbpf_tests::recorder::{Recorder, Recording};
use heapbpf_tests::target::{Target, until};

/// Records processes of this name.
fn record(comm: &str, interval: u64) -> Recording {
    let recorder = Recorder::new().option("--comm", comm).interval(interval).option("--hook", "inline");
    recorder.option("--max-overhead", "none").flag("-v").start()
}

/// How a process was hooked in the end, by the profile and by the statistics, and why not inline.
fn hook(profile: &Profile, stats: &Stats, pid: u32) -> (String, Option<String>) {
    let process = profile.process(pid);
    let hooked = stats.hooks.iter().find(|hooked| hooked.pid == pid).expect("it is listed");
    assert_eq!(process.hook.as_deref(), Some(&*hooked.hook));
    (hooked.hook.clone(), hooked.not_inline.clone())
}

/// The program under the name that only one test gives it.
fn warming(name: &str) -> PathBuf {
    program_with("warming", name, &[])
}

/// Starts it with so many blocks, in quiet, then has its threads allocate until it is hooked inline, and longer.
fn warmed(name: &str, arguments: [&str; 3], interval: u64) -> (Target, Recording) {
    let mut target = Target::start(&warming(name), arguments);
    let recording = record(name, interval);
    target.go();
    target.step();
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert!(!is_hooked(target.pid()), "it is quiet");
    target.go();
    until("it is hooked inline", || is_hooked(target.pid()));
    std::thread::sleep(std::time::Duration::from_millis(500));
    (target, recording)
}

#[test]
fn a_hot_process_keeps_its_blocks_and_counts_when_it_goes_over() {
    let Some(_turn) = turn("inline_a_hot_process_keeps_its_blocks_and_counts") else { return };
    for arguments in [["400", "1", "2000"], ["400", "3", "5000"]] {
        let (mut target, recording) = warmed("warming-keeps", arguments, 1);
        target.go();
        let truth = target.truth();
        let (profile, stats) = recording.stop().results();
        assert!(!is_hooked(target.pid()), "the original pages are back");
        checks::sites(&profile, &truth, 1, Compare::All);
        counted_exactly(&stats, &truth);
        assert_eq!(hook(&profile, &stats, target.pid()), ("inline".into(), None));
    }
}

#[test]
fn threads_at_full_speed_go_over() {
    let Some(_turn) = turn("inline_threads_at_full_speed_go_over") else { return };
    let interval = 1 << 20;
    let (mut target, recording) = warmed("warming-threads", ["900", "4", "0"], interval);
    target.go();
    let truth = target.truth();
    let (profile, stats) = recording.stop().results();
    counted_exactly(&stats, &truth);
    checks::sites(&profile, &truth, interval, Compare::All);
    assert_eq!(hook(&profile, &stats, target.pid()), ("inline".into(), None));
}

#[test]
fn a_quiet_process_stays_on_probes_beside_a_hot_one() {
    let Some(_turn) = turn("inline_a_quiet_process_stays_on_probes_beside_a_hot_one") else { return };
    let mut quiet = Target::start(&warming("warming-quiet"), ["300", "0"]);
    let (mut hot, recording) = warmed("warming-quiet", ["400", "1", "2000"], 1);
    quiet.go();
    quiet.step();
    quiet.go();
    let truths = [&mut hot, &mut quiet].map(|target| {
        target.go();
        target.truth()
    });
    assert!(!is_hooked(quiet.pid()), "it makes few calls");
    let (profile, stats) = recording.stop().results();
    for (target, truth) in [&hot, &quiet].into_iter().zip(&truths) {
        checks::sites_of(&profile, target.pid(), truth, 1, Compare::All);
        assert_eq!(checks::exact(profile.process(target.pid())), (Some(truth.bytes()), Some(truth.allocs())));
    }
    assert_eq!((stats.hits, stats.lost()), (truths.iter().map(|truth| truth.allocs()).sum(), 0), "{stats:?}");
    assert_eq!(hook(&profile, &stats, hot.pid()), ("inline".into(), None));
    assert_eq!(hook(&profile, &stats, quiet.pid()), ("probe".into(), None));
}

#[test]
fn a_hot_process_that_is_refused_stays_on_probes_and_the_reason_is_told() {
    let Some(_turn) = turn("inline_a_hot_process_that_is_refused_stays_on_probes") else { return };
    let mut target = Target::start(&warming("warming-refused"), ["400", "1", "5000"]);
    // SAFETY: the request takes no pointers; its tracer is this thread, which waits for nothing of it.
    let traced = unsafe { libc::ptrace(libc::PTRACE_SEIZE, target.pid(), 0, 0) };
    assert_eq!(traced, 0, "it can be traced");
    let recording = record("warming-refused", 1);
    target.go();
    target.step();
    target.go();
    std::thread::sleep(std::time::Duration::from_secs(4));
    assert!(!is_hooked(target.pid()));
    target.go();
    let truth = target.truth();
    let (profile, stats) = recording.stop().results();
    counted_exactly(&stats, &truth);
    checks::sites(&profile, &truth, 1, Compare::All);
    let (hook, why) = hook(&profile, &stats, target.pid());
    assert!(hook == "probe" && why.is_some_and(|why| why.contains("traces it")), "{stats:?}");
}

/// A trap on every call of it is far beyond the budget.
#[test]
fn what_is_hot_goes_over_before_anything_is_given_up() {
    let Some(_turn) = turn("inline_what_is_hot_goes_over_before_anything_is_given_up") else { return };
    let mut target = Target::start(&warming("warming-budget"), ["400", "2", "0"]);
    let recorder = Recorder::new().option("--comm", "warming-budget").interval(4 << 20).option("--hook", "inline");
    let recording = recorder.option("--max-overhead", "30%").flag("-v").start();
    target.go();
    target.step();
    std::thread::sleep(std::time::Duration::from_millis(2500));
    target.go();
    until("it is hooked inline", || is_hooked(target.pid()));
    std::thread::sleep(std::time::Duration::from_millis(2500));
    target.go();
    let truth = target.truth();
    let (profile, stats) = recording.stop().results();
    counted_exactly(&stats, &truth);
    assert!(profile.totals.inuse_bytes.is_some() && !profile.time_windows, "{:?}", profile.notes);
    assert_eq!(hook(&profile, &stats, target.pid()), ("inline".into(), None));
}

/// The C library's `reallocarray` calls the other allocator's `realloc`, where it counts.
#[test]
fn a_hot_process_with_another_allocator_than_the_c_librarys_goes_over() {
    let Some(_turn) = turn("inline_a_hot_process_with_another_allocator_goes_over") else { return };
    let jemalloc = Path::new("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2");
    if !jemalloc.exists() {
        return skipped("inline_a_hot_process_with_another_allocator", "no libjemalloc.so.2 (Debian: libjemalloc2)");
    }
    let mut command = Command::new(warming("warming-another"));
    let mut target = Target::start_command(command.args(["400", "2", "2000"]).env("LD_PRELOAD", jemalloc));
    let recording = record("warming-another", 1);
    target.go();
    target.step();
    std::thread::sleep(std::time::Duration::from_millis(2500));
    target.go();
    until("it is hooked inline", || is_hooked(target.pid()));
    std::thread::sleep(std::time::Duration::from_millis(500));
    target.go();
    let truth = target.truth();
    let (profile, stats) = recording.stop().results();
    counted_exactly(&stats, &truth);
    checks::sites(&profile, &truth, 1, Compare::All);
    assert_eq!(hook(&profile, &stats, target.pid()), ("inline".into(), None));
}

/// Of some 60 execs, those just before a process was to go over went wrong before it was asked which incarnation lives: its calls
/// were taken for the one's that had ended, and were missing at its end. Without that question this fails nearly always.
#[test]
fn a_hot_process_that_replaces_its_program_is_counted_whole() {
    let Some(_turn) = turn("inline_a_hot_process_that_replaces_its_program") else { return };
    let recording = record("replaced", 1 << 20);
    let started = (1..=6).map(|seed| Target::start(&program("replaced"), ["10".to_owned(), seed.to_string()]));
    let mut targets: Vec<Target> = started.collect();
    targets.iter_mut().for_each(Target::go);
    let sums = targets.iter().map(Target::sums);
    let sums = sums.fold([0; 2], |sum, [calls, bytes]| [sum[0] + calls, sum[1] + bytes]);
    let (profile, stats) = recording.stop().results();
    let counted = checks::exact_of_all(&profile.processes);
    assert_eq!((counted, stats.hits, stats.lost()), (sums, sums[0], 0), "{:?}", profile.notes);
    let inline = profile.processes.iter().filter(|process| process.hook.as_deref() == Some("inline")).count();
    assert!(inline > 10, "{inline} of 60 went over");
}
