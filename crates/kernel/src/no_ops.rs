//! Finds out which no-ops this kernel turns into calls when they are probed. The release does not say: the change came
//! with Linux 6.18, other lengths came later, and distributions choose.

use std::ptr::read_volatile;
use std::sync::OnceLock;

use heapbpf_audit::LinkKind;
use heapbpf_host::arch::NO_OPS;
use heapbpf_probes::NoOpLengths;

use super::is_of_an_instruction;
use super::programs::Programs;
use super::trial::own_location;
use crate::KernelError;

/// A breakpoint: what the kernel puts in place of a probed instruction that it does not optimize.
const BREAKPOINT: u8 = 0xcc;
/// Number of calls after which the kernel has optimized whatever it can. It does so at the first one.
const CALLS: usize = 3;

static FOUND: OnceLock<NoOpLengths> = OnceLock::new();

/// The lengths that [`optimized`] found in this process. `None` if it has not run.
pub fn found() -> Option<NoOpLengths> {
    FOUND.get().copied()
}

/// Saves [`optimized`] its trial, which takes some tenths of a second, by passing lengths that were found since the
/// last boot.
pub fn note(lengths: NoOpLengths) {
    let _ = FOUND.set(lengths);
}

/// The lengths of no-ops that the kernel turns into calls, found by probing some of heapbpf's own, once. Empty if that
/// cannot be tried; that only costs speed. Kernels that support only perf links are too old for any.
pub fn optimized(programs: &Programs) -> NoOpLengths {
    if programs.kind == LinkKind::Perf {
        return NoOpLengths::default();
    }
    *FOUND.get_or_init(|| {
        measure(programs).unwrap_or_else(|error| {
            log::debug!("cannot try which no-ops the kernel optimizes: {error}");
            NoOpLengths::default()
        })
    })
}

/// Probes each of [`NO_OPS`], calls it, and checks what it has become.
fn measure(programs: &Programs) -> Result<NoOpLengths, KernelError> {
    let before = NO_OPS.map(first_byte);
    let places = NO_OPS.iter().filter_map(|(_, no_op)| own_location(*no_op as *const () as u64));
    let links = places
        .map(|place| programs.try_link(&place))
        .filter(|link| !matches!(link, Err(KernelError::Link { source, .. }) if is_of_an_instruction(source)));
    let links = links.collect::<Result<Vec<_>, _>>()?;
    for (_, no_op) in NO_OPS {
        (0..CALLS).for_each(|_| no_op());
    }
    let is_call = |(no_op, before): &(_, u8)| {
        let now = first_byte(*no_op);
        now != *before && now != BREAKPOINT
    };
    let optimized = NO_OPS.into_iter().zip(before).filter(is_call).map(|((bytes, _), _)| bytes).collect();
    // The guardian is the last to close each link, because this process maps the probed code.
    drop(links);
    Ok(optimized)
}

/// The first byte of a no-op as it is now.
fn first_byte((_, no_op): (usize, extern "C" fn())) -> u8 {
    // SAFETY: a function's code is readable, and its first byte is valid for any access. The kernel may change it, so
    // the read is volatile.
    unsafe { read_volatile(no_op as *const u8) }
}

#[cfg(test)]
mod tests {
    use heapbpf_testing::programs_to_load;
    use sampler_ebpf::abi::Config;

    use super::*;
    use crate::guardian::Guardian;
    use crate::loader::{Loader, MapSizes};
    use crate::programs::When;

    #[test]
    fn no_ops_are_seen_to_become_calls_and_are_no_ops_again() {
        let Some(object) = programs_to_load() else { return };
        let object = crate::object::aligned(&object);
        let sizes = MapSizes { events_bytes: 1 << 16, stacks_bytes: 1 << 18, live_max: 1024, stack_traces_max: 1024 };
        let config = Config { self_tgid: std::process::id(), ..Config::default() };
        let loader = std::sync::Arc::new(Loader::new(object, &config, &sizes).unwrap());
        let before = NO_OPS.map(first_byte);
        let programs = Programs::load(&loader, (false, When::AtOnce), None, &Guardian::default()).unwrap();
        let found = measure(&programs).unwrap();
        assert_eq!(NO_OPS.map(first_byte), before);
        let symbols = std::fs::read_to_string("/proc/kallsyms").unwrap();
        let can = symbols.lines().any(|line| line.ends_with(" arch_uprobe_optimize"));
        assert_eq!(found != NoOpLengths::default(), can && programs.kind != LinkKind::Perf, "{found:?}");
    }
}
