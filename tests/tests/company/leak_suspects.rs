//! Leak suspects of a program whose leaks are known, and tables by size.

use heapbpf_tests::environment::turn;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::Target;

fn recorded(options: &[&str]) -> Outcome {
    let mut target = Target::start(&program("suspects"), ["2000"]);
    Recorder::new().pid(target.pid()).flags(options).record(&mut target).0
}

/// The lines from a heading to the next empty line.
fn section<'a>(text: &'a str, heading: &str) -> Vec<&'a str> {
    text.lines().skip_while(|line| !line.starts_with(heading)).take_while(|line| !line.is_empty()).collect()
}

/// Sites that these lines name, in order.
fn sites(lines: &[&str]) -> Vec<String> {
    let site = |line: &&str| line.find("site_").map(|at| line[at..at + 7].to_owned());
    lines.iter().filter_map(site).collect()
}

#[test]
fn what_outlives_its_stack_is_suspected_and_nothing_else() {
    let Some(_turn) = turn("what_outlives_its_stack_is_suspected_and_nothing_else") else { return };
    for interval in ["1", "600"] {
        let outcome = recorded(&["--interval", interval]);
        let text = outcome.report(&["--suspects"]);
        println!("{text}");
        let suspects = section(&text, "Leak suspects");
        // The faster-growing site comes first.
        assert_eq!(sites(&suspects), ["site_02", "site_00"], "R = {interval}:\n{text}");
        assert!(suspects[0].contains(" 2 functions ") && suspects[0].contains("are chance"), "{text}");
        assert!(suspects[1].contains(" KiB/s") || suspects[1].contains(" B/s"), "{text}");
        for evidence in ["samples was freed", "would be expected"] {
            assert!(suspects.iter().any(|line| line.contains(evidence)), "{evidence}: {text}");
        }
        // No block of this site is freed either, but it has stopped growing.
        assert_eq!(sites(&section(&text, "Full: nothing freed")), ["site_05"], "R = {interval}:\n{text}");
        // The report names the first suspect without being asked.
        let growing = outcome.stdout.lines().find(|line| line.trim_start().starts_with("growing")).unwrap_or_default();
        assert!(growing.contains("site_02 +") && growing.contains("/s"), "{}", outcome.stdout);
        // pprof has no ages.
        let text = outcome.report_of("profile.pb.gz", &["--suspects"]);
        assert!(text.contains("no sample ages"), "{text}");
    }
}
