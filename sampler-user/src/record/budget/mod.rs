//! Keeps probes within their budget of CPU time: their cost, what is reduced for it, and the weights of time windows.

pub mod activity;
pub mod controller;
pub mod free_groups;
mod giving_back;
pub mod inline_advice;
pub mod overhead;
pub mod slowed;
pub mod spent;
pub mod window_progress;
pub mod window_times;
