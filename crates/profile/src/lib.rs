#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod adjust;
mod chains;
pub mod diff;
pub mod escape;
pub mod estimates;
pub mod filter;
pub mod formats;
#[cfg(test)]
mod fuzzed;
pub mod group;
mod intern;
mod loss_bounds;
mod loss_comment;
pub mod lost_samples;
pub mod merge;
pub mod model;
pub mod naming;
pub mod origin;
pub mod page;
pub mod process_pools;
pub mod programs;
pub mod proto;
pub mod read;
pub mod report;
mod round;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod units;
pub mod unnamed;
pub mod value;
pub mod workload;

// Code shared with fuzz targets refers to the crate by name.
#[cfg(test)]
extern crate self as heapbpf_profile;

pub use estimates::Pool;
pub use formats::{FORMATS, Format, WriteOptions};
pub use group::GroupBy;
pub use heapbpf_statistics::estimate::Estimate;
pub use model::{Criterion, Frame, Header, Module, Process, Profile, Row, RowKey, SampleSums, Stack};
pub use value::Value;
