//! From single samples to sums per stack.

pub mod ages;
pub mod event;
pub mod live;
pub mod sums;
