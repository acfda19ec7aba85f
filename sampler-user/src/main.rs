//! The `heapbpf` command.
fn main() {}
