//! The profile as data: processes, stacks, sums, accounting. Every format and report is made from this alone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sampler_ebpf::trials;
use serde::{Deserialize, Serialize};

use crate::attach::Missing;
use crate::attach::audit::FileAudit;
use crate::heap::sums::SampleSums;
use crate::sampling::estimators::Estimator;

/// What a sampling trial is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Criterion {
    /// One trial per byte requested (at least one per call).
    #[default]
    Bytes,
    /// One trial per allocation.
    Allocations,
    /// One trial per allocation, an interval per size class.
    SizeClass,
}

impl Criterion {
    /// Every criterion, in the order in which the command line lists them.
    pub const ALL: [Self; 3] = [Self::Bytes, Self::Allocations, Self::SizeClass];

    /// Its name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Allocations => "allocations",
            Self::SizeClass => "size-class",
        }
    }

    /// Its number in the kernel side's constants.
    pub fn code(self) -> u64 {
        match self {
            Self::Bytes => trials::CRITERION_BYTES,
            Self::Allocations => trials::CRITERION_ALLOCATIONS,
            Self::SizeClass => trials::CRITERION_SIZE_CLASS,
        }
    }

    /// The criterion of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|criterion| criterion.name() == name)
    }
}

/// A recording's result.
#[derive(Clone, Debug)]
pub struct Profile {
    /// heapbpf's version that recorded it.
    pub version: String,
    /// Sampling interval R in force at the end, in trials; rows carry their own.
    pub interval: u64,
    /// What a trial is.
    pub criterion: Criterion,
    /// Unwinder that was asked for: `auto`, `dwarf` or `fp`.
    pub unwind: String,
    /// Wall clock at the start.
    pub started: SystemTime,
    /// Wall clock at the moment that figures in use are of.
    pub time: SystemTime,
    /// Records of before `time` that were not read in time; figures lack what they tell.
    pub unread: Option<Unread>,
    /// Length of the recording; of several, their sum.
    pub duration: Duration,
    /// Recordings that were added up: 1, but for a merged profile.
    pub recordings: u32,
    /// Whether frees were followed (`false` with `--no-live`: no in-use figures).
    pub live: bool,
    /// Whether what ended processes held when they ended stands apart from what is in use ([`Row::at_exit`]), as it does
    /// unless targets were named; else it counts as in use.
    pub ended_apart: bool,
    /// Whether rows carry their samples, as every recording does. `false` for a profile read from a format that
    /// keeps estimates alone (pprof): nothing can be said about the error of its figures.
    pub samples_known: bool,
    /// Whether `offset_sum` of the sums is known, as it is of every recording. `false` for samples of other profilers.
    pub offsets_known: bool,
    /// Rule by which bytes are estimated; another than the usual one only where a report asked for it.
    pub estimator: Estimator,
    /// Whether probes were in place in time windows only, for a part of the recording. Figures of allocation are
    /// corrected for that, window by window; how far windows are from the rest is not known, so they have no interval,
    /// and what was counted is not all there was.
    pub time_windows: bool,
    /// Host name.
    pub host: String,
    /// Processes with at least one hit.
    pub processes: Vec<Process>,
    /// One row per (process, thread, function, stack, interval).
    pub rows: Vec<Row>,
    /// Modules that frames refer to.
    pub modules: Vec<Module>,
    /// Accounting of the recording by name, in the order in which it is shown.
    pub counters: BTreeMap<String, u64>,
    /// Remarks the user must see with the figures (losses, coverage, changes of the interval).
    pub notes: Vec<String>,
}

impl Profile {
    /// Whether something can be said about the error of figures of allocation.
    pub const fn errors_known(&self) -> bool {
        self.samples_known && !self.time_windows
    }

    /// Whether what a process (by its index) has in use is known.
    pub fn knows_inuse(&self, process: usize) -> bool {
        self.live && !self.processes.get(process).is_some_and(|process| process.inuse_unknown)
    }

    /// Whether figures in use are known of any of its processes.
    pub fn knows_some_inuse(&self) -> bool {
        self.live && (self.processes.is_empty() || self.processes.iter().any(|process| !process.inuse_unknown))
    }

