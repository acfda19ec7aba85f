//! Turns events into the sums of each stack.

pub mod ages;
pub mod event;
pub mod live;
mod mapped;
pub mod sample;
pub mod windows;
