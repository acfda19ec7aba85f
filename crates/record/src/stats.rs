//! The statistics of a recording, as `--stats` writes them.

use std::collections::BTreeMap;

use heapbpf_audit::{AttachEntry, Hook};
use heapbpf_profile::model::{CPU_NS, LOST_PREFIX, PROBE_NS, Process};
use serde::{Deserialize, Serialize};

use crate::cost::measure::Measured;

/// The fate of every hit, and the cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// Outermost allocation calls of the targets.
    pub hits: u64,
    /// Of these, calls that were not sampled.
    pub unsampled: u64,
    /// Samples that reached the profile.
    pub submitted: u64,
    /// Sampled calls that returned NULL.
    pub failed: u64,
    /// Hits that were lost, by reason.
    pub lost: BTreeMap<String, u64>,
    /// Reentrant calls: those that an allocator makes into its own functions. Not hits.
    #[serde(rename = "inner")]
    pub reentrant: u64,
    /// Calls of hooked freeing functions with a block that is not NULL, including reentrant ones.
    pub frees_seen: u64,
    /// Frees of sampled blocks, including those by realloc, which `frees_seen` does not count.
    pub frees_matched: u64,
    /// Bytes requested, counted exactly.
    pub exact_alloc_bytes: u64,
    /// Allocations, counted exactly.
    pub exact_alloc_objects: u64,
    /// Bytes requested, estimated from the samples.
    pub estimated_alloc_bytes: f64,
    /// Time that probes took in the targets, seconds: calls × the cost of a call as measured on this machine. `None` if
    /// it could not be measured.
    pub probe_seconds: Option<f64>,
    /// The costs of probes as measured on this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe_costs: Option<Measured>,
    /// CPU time of the targets, seconds. `None` unless processes are hooked one by one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub targets_cpu_seconds: Option<f64>,
    /// CPU time of the daemon, seconds.
    pub daemon_cpu_seconds: f64,
    /// Peak resident memory of the daemon, bytes.
    pub daemon_peak_rss_bytes: u64,
    /// Attached probes.
    pub attach: Vec<AttachEntry>,
    /// How the first processes are hooked.
    #[serde(default)]
    pub hooks: Vec<HookedProcess>,
    /// Further counters by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub other: BTreeMap<String, u64>,
}

/// How a process is hooked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookedProcess {
    /// Process id.
    pub pid: u32,
    /// Name of the main thread.
    pub comm: String,
    /// How its calls are counted.
    pub hook: Hook,
    /// Why it has probes although the user asked for inline hooks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_inline: Option<String>,
}

impl HookedProcess {
    /// Maximum number of processes that are listed.
    const MOST: usize = 1000;

    /// The first processes of a profile.
    pub fn list(processes: &[Process]) -> Vec<Self> {
        let one = |process: &Process| {
            let (hook, not_inline) = (process.hook?, process.not_inline.clone());
            Some(Self { pid: process.pid, comm: process.comm.clone(), hook, not_inline })
        };
        processes.iter().filter_map(one).take(Self::MOST).collect()
    }
}

impl Stats {
    /// The right-hand side of the invariant hits = unsampled + submitted + failed + Σ lost.
    pub fn accounted(&self) -> u64 {
        let lost = self.lost.values().fold(0u64, |sum, lost| sum.saturating_add(*lost));
        self.unsampled.saturating_add(self.submitted).saturating_add(self.failed).saturating_add(lost)
    }

    /// Every counter by name: losses as `lost_…`, the two sides of the invariant as `hits` and `accounted`, and if they
    /// are known, the time of the probes as `probe_ns` and the CPU time of the targets as `cpu_ns`.
    pub fn counters(&self) -> BTreeMap<String, u64> {
        let mut counters = self.other.clone();
        for (name, value) in [
            ("hits", self.hits),
            ("accounted", self.accounted()),
            ("unsampled", self.unsampled),
            ("submitted", self.submitted),
            ("failed", self.failed),
            ("inner", self.reentrant),
            ("frees_seen", self.frees_seen),
            ("frees_matched", self.frees_matched),
        ] {
            counters.insert(name.into(), value);
        }
        for (name, lost) in &self.lost {
            let name = if name.starts_with(LOST_PREFIX) { name.clone() } else { format!("{LOST_PREFIX}{name}") };
            counters.insert(name, *lost);
        }
        for (name, seconds) in [(PROBE_NS, self.probe_seconds), (CPU_NS, self.targets_cpu_seconds)] {
            counters.extend(seconds.map(|seconds| (name.to_owned(), (seconds * 1e9) as u64)));
        }
        counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_invariant_has_two_sides() {
        let stats = Stats {
            hits: 100,
            unsampled: 90,
            submitted: 6,
            failed: 1,
            lost: BTreeMap::from([("ring_full".into(), 2), ("abandoned".into(), 1)]),
            ..Stats::default()
        };
        let counters = stats.counters();
        assert_eq!(counters["hits"], counters["accounted"]);
        assert_eq!(counters["lost_ring_full"], 2);
        let text = serde_json::to_string(&stats).expect("plain data");
        for name in [
            "\"hits\":100",
            "\"lost\":{\"abandoned\":1",
            "\"attach\":[]",
            "\"inner\":0",
            "\"estimated_alloc_bytes\":0.0",
        ] {
            assert!(text.contains(name), "{name} in {text}");
        }
        assert_eq!(serde_json::from_str::<Stats>(&text).expect("its own output"), stats);
    }
}
