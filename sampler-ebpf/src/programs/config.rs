//! The recording's constants, patched in by the loader. The verifier treats them as constants and removes dead
//! branches.

use sampler_ebpf::abi::{Config, KernelOffsets};

#[unsafe(no_mangle)]
static CONFIG: Config = Config {
    target_rules: 0,
    follow: 0,
    live: 0,
    stack_kind: 0,
    self_tgid: 0,
    faults: 0,
    criterion: 0,
    stack_bytes: 0,
    seed: 0,
    wake_share: 0,
    cgroup_id: 0,
    cgroup_level: 0,
    memory_bytes: 0,
    page_bytes: 0,
    began_ns: 0,
    comm_pattern: [0; 16],
    offsets: KernelOffsets {
        task_mm: 0,
        task_group_leader: 0,
        task_start_boottime: 0,
        task_self_exec_id: 0,
        task_tgid: 0,
        task_comm: 0,
        task_signal: 0,
        task_thread_pointer: 0,
        signal_live: 0,
        mm_owner: 0,
        mm_start_stack: 0,
        mm_brk: 0,
        mm_total_vm: 0,
        mm_data_vm: 0,
        signal_rlim: 0,
        mm_users: 0,
        task_cpu: 0,
        signal_cpu: 0,
    },
};

/// Reads one constant. The read is volatile, so that the compiler does not assume the zeros above.
macro_rules! config {
    ($($field:ident).+) => {{
        // SAFETY: the pointer is to a field of a static, which is initialised and aligned; nothing writes to it.
        unsafe { core::ptr::read_volatile(&raw const (*$crate::config::pointer()).$($field).+) }
    }};
}
pub(crate) use config;

/// Address of the constants.
#[inline(always)]
pub const fn pointer() -> *const Config {
    &raw const CONFIG
}
