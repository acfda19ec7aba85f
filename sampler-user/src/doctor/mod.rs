//! `heapbpf doctor`: what this kernel allows, and what of each process would be seen: gathered by really trying.

mod kernel;
mod processes;

use serde::Serialize;

use crate::attach::Missing;
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
    /// What was asked for and is in no target.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<Missing>,
}

impl Diagnosis {
    /// Sums up.
    #[must_use]
    pub fn new(kernel: KernelAudit, processes: Vec<ProcessAudit>) -> Self {
        let ok = kernel.checks.iter().all(|check| check.ok || !check.needed)
            && processes.iter().all(|process| process.missing.is_empty());
        Self { ok, kernel, costs: None, processes, missing: Vec::new() }
    }

    /// With what was asked for and is in no target.
    #[must_use]
    pub fn without(self, missing: Vec<Missing>) -> Self {
        Self { ok: self.ok && missing.is_empty(), missing, ..self }
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

    #[test]
    fn something_missed_is_not_ok() {
        let check = |ok, needed| Check { name: "x", ok, needed, detail: String::new() };
        let kernel = |checks| KernelAudit { release: "6.1".into(), link: None, checks };
        assert!(Diagnosis::new(kernel(vec![check(true, true), check(false, false)]), Vec::new()).ok);
        assert!(!Diagnosis::new(kernel(vec![check(false, true)]), Vec::new()).ok);
        let gap = Missing { what: "malloc".into(), why: "an IFUNC".into() };
        let process = ProcessAudit { missing: vec![gap.clone()], ..ProcessAudit::default() };
        let whole = || Diagnosis::new(kernel(Vec::new()), Vec::new());
        assert!(whole().without(Vec::new()).ok && !whole().without(vec![gap]).ok);
        assert!(Diagnosis::new(kernel(Vec::new()), vec![ProcessAudit::default()]).ok);
        assert!(!Diagnosis::new(kernel(Vec::new()), vec![process]).ok);
    }
}
