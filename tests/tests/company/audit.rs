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
    let (outcome, _) = Recorder::of(target.pid(), 1).option("--hook", "probe").record(&mut target);
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
