//! The four figures that every stack has, under the names that pprof gave them.

use std::str::FromStr;

use thiserror::Error;

use super::model::{Profile, Row};
use crate::heap::sums::SampleSums;

/// One of a stack's four figures.
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
}

impl Value {
    /// All, in the order of pprof's columns.
    pub const ALL: [Self; 4] = [Self::AllocObjects, Self::AllocSpace, Self::InuseObjects, Self::InuseSpace];

    /// The values that this profile has: without frees followed, only those of allocation.
    pub fn of_profile(profile: &Profile) -> &'static [Self] {
        if profile.live { &Self::ALL } else { &[Self::AllocObjects, Self::AllocSpace] }
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
        }
    }

    /// `bytes` or `count`.
    pub fn unit(self) -> &'static str {
        if self.is_bytes() { "bytes" } else { "count" }
    }

    /// Whether it counts bytes (else allocations).
    pub fn is_bytes(self) -> bool {
        matches!(self, Self::AllocSpace | Self::InuseSpace)
    }

    /// Whether it is about what is in use at the end (else about all allocations).
    pub fn is_inuse(self) -> bool {
        matches!(self, Self::InuseObjects | Self::InuseSpace)
    }

    /// The sums of a row that this value is estimated from.
    pub fn sums(self, row: &Row) -> &SampleSums {
        if self.is_inuse() { &row.inuse } else { &row.alloc }
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
#[error("{0:?} is not a value of a heap profile: choose alloc_objects, alloc_space, inuse_objects or inuse_space")]
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
