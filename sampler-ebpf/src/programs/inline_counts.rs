//! What processes with inline hooks have counted in their memory: read when they leave it, by an exit or an exec. Their
//! children inherit the hooks.

use core::ffi::c_void;
use core::mem::MaybeUninit;

use aya_ebpf::bindings::BPF_NOEXIST;
use aya_ebpf::helpers::generated::bpf_probe_read_user;
use sampler_ebpf::abi::ProcessKey;
use sampler_ebpf::abi::inline::{InlineProcess, SlotSums, inline_state, memory};

use crate::config::config;
use crate::counters::count_process_event_lost;
use crate::maps::INLINE;
use crate::memory::{read_kernel, read_user};
use crate::process::{current_task, process_of};

/// `sched_prepare_exec(task, program)`: the process is about to leave its memory for that of another program. Its other
/// threads still run: each reads again when it ends.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sched_prepare_exec")]
pub extern "C" fn inline_exec(_: *mut c_void) -> u32 {
    let task = current_task();
    let process = process_of(task);
    let Some(entry) = INLINE.get_ptr_mut(process) else { return 0 };
    // SAFETY: the pointer is to the map's value, which consists of integers.
    unsafe { (*entry).state = inline_state::LEAVES };
    keep(task, process, entry);
    0
}

/// `sched_process_exit`: a thread ends, perhaps the last. Several may find that they are the last.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sched_process_exit")]
pub extern "C" fn inline_exit(_: *mut c_void) -> u32 {
    let task = current_task();
    let process = process_of(task);
    let Some(entry) = INLINE.get_ptr_mut(process) else { return 0 };
    let signal: u64 = read_kernel(task + config!(offsets.task_signal));
    let is_last = read_kernel::<u32>(signal + config!(offsets.signal_live)) == 0;
    // SAFETY: the pointer is to the map's value, which consists of integers.
    let state = unsafe { (*entry).state };
    if is_last || state == inline_state::LEAVES {
        keep(task, process, entry);
    }
    if is_last {
        // SAFETY: as above.
        unsafe { (*entry).state = inline_state::LEFT };
    }
    0
}

/// A process has left its memory for that of another program. What was counted has been kept.
#[inline(always)]
pub fn replaced(process: ProcessKey) {
    if let Some(entry) = INLINE.get_ptr_mut(process) {
        // SAFETY: the pointer is to the map's value, which consists of integers.
        unsafe { (*entry).state = inline_state::LEFT };
    }
}

/// Notes a child of a process with inline hooks, in the context of the parent. It has them too, and counts from zero.
#[inline(always)]
pub fn fork(parent: u64, child: u64) {
    let Some(entry) = INLINE.get_ptr(process_of(parent)) else { return };
    // SAFETY: the pointer is to the map's value, in which these fields never change.
    let (base, parents, hooked) = unsafe { ((*entry).base, (*entry).memory_of, (*entry).hooked) };
    let process = process_of(child);
    let offset = config!(offsets.task_mm);
    let shares = read_kernel::<u64>(parent + offset) == read_kernel::<u64>(child + offset);
    let memory_of = if shares { parents } else { process };
    let entry = InlineProcess { base, memory_of, hooked, ..InlineProcess::default() };
    if INLINE.insert(process, &entry, u64::from(BPF_NOEXIST)).is_err() {
        count_process_event_lost();
    }
}

/// Whether inline hooks count a process.
#[inline(always)]
pub fn counts(process: ProcessKey) -> bool {
    INLINE.get_ptr(process).is_some()
}

/// Keeps what a process has counted, if it runs in memory of its own and still has it (before Linux 6.16, the kernel takes it
/// away first).
#[inline(never)]
fn keep(task: u64, process: ProcessKey, entry: *mut InlineProcess) {
    // SAFETY: the callers pass a pointer to the map's value, in which these fields never change.
    let (base, memory_of) = unsafe { ((*entry).base, (*entry).memory_of) };
    if memory_of != process || read_kernel::<u64>(task + config!(offsets.task_mm)) == 0 {
        return;
    }
    let mut sums = SlotSums::default();
    let unread = add_up(base, &mut sums);
    // SAFETY: as above. Several threads may write, the last ones the same numbers.
    unsafe {
        if sums.calls >= (*entry).counts.calls {
            (*entry).unread_pages = unread;
            (*entry).counts = sums;
        }
    }
}

/// Adds up all slots. Returns the number of pages that are not in memory.
#[inline(always)]
fn add_up(base: u64, sums: &mut SlotSums) -> u32 {
    if read_user::<u64>(base + memory::CONTROL) != Some(memory::MAGIC) {
        return u32::MAX;
    }
    sums.threads = read_user::<u64>(base + memory::THREADS).unwrap_or(0);
    add(base + memory::SHARED_SLOT, sums);
    let mut unread = 0;
    let mut page = 0;
    while page < memory::SLOT_COUNT / memory::SLOTS_OF_PAGE {
        let first = base + memory::SLOTS + page * memory::SLOTS_OF_PAGE * memory::SLOT_BYTES;
        if read_user::<u64>(first).is_some() {
            let mut slot = 0;
            while slot < memory::SLOTS_OF_PAGE {
                add(first + slot * memory::SLOT_BYTES, sums);
                slot += 1;
            }
        } else {
            unread += 1;
        }
        page += 1;
    }
    unread
}

/// Adds a slot; nothing if it is not in memory. Sums wrap: the target may have written anything. (No branches: the verifier
/// follows each.)
#[inline(always)]
fn add(address: u64, sums: &mut SlotSums) {
    let mut slot = MaybeUninit::<SlotSums>::uninit();
    let bytes = size_of::<SlotSums>() as u32;
    // SAFETY: the helper writes that many bytes to `slot`, zeros if it fails. It checks the address itself.
    unsafe { bpf_probe_read_user(slot.as_mut_ptr().cast(), bytes, address as *const c_void) };
    // SAFETY: the helper has written all bytes, and any bytes are a valid value (`FromBytes`).
    let slot = unsafe { slot.assume_init() };
    sums.calls = sums.calls.wrapping_add(slot.calls);
    sums.bytes = sums.bytes.wrapping_add(slot.bytes);
    sums.sampled = sums.sampled.wrapping_add(slot.sampled);
    sums.reported = sums.reported.wrapping_add(slot.reported);
    sums.failed = sums.failed.wrapping_add(slot.failed);
    sums.unsampled_failed = sums.unsampled_failed.wrapping_add(slot.unsampled_failed);
    sums.frees_matched = sums.frees_matched.wrapping_add(slot.frees_matched);
    sums.zero_reallocs = sums.zero_reallocs.wrapping_add(slot.zero_reallocs);
}
