//! Keeps probes within their budget of CPU time: their cost, and what is given up for it.

pub mod activity;
pub mod controller;
pub mod inline_advice;
pub mod overhead;
pub mod slowed;
pub mod spent;
