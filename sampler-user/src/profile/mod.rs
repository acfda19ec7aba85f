//! The profile: what was measured, ready for reports and formats.

pub mod model;
