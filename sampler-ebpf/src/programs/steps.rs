//! Return values of a `bpf_loop` step.

/// The loop continues.
pub const GO_ON: i64 = 0;
/// The loop ends.
pub const STOP: i64 = 1;
