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
    /// The best that can be had for each sample
    #[default]
    Auto,
    /// By call frame information, over a copy of the stack
    Dwarf,
    /// By frame pointers, in the kernel
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
    /// Inline where that is possible (x86-64), else by probes; where a process has no allocator that can be hooked, what it announces itself (usdt)
    #[default]
    Auto,
    /// By probes, which trap on every call; nothing is written into processes
    Probe,
    /// Inside the process, by code that is mapped into it (x86-64), and a warning where that is refused
    Inline,
    /// By the process itself: samples that it announces by USDT probes of the provider otel_memory (x86-64)
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
    /// In processes that are hooked inline, where each costs a few nanoseconds
    #[default]
    Auto,
    /// Also by probes, if no process is to be hooked inline: each object traps when it is allocated, when that returns, and when it is freed, so the program is much slower
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
    /// A trial per byte: which memory
    #[default]
    Bytes,
    /// A trial per allocation: which code is most active
    Allocations,
    /// Every size class seen equally well, or by given intervals (-i @plan.json)
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
    /// A value over time, with bands: of snapshots
    Timeline,
    /// Share of blocks still in use by age, with bands
    Survival,
    /// Time of the probes, and calls: of snapshots
    Overhead,
}

impl PlotArg {
    /// Whether the plot needs several snapshots.
    pub const fn is_of_snapshots(self) -> bool {
        matches!(self, Self::Timeline | Self::Overhead)
    }
}
