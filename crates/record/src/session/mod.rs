//! The session of a recording and its loop (`main_loop`): waits, takes in records, keeps the overhead budget, requests
//! snapshots, and ends on time.

mod activity;
mod cut;
mod ends;
mod errors;
mod finish;
mod growth;
mod housekeeping;
pub mod main_loop;
mod overhead;
mod schedule;
mod snapshots;
mod state;
mod steps;
