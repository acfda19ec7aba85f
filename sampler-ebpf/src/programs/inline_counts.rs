//! The counts that processes with inline hooks have kept in their own memory. They are read when a process leaves that
//! memory, by an exit or an exec. Children inherit the hooks.

use core::ffi::c_void;
use core::mem::MaybeUninit;

use aya_ebpf::bindings::BPF_NOEXIST;
use aya_ebpf::helpers::generated::{bpf_loop, bpf_probe_read_user};
use sampler_ebpf::abi::ProcessKey;
use sampler_ebpf::abi::inline::{InlineProcess, MAX_ALLOCATORS, SlotSums, inline_state, memory};

use crate::config::config;
use crate::counters::count_process_event_lost;
use crate::maps::INLINE;
use crate::memory::{read_kernel, read_user};
use crate::process::{current_task, process_of};
use crate::stack_record::unknown;
use crate::steps::GO_ON;

/// `sched_prepare_exec(task, program)`: the process is about to replace its memory with that of another program. Its
/// other threads still run; each reads the counts again when it ends.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sched_prepare_exec")]
pub extern "C" fn inline_exec(_: *mut c_void) -> u32 {
    let task = current_task();
    let process = process_of(task);
    let Some(entry) = INLINE.get_ptr_mut(process) else { return 0 };
    // SAFETY: the pointer is to the map's value, which consists of integers.
    unsafe { (*entry).state = inline_state::LEAVES };
    keep(task, process, entry);
    keep_apart(task, process, entry);
    0
}

/// `sched_process_exit`: a thread ends, perhaps the last one. Several threads may conclude that they are the last.
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
        keep_apart(task, process, entry);
    }
    if is_last {
        // SAFETY: as above.
        unsafe { (*entry).state = inline_state::LEFT };
    }
    0
}

/// Records that a process has replaced its memory with that of another program. Its counts have already been saved.
#[inline(always)]
pub fn replaced(process: ProcessKey) {
    if let Some(entry) = INLINE.get_ptr_mut(process) {
        // SAFETY: the pointer is to the map's value, which consists of integers.
        unsafe { (*entry).state = inline_state::LEFT };
    }
}

/// Adds a child of a process with inline hooks, in the parent's context. The child has the hooks, too, and counts from
/// zero.
#[inline(always)]
pub fn fork(parent: u64, child: u64) {
    // Another copy of this program may have added it already.
    if !counts(process_of(child)) {
        list_child(parent, child);
        begin_apart(child);
    }
}

/// Lists a child. (A separate function: programs have 512 bytes of stack, including all functions that they call.)
#[inline(never)]
fn list_child(parent: u64, child: u64) {
    let Some(entry) = INLINE.get_ptr(process_of(parent)) else { return };
    // SAFETY: the pointer is to the map's value, in which these fields never change.
    let (bases, parents, hooked) = unsafe { ((*entry).bases, (*entry).memory_of, (*entry).hooked) };
    let process = process_of(child);
    let offset = config!(offsets.task_mm);
    let shares = read_kernel::<u64>(parent + offset) == read_kernel::<u64>(child + offset);
    let memory_of = if shares { parents } else { process };
    let entry = InlineProcess { bases, memory_of, hooked, ..InlineProcess::default() };
    if INLINE.insert(process, &entry, u64::from(BPF_NOEXIST)).is_err() {
        count_process_event_lost();
    }
}

/// Whether inline hooks count a process.
#[inline(always)]
pub fn counts(process: ProcessKey) -> bool {
    INLINE.get_ptr(process).is_some()
}

/// Saves the counts of a process that runs in its own memory, if it still has it (before Linux 6.16, the kernel removes
/// it first).
#[inline(never)]
fn keep(task: u64, process: ProcessKey, entry: *mut InlineProcess) {
    // SAFETY: the callers pass a pointer to the map's value, in which this field never changes.
    let memory_of = unsafe { (*entry).memory_of };
    if memory_of != process || read_kernel::<u64>(task + config!(offsets.task_mm)) == 0 {
        return;
    }
    let mut sum = Sum { entry, first_slot: 0, unread_pages: 0, slots: SlotSums::default() };
    let pages = MAX_ALLOCATORS as u64 * SLOT_PAGES;
    // SAFETY: `add_page` has the type that the helper calls, and gets this context, which outlives the call.
    unsafe { bpf_loop(pages as u32, add_page as *mut c_void, (&raw mut sum).cast(), 0) };
    // SAFETY: as above. Several threads may write; the last ones write the same numbers.
    unsafe {
        if sum.slots.calls >= (*entry).counts.calls {
            (*entry).unread_pages = sum.unread_pages as u32;
            (*entry).counts = sum.slots;
        }
    }
}

/// Records the contents of the thread's slot when a child begins in its parent's memory.
#[inline(never)]
fn begin_apart(child: u64) {
    let process = process_of(child);
    let Some(entry) = INLINE.get_ptr_mut(process) else { return };
    // SAFETY: the pointer is to the map's value, which consists of integers.
    if unsafe { (*entry).memory_of } != process {
        add_slots_of(child, entry);
    }
}

