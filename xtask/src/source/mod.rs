//! The workspace's source as data: its crates, the modules of each crate, and which lines are test code.

pub mod crates;
pub mod test_code;
pub mod tree;
