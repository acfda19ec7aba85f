//! How this kernel runs probed instructions.

use heapbpf_host::limits::Limits;
use heapbpf_kernel::no_ops;
use heapbpf_kernel::programs::Programs;
use heapbpf_probes::{KernelRules, Machine};

/// The rules of this kernel. Without `programs`, what only a trial can show is unknown.
pub fn of_this_kernel(programs: Option<&Programs>) -> KernelRules {
    let version = Limits::read().version.map_or((0, 0), |version| (version.major.into(), version.minor.into()));
    // On any other machine the BPF programs would not have loaded.
    let machine = Machine::host().unwrap_or(Machine::X86_64);
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    KernelRules {
        optimized_no_ops: programs.map(no_ops::optimized).unwrap_or_default(),
        has_shadow_stacks: has_shadow_stacks(&processors),
        ..KernelRules::of(machine, version)
    }
}

/// Whether processes may have shadow stacks, according to `/proc/cpuinfo`: the processor has them and the kernel lets
/// programs use them.
fn has_shadow_stacks(processors: &str) -> bool {
    let flags = processors.lines().filter(|line| line.starts_with("flags"));
    flags.flat_map(str::split_whitespace).any(|flag| flag == "user_shstk")
}

#[cfg(test)]
mod tests {
    use super::has_shadow_stacks;

    #[test]
    fn shadow_stacks_are_a_flag_of_the_processor() {
        assert!(has_shadow_stacks("model name\t: user\nflags\t\t: fpu user_shstk vme\nbugs\t\t: x\n"));
        assert!(!has_shadow_stacks("model name\t: user_shstk\nflags\t\t: fpu shstk vme\n"));
    }
}
