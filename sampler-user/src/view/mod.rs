//! What people read: tables, the status line, figures with units.

mod figure;
pub mod report;
pub mod status;
mod text;
pub mod units;
