//! The schema of the file, as far as it is used to build a profile.

use std::collections::{BTreeMap, BTreeSet};

use heapbpf_audit::{FileAudit, Missing};
use heapbpf_statistics::growth::Growth;
use heapbpf_statistics::sums::SampleSums;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::formats::TotalJson;
use crate::model::{InMemory, Lifetimes, LossBound, Losses, Module, Resident, Unread};

/// The parts of the schema from which a profile is built. Fields that other versions leave out are optional.
#[derive(Deserialize)]
pub(super) struct Top<'a> {
    #[serde(default)]
    pub(super) version: String,
    pub(super) interval_bytes: u64,
    #[serde(default)]
    pub(super) earlier_intervals_bytes: BTreeSet<u64>,
    pub(super) criterion: String,
    #[serde(default)]
    pub(super) unwind: String,
    pub(super) started: String,
    pub(super) time: Option<String>,
    pub(super) unread: Option<Unread>,
    pub(super) duration_seconds: f64,
    pub(super) growth_seconds: Option<f64>,
    #[serde(default)]
    pub(super) host: String,
    #[serde(default = "yes")]
    pub(super) live: bool,
    #[serde(default)]
    pub(super) ended_apart: bool,
    #[serde(default = "yes")]
    pub(super) samples_known: bool,
    #[serde(default)]
    pub(super) recordings: u32,
    #[serde(default)]
    pub(super) time_windows: bool,
    pub(super) processes: Vec<ProcessJson>,
    #[serde(default)]
    pub(super) audit: Vec<FileAudit>,
    #[serde(default)]
    pub(super) modules: Vec<Module>,
    #[serde(borrow)]
    pub(super) stacks: Vec<RowJson<'a>>,
    #[serde(default)]
    pub(super) counters: BTreeMap<String, u64>,
    #[serde(default)]
    pub(super) notes: Vec<String>,
}

fn yes() -> bool {
    true
}

fn unknown_size() -> u64 {
    u64::MAX
}

#[derive(Deserialize)]
pub(super) struct ProcessJson {
    pub(super) pid: u32,
    /// Number of the program under which its stacks are merged.
    pub(super) program: Option<usize>,
    #[serde(default)]
    pub(super) sums: Vec<TotalJson>,
    #[serde(default)]
    pub(super) stands_for: u64,
    pub(super) namespace_pid: Option<u32>,
    pub(super) comm: String,
    #[serde(default)]
    pub(super) exe: String,
    #[serde(default)]
    pub(super) cgroup: String,
    #[serde(default)]
    pub(super) container: String,
    #[serde(default)]
    pub(super) pod: String,
    #[serde(default)]
    pub(super) unit: String,
    #[serde(default)]
    pub(super) allocators: Vec<String>,
    /// A word that this version does not know is no reason to reject the file.
    pub(super) hook: Option<String>,
    pub(super) not_inline: Option<String>,
    pub(super) own_links: Option<bool>,
    /// Indices of its files in the profile's audit.
    #[serde(default)]
    pub(super) audit: Vec<usize>,
    #[serde(default)]
    pub(super) missing: Vec<Missing>,
    #[serde(default)]
    pub(super) coverage: f64,
    pub(super) cpu_coverage: Option<f64>,
    #[serde(default)]
    pub(super) idle: bool,
    #[serde(default)]
    pub(super) ended: bool,
    #[serde(default = "yes")]
    pub(super) live: bool,
    pub(super) inuse_since: Option<String>,
    #[serde(default)]
    pub(super) losses: Losses,
    #[serde(default)]
    pub(super) slack: LossBound,
    pub(super) resident: Option<Resident>,
    #[serde(default)]
    pub(super) alloc_bytes: Figure,
    #[serde(default)]
    pub(super) alloc_objects: Figure,
}

#[derive(Deserialize, Default)]
pub(super) struct Figure {
    pub(super) estimate: Option<f64>,
    pub(super) exact: Option<u64>,
    pub(super) variance: Option<f64>,
    #[serde(default)]
    pub(super) correction: f64,
}