    /// Number of processes that figures in use are without.
    pub fn without_inuse(&self) -> usize {
        self.processes.iter().filter(|process| self.live && process.inuse_unknown).count()
    }

    /// Whether a process (by its index) may have held something at its end that stands apart from what is in use.
    pub fn may_hold_at_exit(&self, process: usize) -> bool {
        self.ended_apart && self.processes.get(process).is_some_and(|process| process.ended)
    }

    /// Whether an ended process held something at its end, as far as frees were followed.
    pub fn has_at_exit(&self) -> bool {
        self.live && self.rows.iter().any(|row| row.at_exit.objects != 0.0)
    }

    /// The part of the profile that is about one process (by its index).
    pub fn only_process(&self, process: usize) -> Self {
        let rows = self.rows.iter().filter(|row| row.process == process);
        Self {
            live: self.knows_inuse(process),
            processes: self.processes.get(process).cloned().into_iter().collect(),
            rows: rows.map(|row| Row { process: 0, ..row.clone() }).collect(),
            version: self.version.clone(),
            unwind: self.unwind.clone(),
            host: self.host.clone(),
            modules: self.modules.clone(),
            counters: self.counters.clone(),
            notes: self.notes.clone(),
            ..*self
        }
    }
}

/// A process in a profile.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Process {
    /// Process id, in the initial pid namespace.
    pub pid: u32,
    /// Process id inside its own pid namespace, if that differs.
    pub namespace_pid: Option<u32>,
    /// Name of the main thread.
    pub comm: String,
    /// Executable's path as the process sees it.
    pub exe: String,
    /// cgroup path (v2), empty if unknown.
    pub cgroup: String,
    /// Allocators found, e.g. `glibc 2.36`.
    pub allocators: Vec<String>,
    /// What was hooked of each of its files with an allocator, at which instructions, and what was not.
    pub audit: Vec<Arc<FileAudit>>,
    /// What else of its files was not hooked, and why.
    pub missing: Vec<Missing>,
    /// Share of the process's life in the recording during which its allocators were hooked, 0 to 1.
    pub coverage: f64,
    /// Whether it ended during the recording; what it held then is in use, or apart ([`Profile::ended_apart`]).
    pub ended: bool,
    /// Whether nothing is known of what it has in use although the recording followed frees: its own were given up to keep
    /// the budget. Its rows have nothing in use then, and sums over processes are without it.
    pub inuse_unknown: bool,
    /// Bytes asked for, counted (not estimated); `None` if they could not be counted.
    pub exact_alloc_bytes: Option<u64>,
    /// Allocation calls, counted.
    pub exact_alloc_objects: Option<u64>,
    /// What the figures may lack, or hold too much of, because events were lost.
    pub losses: Losses,
    /// At most so much was counted after the moment that the samples are of: by so much the exact counts may be larger.
    pub slack: LossBound,
}

/// Sampled allocations that something concerns: at most so many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct LossBound {
    /// Their number.
    pub samples: u64,
    /// Sum of their sizes in bytes, not weighted.
    pub sampled_bytes: u64,
}

impl LossBound {
    /// Adds those of another bound.
    pub fn add(&mut self, other: &Self) {
        self.samples = self.samples.saturating_add(other.samples);
        self.sampled_bytes = self.sampled_bytes.saturating_add(other.sampled_bytes);
    }

    /// These without the ones that another bound is of.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self {
            samples: self.samples.saturating_sub(other.samples),
            sampled_bytes: self.sampled_bytes.saturating_sub(other.sampled_bytes),
        }
    }

    /// Whether it is of none.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// What lost events may have done to figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Losses {
    /// Sampled allocations that are missing from the figures of allocation.
    pub alloc: LossBound,
    /// Those that may be in use and are not in the figures in use.
    pub inuse_missing: LossBound,
    /// Those that are in the figures in use and may have been freed.
    pub inuse_stale: LossBound,
    /// Largest sampling interval R that may have been in force when they were lost, in trials; 0: the profile's largest.
    pub interval: u64,
    /// Whether events were lost before the peak: then its figures have no honest interval.
    pub peak_unknown: bool,
    /// Whether no bound can be given of the figures in use: they are those of such a peak.
    pub inuse_unbounded: bool,
    /// Whether no bound can be given.
    pub unbounded: bool,
}

