//! The values of a stack: the four columns of pprof, and what ended processes held at exit.

use std::str::FromStr;

use thiserror::Error;

use super::model::{Profile, Row};
use heapbpf_statistics::sums::SampleSums;

/// One of the values of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    /// Number of allocations during the recording.
    AllocObjects,
    /// Bytes requested during the recording.
    AllocSpace,
    /// Number of allocations in use at the end.
    InuseObjects,
    /// Bytes in use at the end.
    InuseSpace,
    /// Number of allocations that ended processes held at exit, in recordings that separate them from those in use.
    AtExitObjects,
    /// Bytes that ended processes held at exit, in recordings that separate them from those in use.
    AtExitSpace,
}

impl Value {
    /// The columns of pprof, in its order.
    pub const COLUMNS: [Self; 4] = [Self::AllocObjects, Self::AllocSpace, Self::InuseObjects, Self::InuseSpace];

    /// Every value: the columns of pprof, then those at exit.
    pub const ALL: [Self; 6] = [
        Self::AllocObjects,
        Self::AllocSpace,
        Self::InuseObjects,
        Self::InuseSpace,
        Self::AtExitObjects,
        Self::AtExitSpace,
    ];

    /// The columns of pprof that this profile has: only those of allocation if frees were not followed.
    pub fn of_profile(profile: &Profile) -> &'static [Self] {
        if profile.header.live { &Self::COLUMNS } else { &[Self::AllocObjects, Self::AllocSpace] }
    }

    /// The columns of pprof that this profile has, and the values at exit if an ended process held something.
    pub fn shown_of(profile: &Profile) -> &'static [Self] {
        if profile.has_at_exit() { &Self::ALL } else { Self::of_profile(profile) }
    }

    /// The default value of a profile: bytes in use, or bytes allocated if frees were not followed.
    pub fn default_of(profile: &Profile) -> Self {
        if profile.header.live { Self::InuseSpace } else { Self::AllocSpace }
    }

    /// Name of the value on the command line and in files, for example `inuse_space`.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllocObjects => "alloc_objects",
            Self::AllocSpace => "alloc_space",
            Self::InuseObjects => "inuse_objects",
            Self::InuseSpace => "inuse_space",
            Self::AtExitObjects => "at_exit_objects",
            Self::AtExitSpace => "at_exit_space",
        }
    }

    /// The value with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|value| value.name() == name)
    }

    /// The value in words, for titles.
    pub fn title(self) -> &'static str {
        match self {
            Self::AllocObjects => "allocations",
            Self::AllocSpace => "bytes allocated",
            Self::InuseObjects => "objects in use",
            Self::InuseSpace => "bytes in use",
            Self::AtExitObjects => "objects held at exit",
            Self::AtExitSpace => "bytes held at exit",
        }
    }

    /// Unit of the value: `bytes` or `count`.
    pub fn unit(self) -> &'static str {
        if self.is_bytes() { "bytes" } else { "count" }
    }

    /// Whether it counts bytes (else allocations).
    pub fn is_bytes(self) -> bool {
        matches!(self, Self::AllocSpace | Self::InuseSpace | Self::AtExitSpace)
    }

    /// Whether it is a value in use.
    pub fn is_inuse(self) -> bool {
        matches!(self, Self::InuseObjects | Self::InuseSpace)
    }

    /// Whether it is a value at exit.
    pub fn is_at_exit(self) -> bool {
        matches!(self, Self::AtExitObjects | Self::AtExitSpace)
    }

    /// Whether it is known only if frees were followed.
    pub fn needs_frees(self) -> bool {
        self.is_inuse() || self.is_at_exit()
    }

    /// The sums of a row that this value is estimated from.
    pub fn sums(self, row: &Row) -> &SampleSums {
        match self {
            Self::AllocObjects | Self::AllocSpace => &row.alloc,
            Self::InuseObjects | Self::InuseSpace => &row.inuse,
            Self::AtExitObjects | Self::AtExitSpace => &row.at_exit,
        }
    }

    /// The point estimate from sums, in bytes or allocations, including corrections by calibration or another
    /// estimator.
    pub fn estimate_of(self, sums: &SampleSums) -> f64 {
        if self.is_bytes() { sums.bytes + sums.bytes_correction } else { sums.objects + sums.objects_correction }
    }

    /// The unbiased point estimate from sums, without corrections. Intervals and the self-check refer to it.
    pub fn raw_estimate_of(self, sums: &SampleSums) -> f64 {
        if self.is_bytes() { sums.bytes } else { sums.objects }
    }

    /// The point estimate of a row, in bytes or allocations, including corrections.
    pub fn of(self, row: &Row) -> f64 {
        self.estimate_of(self.sums(row))
    }
}

/// No value has this name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{0:?} is not a value of a heap profile: choose alloc_objects, alloc_space, inuse_objects, inuse_space, \
     at_exit_objects or at_exit_space"
)]
pub struct UnknownValue(String);

impl FromStr for Value {
    type Err = UnknownValue;

    fn from_str(name: &str) -> Result<Self, UnknownValue> {
        Self::from_name(name).ok_or_else(|| UnknownValue(name.into()))
    }
}
