//! Every profile has an audit, which equals doctor's and lists what is not hooked.

use heapbpf_tests::doctor::doctor_of;
use heapbpf_tests::environment::turn;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use serde_json::Value;

/// Joins one list from every file in a process's audit.
fn joined(audit: &[Value], files: &[usize], list: &str) -> Vec<Value> {
    files.iter().flat_map(|file| audit[*file][list].as_array().expect("a list").clone()).collect()
}

#[test]
fn the_profile_s_audit_is_the_doctor_s() {
    let Some(_turn) = turn("the_profile_s_audit_is_the_doctor_s") else { return };
    let mut target = Target::start(&program("mix"), ["1000"]);
    let found = doctor_of(target.pid()).1;
    let recording = Recorder::of(target.pid(), 1).option("--hook", "probe").start();
    target.run();
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    let process = profile.process(target.pid());
    for list in ["attach", "covered", "limits"] {
        assert_eq!(Value::from(joined(&profile.audit, &process.audit, list)), found[list], "{list}");
    }
    assert_eq!(serde_json::to_value(&profile.audit[process.audit[0]]["allocator"]).unwrap(), found["allocators"][0]);
    let malloc = |entry: &&Value| entry["function"] == "malloc";
    let attach = joined(&profile.audit, &process.audit, "attach");
    let probe = attach.iter().find(malloc).expect("malloc is hooked");
    assert!(["emulated", "optimized", "stepped"].contains(&probe["kind"].as_str().expect("a kind")), "{probe}");
    assert!(probe["link"].is_string() && probe["offset"].is_u64() && probe["reason"].is_string(), "{probe}");
    assert_eq!(attach.len(), stats.attach.len());
    for (entry, probe) in attach.iter().zip(&stats.attach) {
        assert_eq!(
            (entry["function"].as_str(), entry["reason"].as_str()),
            (Some(&*probe.function), Some(&*probe.reason))
        );
    }
    assert_eq!(process.missing, []);
}

/// If frees are not tracked, the audit has no freeing functions.
#[test]
fn the_audit_is_of_this_recording() {
    let Some(_turn) = turn("the_audit_is_of_this_recording") else { return };
    let mut target = Target::start(&program("mix"), ["1000"]);
    let recording =
        Recorder::of(target.pid(), 1).option("--hook", "probe").flag("--no-live").option("--link", "multi").start();
    target.run();
    let (profile, _) = recording.stop().results();
    let attach = joined(&profile.audit, &profile.process(target.pid()).audit, "attach");
    let is_expected = |entry: &Value| entry["function"] != "free" && entry["link"] == "multi";
    assert!(!attach.is_empty() && attach.iter().all(is_expected), "{attach:?}");
}