#[derive(Deserialize)]
pub(super) struct RowJson<'a> {
    pub(super) process: Option<usize>,
    pub(super) pid: Option<u32>,
    pub(super) program: Option<usize>,
    pub(super) thread: String,
    pub(super) function: String,
    pub(super) interval: u64,
    pub(super) samples: u64,
    #[serde(default)]
    pub(super) zero_byte_samples: u64,
    pub(super) sampled_bytes: u64,
    pub(super) offset_sum: Option<u64>,
    /// Missing sizes are assumed to differ, so that no interval is claimed for a count.
    #[serde(default)]
    pub(super) smallest_bytes: u64,
    #[serde(default = "unknown_size")]
    pub(super) largest_bytes: u64,
    #[serde(default)]
    pub(super) inuse_samples: u64,
    #[serde(default)]
    pub(super) inuse_zero_byte_samples: u64,
    #[serde(default)]
    pub(super) inuse_sampled_bytes: u64,
    pub(super) inuse_offset_sum: Option<u64>,
    #[serde(default)]
    pub(super) inuse_smallest_bytes: u64,
    #[serde(default = "unknown_size")]
    pub(super) inuse_largest_bytes: u64,
    #[serde(default)]
    pub(super) at_exit_samples: u64,
    #[serde(default)]
    pub(super) at_exit_zero_byte_samples: u64,
    #[serde(default)]
    pub(super) at_exit_sampled_bytes: u64,
    pub(super) at_exit_offset_sum: Option<u64>,
    #[serde(default)]
    pub(super) at_exit_smallest_bytes: u64,
    pub(super) at_exit_largest_bytes: Option<u64>,
    pub(super) complete: bool,
    pub(super) cut: Option<String>,
    #[serde(default)]
    pub(super) unwinder: String,
    /// Frames are first kept as text, so that equal ones are parsed only once.
    #[serde(borrow)]
    pub(super) frames: Vec<&'a RawValue>,
    pub(super) alloc_bytes: Figure,
    pub(super) alloc_objects: Figure,
    #[serde(default)]
    pub(super) inuse_bytes: Figure,
    #[serde(default)]
    pub(super) inuse_objects: Figure,
    #[serde(default)]
    pub(super) at_exit_bytes: Figure,
    #[serde(default)]
    pub(super) at_exit_objects: Figure,
    pub(super) peak: Option<SampleSums>,
    pub(super) in_memory: Option<Box<InMemory>>,
    pub(super) growth: Option<Growth>,
    pub(super) lifetimes: Option<Lifetimes>,
}

impl RowJson<'_> {
    pub(super) fn alloc(&self) -> SampleSums {
        SampleSums {
            samples: self.samples,
            zero_byte_samples: self.zero_byte_samples,
            sampled_bytes: self.sampled_bytes,
            offset_sum: self.offset_sum.unwrap_or(0),
            smallest_bytes: self.smallest_bytes,
            largest_bytes: self.largest_bytes,
            ..estimates(&self.alloc_bytes, &self.alloc_objects)
        }
    }

    pub(super) fn inuse(&self) -> SampleSums {
        SampleSums {
            samples: self.inuse_samples,
            zero_byte_samples: self.inuse_zero_byte_samples,
            sampled_bytes: self.inuse_sampled_bytes,
            offset_sum: SampleSums::offset_sum_of(self.inuse_samples, self.inuse_offset_sum),
            smallest_bytes: self.inuse_smallest_bytes,
            largest_bytes: self.inuse_largest_bytes,
            ..estimates(&self.inuse_bytes, &self.inuse_objects)
        }
    }

    pub(super) fn at_exit(&self) -> SampleSums {
        let largest_if_missing = if self.at_exit_samples > 0 { unknown_size() } else { 0 };
        SampleSums {
            samples: self.at_exit_samples,
            zero_byte_samples: self.at_exit_zero_byte_samples,
            sampled_bytes: self.at_exit_sampled_bytes,
            offset_sum: SampleSums::offset_sum_of(self.at_exit_samples, self.at_exit_offset_sum),
            smallest_bytes: self.at_exit_smallest_bytes,
            largest_bytes: self.at_exit_largest_bytes.unwrap_or(largest_if_missing),
            ..estimates(&self.at_exit_bytes, &self.at_exit_objects)
        }
    }
}

/// The estimates in sums; the integers in sums are separate fields.
fn estimates(bytes: &Figure, objects: &Figure) -> SampleSums {
    SampleSums {
        bytes: bytes.estimate.unwrap_or(0.0) - bytes.correction,
        bytes_variance: bytes.variance.unwrap_or(0.0),
        objects: objects.estimate.unwrap_or(0.0) - objects.correction,
        objects_variance: objects.variance.unwrap_or(0.0),
        bytes_correction: bytes.correction,
        objects_correction: objects.correction,
        ..SampleSums::default()
    }
}
