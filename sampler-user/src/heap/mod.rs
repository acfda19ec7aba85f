//! From single samples to sums per stack.

pub mod ages;
pub mod event;
pub mod live;
mod mapped;
pub mod sums;
pub mod windows;
