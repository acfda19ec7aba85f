//! Tests of the JSON writer.

use super::*;
use crate::testing;

fn json(profile: &Profile) -> serde_json::Value {
    testing::json(profile, "json")
}

fn keys(value: &serde_json::Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn every_key_of_the_contract_is_there() {
    let value = json(&testing::small());
    let has = |value: &serde_json::Value, names: &str| {
        let present = keys(value);
        for name in names.split(' ') {
            assert!(present.contains(&name), "{name} in {present:?}");
        }
    };
    has(&value, "version interval_bytes criterion unwind started duration_seconds totals processes stacks counters");
    has(&value, "time ended_apart");
    has(&value["totals"], "alloc_bytes alloc_objects inuse_bytes inuse_objects at_exit_bytes at_exit_objects");
    has(&value["processes"][1], "at_exit_bytes at_exit_objects");
    has(&value["stacks"][4], "at_exit_bytes at_exit_objects");
    has(&value["processes"][0], "pid comm exe cgroup allocators audit missing coverage alloc_bytes inuse_objects");
    has(
        &value["stacks"][0],
        "pid thread function interval samples sampled_bytes offset_sum inuse_samples inuse_sampled_bytes complete \
         frames alloc_bytes alloc_objects inuse_bytes inuse_objects",
    );
    has(&value["stacks"][0]["frames"][0], "function file line module build_id address inlined reason");
    has(&value["stacks"][0]["alloc_bytes"], "estimate low high exact");
    assert_eq!(value["started"], "2023-11-14T22:13:20.123456789Z");
    assert_eq!(value["processes"][0]["alloc_bytes"]["exact"], 60_000_000);
    assert_eq!(value["totals"]["alloc_bytes"]["exact"], serde_json::Value::Null);
    assert_eq!(value["processes"][0]["hook"], "inline");
    assert_eq!(value["processes"][1]["hook"], "probe");
    assert_eq!(value["processes"][1]["not_inline"], "it runs with shadow stacks");
    assert_eq!(value["stacks"][5]["complete"], false);
    assert_eq!(value["stacks"][0]["frames"][0]["inlined"], true);
}

#[test]
fn without_frees_figures_in_use_are_null_with_a_reason() {
    let mut profile = testing::small();
    profile.header.live = false;
    let value = json(&profile);
    assert_eq!(value["stacks"][0]["inuse_bytes"]["estimate"], serde_json::Value::Null);
    assert_eq!(value["totals"]["inuse_bytes"]["reason"], "frees were not tracked");
    assert!(value["stacks"][0].get("inuse_samples").is_none());
}

#[test]
fn figures_in_use_say_since_when_frees_are_followed() {
    let value = json(&testing::followed_again());
    assert_eq!(value["processes"][0]["inuse_since"], "2023-11-14T22:13:32.623456789Z");
    assert!(value["processes"][0]["inuse_bytes"]["estimate"].is_number());
    assert_eq!(value["processes"][1].get("inuse_since"), None);
    let mut unknown = testing::followed_again();
    unknown.processes[0].inuse_unknown = true;
    assert_eq!(json(&unknown)["processes"][0].get("inuse_since"), None);
}

#[test]
fn a_process_whose_frees_were_given_up_is_told_apart() {
    let value = json(&testing::partly_followed());
    assert_eq!((&value["live"], &value["processes"][0]["live"]), (&true.into(), &true.into()));
    assert_eq!(value["processes"][1]["live"], false);
    for unknown in [&value["processes"][1], &value["stacks"][4], &value["stacks"][5]] {
        assert_eq!(unknown["inuse_bytes"]["estimate"], serde_json::Value::Null);
        assert_eq!(unknown["inuse_objects"]["reason"], "frees were not tracked");
        assert!(unknown["alloc_bytes"]["estimate"].is_number() && unknown.get("inuse_samples").is_none());
    }
    let inuse = |of: &serde_json::Value| of["inuse_bytes"]["estimate"].as_f64().expect("an estimate");
    assert!((inuse(&value["totals"]) / inuse(&value["processes"][0]) - 1.0).abs() < 1e-12);
    let reason = value["totals"]["inuse_bytes"]["reason"].as_str().expect("a reason");
    assert!(reason.contains("without the processes"), "{reason}");
    assert_eq!(value["totals"]["alloc_bytes"].get("reason"), None);
}
