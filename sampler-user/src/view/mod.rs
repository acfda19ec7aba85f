//! Tables for the terminal.

pub mod census;
pub mod diff;
pub mod doctor;
pub mod plan;
