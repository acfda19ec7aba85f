//! Shadow stacks (x86-64): the processor compares each return address with a copy that it keeps. A return probe
//! replaces return addresses, so the kernel has to update the copy. Kernels before 6.11 do not, and the process crashes
//! at its first return.

use std::fs;
use std::sync::LazyLock;

use heapbpf_remote::Status;

/// The kernel function that updates the copy at a return probe (since Linux 6.11, commit 1713b63a07a2).
const MENDS: &str = "shstk_update_last_frame";

const FORBIDDEN: &str = "it has a shadow stack, and return probes would crash it on this kernel (before Linux 6.11). \
                         Start it without one (GLIBC_TUNABLES=glibc.cpu.x86_shstk=off)";

/// Why a process must not get return probes: it has a shadow stack that this kernel does not update. `None` if return
/// probes are safe. If the list of the kernel's functions cannot be read, the kernel is assumed not to update it.
pub fn forbid_return_probes(pid: u32) -> Option<&'static str> {
    static MENDED: LazyLock<bool> =
        LazyLock::new(|| fs::read_to_string("/proc/kallsyms").is_ok_and(|functions| mended_by(&functions)));
    let is_on = Status::read(&format!("/proc/{pid}/status")).is_ok_and(|status| status.has_shadow_stack);
    (is_on && !*MENDED).then_some(FORBIDDEN)
}

fn mended_by(functions: &str) -> bool {
    functions.lines().any(|line| line.split_whitespace().nth(2) == Some(MENDS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_mends_them_has_the_function() {
        assert!(mended_by("ffffffff81000000 T _text\nffffffff8104a3b0 T shstk_update_last_frame\n"));
        assert!(!mended_by("ffffffff8104a3b0 T shstk_update_last_frame_x\nffffffff81 T shstk_setup\n"));
    }
}
