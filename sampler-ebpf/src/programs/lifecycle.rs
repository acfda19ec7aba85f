//! Fork, exec and exit: children become targets, a thread's totals move to its process, and process generations end in
//! order.

use core::ffi::c_void;

use sampler_ebpf::abi::{ProcessKey, kind, link_kind, target_rule};

use crate::config::config;
use crate::context::argument;
use crate::counters::{add_shared, totals_of};
use crate::inline_counts;
use crate::maps::{self, PYTHON, TARGETS, THREADS, TOTALS};
use crate::memory::{make_zero, read_kernel};
use crate::output;
use crate::process::{cpu_ns, current_task, process_of};
use crate::target;
use crate::thread::{NEW, ThreadState};

/// `sched_process_fork(parent, child)`; runs in the context of the parent, before the child does.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sched_process_fork")]
pub extern "C" fn process_fork(ctx: *mut c_void) -> u32 {
    let (parent, child) = (argument(ctx, 0), argument(ctx, 1));
    let parent_tgid: u32 = read_kernel(parent + config!(offsets.task_tgid));
    let child_tgid: u32 = read_kernel(child + config!(offsets.task_tgid));
    if parent_tgid == child_tgid {
        return 0;
    }
    // The child has the hooks, whether it is a target or not.
    inline_counts::fork(parent, child);
    let announces = target::announces(parent_tgid);
    if config!(target_rules) & target_rule::ALL != 0 && announces {
        // Every process is a target; this one is only listed because of how it is counted.
        let _ = target::list_as(child_tgid, link_kind::ANNOUNCED);
    }
    if !target::follows() || !target::is_target(parent_tgid) {
        return 0;
    }
    // A child has a copy of its parent's interpreter.
    // SAFETY: the daemon sets a process's value once, before it is used.
    if let Some(python) = unsafe { PYTHON.get(parent_tgid) } {
        let _ = PYTHON.insert(child_tgid, python, 0);
    }
    let kind = if announces {
        link_kind::ANNOUNCED
    } else if inline_counts::counts(process_of(child)) {
        link_kind::INHERITED_HOOKS
    } else {
        link_kind::SHARED
    };
    // If there is no space for the child, that is counted.
    if target::list_as(child_tgid, kind) {
        output::submit_process(kind::FORK, process_of(parent), process_of(child));
    }
    0
}

/// `sched_process_exec(task, old thread id)`; runs in the context of the process, which already has its new name and
/// address space. All of its other threads have ended. If the calling thread was not the first one, it has taken over
/// the first one's id.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sched_process_exec")]
pub extern "C" fn process_exec(ctx: *mut c_void) -> u32 {
    let next = process_of(current_task());
    let announced = target::begin_anew(next.tgid);
    if target::is_target(next.tgid) {
        target::list_by_rule(next.tgid);
    }
    if argument(ctx, 1) as u32 != next.tgid {
        target::leave_own_links(next.tgid);
    }
    // The new program is mapped, and has not run yet. It reaches its entry point soon after this program returns, so
    // it is reported to whoever holds it there, and may list it anew, as early as possible.
    if target::listed(next.tgid) {
        output::report_exec(next.tgid);
    }
    let mut ended = ProcessKey { exec_id: next.exec_id.wrapping_sub(1), ..next };
    let ran_python = PYTHON.remove(next.tgid).is_ok();
    if announced || ran_python {
        output::submit_process(kind::RESET, next, ProcessKey::default());
    }
    let mut was_tracked = false;
    if let Some(state) = THREADS.current() {
        if state.is_tracked() {
            was_tracked = true;
            ended = state.process;
            flush(state);
        }
        state.status = NEW;
    }
    inline_counts::replaced(ended);
    // The thread that calls exec may never have called an allocator. The totals then show whether other threads have.
    let counted = was_tracked || has_totals(ended) || inline_counts::counts(ended);
    if counted {
        output::submit_process(kind::EXEC, ended, next);
    }
    report_if_uncounted(ended, counted);
    0
}

