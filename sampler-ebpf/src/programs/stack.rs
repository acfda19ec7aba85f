//! The stack of a sample: the kernel's frame-pointer walk, or registers and a copy of the stack's top.

use core::ffi::c_void;

use aya_ebpf::bindings::BPF_F_USER_STACK;
use aya_ebpf::helpers::generated::{bpf_get_stackid, bpf_probe_read_user, bpf_ringbuf_reserve, bpf_ringbuf_submit};
use sampler_ebpf::abi::{LARGEST_STACK_BYTES, Registers, StackRecord, stack_kind};

use crate::config::config;
use crate::maps::{self, STACK_TRACES};
use crate::memory::read_kernel;
use crate::output;
use crate::process::current_task;
use crate::thread::ThreadState;

/// The smallest page size. Larger pages are multiples of it.
const PAGE: u64 = 4096;
/// Most bytes that are copied page by page, after a single read has failed.
const LARGEST_PAGEWISE: u64 = 64 << 10;
const HEADER: u64 = size_of::<StackRecord>() as u64;

/// The stack that was taken, for the allocation's record.
pub struct Taken {
    /// One of [`stack_kind`]; [`stack_kind::NONE`] means that the stack was lost.
    pub kind: u32,
    /// Key in the kernel's stack map.
    pub id: i32,
}

const LOST: Taken = Taken { kind: stack_kind::NONE, id: -1 };

/// Takes the stack of a sampled call, from `registers` up.
#[inline(always)]
pub fn take(ctx: *mut c_void, registers: &Registers, state: &ThreadState, sample: u64, time_ns: u64) -> Taken {
    match config!(stack_kind) {
        stack_kind::FRAME_POINTERS => walk(ctx),
        stack_kind::COPIED => copy(registers, state, sample, time_ns),
        _ => LOST,
    }
}

#[inline(always)]
fn walk(ctx: *mut c_void) -> Taken {
    // Without REUSE_STACKID, so that an id keeps its meaning for the whole recording.
    // SAFETY: `ctx` is the context that the kernel passed to the program, and the map is one of stacks, as the helper
    // expects.
    let id = unsafe { bpf_get_stackid(ctx, maps::handle(&STACK_TRACES), u64::from(BPF_F_USER_STACK)) };
    if id < 0 { LOST } else { Taken { kind: stack_kind::FRAME_POINTERS, id: id as i32 } }
}

/// Distance from the stack pointer to the top of the stack, if known.
///
/// glibc and musl put a thread's control block at the top of its stack. The main thread's stack starts where the kernel
/// put it.
#[inline(always)]
fn distance_to_top(sp: u64) -> Option<u64> {
    let task = current_task();
    let thread_pointer: u64 = read_kernel(task + config!(offsets.task_thread_pointer));
    let distance = thread_pointer.wrapping_sub(sp);
    if distance <= LARGEST_STACK_BYTES {
        return Some(distance);
    }
    let mm: u64 = read_kernel(task + config!(offsets.task_mm));
    let start: u64 = read_kernel(mm + config!(offsets.mm_start_stack));
    let distance = start.wrapping_sub(sp);
    (distance <= LARGEST_STACK_BYTES).then_some(distance)
}

#[inline(always)]
fn copy(registers: &Registers, state: &ThreadState, sample: u64, time_ns: u64) -> Taken {
    let sp = registers.sp;
    let limit = config!(stack_bytes);
    let known = distance_to_top(sp);
    let (wanted, whole) = match known {
        Some(distance) if distance <= limit => (distance, 1),
        _ => (limit, 0),
    };
    let head = StackRecord {
        sample,
        time_ns,
        space: state.space,
        registers: *registers,
        in_flight: state.in_flight_calls(),
        copied_bytes: 0,
        whole,
    };
    // A reservation must have a constant size, so take the smallest class that is large enough.
    if wanted <= 4 << 10 {
        return copy_into::<{ 4 << 10 }>(&head, wanted);
    }
    if wanted <= 8 << 10 {
        return copy_into::<{ 8 << 10 }>(&head, wanted);
    }
    if wanted <= 16 << 10 {
        return copy_into::<{ 16 << 10 }>(&head, wanted);
    }
    if wanted <= 32 << 10 {
        return copy_into::<{ 32 << 10 }>(&head, wanted);
    }
    if wanted <= 64 << 10 {
        return copy_into::<{ 64 << 10 }>(&head, wanted);
    }
    if wanted <= 256 << 10 {
        return copy_into::<{ 256 << 10 }>(&head, wanted);
    }
    copy_into::<{ 1 << 20 }>(&head, wanted)
}

#[inline(always)]
fn copy_into<const CLASS: u64>(head: &StackRecord, wanted: u64) -> Taken {
    // SAFETY: the map is a ring and the size is a constant, as the helper expects; its result is checked.
    let record = unsafe { bpf_ringbuf_reserve(maps::stacks(), HEADER + CLASS, 0) }.cast::<u8>();
    if record.is_null() {
        return LOST;
    }
    let sp = head.registers.sp;
    let mut bytes = if wanted > CLASS { CLASS } else { wanted };
    // SAFETY: the reservation has HEADER + CLASS bytes, and `bytes` is at most CLASS. The helper checks `sp` itself.
    let status = unsafe { bpf_probe_read_user(record.add(HEADER as usize).cast(), bytes as u32, sp as *const c_void) };
    if status != 0 {
        // Large classes fall back on what the verifier can follow: the first 64 KiB.
        bytes = if CLASS > LARGEST_PAGEWISE {
            copy_pages::<LARGEST_PAGEWISE>(record, sp, wanted)
        } else {
            copy_pages::<CLASS>(record, sp, wanted)
        };
    }
    let flags = output::wake_up(maps::stacks(), config!(stacks_mark));
    // SAFETY: the reservation begins with space for the header, and is submitted here and nowhere else.
    unsafe {
        record.cast::<StackRecord>().write(StackRecord { copied_bytes: bytes as u32, ..*head });
        bpf_ringbuf_submit(record.cast(), flags);
    }
    Taken { kind: stack_kind::COPIED, id: 0 }
}

/// A read that crosses the end of the mapping fails as a whole. Then copies page by page, up to the first missing page.
#[inline(always)]
fn copy_pages<const CLASS: u64>(record: *mut u8, sp: u64, wanted: u64) -> u64 {
    let mut done = 0_u64;
    let mut piece = PAGE - (sp & (PAGE - 1));
    let mut i = 0;
    while i < CLASS / PAGE {
        i += 1;
        if done >= wanted || done > CLASS - PAGE || piece > PAGE {
            break;
        }
        // SAFETY: the reservation has HEADER + CLASS bytes, and `done + piece` is at most CLASS. The helper checks the
        // address itself.
        let status = unsafe {
            bpf_probe_read_user(record.add((HEADER + done) as usize).cast(), piece as u32, (sp + done) as *const c_void)
        };
        if status != 0 {
            break;
        }
        done += piece;
        piece = PAGE;
    }
    done
}
