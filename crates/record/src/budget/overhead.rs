//! What is known about the cost of a recording's probes.

use super::controller::OverheadController;
use super::slowed::SlowedTargets;
use super::spent::Spent;
use crate::cost::cpu_time::CpuTime;

/// State of the overhead control of a recording.
pub struct Overhead {
    /// The controller that decides.
    pub controller: OverheadController,
    /// Time that probes have taken so far.
    pub spent: Spent,
    /// CPU time of the targets.
    pub cpu_time: CpuTime,
    /// Targets that probes slow down. Under a budget, their own links are detached.
    pub slowed: SlowedTargets,
}

impl Overhead {
    /// Creates the state of a recording; nothing is known yet.
    pub fn new(controller: OverheadController) -> Self {
        Self { controller, spent: Spent::default(), cpu_time: CpuTime::begin(), slowed: SlowedTargets::default() }
    }
}
