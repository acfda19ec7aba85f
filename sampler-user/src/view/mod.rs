//! Tables for the terminal.

pub mod diff;
pub mod doctor;
pub mod plan;
