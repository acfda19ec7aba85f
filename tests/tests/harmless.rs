//! What a profile must never do to a target: end it, or change what it computes. Each program notices itself.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{skipped, turn};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;

/// Whether this is x86-64; if not, says that `case` is skipped.
fn is_x86_64(case: &str) -> bool {
    let is = std::env::consts::ARCH == "x86_64";
    if !is {
        skipped(case, "its program is in x86-64 assembly");
    }
    is
}

/// A five-byte no-op that is probed may become a call, which writes below the stack pointer. A function may keep data there.
#[test]
fn data_below_the_stack_pointer_stay_as_they_are() {
    let case = "data_below_the_stack_pointer_stay_as_they_are";
    let Some(_turn) = turn(case) else { return };
    if !is_x86_64(case) {
        return;
    }
    let red_zone = program("redzone");
    let allocator = format!("{}:zone_take(size=arg0)->ret,free=zone_give(arg0)", red_zone.display());
    for (link, interval) in [("session", 1), ("session", 1000), ("multi", 1), ("perf", 1)] {
        let mut target = Target::start(&red_zone, ["2000"]);
        let recorder = Recorder::of(target.pid(), interval).option("--alloc", &allocator).option("--link", link);
        let recording = recorder.start();
        let truth = target.run();
        let (profile, stats) = recording.stop().results();
        checks::sites(&profile, &truth, interval, Compare::All);
        for probe in stats.attach.iter().filter(|probe| probe.function.starts_with("zone_")) {
            assert_ne!(probe.kind, "optimized", "{link}: {probe:?}");
        }
    }
}
