//! Option values that are chosen from a few words.

use clap::ValueEnum;
use heapbpf_kernel::programs::LinkKind;
use heapbpf_profile::adjust::At;
use heapbpf_profile::model::Criterion;

/// How a census is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum CensusFormat {
    /// A table
    #[default]
    Text,
    /// JSON
    Json,
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
