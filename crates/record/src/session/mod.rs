//! The loop of a recording: waits, takes in records, keeps the overhead budget, requests snapshots, and ends on time.

pub mod active;
mod activity;
mod cut;
mod ends;
mod errors;
mod finish;
mod growth;
mod housekeeping;
mod overhead;
mod schedule;
mod snapshots;
mod state;
mod steps;
