//! The library of the benchmark programs: simulated samples with known truth, recordings, tables in documents.

pub mod document;
pub mod machine;
pub mod recording;
pub mod simulation;
pub mod sql;