/// Saves what a process has counted in another one's memory: the increase of its thread's slot since it began. After
/// `vfork`, the slot is that of the parent's thread, which waits in the meantime.
#[inline(never)]
fn keep_apart(task: u64, process: ProcessKey, entry: *mut InlineProcess) {
    let has_left = read_kernel::<u64>(task + config!(offsets.task_mm)) == 0;
    // SAFETY: the callers pass a pointer to the map's value, which consists of integers.
    unsafe {
        if has_left || (*entry).memory_of == process || (*entry).unread_pages != 0 {
            return;
        }
        // Subtracts the earlier values, and adds the present ones.
        let kept = (&raw mut (*entry).counts).cast::<u64>();
        let mut word = 0;
        while word < size_of::<SlotSums>() / size_of::<u64>() {
            *kept.add(word) = (*kept.add(word)).wrapping_neg();
            word += 1;
        }
        add_slots_of(task, entry);
        (*entry).unread_pages = 1;
    }
}

/// Adds the slots of a task's thread, one per allocator, to the counts of a process.
#[inline(never)]
fn add_slots_of(task: u64, entry: *mut InlineProcess) {
    let thread_pointer = read_kernel(task + config!(offsets.task_thread_pointer));
    let mut allocator = 0;
    while allocator < MAX_ALLOCATORS {
        // SAFETY: the callers pass a pointer to the map's value, which consists of integers.
        unsafe {
            if (*entry).bases[allocator] != 0 {
                let slot = slot_of(thread_pointer, (*entry).bases[allocator]);
                if slot != 0 {
                    add(slot, &mut (*entry).counts, 1);
                }
            }
        }
        allocator += 1;
    }
}

/// Returns the address of a thread's slot; 0 if it has none. (A global function: the verifier checks it once.)
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn slot_of(thread_pointer: u64, base: u64) -> u64 {
    const SLOTS_BYTES: u64 = memory::SLOT_COUNT * memory::SLOT_BYTES;
    let first = (thread_pointer.wrapping_mul(memory::HASH) >> memory::HASH_SHIFT) & (SLOTS_BYTES - memory::SLOT_BYTES);
    let mut tried = 0;
    while tried < memory::TRIES {
        let slot = base + memory::SLOTS + ((first + tried * memory::SLOT_BYTES) & (SLOTS_BYTES - 1));
        match read_user::<u64>(slot) {
            Some(key) if key == thread_pointer => return slot,
            Some(key) if key != 0 => tried += 1,
            _ => return 0,
        }
    }
    0
}

/// Number of pages of slots.
const SLOT_PAGES: u64 = memory::SLOT_COUNT / memory::SLOTS_OF_PAGE;

/// A walk through the slots of all allocators, in steps of `bpf_loop`. The verifier checks each step function once.
struct Sum {
    entry: *mut InlineProcess,
    /// Address of the first slot of a page.
    first_slot: u64,
    /// Number of pages that are not in memory.
    unread_pages: u64,
    slots: SlotSums,
}

/// Adds a page of slots, and, with an allocator's first page, the counts that all threads share.
extern "C" fn add_page(step: u64, sum: *mut Sum) -> i64 {
    // SAFETY: the context of `keep`, which nothing else uses during the call, with a pointer to the map's value.
    let sum = unsafe { &mut *sum };
    let step = unknown(step);
    let (allocator, page) = ((step / SLOT_PAGES) as usize & (MAX_ALLOCATORS - 1), step % SLOT_PAGES);
    // SAFETY: as above.
    let base = unsafe { (*sum.entry).bases[allocator] };
    if base == 0 {
        return GO_ON;
    }
    if read_user::<u64>(base + memory::CONTROL) != Some(memory::MAGIC) {
        sum.unread_pages += 1;
        return GO_ON;
    }
    if page == 0 {
        let threads = read_user::<u64>(base + memory::THREADS).unwrap_or(0);
        sum.slots.threads = sum.slots.threads.wrapping_add(threads);
        // Its open calls may be those of several threads, so nothing is known about them.
        add(base + memory::SHARED_SLOT, &mut sum.slots, 0);
    }
    sum.first_slot = base + memory::SLOTS + page * memory::SLOTS_OF_PAGE * memory::SLOT_BYTES;
    if read_user::<u64>(sum.first_slot).is_none() {
        sum.unread_pages += 1;
        return GO_ON;
    }
    // SAFETY: `add_slot` has the type that the helper calls, and gets this context, which outlives the call.
    unsafe { bpf_loop(memory::SLOTS_OF_PAGE as u32, add_slot as *mut c_void, (&raw mut *sum).cast(), 0) };
    GO_ON
}

/// Adds one slot of a page.
extern "C" fn add_slot(number: u64, sum: *mut Sum) -> i64 {
    // SAFETY: the context of `add_page`.
    let sum = unsafe { &mut *sum };
    add(sum.first_slot + number * memory::SLOT_BYTES, &mut sum.slots, 1);
    GO_ON
}

/// Adds a slot; adds nothing if it is not in memory. Sums wrap, because the target may have written anything.
/// `reports_left`: 1 if the slot shows which calls were left by a jump. (There are no branches, because the verifier
/// follows each one.)
#[inline(always)]
fn add(address: u64, sums: &mut SlotSums, reports_left: u64) {
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
    sums.sampled_bytes = sums.sampled_bytes.wrapping_add(slot.sampled_bytes);
    sums.zero_reallocs = sums.zero_reallocs.wrapping_add(slot.zero_reallocs);
    let open = slot.sampled.wrapping_sub(slot.reported).wrapping_sub(slot.failed);
    // 1 if the last call was sampled, and may still be in progress.
    let other = slot.calls ^ slot.sampled_call;
    let last_is_sampled = 1 ^ ((other | other.wrapping_neg()) >> 63);
    let is_open = (open | open.wrapping_neg()) >> 63;
    let left = open.wrapping_sub(last_is_sampled & is_open);
    sums.sampled_call = sums.sampled_call.wrapping_add(left * reports_left);
}
