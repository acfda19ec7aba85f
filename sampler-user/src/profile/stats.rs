//! The accounting of a recording as `--stats` writes it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::cost::measure::Measured;

/// Prefix of loss counters among [`super::model::Profile::counters`].
pub const LOST_PREFIX: &str = "lost_";

/// What happened to every hit, and what it cost.
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
    /// Calls that allocators made into themselves; not hits.
    pub inner: u64,
    /// Calls of hooked functions that free, of a block that is not NULL: the program's, and those that allocators make into
    /// themselves.
    pub frees_seen: u64,
    /// Frees of sampled blocks.
    pub frees_matched: u64,
    /// Bytes asked for, counted.
    pub exact_alloc_bytes: u64,
    /// Allocations, counted.
    pub exact_alloc_objects: u64,
    /// Bytes asked for, estimated from the samples.
    pub estimated_alloc_bytes: f64,
    /// Time spent in probes, in the targets: calls × the cost of one as measured on this machine, if it could be.
    pub probe_seconds: Option<f64>,
    /// What probes cost on this machine, as it was measured there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe_costs: Option<Measured>,
    /// CPU time of the daemon.
    pub daemon_cpu_seconds: f64,
    /// Largest resident memory of the daemon.
    pub daemon_peak_rss_bytes: u64,
    /// Probes that were placed.
    pub attach: Vec<Attachment>,
    /// Counters beyond those above, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub other: BTreeMap<String, u64>,
}

/// A placed probe.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// File that it is in.
    pub file: String,
    /// Function.
    pub function: String,
    /// File offset of the instruction.
    pub offset: u64,
    /// What the kernel does with the instruction: `emulated`, `stepped` or `optimized`.
    pub kind: String,
    /// Kind of link: `session`, `multi` or `perf`.
    pub link: String,
    /// Why this instruction.
    #[serde(default)]
    pub reason: String,
}

impl Stats {
    /// The right side of the invariant: hits = unsampled + submitted + failed + Σ lost.
    pub fn accounted(&self) -> u64 {
        let lost = self.lost.values().fold(0u64, |sum, lost| sum.saturating_add(*lost));
        self.unsampled.saturating_add(self.submitted).saturating_add(self.failed).saturating_add(lost)
    }

    /// Every counter by its name, losses as `lost_…`, and the invariant's two sides as `hits` and `accounted`.
    pub fn counters(&self) -> BTreeMap<String, u64> {
        let mut counters = self.other.clone();
        for (name, value) in [
            ("hits", self.hits),
            ("accounted", self.accounted()),
            ("unsampled", self.unsampled),
            ("submitted", self.submitted),
            ("failed", self.failed),
            ("inner", self.inner),
            ("frees_seen", self.frees_seen),
            ("frees_matched", self.frees_matched),
        ] {
            counters.insert(name.into(), value);
        }
        for (name, lost) in &self.lost {
            let name = if name.starts_with(LOST_PREFIX) { name.clone() } else { format!("{LOST_PREFIX}{name}") };
            counters.insert(name, *lost);
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
        for name in ["\"hits\":100", "\"lost\":{\"abandoned\":1", "\"attach\":[]", "\"estimated_alloc_bytes\":0.0"] {
            assert!(text.contains(name), "{name} in {text}");
        }
        assert_eq!(serde_json::from_str::<Stats>(&text).expect("its own output"), stats);
    }
}