/// `sched_process_exit`; runs for every thread.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sched_process_exit")]
pub extern "C" fn process_exit(_: *mut c_void) -> u32 {
    end_thread(THREADS.current());
    let task = current_task();
    let signal: u64 = read_kernel(task + config!(offsets.task_signal));
    let live: u32 = read_kernel(signal + config!(offsets.signal_live));
    if live != 0 {
        return 0;
    }
    let process = process_of(task);
    let _ = PYTHON.remove(process.tgid);
    let is_counted = inline_counts::counts(process);
    let cpu_ns = cpu_ns(task, signal);
    if process.start_ns >= config!(began_ns) && (is_counted || target::is_target(process.tgid)) {
        note_end(is_counted || target::has_own_links(process.tgid), cpu_ns);
    }
    let counted = is_counted || has_totals(process);
    report_if_uncounted(process, counted);
    let listed = TARGETS.remove(process.tgid).is_ok();
    if listed || counted {
        output::submit_exit(process, cpu_ns);
    }
    0
}

/// `sched_process_free(task)`: a thread that ended some time ago is freed. If [`process_exit`] was skipped for it, it
/// still has its counters. Threads are not preempted in this program, because the kernel runs it where preemption is
/// off.
#[unsafe(no_mangle)]
#[unsafe(link_section = "tp_btf/sched_process_free")]
pub extern "C" fn thread_freed(ctx: *mut c_void) -> i32 {
    // SAFETY: the context is an array of the arguments, of which the first is a task that has ended.
    end_thread(unsafe { THREADS.of_ended(*ctx.cast::<*mut c_void>()) });
    0
}

/// Whether anything of a process was counted. (If only the pointer were compared, the compiler would turn that into
/// arithmetic, which the verifier rejects.)
#[inline(always)]
fn has_totals(process: ProcessKey) -> bool {
    // SAFETY: the pointer is to a value of the map, which begins with a u64.
    TOTALS.get_ptr(process).is_some_and(|totals| unsafe { totals.cast::<u64>().read_volatile() } != u64::MAX)
}

/// Reports that a target's program has ended, if nothing counted it and programs are counted individually.
#[inline(always)]
fn report_if_uncounted(process: ProcessKey, is_counted: bool) {
    if !is_counted && maps::execs().is_some() && target::listed(process.tgid) {
        output::submit_process(kind::UNCOUNTED, process, ProcessKey::default());
    }
}

/// Records the end of a target that began during the recording.
#[inline(always)]
fn note_end(is_counted: bool, cpu_ns: u64) {
    let Some(progress) = maps::progress() else { return };
    // SAFETY: the pointers are to counters in the map's value.
    unsafe {
        if is_counted {
            add_shared(&raw mut (*progress).ended_counted_ns, cpu_ns);
        } else {
            add_shared(&raw mut (*progress).ended_uncounted, 1);
            add_shared(&raw mut (*progress).ended_uncounted_ns, cpu_ns);
        }
    }
}

/// Keeps the counters of a thread that has ended.
#[inline(always)]
fn end_thread(state: Option<&mut ThreadState>) {
    if let Some(state) = state
        && state.is_tracked()
    {
        flush(state);
        state.status = NEW;
    }
}

/// Adds a thread's counters to its process's totals and clears them.
#[inline(always)]
fn flush(state: &mut ThreadState) {
    state.abandon_all();
    // All in place: a copy would take half of the program's stack.
    state.counters.calls = state.calls;
    state.counters.unsampled = state.unsampled;
    state.counters.unsampled_bytes = state.unsampled_bytes;
    state.counters.frees_seen = state.frees_seen;
    state.counters.threads = 1;
    // If there is no space for the process, its counts go to the unattributed counters, so that the sums still add up.
    if let Some(totals) = totals_of(state.process).or_else(|| maps::UNATTRIBUTED.get_ptr_mut(0)) {
        let mut i = 0;
        while i < sampler_ebpf::abi::COUNTERS {
            // SAFETY: `totals` is a value of the map, which consists of `COUNTERS` u64s, and `i` is below that.
            unsafe { add_shared(totals.cast::<u64>().add(i), state.counters.as_array()[i]) };
            i += 1;
        }
    }
    if let Some(progress) = maps::progress() {
        // SAFETY: the pointer is to a counter in the map's value.
        unsafe { add_shared(&raw mut (*progress).threads_flushed, 1) };
    }
    state.calls = 0;
    state.unsampled = 0;
    state.unsampled_bytes = 0;
    state.frees_seen = 0;
    // SAFETY: the counters are words, which may be zero.
    unsafe { make_zero(&raw mut state.counters) };
    state.outer_sp = 0;
}
