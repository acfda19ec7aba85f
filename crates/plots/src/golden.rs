//! Golden tests of whole pictures. `HEAPBPF_BLESS=1` rewrites the expected files; check them before you commit them.

use std::path::Path;
use std::time::Duration;

use heapbpf_profile::model::{Lifetimes, Octave, Profile};
use heapbpf_profile::report::subject;
use heapbpf_profile::testing;
use heapbpf_profile::value::Value;
use heapbpf_profile::workload::workload;
use heapbpf_statistics::plan::Costs;

use super::*;

/// Compares the SVG with the expected file. The PNG must have twice the size and must not be blank.
fn check(name: &str, figure: &Figure) {
    let found = figure.svg().expect("drawn");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/golden").join(format!("{name}.svg"));
    let png = figure.png().expect("drawn");
    if std::env::var_os("HEAPBPF_BLESS").is_some() {
        std::fs::write(&path, &found).expect("writable");
    }
    if let Some(dir) = std::env::var_os("HEAPBPF_PICTURES") {
        std::fs::write(Path::new(&dir).join(format!("{name}.png")), &png).expect("writable");
    }
    let kept = std::fs::read_to_string(&path).expect("HEAPBPF_BLESS=1 writes it");
    assert!(kept == found, "{name} differs from {}; HEAPBPF_BLESS=1 writes it anew", path.display());
    let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info().expect("a PNG");
    let mut pixels = vec![0; reader.output_buffer_size().expect("small")];
    let info = reader.next_frame(&mut pixels).expect("pixels");
    let size = format!("width=\"{}\" height=\"{}\" ", info.width / 2, info.height / 2);
    assert!(found.contains(&size), "{size}: {}", &found[..200]);
    let drawn = pixels.chunks(3).filter(|pixel| pixel.iter().any(|color| *color < 200)).count();
    let share = drawn as f64 / (pixels.len() / 3) as f64;
    assert!((0.005..0.5).contains(&share), "{share} of {name} is drawn");
}

/// A growing program: only the first process, at four points in time.
fn snapshots() -> Vec<Profile> {
    let at = |second: u64| {
        let mut profile = testing::small().only_process(0);
        profile.rows.truncate(4);
        let interval = profile.header.interval;
        profile.rows[0].inuse = testing::sums(4 * second, 70_000, interval);
        profile.rows[3].inuse = testing::sums(30, 5_000, interval);
        profile.header.duration = Duration::from_secs(second);
        profile.header.time = profile.header.started + Duration::from_secs(second);
        profile.counters.insert("hits".into(), second * second * 1_000);
        profile.counters.insert("probe_ns".into(), second * second * 600_000);
        profile
    };
    [3, 6, 9, 12].map(at).into()
}

/// Three stacks: one frees everything, one most of it, and one nothing.
fn with_lifetimes() -> Profile {
    let mut profile = testing::small().only_process(0);
    profile.rows.truncate(4);
    let octave = |exponent, freed, left| Octave { exponent, freed, left };
    let lives = |survival: Vec<(f64, f64)>, ages: Vec<Octave>| {
        Some(Lifetimes {
            median_seconds: survival.iter().find(|(_, share)| *share <= 0.5).map(|at| at.0),
            temporary: 0.0,
            survival,
            ages,
        })
    };
    let fall: Vec<(f64, f64)> =
        (1..=20).map(|step| (0.002 * 1.3_f64.powi(step), 1.0 - 0.045 * f64::from(step))).collect();
    profile.rows[0].lifetimes = lives(
        fall,
        vec![octave(21, 20, 0), octave(23, 40, 2), octave(25, 60, 4), octave(28, 60, 3), octave(34, 0, 21)],
    );
    profile.rows[3].lifetimes = lives(vec![], vec![octave(30, 0, 5), octave(33, 0, 14)]);
    profile
}

#[test]
fn pictures_look_as_they_should() {
    let options = PlotOptions::default();
    check("timeline", &timeline(&snapshots(), &options).expect("snapshots"));
    check("survival", &survival(&with_lifetimes(), &options).expect("lifetimes"));
    check("overhead", &overhead(&snapshots()).expect("probe times"));
    let profile = testing::small();
    let costs = Costs { probe_ns: 1_050.0, inline_ns: 1.0, sample_ns: 2_000.0 };
    check("plan", &plan(&subject(&profile), &workload(&profile, false), costs));
}

#[test]
fn what_cannot_be_drawn_is_told() {
    let options = PlotOptions::default();
    let one = snapshots().split_off(3);
    assert_eq!(timeline(&one, &options).err(), Some(PlotError::NeedsSnapshots("a timeline")));
    assert_eq!(timeline(&[], &options).err(), Some(PlotError::NeedsSnapshots("a timeline")));
    assert_eq!(overhead(&one).err(), Some(PlotError::NeedsSnapshots("overhead")));
    let mut without = snapshots();
    without[1].counters.clear();
    assert_eq!(overhead(&without).err(), Some(PlotError::NoProbeTimes));
    let mut unknown = testing::small();
    unknown.rows.iter_mut().for_each(|row| row.lifetimes = None);
    assert_eq!(survival(&unknown, &options).err(), Some(PlotError::NoLifetimes));
    let mut dead = snapshots();
    dead.iter_mut().for_each(|profile| profile.header.live = false);
    let in_use = PlotOptions { value: Some(Value::InuseSpace), ..options };
    assert_eq!(timeline(&dead, &in_use).err(), Some(PlotError::NotFollowed("inuse_space")));
    assert!(timeline(&dead, &options).is_ok_and(|figure| figure.title == "Bytes allocated over time"));
}

/// Names and figures in files may be anything. The picture is drawn anyway, and none of its text acts as markup.
#[test]
fn hostile_profiles_are_drawn() {
    let mut profiles = snapshots();
    for profile in &mut profiles {
        profile.processes[0].comm = "<script>\u{202e}\x1b[2J".into();
        profile.header.duration = Duration::MAX;
        profile.rows[0].inuse.bytes = f64::NAN;
        profile.rows[1].alloc.objects = f64::INFINITY;
    }
    let figure = timeline(&profiles, &PlotOptions::default()).expect("snapshots");
    let svg = figure.svg().expect("drawn");
    assert!(!svg.contains("<script") && !svg.contains('\u{202e}') && !svg.contains('\x1b'), "{svg}");
    let mut lives = with_lifetimes();
    let absurd = Lifetimes {
        median_seconds: Some(f64::NAN),
        temporary: 2.0,
        survival: vec![(f64::NAN, 0.5), (-1.0, 7.0), (1e300, f64::NEG_INFINITY)],
        ages: vec![
            Octave { exponent: u32::MAX, freed: u64::MAX, left: u64::MAX },
            Octave { exponent: 0, freed: 1, left: 0 },
        ],
    };
    lives.rows[0].lifetimes = Some(absurd);
    assert!(survival(&lives, &PlotOptions::default()).expect("lifetimes").png().is_ok());
}
