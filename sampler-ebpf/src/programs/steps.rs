//! Results of a step of `bpf_loop`.

/// There are more steps.
pub const GO_ON: i64 = 0;
/// The loop ends.
pub const STOP: i64 = 1;
