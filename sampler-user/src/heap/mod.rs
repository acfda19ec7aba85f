//! From single samples to sums per stack.

pub mod sums;
