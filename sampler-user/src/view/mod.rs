//! What people read: tables, the status line, figures with units.

pub mod detection_chart;
pub mod diff;
pub mod doctor;
mod figure;
pub mod plan;
pub mod report;
pub mod status;
mod text;
pub mod units;
