//! What a recording writes and shows: files, snapshots and their triggers, the status line, and the closing table.

pub mod files;
mod memory_limits;
pub mod notify;
pub mod report;
pub mod status;
pub mod status_line;
pub mod triggers;
