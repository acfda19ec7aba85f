//! `heapbpf doctor`: finds out by trying what this kernel allows, and what a recording of each process would observe.

pub mod clean;
mod kernel;
mod processes;

use heapbpf_audit::Missing;
use heapbpf_record::cost::measure::Measured;
use serde::Serialize;

pub use self::kernel::{Check, KernelAudit, KernelSide, hooking};
pub use self::processes::{InlineAudit, ModuleAudit, ProcessAudit, Symbols, Unwinding, command, processes};

/// The result of `heapbpf doctor`.
#[derive(Debug, Serialize)]
pub struct Diagnosis {
    /// Whether nothing would be missed.
    pub ok: bool,
    /// The kernel.
    pub kernel: KernelAudit,
    /// Costs of probes on this machine, if measured since the last boot.
    pub costs: Option<Measured>,
    /// The targets.
    pub processes: Vec<ProcessAudit>,
    /// What the user requested and no target has.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<Missing>,
}

impl Diagnosis {
    /// The diagnosis of a kernel and of processes.
    #[must_use]
    pub fn new(kernel: KernelAudit, processes: Vec<ProcessAudit>) -> Self {
        let ok = kernel.checks.iter().all(|check| check.ok || !check.needed)
            && processes.iter().all(|process| process.missing.is_empty());
        Self { ok, kernel, costs: None, processes, missing: Vec::new() }
    }

    /// Adds what the user requested and no target has.
    #[must_use]
    pub fn without(self, missing: Vec<Missing>) -> Self {
        Self { ok: self.ok && missing.is_empty(), missing, ..self }
    }

    /// Adds the costs of probes.
    #[must_use]
    pub fn with_costs(self, costs: Option<Measured>) -> Self {
        let mut processes = self.processes;
        if let Some(costs) = &costs {
            for inline in processes.iter_mut().flat_map(|it| &mut it.inline).filter(|it| it.why_not.is_none()) {
                (inline.pair_ns, inline.pair_is_bound) = (costs.inline_pair_ns, costs.inline_is_bound);
                inline.probe_pair_ns = Some(costs.costs.allocation_ns + costs.costs.free_ns);
            }
        }
        Self { costs, processes, ..self }
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
