//! Which processes are hot, and what it takes to hook them inline while they run.

use crate::kernel::handover::HandoverMap;
use crate::record::budget::heat::Heat;

/// Processes that are hooked inline once they are hot.
pub(super) struct Hot {
    pub(super) heat: Heat,
    pub(super) handover: HandoverMap,
    /// When hot ones are looked for next (CLOCK_MONOTONIC).
    pub(super) next_ns: u64,
}

impl Hot {
    /// None is known.
    pub(super) fn new(handover: HandoverMap) -> Self {
        Self { heat: Heat::default(), handover, next_ns: 0 }
    }
}
