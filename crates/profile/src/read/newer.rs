//! Reports the parts of a profile from a newer version that this version does not understand.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::escape::escaped;

/// The version of this reader.
const OURS: &str = env!("CARGO_PKG_VERSION");
/// Maximum number of fields that are named.
const MOST_NAMED: usize = 8;
/// Maximum length of a field name, in characters.
const LONGEST: usize = 40;

/// Fields that this version writes and therefore understands.
const TOP: &str = "audit confidence counters criterion duration_seconds earlier_intervals_bytes ended_apart estimator \
                   growth_seconds host interval_bytes live modules notes processes recordings samples_known stacks \
                   started time time_windows totals unread unwind version";
const FIGURES: &str = "address_space_bytes alloc_bytes alloc_objects at_exit_bytes at_exit_objects inuse_bytes \
                       inuse_objects resident_bytes swapped_bytes";
const PROCESS: &str = "allocators audit cgroup comm container coverage cpu_coverage ended exe hook idle inuse_before inuse_since live losses memory_coverage missing \
                       namespace_pid not_inline own_links pid pod program resident slack stands_for sums unit";
const STACK: &str = "at_exit_largest_bytes at_exit_offset_sum at_exit_sampled_bytes at_exit_samples at_exit_smallest_bytes \
                     at_exit_zero_byte_samples complete cut frames function growth in_memory interval inuse_largest_bytes inuse_offset_sum \
                     inuse_sampled_bytes inuse_samples inuse_smallest_bytes inuse_zero_byte_samples largest_bytes lifetimes \
                     offset_sum peak pid process program sampled_bytes samples smallest_bytes source thread unwinder \
                     zero_byte_samples";

/// A sentence about the fields that are not understood, if a newer version wrote the profile (heapbpf's JSON) and there
/// are such fields.
pub(super) fn note(version: &str, bytes: &[u8]) -> Option<String> {
    if is_newer(version) { note_of(version, &unknown_fields(bytes)) } else { None }
}

/// A sentence about the parts of a profile that are not understood, if a newer version wrote it and there are such
/// parts. `parts` are names as [`shown`] returns them.
pub(super) fn note_of(version: &str, parts: &BTreeSet<String>) -> Option<String> {
    if !is_newer(version) || parts.is_empty() {
        return None;
    }
    let named: Vec<&str> = parts.iter().map(String::as_str).take(MOST_NAMED).collect();
    let more = parts.len().saturating_sub(MOST_NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Some(format!(
        "the profile was written by heapbpf {version}; this version, {OURS}, does not understand {}{more} and ignores it",
        named.join(", ")
    ))
}

/// A name from a profile, prepared for use in such a sentence.
pub(super) fn shown(name: &str) -> String {
    escaped(name).chars().take(LONGEST).collect()
}

/// Text to append to an error about a profile that `version` wrote.
pub(super) fn hint_of(version: &str) -> String {
    if is_newer(version) {
        format!(" (it was written by heapbpf {version}, and this is {OURS})")
    } else {
        String::new()
    }
}

/// Text to append to an error about the profile, which says that a newer version wrote it.
pub(super) fn hint(bytes: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Version {
        version: String,
    }
    let version = serde_json::from_slice(bytes).ok().map(|Version { version }| version);
    version.map_or_else(String::new, |version| hint_of(&version))
}

/// Whether a version is later than this one.
pub(super) fn is_newer(version: &str) -> bool {
    let numbers =
        |version: &str| -> Option<Vec<u32>> { version.split('.').map(|number| number.parse().ok()).collect() };
    numbers(version).zip(numbers(OURS)).is_some_and(|(theirs, ours)| theirs.len() < 5 && theirs > ours)
}

/// Names of the fields in the profile, in processes and in stacks that this version does not write.
fn unknown_fields(bytes: &[u8]) -> BTreeSet<String> {
    #[derive(Deserialize, Default)]
    struct Lists<'a> {
        #[serde(borrow)]
        processes: Vec<&'a RawValue>,
        #[serde(borrow)]
        stacks: Vec<&'a RawValue>,
    }
    let unknown = |object: &[u8], of: &str, known: [&str; 2]| -> Vec<String> {
        // Damaged files were rejected earlier.
        let fields: BTreeMap<String, IgnoredAny> = serde_json::from_slice(object).unwrap_or_default();
        let is_known = |name: &str| known.iter().any(|names| names.split_whitespace().any(|known| known == name));
        fields.keys().filter(|name| !is_known(name.as_str())).map(|name| format!("{of}{}", shown(name))).collect()
    };
    let lists: Lists = serde_json::from_slice(bytes).unwrap_or_default();
    let of_processes = lists.processes.iter().map(|it| (it, "processes[].", [PROCESS, FIGURES]));
    let of_stacks = lists.stacks.iter().map(|it| (it, "stacks[].", [STACK, FIGURES]));
    let of_lists = of_processes.chain(of_stacks).flat_map(|(it, of, known)| unknown(it.get().as_bytes(), of, known));
    unknown(bytes, "", [TOP, ""]).into_iter().chain(of_lists).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn all_that_this_version_writes_is_known() {
        for profile in [
            testing::small(),
            testing::ended_apart(),
            testing::partly_followed(),
            testing::followed_again(),
            testing::stripped(),
            testing::large(20, 5),
        ] {
            assert_eq!(unknown_fields(&testing::written(&profile, "json")), BTreeSet::new());
        }
    }

    #[test]
    fn what_a_newer_version_added_is_named() {
        let mut value = testing::json(&testing::small(), "json");
        assert_eq!(crate::read::parse(value.to_string().as_bytes()).expect("ours").notes, testing::small().notes);
        value["flavour"] = 1.into();
        value["processes"][1]["numa\u{1b}[31m"] = serde_json::json!({"node": [1, 2]});
        value["stacks"][2]["colour"] = "red".into();
        value["version"] = OURS.into();
        assert_eq!(crate::read::parse(value.to_string().as_bytes()).expect("ours").notes, testing::small().notes);
        value["version"] = "99.0.1".into();
        let read = crate::read::parse(value.to_string().as_bytes()).expect("the rest is understood");
        let said = read.notes.last().expect("a note");
        assert!(said.contains("by heapbpf 99.0.1"), "{said}");
        assert!(
            said.contains("understand flavour, processes[].numa\\u{1b}[31m, stacks[].colour and ignores it"),
            "{said}"
        );
        value["criterion"] = "phase of the moon".into();
        let error = crate::read::parse(value.to_string().as_bytes()).expect_err("it means something else");
        assert!(error.to_string().contains("phase of the moon") && error.to_string().contains("99.0.1"), "{error}");
        value["interval_bytes"] = "many".into();
        let error = crate::read::parse(value.to_string().as_bytes()).expect_err("no number");
        assert!(error.to_string().contains("99.0.1"), "{error}");
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert!(is_newer("1000.0.0") && is_newer("1000"));
        for other in [OURS, "0.0.9", "", "x", "1000.0.0-beta", "1000.<b>", "99999999999999"] {
            assert!(!is_newer(other), "{other}");
        }
    }
}
