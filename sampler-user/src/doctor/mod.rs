//! `heapbpf doctor`: what this kernel allows, and what of each process would be seen: gathered by really trying.

mod kernel;
mod processes;

use serde::Serialize;

use crate::cost::measure::Measured;
pub use kernel::{Check, KernelAudit, KernelSide};

pub use processes::{ModuleAudit, ProcessAudit, Symbols, Unwinding, command, processes};

/// What doctor found.
#[derive(Debug, Serialize)]
pub struct Diagnosis {
    /// Nothing would be missed.
    pub ok: bool,
    /// The kernel.
    pub kernel: KernelAudit,
    /// What probes cost here, if it was measured since the last boot.
    pub costs: Option<Measured>,
    /// The targets.
    pub processes: Vec<ProcessAudit>,
}

impl Diagnosis {
    /// Sums up.
    #[must_use]
    pub fn new(kernel: KernelAudit, processes: Vec<ProcessAudit>) -> Self {
        let ok = kernel.checks.iter().all(|check| check.ok || !check.needed)
            && processes.iter().all(|process| process.missing.is_empty());
        Self { ok, kernel, costs: None, processes }
    }

    /// With what probes cost.
    #[must_use]
    pub fn with_costs(self, costs: Option<Measured>) -> Self {
        Self { costs, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::Missing;

    #[test]
    fn something_missed_is_not_ok() {
        let check = |ok, needed| Check { name: "x", ok, needed, detail: String::new() };
        let kernel = |checks| KernelAudit { release: "6.1".into(), link: None, checks };
        assert!(Diagnosis::new(kernel(vec![check(true, true), check(false, false)]), Vec::new()).ok);
        assert!(!Diagnosis::new(kernel(vec![check(false, true)]), Vec::new()).ok);
        let gap = Missing { what: "malloc".into(), why: "an IFUNC".into() };
        let process = ProcessAudit { missing: vec![gap], ..ProcessAudit::default() };
        assert!(Diagnosis::new(kernel(Vec::new()), vec![ProcessAudit::default()]).ok);
        assert!(!Diagnosis::new(kernel(Vec::new()), vec![process]).ok);
    }
}
