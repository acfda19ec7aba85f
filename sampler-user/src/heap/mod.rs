//! Turns events into the sums of each stack.

#[cfg(feature = "daemon")]
pub mod ages;
pub mod event;
#[cfg(feature = "daemon")]
pub mod live;
#[cfg(feature = "daemon")]
mod mapped;
#[cfg(feature = "daemon")]
pub mod sample;
