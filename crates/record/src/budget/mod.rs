//! Keeps probes within their budget of CPU time: what they cost, and what is reduced or detached for it.

pub mod activity;
pub mod controller;
pub mod decision;
pub mod inline_advice;
pub mod slowed;
pub mod spent;
