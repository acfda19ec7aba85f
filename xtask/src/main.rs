//! The only build tool a contributor learns: `cargo xtask <command>`.
fn main() {}
