//! Leak suspects of a simulated server: a slow leak among temporaries, sessions, and caches that are full after half of
//! the time.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use heapbpf_profile::model::{Criterion, Frame, Header, Lifetimes, Process, Profile, Row, RowKey, Stack};
use heapbpf_profile::report::ReportOptions;
use heapbpf_profile::report::data;
use heapbpf_statistics::weight::inclusion;

use super::Heap;
use super::tests::{process, sample, stack};
use crate::sample::Sample;

/// What one stack of the server does.
struct Kind {
    name: &'static str,
    bytes: u64,
    per_second: f64,
    /// Share of the recording after which it stops allocating.
    until: f64,
    /// Lifetime of a block in seconds; the second argument is the recording's length in seconds.
    lives: fn(&mut Rng, f64) -> f64,
}

/// 50 KB/s.
const LEAK: Kind = Kind { name: "leak", bytes: 500, per_second: 100.0, until: 1.0, lives: |_, _| f64::INFINITY };

const HARMLESS: [Kind; 4] = [
    // 200 MB/s.
    Kind { name: "temporary", bytes: 4_000, per_second: 50_000.0, until: 1.0, lives: |_, _| 1e-5 },
    Kind {
        name: "session",
        bytes: 2_000,
        per_second: 1_000.0,
        until: 1.0,
        lives: |random, _| -3.0 * random.f64().ln(),
    },
    Kind { name: "cache", bytes: 1_000, per_second: 3_000.0, until: 0.5, lives: |_, _| f64::INFINITY },
    // Once it is full, each block replaces the oldest one.
    Kind { name: "replacing cache", bytes: 1_000, per_second: 500.0, until: 1.0, lives: |_, seconds| seconds / 2.0 },
];

/// Returns the suspects in a recording of this many seconds: function names, and the growth's interval in bytes per
/// second.
fn suspects(seed: u64, interval: u64, seconds: f64, kinds: &[Kind]) -> Vec<(String, [f64; 2])> {
    let mut random = Rng::with_seed(seed);
    let stacks: Vec<_> = kinds.iter().map(|_| stack()).collect();
    // Time, whether it is a free, sample, stack.
    let mut events: Vec<(u64, bool, u64, usize)> = Vec::new();
    let ns = |seconds: f64| (seconds * 1e9) as u64;
    let mut id = 0;
    for (number, kind) in kinds.iter().enumerate() {
        let sampled = kind.per_second / inclusion(kind.bytes, interval).expect("an interval").weight;
        let mut at = -random.f64().ln() / sampled;
        while at < seconds * kind.until {
            id += 1;
            events.push((ns(at), false, id, number));
            let end = at + (kind.lives)(&mut random, seconds);
            events.extend((end < seconds).then_some((ns(end), true, id, number)));
            at -= random.f64().ln() / sampled;
        }
    }
    events.sort_unstable();
    let mut heap = Heap::default();
    for (time_ns, is_free, id, number) in events {
        if is_free {
            heap.free(process(1), id, time_ns, false);
            continue;
        }
        let mut sample = sample(id, 1, kinds[number].bytes, &stacks[number]);
        sample.key.interval = interval;
        heap.allocate(Sample { time_ns, ..sample });
    }
    let now_ns = ns(seconds);
    let since_ns = heap.growth_since(now_ns).expect("samples");
    let rows = heap.snapshot(now_ns, true).map(|it| {
        let kind = stacks.iter().position(|stack| Arc::ptr_eq(stack, &it.row.key.stack)).expect("one of ours");
        let frame = Frame { function: Some(kinds[kind].name.into()), ..Frame::default() };
        let stack = Arc::new(Stack { frames: vec![Arc::new(frame)], ..Stack::default() });
        let ages = it.ages.map(|ages| ages.octaves()).unwrap_or_default();
        Row {
            alloc: it.row.alloc,
            inuse: it.inuse,
            growth: it.growth,
            lifetimes: Some(Lifetimes { ages, ..Lifetimes::default() }),
            ..Row::new(RowKey { process: 0, thread: "".into(), function: "malloc".into(), interval, stack })
        }
    });
    let mut profile = Profile::new(Header {
        duration: Duration::from_nanos(now_ns),
        growth_over: Some(Duration::from_nanos(now_ns - since_ns)),
        ..Header::new(interval, Criterion::Bytes)
    });
    profile.rows = rows.collect();
    profile.processes = vec![Process::default()];
    let json = data::json(&profile, &ReportOptions { suspects: true, ..ReportOptions::default() }).expect("JSON");
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let suspect = |row: &serde_json::Value| {
        let end = |name: &str| row[name].as_f64().unwrap_or(f64::NAN);
        (row["stack"][0].as_str().unwrap_or_default().to_owned(), [end("growth_low"), end("growth_high")])
    };
    json["rows"].as_array().expect("rows").iter().map(suspect).collect()
}

/// Runs the server with each seed. Checks that the leak is always found, is the first suspect, and that its growth is
/// right. Returns the number of runs in which something harmless was suspected.
fn false_alarms(seeds: std::ops::Range<u64>, interval: u64, seconds: f64) -> usize {
    let kinds: Vec<Kind> = std::iter::once(LEAK).chain(HARMLESS).collect();
    let number = (seeds.end - seeds.start) as usize;
    let (mut covered, mut alarms) = (0, 0);
    for seed in seeds {
        let found = suspects(seed, interval, seconds, &kinds);
        let Some((first, [low, high])) = found.first() else { panic!("seed {seed}: the leak is not found") };
        assert_eq!(first, "leak", "seed {seed}: {found:?}");
        covered += usize::from((*low..=*high).contains(&50_000.0));
        alarms += usize::from(found.len() > 1);
    }
    // 95 % intervals: 4 of 20 miss with a probability of 1.6 %, 3 of 3 with one of 0.01 %.
    assert!(covered * 20 >= number * 17 || covered + 2 >= number, "{covered} of {number} intervals have the truth");
    alarms
}

#[test]
fn a_slow_leak_is_the_first_suspect_and_full_caches_and_sessions_are_none() {
    assert_eq!(false_alarms(1..4, 64 << 10, 60.0), 0);
}

mod long {
    use super::*;

    #[test]
    fn a_slow_leak_is_found_after_a_minute_and_with_few_samples_after_eight() {
        for (interval, seconds) in [(64 << 10, 60.0), (512 << 10, 480.0)] {
            let alarms = false_alarms(1..21, interval, seconds);
            println!("{interval}: something harmless was suspected in {alarms} of 20 runs");
            assert_eq!(alarms, 0);
        }
    }

    /// Without a leak, at most 1 % of the runs should have a suspect.
    #[test]
    fn false_alarms_are_as_rare_as_is_said() {
        let alarms = (0..400).filter(|seed| !suspects(1_000 + seed, 64 << 10, 60.0, &HARMLESS[1..]).is_empty()).count();
        println!("{alarms} of 400 runs without a leak have a suspect");
        // At 1 %, σ = 2.0 runs: the limit is three of them above the mean.
        assert!(alarms <= 10, "{alarms}");
    }
}
