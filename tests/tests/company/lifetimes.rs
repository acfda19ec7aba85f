//! Lifetimes of blocks and the peak, for a program whose lifetimes are known.

use std::path::Path;

use heapbpf_tests::environment::turn;
use heapbpf_tests::output;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::Target;
use heapbpf_tests::truth::{Law, Truth};
use serde_json::Value;

/// Records the program with these options and `rounds` of blocks of 100 bytes.
fn record(rounds: u64, options: &[&str]) -> (Outcome, Truth) {
    let mut target = Target::start(&program("lifetimes"), [rounds.to_string()]);
    Recorder::new().pid(target.pid()).flags(options).record(&mut target)
}

/// Records at R = 1 until the program has ended.
fn record_to_the_end(rounds: u64) -> Outcome {
    let mut target = Target::start(&program("lifetimes"), [rounds.to_string()]);
    let recording = Recorder::of(target.pid(), 1).start();
    target.run();
    target.end();
    recording.finish()
}

/// The only stack of a site.
fn stack<'a>(profile: &'a Value, site: &str) -> &'a Value {
    let is_at_site = |stack: &&Value| {
        let mut frames = stack["frames"].as_array().into_iter().flatten();
        frames.any(|frame| frame["function"] == site)
    };
    let found: Vec<&Value> = profile["stacks"].as_array().into_iter().flatten().filter(is_at_site).collect();
    assert_eq!(found.len(), 1, "{site}");
    found[0]
}

struct Lives {
    median: Option<f64>,
    temporary: f64,
    /// Share of the allocations that remain after the last free.
    left: f64,
}

fn lives(profile: &Value, site: &str) -> Lives {
    let lifetimes = &stack(profile, site)["lifetimes"];
    let curve: Vec<[f64; 2]> = serde_json::from_value(lifetimes["survival"].clone()).expect("a curve");
    assert!(curve.windows(2).all(|two| two[0][0] < two[1][0] && two[0][1] >= two[1][1]), "{site} {curve:?}");
    Lives {
        median: lifetimes["median_seconds"].as_f64(),
        temporary: lifetimes["temporary"].as_f64().expect("a share"),
        left: curve.last().map_or(1.0, |last| last[1]),
    }
}

/// With everything sampled, shares are exact. A lifetime of 100 ms may come out shorter by half a bin (1/16), or longer
/// on a busy machine: its only upper bound is the length of the recording.
#[test]
fn lifetimes_are_those_of_the_program() {
    let Some(_turn) = turn("lifetimes_are_those_of_the_program") else { return };
    let (outcome, _) = record(300, &["--interval", "1"]);
    outcome.results();
    let profile: Value = output::read(&outcome.file("profile.json"));
    let duration = profile["duration_seconds"].as_f64().expect("a number");
    for (site, temporary) in [("site_00", 1.0), ("site_01", 0.0), ("site_02", 1.0), ("site_03", 0.0), ("site_05", 0.0)]
    {
        let lives = lives(&profile, site);
        assert_eq!((lives.temporary, lives.left), (temporary, 0.0), "{site}");
        let median = lives.median.expect("all are freed");
        let longest = if site == "site_03" { duration } else { 0.1 };
        let shortest = if site == "site_03" { 0.1 * 15.0 / 16.0 } else { 0.0 };
        assert!((shortest..longest).contains(&median), "{site}: {median} s");
    }
    let third = lives(&profile, "site_04");
    assert!(third.median.is_none() && (third.left - 2.0 / 3.0).abs() < 1e-9, "{} left", third.left);
    let mixed = lives(&profile, "site_06");
    assert!((mixed.left - 1.0 / 11.0).abs() < 1e-9 && (mixed.temporary - 10.0 / 11.0).abs() < 1e-9, "{}", mixed.left);

    // Blocks that are left when their process ends were not freed either.
    let ended = record_to_the_end(3);
    ended.results();
    let ended: Value = output::read(&ended.file("profile.json"));
    for (site, left) in [("site_03", 0.0), ("site_04", 2.0 / 3.0), ("site_06", 1.0 / 11.0)] {
        let found = lives(&ended, site).left;
        assert!((found - left).abs() < 1e-9, "{site}: {found} left of an ended process");
    }

    let text = outcome.report(&["--details"]);
    for said in ["100 % temporary", "more than half are not freed", "half are freed within "] {
        assert!(text.contains(said), "{said:?} is not in\n{text}");
    }
}

/// For each large block that is kept, ten small ones are freed at once. Nearly all samples are large blocks, but these
/// are only a tenth of the allocations. The curve shows allocations, within the tolerance of the number of small ones.
#[test]
fn curves_are_of_allocations_not_of_samples() {
    const R: u64 = 4096;
    let Some(_turn) = turn("curves_are_of_allocations_not_of_samples") else { return };
    let (outcome, truth) = record(2_000, &["--interval", "4096"]);
    let profile: Value = output::read(&outcome.file("profile.json"));
    let site = truth.site("site_06");
    let [large, small] = [65_536, 16].map(|size| {
        let allocations = site.sizes.iter().filter(|row| row[0] == size).map(|row| (row[0], row[1]));
        Law::of(allocations, R).objects
    });
    let left = |small: f64| large.truth / (large.truth + small);
    let allowed = left(small.truth + small.tolerance())..left((small.truth - small.tolerance()).max(0.0));
    let found = lives(&profile, "site_06").left;
    println!("{found} left; {} of the allocations are; allowed {allowed:?}", left(small.truth));
    assert!(allowed.contains(&found) && allowed.end < 0.5, "{found} is not in {allowed:?}");
}

/// 8 MiB that were in use together and then freed are in the peak, but not in use at the end.
#[test]
fn the_peak_is_of_its_moment() {
    const R: u64 = 65_536;
    let Some(_turn) = turn("the_peak_is_of_its_moment") else { return };
    let inuse = |path: &Path| {
        let profile: Value = output::read(path);
        stack(&profile, "site_07")["inuse_bytes"]["estimate"].as_f64().expect("a figure")
    };
    let (end, _) = record(5, &["--interval", "65536"]);
    let (peak, truth) = record(5, &["--interval", "65536", "--at", "peak"]);
    assert_eq!(inuse(&end.file("profile.json")), 0.0);
    let law = truth.site("site_07").law(R, false).bytes;
    // A new peak is recorded only if it exceeds the last one by 2 %, so the last blocks may be missing.
    let found = inuse(&peak.file("profile.json"));
    let lowest = (law.truth - law.tolerance()) / 1.02;
    assert!((lowest..law.truth + law.tolerance()).contains(&found), "{found} of {}", law.truth);
    // The final profile includes the peak's.
    assert!(end.report(&["--at", "peak"]).contains("site_07"));
}
