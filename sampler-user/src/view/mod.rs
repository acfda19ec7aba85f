//! Text for the terminal: tables and the status line.

pub mod diff;
pub mod doctor;
pub mod plan;
pub mod status;
