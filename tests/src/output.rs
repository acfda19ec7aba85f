//! The files that heapbpf writes, read only by their documented format: the `.json` profile and `--stats`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

/// An estimate with its 95 % confidence interval.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Estimate {
    /// The unbiased estimate, if there is one.
    pub estimate: Option<f64>,
    /// Lower end of the interval.
    pub low: Option<f64>,
    /// Upper end of the interval.
    pub high: Option<f64>,
    /// The exact number, if it was counted.
    pub exact: Option<f64>,
    /// Why the estimate or its interval is missing.
    pub reason: Option<String>,
}

impl Estimate {
    /// The estimate.
    ///
    /// # Panics
    /// If there is none.
    pub fn value(&self) -> f64 {
        self.estimate.unwrap_or_else(|| panic!("no estimate: {self:?}"))
    }
}

/// Allocated and in-use figures of totals, processes or stacks.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Figures {
    /// Bytes allocated.
    pub alloc_bytes: Estimate,
    /// Number of allocations.
    pub alloc_objects: Estimate,
    /// Bytes in use, or `None` with `--no-live`.
    pub inuse_bytes: Option<Estimate>,
    /// Blocks in use.
    pub inuse_objects: Option<Estimate>,
    /// Address space of the mappings in use.
    pub address_space_bytes: Option<Estimate>,
    /// Bytes that ended processes held when they ended, where these are separate from those in use.
    pub at_exit_bytes: Option<Estimate>,
    /// Blocks that ended processes held when they ended.
    pub at_exit_objects: Option<Estimate>,
}

/// Something that is not hooked.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Missing {
    /// Function or file.
    pub what: String,
    /// Why it is not hooked.
    pub why: String,
}

/// How far the counts of a process may be ahead of its profile.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Slack {
    /// Maximum number of samples.
    pub samples: u64,
    /// Maximum number of bytes that their calls requested.
    pub sampled_bytes: u64,
}

/// A process.
#[derive(Clone, Debug, Deserialize)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// Process id in its own pid namespace, if that differs.
    pub namespace_pid: Option<u32>,
    /// Samples after the profile's moment that its counts may include.
    #[serde(default)]
    pub slack: Slack,
    /// Name.
    pub comm: String,
    /// Executable.
    pub exe: String,
    /// ID of its container.
    #[serde(default)]
    pub container: String,
    /// UID of its pod.
    #[serde(default)]
    pub pod: String,
    /// Its systemd unit.
    #[serde(default)]
    pub unit: String,
    /// Allocators found.
    pub allocators: Vec<String>,
    /// Indices of its files in the profile's audit.
    #[serde(default)]
    pub audit: Vec<usize>,
    /// What is not hooked.
    #[serde(default)]
    pub missing: Vec<Missing>,
    /// How it is hooked.
    pub hook: Option<String>,
    /// Why it is not hooked inline, if it should be.
    pub not_inline: Option<String>,
    /// Share of its time in the recording that was covered.
    pub coverage: f64,
    /// Whether none of its calls were counted.
    #[serde(default)]
    pub idle: bool,
    /// Share of its CPU time during which it was counted.
    pub cpu_coverage: Option<f64>,
    /// Since when blocks count as in use, if not since the start.
    pub inuse_since: Option<String>,
    /// Whether it ended while it was recorded.
    #[serde(default)]
    pub ended: bool,
    /// Its figures.
    #[serde(flatten)]
    pub figures: Figures,
}

impl Process {
    /// Whether another recording had hooked it inline for a while, so that probes did not see its calls.
    pub fn was_hidden(&self) -> bool {
        self.missing.iter().any(|missing| missing.what == "the time under another recording's inline hooks")
    }

    /// Whether only the sampled ones of its mappings are told from an allocator's own.
    pub fn lacks_exact_mappings(&self) -> bool {
        self.missing.iter().any(|missing| missing.what == "exact totals with --mmap")
    }

    /// Whether the counts of its inline hooks are plausible.
    pub fn is_believed(&self) -> bool {
        self.missing.iter().all(|missing| missing.what != "exact totals")
    }
}

/// A frame of a stack.
#[derive(Clone, Debug, Deserialize)]
pub struct Frame {
    /// Function. If it is `None`, there is a reason.
    pub function: Option<String>,
    /// Module.
    pub module: Option<String>,
    /// Build ID of the module.
    pub build_id: Option<String>,
    /// Source file.
    pub file: Option<String>,
    /// Source line.
    pub line: Option<u32>,
    /// Whether it is inlined into the next frame.
    #[serde(default)]
    pub inlined: bool,
    /// Why there is no function.
    pub reason: Option<String>,
}

fn zero_if_null<'de, D: Deserializer<'de>>(input: D) -> Result<u32, D::Error> {
    Ok(Option::deserialize(input)?.unwrap_or_default())
}

/// A stack of a process.
#[derive(Clone, Debug, Deserialize)]
pub struct Stack {
    /// Process id; 0 if the stack is one of several processes.
    #[serde(deserialize_with = "zero_if_null")]
    pub pid: u32,
    /// Thread name.
    pub thread: Option<String>,
    /// Allocator function called.
    pub function: String,
    /// What has sampled it, if not heapbpf.
    pub source: Option<String>,
    /// Sampling interval of these samples.
    pub interval: u64,
    /// Number of samples taken.
    pub samples: u64,
    /// Bytes of these samples.
    pub sampled_bytes: u64,
    /// Number of these samples still in use.
    pub inuse_samples: Option<u64>,
    /// How long its blocks live, if that is known.
    pub lifetimes: Option<serde_json::Value>,
    /// Whether the stack reaches the thread's entry.
    pub complete: bool,
    /// Why it does not reach the thread's entry.
    pub cut: Option<String>,
    /// Leaf first.
    pub frames: Vec<Frame>,
    /// Its figures.
    #[serde(flatten)]
    pub figures: Figures,
}

