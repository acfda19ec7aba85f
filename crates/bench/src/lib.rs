//! The library of the benchmark programs: simulated samples with known truth, charts, tables in documents.

pub mod document;
pub mod points_chart;
pub mod simulation;
pub mod sql;
