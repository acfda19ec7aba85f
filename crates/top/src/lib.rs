//! heapbpf's live view in a terminal, as a function of profiles and keys. [`Top`] takes profiles, keys and the time,
//! and draws itself into a buffer of cells. It does no I/O; that is up to the caller.
//!
//! Texts that come from targets pass the sanitizer of heapbpf's reports before they become cells.

#![forbid(unsafe_code)]

mod details;
mod entries;
mod history;
mod key;
mod layout;
mod leaves;
mod marked;
mod moment;
mod screen;
mod sums;
mod theme;
mod top;
mod tree;
mod view;
mod world;

pub use self::key::Key;
pub use self::theme::Theme;
pub use self::top::{Action, Options, Status, Top};

#[cfg(test)]
mod tests;
