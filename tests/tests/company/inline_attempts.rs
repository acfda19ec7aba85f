//! Targets that cannot be hooked inline at first, or ever.

use std::time::Duration;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::inline::{counted_exactly, is_hooked};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;

fn inline(pid: u32) -> Recorder {
    Recorder::of(pid, 1).option("--hook", "inline").flag("--no-follow").flag("-v")
}

#[test]
fn a_target_that_cannot_be_stopped_at_first_is_hooked_soon() {
    let Some(_turn) = turn("inline_a_target_that_cannot_be_stopped_at_first_is_hooked_soon") else { return };
    let mut target = Target::start(&program("vforked"), ["2000"]);
    let pid = target.pid();
    let recording = std::thread::scope(|scope| {
        // Another process runs in the target's memory for two seconds.
        scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(2));
            target.go();
        });
        inline(pid).start()
    });
    assert!(is_hooked(pid), "{}", recording.said());
    target.step();
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    checks::sites(&profile, &truth, 1, Compare::All);
    counted_exactly(&stats, &truth);
    assert_eq!(stats.unsampled, 0, "{stats:?}");
}

#[test]
fn a_target_that_cannot_be_stopped_for_long_is_probed_and_the_reason_is_told() {
    let Some(_turn) = turn("inline_a_target_that_cannot_be_stopped_for_long_is_probed") else { return };
    let mut target = Target::start(&program("vforked"), ["2000"]);
    let pid = target.pid();
    let recording = inline(pid).start();
    assert!(!is_hooked(pid), "{}", recording.said());
    let messages = recording.said();
    assert!(messages.contains(&format!("process {pid} uses probes: ")), "{messages}");
    assert!(messages.contains("in time") || messages.contains("it shares its memory with"), "{messages}");
    let said = messages.matches("it is tried again for up to 12s").count();
    assert_eq!(said, 1, "the wait is told once: {messages}");
    target.go();
    target.step();
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    checks::sites(&profile, &truth, 1, Compare::All);
    counted_exactly(&stats, &truth);
}

/// A stop would end the target's call with only part of the data written.
#[test]
fn a_target_that_is_always_in_a_call_that_would_come_back_early_is_probed() {
    let Some(_turn) = turn("inline_a_target_that_is_always_in_a_call_that_would_come_back_early_is_probed") else {
        return;
    };
    let mut target = Target::start(&program("slow_reader"), ["2000"]);
    let pid = target.pid();
    let recording = inline(pid).start();
    let messages = recording.said();
    assert!(!is_hooked(pid) && messages.contains("in a system call that a stop might cut short"), "{messages}");
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    checks::sites(&profile, &truth, 1, Compare::All);
    counted_exactly(&stats, &truth);
    assert!(target.end().success(), "its call wrote all");
}
