//! What the probes on one call cost.

use serde::{Deserialize, Serialize};

/// What probes cost the target, in nanoseconds of its CPU time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbeCosts {
    /// An allocation call that is not sampled.
    pub allocation_ns: f64,
    /// A free of a block that is not tracked.
    pub free_ns: f64,
    /// What a sample adds, including the free of its block.
    pub sample_ns: f64,
}

/// Cost of a probe in a typical program relative to the measuring loop, where everything is cached (docs/overhead.md).
const IN_PROGRAMS: f64 = 1.2;

impl ProbeCosts {
    /// The costs in a typical program, from those measured in a loop.
    #[must_use]
    pub fn in_programs(&self) -> Self {
        Self {
            allocation_ns: IN_PROGRAMS * self.allocation_ns,
            free_ns: IN_PROGRAMS * self.free_ns,
            sample_ns: IN_PROGRAMS * self.sample_ns,
        }
    }
}
