//! The loop of a recording: waits, takes in records, keeps the overhead budget, requests snapshots, and ends on time.

pub mod active;
mod activity;
mod cut;
mod ends;
mod entry;
mod errors;
mod exited;
mod finish;
mod go;
mod growth;
mod housekeeping;
mod moment;
mod overhead;
mod pace;
mod priority;
mod retries;
mod schedule;
mod signals;
mod snapshots;
mod state;
mod steps;
mod unfinished;
