//! The figures that every stack has: the four that pprof names, and what ended processes held.

use std::str::FromStr;

use thiserror::Error;

use super::model::{Profile, Row};
use crate::heap::sums::SampleSums;

/// One of a stack's figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    /// Allocations during the recording.
    AllocObjects,
    /// Bytes that they asked for.
    AllocSpace,
    /// Allocations still in use at the end.
    InuseObjects,
    /// Bytes still in use at the end.
    InuseSpace,
    /// Allocations that ended processes held when they ended, where that stands apart from what is in use.
    AtExitObjects,
    /// Their bytes.
    AtExitSpace,
}

impl Value {
    /// Those that pprof names, in the order of its columns.
    pub const COLUMNS: [Self; 4] = [Self::AllocObjects, Self::AllocSpace, Self::InuseObjects, Self::InuseSpace];

    /// All: pprof's columns, then the figures at exit.
    pub const ALL: [Self; 6] = [
        Self::AllocObjects,
        Self::AllocSpace,
        Self::InuseObjects,
        Self::InuseSpace,
        Self::AtExitObjects,
        Self::AtExitSpace,
    ];

    /// The columns that this profile has: without frees followed, only those of allocation.
    pub fn of_profile(profile: &Profile) -> &'static [Self] {
        if profile.live { &Self::COLUMNS } else { &[Self::AllocObjects, Self::AllocSpace] }
    }

    /// The columns that this profile has, and the figures at exit if an ended process held something.
    pub fn shown_of(profile: &Profile) -> &'static [Self] {
        if profile.has_at_exit() { &Self::ALL } else { Self::of_profile(profile) }
    }

    /// What is shown when nobody asked for another: bytes in use, or bytes allocated if frees were not followed.
    pub fn default_of(profile: &Profile) -> Self {
        if profile.live { Self::InuseSpace } else { Self::AllocSpace }
    }

    /// Name on the command line and in files, e.g. `inuse_space`.
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

    /// The value of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|value| value.name() == name)
    }

    /// In words, for titles.
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

    /// `bytes` or `count`.
    pub fn unit(self) -> &'static str {
        if self.is_bytes() { "bytes" } else { "count" }
    }

    /// Whether it counts bytes (else allocations).
    pub fn is_bytes(self) -> bool {
        matches!(self, Self::AllocSpace | Self::InuseSpace | Self::AtExitSpace)
    }

    /// Whether it is about what is in use at the end.
    pub fn is_inuse(self) -> bool {
        matches!(self, Self::InuseObjects | Self::InuseSpace)
    }

    /// Whether it is about what ended processes held when they ended.
    pub fn is_at_exit(self) -> bool {
        matches!(self, Self::AtExitObjects | Self::AtExitSpace)
    }

    /// Whether it is known only where frees were followed.
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

    /// The point estimate in these sums, in bytes or allocations: unbiased, or by another rule if one was applied.
    pub fn estimate_of(self, sums: &SampleSums) -> f64 {
        if self.is_bytes() { sums.bytes + sums.bytes_correction } else { sums.objects + sums.objects_correction }
    }

    /// The unbiased point estimate, which error bars and the self-check belong to.
    pub fn raw_estimate_of(self, sums: &SampleSums) -> f64 {
        if self.is_bytes() { sums.bytes } else { sums.objects }
    }

    /// The unbiased point estimate of a row, in bytes or allocations.
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

#[cfg(test)]
mod tests {
    use super::Value;

    #[test]
    fn names_lead_back_to_their_values() {
        for value in Value::ALL {
            assert_eq!(Value::from_name(value.name()), Some(value));
        }
        assert_eq!(Value::from_name("inuse_bytes"), None);
    }
}
