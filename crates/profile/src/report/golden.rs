//! Golden tests of whole reports. `HEAPBPF_BLESS=1` rewrites the expected files; check them before you commit them.

use std::collections::HashSet;
use std::path::Path;

use super::*;
use crate::model::{Lifetimes, Octave};
use crate::testing;
use heapbpf_statistics::growth::Growth;
use heapbpf_statistics::sums::SampleSums;

fn check(name: &str, profile: &Profile, options: ReportOptions) {
    let found = report(profile, &options);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/report/golden").join(format!("{name}.txt"));
    if std::env::var_os("HEAPBPF_BLESS").is_some() {
        std::fs::write(&path, &found).expect("writable");
    }
    let kept = std::fs::read_to_string(&path).expect("HEAPBPF_BLESS=1 writes it");
    assert_eq!(kept, found, "{name}:\n{found}");
}

/// The small profile, in which one stack has a share of blocks that are never freed and another only grows.
pub(super) fn leaking() -> Profile {
    let mut profile = testing::small();
    let octave = |exponent, freed, left| Octave { exponent, freed, left };
    let with = |ages| Some(Lifetimes { median_seconds: Some(0.02), survival: vec![(0.02, 0.5)], temporary: 0.0, ages });
    profile.rows[0].lifetimes = with(vec![octave(24, 900, 0), octave(25, 30, 0), octave(29, 0, 4), octave(33, 0, 16)]);
    profile.rows[0].growth = Some(Growth { kept: testing::sums(12, 70_000, 512 << 10), freed: SampleSums::default() });
    profile.rows[4].growth = Some(Growth { kept: testing::sums(9, 4_096, 512 << 10), freed: SampleSums::default() });
    profile.rows[3].lifetimes = with(vec![octave(24, 40, 0), octave(33, 1, 0)]);
    profile.rows[4].lifetimes = with(vec![octave(30, 0, 5), octave(33, 0, 4)]);
    profile
}

#[test]
fn reports_look_as_they_should() {
    let default = ReportOptions::default;
    check("whole", &testing::small(), default());
    check("whole_60", &testing::small(), ReportOptions { width: 60, ..default() });
    let mut one = leaking().only_process(0);
    one.counters.clear();
    check("one", &one, ReportOptions { width: 80, source: Some("x.json".into()), ..default() });
    check("brief", &one, ReportOptions { brief: true, width: 80, source: Some("x.json".into()), ..default() });
    check("brief_growing", &leaking(), ReportOptions { brief: true, width: 120, ..default() });
    check("brief_many", &testing::measured(), ReportOptions { brief: true, ..default() });
    check("brief_host", &testing::whole_host(), ReportOptions { brief: true, width: 80, ..default() });
    check("host", &testing::whole_host(), default());
    check("suspects", &leaking(), ReportOptions { suspects: true, ..default() });
    check("no_suspects", &testing::small(), ReportOptions { suspects: true, ..default() });
    for by in [By::Function, By::Size] {
        check(&format!("by_{}", by.name()), &testing::small(), ReportOptions { by, ..default() });
    }
    check("tree", &testing::small(), ReportOptions { tree: Some(Tree::Down), ..default() });
}

/// Words of the code, which tell a user nothing; and words for which there is a sign.
const NOT_ON_A_FIRST_SCREEN: [&str; 7] = ["session link", "criterion", "hooked", "given up", "σ", "q <", "at least "];

/// The default report of each profile fits on a screen, says nothing twice, and is in plain words.
#[test]
fn first_screens_are_short_and_plain() {
    for profile in [
        testing::small(),
        testing::small().only_process(0),
        testing::small().only_process(1),
        leaking(),
        leaking().only_process(0),
        testing::measured(),
        testing::whole_host(),
        testing::stripped(),
        testing::partly_followed(),
        testing::partly_in_memory(),
        testing::followed_again(),
        testing::ended_apart(),
        testing::partly_read(),
        testing::with_go_heap(),
    ] {
        for width in [80, 100] {
            let text = report(&profile, &ReportOptions { brief: true, width, ..ReportOptions::default() });
            assert!(text.lines().count() <= 25, "{text}");
            let mut said = HashSet::new();
            for line in text.lines().filter(|line| !line.is_empty()) {
                assert!(said.insert(line), "twice: {line}\n{text}");
            }
            for word in NOT_ON_A_FIRST_SCREEN {
                assert!(!text.to_lowercase().contains(word), "{word}: {text}");
            }
        }
    }
}
