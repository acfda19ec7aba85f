//! What people read: tables, the status line, figures with units.

pub mod diff;
pub mod detection_chart;
mod figure;
pub mod report;
pub mod status;
mod text;
pub mod units;