impl Losses {
    /// Adds those of another process, or of another recording.
    pub fn add(&mut self, other: &Self) {
        self.alloc.add(&other.alloc);
        self.inuse_missing.add(&other.inuse_missing);
        self.inuse_stale.add(&other.inuse_stale);
        self.interval = self.interval.max(other.interval);
        self.peak_unknown |= other.peak_unknown;
        self.inuse_unbounded |= other.inuse_unbounded;
        self.unbounded |= other.unbounded;
    }

    /// Whether nothing was lost.
    pub fn is_none(&self) -> bool {
        Self { interval: 0, ..*self } == Self::default()
    }
}

/// Records that the kernel had sent and that were not read in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unread {
    /// How many were not read.
    pub records: u64,
    /// Of how many that had been sent.
    pub of: u64,
}

impl Unread {
    /// The share of records that were not read, 0 to 1.
    pub fn share(&self) -> f64 {
        if self.of == 0 { 0.0 } else { (self.records as f64 / self.of as f64).min(1.0) }
    }

    /// Adds those of another recording.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self { records: self.records.saturating_add(other.records), of: self.of.saturating_add(other.of) }
    }
}

/// Sums of one stack of one thread name of one process, under one interval.
#[derive(Clone, Debug)]
pub struct Row {
    /// Index into [`Profile::processes`].
    pub process: usize,
    /// Thread name.
    pub thread: Arc<str>,
    /// Allocator function that was called.
    pub function: Arc<str>,
    /// Sampling interval R of these samples, in trials.
    pub interval: u64,
    /// All samples.
    pub alloc: SampleSums,
    /// Those in use at [`Profile::time`], or at the end of their process unless that stands apart.
    pub inuse: SampleSums,
    /// Those that were in use when their process ended, where that stands apart from what is in use.
    pub at_exit: SampleSums,
    /// Those in use when the estimated total in use was highest, if that was kept.
    pub peak: Option<SampleSums>,
    /// Lifetimes of the sampled blocks, if they were followed.
    pub lifetimes: Option<Lifetimes>,
    /// The stack, innermost call first.
    pub stack: Arc<Stack>,
}

/// How long sampled blocks lived (weighted by objects).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lifetimes {
    /// Weighted median lifetime from the Kaplan–Meier curve, seconds; `None` while more than half is alive.
    pub median_seconds: Option<f64>,
    /// Share of allocations freed by their own thread with no allocation in between, 0 to 1.
    pub temporary: f64,
    /// Survival curve: (age in seconds, share still alive at that age), ages ascending.
    pub survival: Vec<(f64, f64)>,
}

/// A call stack, and how it was found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stack {
    /// Frames, innermost first.
    pub frames: Vec<Frame>,
    /// Unwinder that made it: `dwarf`, `fp` or `caller` (only the caller's address is known).
    pub unwinder: &'static str,
    /// `None` if the stack reaches the thread's entry, else why it was cut.
    pub cut: Option<Arc<str>>,
}

/// One frame. Inlined functions are frames of their own, before the function that they are inlined into.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Frame {
    /// Function name, demangled; `None` if unknown, then `reason` says why.
    pub function: Option<Arc<str>>,
    /// Symbol name before demangling, if different.
    pub system_name: Option<Arc<str>>,
    /// Source file.
    pub file: Option<Arc<str>>,
    /// Source line.
    pub line: Option<u32>,
    /// Whether this is a function inlined into the next frame.
    pub inlined: bool,
    /// Why there is no function name.
    pub reason: Option<Arc<str>>,
    /// Index into [`Profile::modules`].
    pub module: Option<usize>,
    /// Address in the process (of the call, not of the return: return address − 1), 0 if unknown.
    pub address: u64,
    /// The same as offset in the module's file.
    pub file_offset: Option<u64>,
}

/// A mapped file (or the vDSO, or a JIT region).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Module {
    /// Path as the process saw it.
    pub path: Arc<str>,
    /// GNU build ID.
    pub build_id: Option<Vec<u8>>,
    /// Lowest address of its executable mapping in the process that it was first seen in.
    pub start: u64,
    /// End of that mapping.
    pub end: u64,
    /// File offset of that mapping.
    pub file_offset: u64,
}
