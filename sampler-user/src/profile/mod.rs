//! The profile: what was measured, ready for reports and formats.

pub mod adjust;
pub mod chains;
pub mod diff;
pub mod estimates;
pub mod formats;
pub mod group;
pub mod intern;
pub mod loss_bounds;
pub mod loss_comment;
pub mod merge;
pub mod model;
pub mod naming;
pub mod output;
pub mod proto;
pub mod read;
pub mod round;
pub mod stats;
#[cfg(test)]
pub mod testing;
pub mod value;
pub mod workload;
