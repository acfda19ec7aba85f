//! `--hook inline` with names of processes: what is hot goes over from probes to inline hooks while it runs.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::inline::{counted_exactly, is_hooked};
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::program;
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

/// Starts it with so many blocks, in quiet, then has its threads allocate until it is hooked inline, and longer.
fn warmed(arguments: [&str; 3], interval: u64) -> (Target, Recording) {
    let mut target = Target::start(&program("warming"), arguments);
    let recording = record("warming", interval);
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
    for arguments in [["400", "2", "300"]] {
        let (mut target, recording) = warmed(arguments, 1);
        target.go();
        let truth = target.truth();
        let outcome = recording.stop();
        println!("{}", outcome.stderr);
        let (profile, stats) = outcome.results();
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
    let (mut target, recording) = warmed(["900", "4", "0"], interval);
    target.go();
    let truth = target.truth();
    let (profile, stats) = recording.stop().results();
    counted_exactly(&stats, &truth);
    checks::sites(&profile, &truth, interval, Compare::All);
    assert_eq!(hook(&profile, &stats, target.pid()), ("inline".into(), None));
}
