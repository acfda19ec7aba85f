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
        for (width, files) in [(80, 0), (80, 1), (100, 0), (100, 1)] {
            let files = vec![("x.json".to_owned(), "heapbpf report x.json".to_owned()); files];
            let text = report(&profile, &ReportOptions { brief: true, width, files, ..ReportOptions::default() });
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

/// The first screen of a whole host has room for the largest functions, and one line for all resident memory.
#[test]
fn the_first_screen_of_a_host_has_its_functions_and_its_resident_memory() {
    let mut profile = testing::whole_host();
    for name in ["first", "second", "third"] {
        let mut row = profile.rows[0].clone();
        let rename = |frame: &mut crate::model::Frame| frame.function = Some(name.into());
        row.key.stack = std::sync::Arc::new(row.key.stack.with_frames(&mut Default::default(), rename));
        profile.rows.push(row);
    }
    for width in [80, 100] {
        let files = vec![("x.json".to_owned(), "heapbpf report x.json".to_owned())];
        let text = report(&profile, &ReportOptions { brief: true, width, files, ..ReportOptions::default() });
        let rows = text.lines().skip_while(|line| !line.starts_with("By function")).skip(2);
        assert_eq!(rows.take_while(|line| !line.is_empty()).filter(|line| line.contains('%')).count(), 5, "{text}");
        assert!(text.lines().count() <= 25, "{text}");
        let resident: Vec<&str> = text.lines().filter(|line| line.trim_start().starts_with("resident")).collect();
        assert_eq!(resident.len(), 1, "{text}");
        assert!(resident[0].contains("938 MiB = heap 480 MiB + anonymous 2.00 MiB + other 456 MiB"), "{text}");
    }
}
