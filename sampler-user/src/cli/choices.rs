//! Option values that are chosen from a few words.

use clap::ValueEnum;
use heapbpf_kernel::programs::LinkKind;
use heapbpf_profile::adjust::At;
use heapbpf_profile::model::Criterion;
use heapbpf_record::plan::{Hook, PythonObjects, Unwind};

/// How a census is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum CensusFormat {
    /// A table
    #[default]
    Text,
    /// JSON
    Json,
}

/// How stacks are found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum UnwindArg {
    /// The best method available for each sample
    #[default]
    Auto,
    /// With call frame information, on a copy of the stack
    Dwarf,
    /// With frame pointers, in the kernel
    Fp,
}

impl From<UnwindArg> for Unwind {
    fn from(arg: UnwindArg) -> Self {
        match arg {
            UnwindArg::Auto => Self::Auto,
            UnwindArg::Dwarf => Self::Dwarf,
            UnwindArg::Fp => Self::FramePointers,
        }
    }
}

/// How uprobes are linked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LinkArg {
    /// The best that this kernel has
    #[default]
    Auto,
    /// Sessions (kernel 6.13)
    Session,
    /// Multi links (kernel 6.6)
    Multi,
    /// Perf events
    Perf,
}

impl LinkArg {
    /// The kind of link, if one is forced.
    pub const fn kind(self) -> Option<LinkKind> {
        match self {
            Self::Auto => None,
            Self::Session => Some(LinkKind::Session),
            Self::Multi => Some(LinkKind::Multi),
            Self::Perf => Some(LinkKind::Perf),
        }
    }
}

/// How calls are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum HookArg {
    /// Inline where possible (x86-64), else with probes; usdt for a process without an allocator that either can count
    #[default]
    Auto,
    /// With probes, which trap on every call; nothing is written into processes
    Probe,
    /// From inside the process, by code that heapbpf puts into it (x86-64); warns where that is refused
    Inline,
    /// By the process itself, which announces samples through USDT probes of the provider otel_memory (x86-64)
    Usdt,
}

impl From<HookArg> for Hook {
    fn from(arg: HookArg) -> Self {
        match arg {
            HookArg::Auto => Self::Auto,
            HookArg::Probe => Self::Probe,
            HookArg::Inline => Self::Inline,
            HookArg::Usdt => Self::Usdt,
        }
    }
}

/// Whether Python's own objects are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum PythonObjectsArg {
    /// In processes with inline hooks, where each costs a few nanoseconds
    #[default]
    Auto,
    /// Also with probes, if no process is counted from inside: each object then traps three times (call, return, free), so the program is much slower
    Yes,
    /// Nowhere
    No,
}

impl From<PythonObjectsArg> for PythonObjects {
    fn from(arg: PythonObjectsArg) -> Self {
        match arg {
            PythonObjectsArg::Auto => Self::Inline,
            PythonObjectsArg::Yes => Self::Always,
            PythonObjectsArg::No => Self::Never,
        }
    }
}

/// Yes or no, as written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum YesNoArg {
    /// Yes
    Yes,
    /// No
    No,
}

/// Criterion as written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum CriterionArg {
    /// Each byte: shows where memory goes
    #[default]
    Bytes,
    /// Each allocation: shows which code is most active
    Allocations,
    /// Each size class, or according to given intervals (-i @plan.json)
    SizeClass,
}

impl From<CriterionArg> for Criterion {
    fn from(arg: CriterionArg) -> Self {
        match arg {
            CriterionArg::Bytes => Self::Bytes,
            CriterionArg::Allocations => Self::Allocations,
            CriterionArg::SizeClass => Self::SizeClass,
        }
    }
}

/// Moment of the figures in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum AtArg {
    /// The end of the recording
    #[default]
    End,
    /// When the estimated total in use was highest
    Peak,
}

impl From<AtArg> for At {
    fn from(arg: AtArg) -> Self {
        match arg {
            AtArg::End => Self::End,
            AtArg::Peak => Self::Peak,
        }
    }
}

/// What is drawn of profiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlotArg {
    /// A value over time, with error bands; needs snapshots
    Timeline,
    /// Share of blocks still in use by age, with error bands
    Survival,
    /// Time in probes, and calls; needs snapshots
    Overhead,
}

impl PlotArg {
    /// Whether the plot needs several snapshots.
    pub const fn is_of_snapshots(self) -> bool {
        matches!(self, Self::Timeline | Self::Overhead)
    }
}
