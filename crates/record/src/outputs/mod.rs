//! What a recording writes and shows: files, snapshots and their triggers, the status line, and the closing table.

pub mod files;
pub mod notify;
pub mod report;
pub mod status_line;
pub mod triggers;
