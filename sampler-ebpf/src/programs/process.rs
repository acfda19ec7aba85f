//! The process of a task, and the address space that it runs in.

use aya_ebpf::helpers::generated::{bpf_get_current_pid_tgid, bpf_get_current_task_btf};
use sampler_ebpf::abi::{KernelOffsets, ProcessKey};

use crate::config::config;
use crate::memory::read_kernel;

/// Process id in the upper half, thread id in the lower half.
#[inline(always)]
pub fn current_pid_tgid() -> u64 {
    // SAFETY: the helper takes no argument and returns an integer.
    unsafe { bpf_get_current_pid_tgid() }
}

/// Address of the current task's `task_struct`.
#[inline(always)]
pub fn current_task() -> u64 {
    // SAFETY: the helper takes no argument, and its result is used only as an integer.
    unsafe { bpf_get_current_task_btf() as u64 }
}

/// The current generation of a task's process.
#[inline(always)]
pub fn process_of(task: u64) -> ProcessKey {
    let leader: u64 = read_kernel(task + config!(offsets.task_group_leader));
    ProcessKey {
        start_ns: read_kernel(leader + config!(offsets.task_start_boottime)),
        tgid: read_kernel(task + config!(offsets.task_tgid)),
        exec_id: read_kernel(task + config!(offsets.task_self_exec_id)),
    }
}

/// CPU time that a task has used, ns. For the first thread of a process, this includes the threads that have ended.
/// `signal`: the structure that the threads share.
#[inline(always)]
pub fn cpu_ns(task: u64, signal: u64) -> u64 {
    let own: u64 = read_kernel(task + config!(offsets.task_cpu));
    if read_kernel::<u64>(task + config!(offsets.task_group_leader)) != task {
        return own;
    }
    own.wrapping_add(read_kernel(signal + config!(offsets.signal_cpu)))
}

/// The owner of the address space that a task runs in. After `vfork`, that is another process.
#[inline(always)]
pub fn space_of(task: u64, process: ProcessKey) -> ProcessKey {
    let owner_offset = config!(offsets.mm_owner);
    if owner_offset == KernelOffsets::ABSENT {
        return process;
    }
    let mm: u64 = read_kernel(task + config!(offsets.task_mm));
    let owner: u64 = read_kernel(mm + owner_offset);
    if mm == 0 || owner == 0 {
        return process;
    }
    let space = process_of(owner);
    if space.tgid == process.tgid || space.tgid == 0 { process } else { space }
}
