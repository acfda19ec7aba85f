//! What people read: tables, the status line, figures with units.

mod chart;
pub mod detection_chart;
pub mod diff;
pub mod doctor;
pub mod document;
mod figure;
pub mod plan;
pub mod points_chart;
pub mod report;
pub mod status;
pub mod text;
pub mod units;
