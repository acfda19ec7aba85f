//! The test programs report the truth: their reports equal what a preloaded library counts, without probes. Needs no
//! root.

use std::process::Command;

use heapbpf_tests::counting::Counting;
use heapbpf_tests::program::program;
use heapbpf_tests::target::Target;

/// Programs in which only the sites allocate between READY and the report.
const PROGRAMS: &[(&str, &[&str])] = &[
    ("pairs", &["2000", "8", "100"]),
    ("mix", &["20000"]),
    ("threads", &["1280"]),
    ("handover", &["2000"]),
    ("reallocs", &["50"]),
    ("aligned", &["50"]),
    ("refused", &["50"]),
    ("family", &["fork"]),
    ("family", &["vfork"]),
    ("family", &["clone"]),
    ("window", &["handler", "50"]),
    ("window", &["jump", "50"]),
    ("window", &["thread", "50"]),
    ("window", &["timer", "50"]),
    ("callers", &["100"]),
    ("lifetimes", &["50"]),
    ("sequence", &["10", "10000x1", "1x100"]),
    ("deep", &["100", "1000"]),
    ("frames", &["50"]),
];

#[test]
fn what_they_report_is_what_is_counted() {
    for (name, arguments) in PROGRAMS {
        let counting = Counting::new();
        let mut target = Target::start_command(Command::new(program(name)).args(*arguments).envs(counting.variables()));
        let before = counting.now();
        target.go();
        if *name == "family" {
            target.step();
            target.go();
        }
        let truth = target.truth();
        let after = counting.now();
        assert_eq!(
            [truth.allocs(), truth.bytes()],
            [after[0] - before[0], after[1] - before[1]],
            "calls and bytes: {name} {arguments:?}"
        );
        assert!(truth.live_allocs() <= truth.allocs() && truth.live_bytes() <= truth.bytes(), "{name}");
        for site in &truth.sites {
            let sum = |i: usize| -> u64 { site.sizes.iter().map(|row| row[i]).sum() };
            assert_eq!((sum(1), sum(2)), (site.allocs, site.live_allocs), "{name} {}", site.site);
        }
    }
}
