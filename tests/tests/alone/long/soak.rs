//! `cargo xtask soak`: a service records a mixed load for a long time. Its memory stays flat, and its estimates stay
//! close to the exact counts.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use flate2::read::GzDecoder;
use heapbpf_tests::distinct::Distinct;
use heapbpf_tests::environment::turn;
use heapbpf_tests::output::Profile;
use heapbpf_tests::program::program_with;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::scrape::get;
use heapbpf_tests::soak::{Drift, Line, Totals};
use heapbpf_tests::target::Target;
use heapbpf_tests::torture::Unharmed;

/// Share of the time that the slope leaves out, while caches and tables fill.
const WARMING: f64 = 0.33;
/// Tolerated growth per hour, as a share of the memory.
const GROWTH: f64 = 0.05;
/// Multiple of the standard error beyond which a deviation is not chance: less than once in a million runs.
const BEYOND_CHANCE: f64 = 5.0;

fn number(variable: &str, usual: f64) -> f64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// The state of the service at one moment.
struct Sample {
    seconds: f64,
    resident: f64,
    samples: f64,
    lost: f64,
    stacks: usize,
    processes: usize,
    totals: Totals,
}

fn sample(address: SocketAddr, seconds: f64) -> Sample {
    let metrics = get(address, "/metrics");
    let metric = |name: &str| metrics.metric(name).unwrap_or_else(|| panic!("no {name}"));
    let text = metrics.text();
    let losses = text.lines().filter(|line| line.starts_with("heapbpf_lost_total"));
    let lost = losses.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum();
    let answer = get(address, "/debug/pprof/heap?format=json");
    assert_eq!(answer.status, 200, "{}", answer.text());
    let profile: Profile = serde_json::from_reader(GzDecoder::new(&answer.body[..])).expect("a profile");
    let total = &profile.totals.alloc_bytes;
    let (low, high) = (total.low.unwrap_or_default(), total.high.unwrap_or_default());
    Sample {
        seconds,
        resident: metric("heapbpf_daemon_resident_bytes"),
        samples: metric("heapbpf_samples_total"),
        lost,
        stacks: profile.stacks.len(),
        processes: profile.processes.len(),
        // The interval is a 95 % interval.
        totals: Totals {
            exact: total.exact.expect("allocations are counted"),
            estimated: total.value(),
            sigma: (high - low) / 2.0 / 1.96,
        },
    }
}

/// A load of threads, forks, exceptions and libraries, of programs that start others, and of many idle threads.
fn load() -> (Unharmed, Vec<Target>) {
    let enduring = program_with("enduring", "soak-enduring", &[]);
    let start =
        |arguments: &[&str]| Target::start_command(Command::new(&enduring).args(arguments).env("PAUSE_US", "50000"));
    let unharmed = program_with("unharmed", "soak-unharmed", &[]);
    (Unharmed::start_as(&unharmed), vec![start(&["exec"]), start(&["exec"]), start(&["threads", "50"])])
}

#[test]
#[ignore = "takes as long as it is told: cargo xtask soak --minutes N"]
fn memory_stays_flat_and_estimates_do_not_drift() {
    let Some(_turn) = turn("memory_stays_flat_and_estimates_do_not_drift") else { return };
    let whole = Duration::from_secs_f64(60.0 * number("HEAPBPF_SOAK_MINUTES", 20.0));
    let every = Duration::from_secs_f64(number("HEAPBPF_SOAK_EVERY", 5.0));
    let recorder = Recorder::new().service().without_outputs().interval(16 << 10);
    let recorder = recorder.option("--comm", "soak-*").option("--max-overhead", "none");
    let (recording, address) = recorder.serve();
    let (unharmed, others) = load();
    let (begun, mut samples) = (Instant::now(), Vec::new());
    while begun.elapsed() < whole {
        std::thread::sleep(every);
        samples.push(sample(address, begun.elapsed().as_secs_f64()));
    }
    recording.stop();
    let answer = unharmed.ends_well();
    for mut other in others {
        other.go();
        assert!(other.line().starts_with("OK"));
        assert!(other.end().success());
    }
    for each in samples.iter().step_by((samples.len() / 12).max(1)) {
        println!(
            "{:6.0} s: {:7.2} MiB, {} samples, {} lost, {} stacks, {} processes, estimated/exact {:.5}",
            each.seconds,
            each.resident / f64::from(1 << 20),
            each.samples,
            each.lost,
            each.stacks,
            each.processes,
            each.totals.estimated / each.totals.exact
        );
    }
    let warm: Vec<&Sample> = samples.iter().filter(|it| it.seconds > WARMING * whole.as_secs_f64()).collect();
    let hours: Vec<(f64, f64)> =
        warm.iter().map(|it| (it.seconds / 3600.0, it.resident / f64::from(1 << 20))).collect();
    let line = Line::through(&hours).expect("more samples: more minutes, or a shorter time between them");
    let mean = hours.iter().map(|point| point.1).sum::<f64>() / hours.len() as f64;
    let totals: Vec<Totals> = samples.iter().map(|it| it.totals).collect();
    let drift = Drift::of(&totals).expect("samples");
    println!(
        "{:.1} minutes; memory {mean:.1} MiB, slope {:+.2} ± {:.2} MiB/h of the last {:.0} % ({} samples)",
        whole.as_secs_f64() / 60.0,
        line.slope,
        line.error,
        100.0 * (1.0 - WARMING),
        hours.len()
    );
    println!(
        "estimated − exact: {:+.2} σ at the end; of {} increments {:+.2} ± {:.2} σ on average, spread {:.2} σ",
        drift.at_end,
        drift.increments,
        drift.mean,
        1.0 / (drift.increments as f64).sqrt(),
        drift.spread
    );
    println!("targets right: {answer}");
    assert!(line.slope - BEYOND_CHANCE * line.error < GROWTH * mean, "the daemon's memory grows: {line:?}");
    assert!(drift.at_end.abs() < BEYOND_CHANCE, "estimates drift: {drift:?}");
    assert!(drift.mean.abs() * (drift.increments as f64).sqrt() < BEYOND_CHANCE, "estimates drift: {drift:?}");
}

/// An hour of 10,000 programs that are all different: tables, descriptors and memory end where they began.
#[test]
#[ignore = "takes an hour"]
fn programs_that_never_come_again_leave_nothing() {
    const PROGRAMS: u64 = 10_000;
    let Some(_turn) = turn("programs_that_never_come_again_leave_nothing") else { return };
    let whole = Duration::from_secs_f64(60.0 * number("HEAPBPF_SOAK_MINUTES", 60.0));
    let (recording, address) = Recorder::new().service().without_outputs().flag("--all").serve();
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", recording.pid())).expect("it runs").count();
    let mut programs = Distinct::new();
    // Let the tables fill first: they keep a row for a thousand programs that have ended.
    programs.run(PROGRAMS / 5);
    let before = (programs.settled(address, u64::MAX), descriptors());
    let begun = Instant::now();
    for done in 1..=PROGRAMS / 100 {
        programs.run(100);
        std::thread::sleep((whole * done as u32 / (PROGRAMS / 100) as u32).saturating_sub(begun.elapsed()));
    }
    let after = (programs.settled(address, before.0.modules + 128), descriptors());
    println!("before: {before:?}; after {PROGRAMS} programs: {after:?}");
    assert!(after.0.resident <= 1.05 * before.0.resident, "memory");
    assert!(after.1 <= before.1 + 128 && after.1 < 1000, "descriptors");
    recording.stop();
}
