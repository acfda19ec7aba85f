//! Losses are read back from files, so that intervals do not change.

use super::*;
use crate::estimates::Pool;
use crate::model::{LossBound, Losses, Process};

fn bound(samples: u64, sampled_bytes: u64) -> LossBound {
    LossBound { samples, sampled_bytes }
}

/// A profile with losses of every kind, and with a process that lost all its samples.
fn lossy() -> Profile {
    let mut profile = testing::small();
    profile.processes[0].losses = Losses {
        alloc: bound(3, 1_536),
        inuse_missing: bound(4, 2_048),
        inuse_stale: bound(2, 140_000),
        peak_unknown: true,
        ..Losses::default()
    };
    profile.processes[0].slack = bound(1, 70_000);
    let losses = Losses { alloc: bound(7, 700), interval: 4_194_304, ..Losses::default() };
    profile.processes.push(Process { pid: 9, comm: "silent".into(), losses, coverage: 1.0, ..Process::default() });
    profile.keep_loss_intervals();
    profile
}

fn intervals(profile: &Profile) -> Vec<(Option<f64>, Option<f64>)> {
    let of = |value| Pool::whole(profile).estimate(profile, value, 0.95);
    [Value::AllocSpace, Value::InuseSpace].map(of).map(|found| (found.low, found.high)).into()
}

#[test]
fn json_keeps_losses_and_slack() {
    let profile = lossy();
    let back = parse(&written(&profile, "json")).expect("its own output");
    assert_eq!(back.processes, profile.processes);
    assert_eq!(intervals(&back), intervals(&profile));
    let value = testing::json(&profile, "json");
    assert_eq!(value["processes"][0]["losses"]["alloc"], serde_json::json!({"samples": 3, "sampled_bytes": 1_536}));
    assert_eq!(value["processes"][0]["slack"]["samples"], 1);
    assert!(value["processes"][1].get("losses").is_none() && value["processes"][1].get("slack").is_none());
    let high = value["totals"]["alloc_bytes"]["high"].as_f64();
    assert_eq!(high, intervals(&profile)[0].1, "totals cover the process without a row");
    assert!(value["processes"][2]["alloc_bytes"]["high"].as_f64() > Some(7.0 * 4_194_303.0));
}

#[test]
fn json_keeps_resident_memory() {
    let mut profile = testing::measured();
    let value = testing::json(&profile, "json");
    assert_eq!(value["processes"][0]["resident"]["heap"], 300 << 20);
    assert!(value["processes"][0]["resident"].get("growth_per_minute").is_some_and(serde_json::Value::is_null));
    assert!(value["processes"][1].get("resident").is_none());
    profile.processes[0].resident.as_mut().expect("measured").growth_per_minute = Some(-4096);
    let back = parse(&written(&profile, "json")).expect("its own output");
    assert_eq!(back.processes[0].resident, profile.processes[0].resident);
}

#[test]
fn parquet_keeps_losses() {
    let profile = lossy();
    let back = parse(&written(&profile, "parquet")).expect("its own output");
    assert_eq!((back.rows.len(), back.processes.len()), (5, 3));
    for (back, process) in back.processes.iter().zip(&profile.processes) {
        // Parquet does not store the peak.
        assert_eq!(back.losses, Losses { peak_unknown: false, ..process.losses });
    }
    assert_eq!(intervals(&back), intervals(&profile));
    let mut unbounded = lossy();
    unbounded.processes[1].losses.unbounded = true;
    unbounded.processes[0].losses.inuse_unbounded = true;
    let back = parse(&written(&unbounded, "parquet")).expect("its own output");
    assert_eq!(intervals(&back), [(None, None), (None, None)]);
    assert!(back.processes[0].losses.inuse_unbounded && back.processes[1].losses.unbounded);
}

#[test]
fn pprof_says_what_was_lost() {
    let mut profile = lossy();
    let back = parse(&written(&profile, "pprof")).expect("its own output");
    assert_eq!(back.processes[0].losses, profile.processes[0].losses);
    assert_eq!(back.processes[0].slack, profile.processes[0].slack);
    assert!(back.processes[1].losses.is_none());
    let of_silent = "losses silent (9): alloc=7/700 interval=4194304";
    assert!(back.notes.iter().any(|note| note == of_silent), "{:?}", back.notes);
    assert_eq!(parse(&written(&testing::small(), "pprof")).expect("its own output").notes, testing::small().notes);
    // On a host with many processes, they share one comment.
    for pid in 100..150 {
        let process = Process { pid, comm: "many".into(), ..profile.processes[2].clone() };
        profile.processes.push(process);
    }
    let back = parse(&written(&profile, "pprof")).expect("its own output");
    let all = "losses of other processes: alloc=360/37236 ";
    assert!(back.notes.iter().any(|note| note.starts_with(all)), "{:?}", back.notes);
    assert!(back.notes.iter().all(|note| !note.contains("all processes")), "{:?}", back.notes);
}

/// Absurd numbers are added without overflow, and non-numeric values are rejected.
#[test]
fn hostile_losses_are_bounded() {
    let mut value = testing::json(&lossy(), "json");
    let most = serde_json::json!({"samples": u64::MAX, "sampled_bytes": u64::MAX});
    for process in value["processes"].as_array_mut().expect("a list") {
        process["losses"] = serde_json::json!({"alloc": most, "inuse_stale": most, "interval": u64::MAX});
    }
    let back = parse(value.to_string().as_bytes()).expect("numbers");
    for (low, high) in intervals(&back) {
        assert!(low.is_some_and(|low| low >= 0.0) && high.is_some_and(f64::is_finite), "{low:?} {high:?}");
    }
    value["processes"][0]["losses"] = serde_json::json!({"alloc": {"samples": -1}});
    assert!(parse(value.to_string().as_bytes()).is_err());
    value["processes"][0]["losses"] = serde_json::json!({"alloc": {}, "of a later version": 1});
    assert!(parse(value.to_string().as_bytes()).expect("what is missing is none").processes[0].losses.is_none());
}
