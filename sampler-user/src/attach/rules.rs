//! How this kernel runs probed instructions.

use heapbpf_probes::{KernelRules, Machine};

use crate::host::limits::Limits;
use crate::kernel::no_ops;
use crate::kernel::programs::Programs;

/// The rules of this kernel. Without `programs`, what only a trial tells is not known.
pub fn of_this_kernel(programs: Option<&Programs>) -> KernelRules {
    let version = Limits::read().version.map_or((0, 0), |version| (version.major.into(), version.minor.into()));
    // On any other machine the kernel side would not have loaded.
    let rules = KernelRules::of(Machine::host().unwrap_or(Machine::X86_64), version);
    rules.with_optimized_no_ops(programs.map(no_ops::optimized).unwrap_or_default())
}