impl Stack {
    /// Whether a function is anywhere on the stack.
    pub fn has(&self, function: &str) -> bool {
        self.frames.iter().any(|frame| frame.function.as_deref() == Some(function))
    }

    /// The functions, innermost first; `?` without a name.
    pub fn names(&self) -> Vec<&str> {
        self.frames.iter().map(|frame| frame.function.as_deref().unwrap_or("?")).collect()
    }

    /// The `site_NN` that the stack belongs to.
    pub fn site(&self) -> Option<&str> {
        self.frames.iter().filter_map(|frame| frame.function.as_deref()).find(|name| name.starts_with("site_"))
    }
}

/// Records that were sent but not read in time.
#[derive(Clone, Debug, Deserialize)]
pub struct Unread {
    /// Number of unread records.
    pub records: u64,
    /// Number of records that were sent.
    pub of: u64,
    /// Share of unread records.
    pub share: f64,
}

/// A `.json` profile.
#[derive(Clone, Debug, Deserialize)]
pub struct Profile {
    /// Sampling interval R.
    pub interval_bytes: u64,
    /// Length of the recording.
    pub duration_seconds: f64,
    /// Moment of the in-use figures, as text.
    pub time: Option<String>,
    /// Records from before that moment that were not read in time.
    pub unread: Option<Unread>,
    /// Sums.
    pub totals: Figures,
    /// Processes.
    pub processes: Vec<Process>,
    /// What was hooked in each file with an allocator.
    #[serde(default)]
    pub audit: Vec<serde_json::Value>,
    /// Stacks.
    pub stacks: Vec<Stack>,
    /// Remarks about the figures.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Accounting.
    pub counters: BTreeMap<String, serde_json::Value>,
}

/// A frame as shown: function, file, line, and whether it is inlined.
pub type Shown = (Option<String>, Option<String>, Option<u32>, bool);

impl Profile {
    /// Why stacks were cut.
    pub fn cuts(&self) -> BTreeSet<String> {
        self.stacks.iter().filter_map(|stack| stack.cut.clone()).collect()
    }

    /// Number of samples by stack, as shown.
    pub fn shown(&self) -> BTreeMap<Vec<Shown>, u64> {
        let frame = |it: &Frame| (it.function.clone(), it.file.clone(), it.line, it.inlined);
        let mut shown = BTreeMap::new();
        for stack in &self.stacks {
            *shown.entry(stack.frames.iter().map(frame).collect()).or_default() += stack.samples;
        }
        shown
    }

    /// How far the counts of all processes may be ahead of the profile.
    pub fn slack(&self) -> Slack {
        let add = |sum: Slack, process: &Process| Slack {
            samples: sum.samples + process.slack.samples,
            sampled_bytes: sum.sampled_bytes + process.slack.sampled_bytes,
        };
        self.processes.iter().fold(Slack::default(), add)
    }

    /// Whether a process is listed.
    pub fn has(&self, pid: u32) -> bool {
        self.processes.iter().any(|process| process.pid == pid)
    }

    /// A process by its id. If it has several process generations, returns the last.
    ///
    /// # Panics
    /// If it is not in the profile.
    pub fn process(&self, pid: u32) -> &Process {
        let listed: Vec<_> = self.processes.iter().map(|p| (p.pid, &p.comm)).collect();
        self.processes.iter().rfind(|process| process.pid == pid).unwrap_or_else(|| panic!("no {pid} in {listed:?}"))
    }
}

/// A probe that was attached.
#[derive(Clone, Debug, Deserialize)]
pub struct Attached {
    /// File offset of the instruction.
    #[serde(default)]
    pub offset: u64,
    /// File.
    pub file: String,
    /// Function.
    pub function: String,
    /// How the kernel executes the probed instruction.
    pub kind: String,
    /// How the probe is linked.
    pub link: String,
    /// Why this instruction was chosen.
    #[serde(default)]
    pub reason: String,
}

/// The statistics of `--stats`.
#[derive(Clone, Debug, Deserialize)]
#[allow(missing_docs, reason = "the names are the contract's")]
pub struct Stats {
    pub hits: u64,
    pub unsampled: u64,
    pub submitted: u64,
    pub failed: u64,
    pub lost: BTreeMap<String, u64>,
    #[serde(rename = "inner")]
    pub reentrant: u64,
    pub frees_seen: u64,
    pub frees_matched: u64,
    pub exact_alloc_bytes: u64,
    pub exact_alloc_objects: u64,
    pub estimated_alloc_bytes: f64,
    pub probe_seconds: Option<f64>,
    pub daemon_cpu_seconds: f64,
    pub daemon_peak_rss_bytes: u64,
    pub attach: Vec<Attached>,
    pub hooks: Vec<HookedProcess>,
    /// Further counters.
    #[serde(default)]
    pub other: BTreeMap<String, u64>,
}

/// How a process is hooked.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[allow(missing_docs, reason = "the names are the contract's")]
pub struct HookedProcess {
    pub pid: u32,
    pub comm: String,
    pub hook: String,
    pub not_inline: Option<String>,
}

impl Stats {
    /// Sum of all losses.
    pub fn lost(&self) -> u64 {
        self.lost.values().sum()
    }
}

/// Reads a JSON file.
///
/// # Panics
/// If it is missing or does not have the documented format.
pub fn read<T: DeserializeOwned>(path: &Path) -> T {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{} is not as promised: {e}", path.display()))
}
