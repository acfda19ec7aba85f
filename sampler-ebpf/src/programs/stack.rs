//! The stack of a sample: the kernel's frame-pointer walk, or registers and a copy of the stack.
//!
//! If the top of the stack is known, a copy ends there and takes no more space than needed. If it is not known, as on a
//! coroutine's stack, the copy is as long as this process's stacks have needed so far, according to the daemon. In both
//! cases, a copy of more than [`FIRST_STACK_BYTES`] takes at most a fixed share of the ring's free space: while the
//! daemon lags behind, long copies get shorter before any is lost. A copy that finds no space is made again with the
//! innermost [`SHORTEST`] bytes.

use core::ffi::c_void;

use aya_ebpf::bindings::BPF_F_USER_STACK;
use aya_ebpf::helpers::generated::{bpf_get_stackid, bpf_loop, bpf_probe_read_user, bpf_ringbuf_submit};
use sampler_ebpf::abi::{
    FIRST_STACK_BYTES, LARGEST_STACK_BYTES, MOST_MISSING_PAGES, Registers, STACK_SPACE_SHARE, StackRecord, copy_end,
    ring, stack_kind,
};

use crate::config::config;
use crate::maps::{self, STACK_LIMITS, STACK_TRACES};
use crate::memory::read_kernel;
use crate::outer_frames;
use crate::output;
use crate::process::current_task;
use crate::python;
use crate::ring_array::Ring;
use crate::stack_record::{HEADER, Source, Taken, unknown};
use crate::steps::{GO_ON, STOP};
use crate::thread::ThreadState;

/// The smallest page size. Larger pages are multiples of it.
const PAGE: u64 = 4096;
/// Size of a copy for which there is no space otherwise, bytes: the smallest class.
const SHORTEST: u64 = 4 << 10;

/// Captures the stack of a sampled call, from `registers` up.
#[inline(always)]
pub fn take(ctx: *mut c_void, registers: &Registers, state: &ThreadState, sample: u64, time_ns: u64) -> Taken {
    match config!(stack_kind) {
        stack_kind::FRAME_POINTERS => walk(ctx),
        stack_kind::COPIED => {
            // If the Python frames are lost, the stack counts as lost, because it would look like a stack of native
            // code only.
            if python::report_python(state, sample, time_ns) == 0 {
                return Taken::of_kind(stack_kind::LOST_NO_SPACE);
            }
            Taken::of_kind(take_copy(registers, state, sample, time_ns))
        }
        _ => Taken::of_kind(stack_kind::NONE),
    }
}

/// Copies a stack, and returns its kind. (A global function: the verifier checks it once, separately. It is a third of
/// all code to check.)
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn take_copy(registers: *const Registers, state: *const ThreadState, sample: u64, time_ns: u64) -> u32 {
    // SAFETY: the caller passes references.
    let (Some(registers), Some(state)) = (unsafe { registers.as_ref() }, unsafe { state.as_ref() }) else {
        return stack_kind::NONE;
    };
    maps::stacks().map_or(stack_kind::LOST_NO_SPACE, |ring| copy(ring, registers, state, sample, time_ns))
}

/// `-EEXIST`: another stack occupies the slot in the map. `-ENOMEM`: there is no free slot.
const EXISTS: i64 = -17;
const NO_MEMORY: i64 = -12;

#[inline(always)]
fn walk(ctx: *mut c_void) -> Taken {
    // Without REUSE_STACKID, so that an id keeps its meaning for the whole recording.
    // SAFETY: `ctx` is the context that the kernel passed to the program, and the map is one of stacks, as the helper
    // expects.
    let id = unsafe { bpf_get_stackid(ctx, maps::handle(&STACK_TRACES), u64::from(BPF_F_USER_STACK)) };
    match id {
        0.. => Taken { kind: stack_kind::FRAME_POINTERS, id: id as i32 },
        EXISTS | NO_MEMORY => Taken::of_kind(stack_kind::LOST_TABLE_FULL),
        _ => Taken::of_kind(stack_kind::NONE),
    }
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
fn copy(ring: Ring, registers: &Registers, state: &ThreadState, sample: u64, time_ns: u64) -> u32 {
    let most = config!(stack_bytes);
    let source = Source { registers, state, sample, time_ns };
    let distance = distance_to_top(registers.sp);
    if outer_frames::copy(ring, &source, distance.unwrap_or(u64::MAX)) {
        return stack_kind::COPIED;
    }
    let (mut wanted, mut ends_at) = match distance {
        Some(distance) if distance <= most => (distance, copy_end::TOP),
        Some(_) => (most, copy_end::STACK_BYTES),
        None => (limit_of_process(state).min(most), copy_end::PROCESS_LIMIT),
    };
    if wanted > FIRST_STACK_BYTES {
        let share = free_share(ring);
        if wanted > share {
            (wanted, ends_at) = (share, copy_end::NO_SPACE);
        }
    }
    let taken = if wanted <= FIRST_STACK_BYTES {
        copy_short(ring, &source, wanted, ends_at)
    } else {
        copy_long(ring, &source, wanted, ends_at)
    };
    if taken != stack_kind::LOST_NO_SPACE || wanted <= SHORTEST {
        return taken;
    }
    // The ring is nearly full, or other CPUs were faster.
    copy_into::<SHORTEST>(ring, &source, SHORTEST, copy_end::NO_SPACE)
}

/// Maximum number of bytes copied of a stack of the calling process whose top is not known.
#[inline(always)]
fn limit_of_process(state: &ThreadState) -> u64 {
    // SAFETY: the value is copied at once, and is a single integer.
    unsafe { STACK_LIMITS.get(state.space) }.copied().unwrap_or(FIRST_STACK_BYTES)
}

/// Maximum number of bytes that a long copy may take of the ring's free space.
#[inline(always)]
fn free_share(ring: Ring) -> u64 {
    let left = ring.size().saturating_sub(ring.fill());
    (left / STACK_SPACE_SHARE).max(FIRST_STACK_BYTES)
}

/// Copies into a reservation of the smallest of these size classes (KiB) that is large enough, or else of the last one
/// (bytes). A reservation must have a constant size.
macro_rules! copy_in_class {
    ($copy:expr, [$($kib:literal)*], $largest:expr) => {{
        let (ring, source, wanted, ends_at) = $copy;
        $(if wanted <= $kib << 10 {
            return copy_into::<{ $kib << 10 }>(ring, source, wanted, ends_at);
        })*
        copy_into::<{ $largest }>(ring, source, wanted, ends_at)
    }};
}

/// Copies at most [`FIRST_STACK_BYTES`].
#[inline(always)]
fn copy_short(ring: Ring, source: &Source<'_>, wanted: u64, ends_at: u32) -> u32 {
    copy_in_class!((ring, source, wanted, ends_at), [4 8 16 32], FIRST_STACK_BYTES)
}

/// Same as [`copy_short`], for more bytes. The classes are closer together, because they are large.
#[inline(always)]
fn copy_long(ring: Ring, source: &Source<'_>, wanted: u64, ends_at: u32) -> u32 {
    copy_in_class!((ring, source, wanted, ends_at), [96 128 192 256 384 512 768], 1 << 20)
}

#[inline(always)]
fn copy_into<const CLASS: u64>(ring: Ring, source: &Source<'_>, wanted: u64, ends_at: u32) -> u32 {
    let record = ring.reserve(HEADER + CLASS).cast::<StackRecord>();
    if record.is_null() {
        return stack_kind::LOST_NO_SPACE;
    }
    // SAFETY: the reservation begins with the header.
    unsafe {
        source.begin(record);
        (*record).ends_at = ends_at;
        (*record).top = source.registers.sp.wrapping_add(wanted);
    }
    let sp = source.registers.sp;
    let mut bytes = unknown(wanted);
    if bytes > CLASS {
        bytes = CLASS;
    }
    // SAFETY: the reservation has HEADER + CLASS bytes, and `bytes` is at most CLASS. The helper checks `sp` itself.
    let status = unsafe {
        bpf_probe_read_user(record.cast::<u8>().add(HEADER as usize).cast(), bytes as u32, sp as *const c_void)
    };
    if status != 0 {
        bytes = copy_pages::<CLASS>(record, sp, bytes);
    }
    let flags = output::wake_up(ring::STACKS, HEADER + CLASS);
    // SAFETY: the reservation begins with the header, and is submitted here and nowhere else.
    unsafe {
        (*record).copied_bytes = bytes as u32;
        bpf_ringbuf_submit(record.cast(), flags);
    }
    stack_kind::COPIED
}

/// State of a copy page by page.
struct Pages {
    record: *mut StackRecord,
    sp: u64,
    /// Number of bytes up to the end of the first page.
    first: u64,
    wanted: u64,
}

/// Copies page by page, because a read that meets an absent page fails as a whole. Missing pages become zeros: most
/// were never touched, as in an array that is not used yet, and the stack continues above them. Returns the end of the
/// last page that is present, at most `wanted`.
///
/// The pages are copied by a kernel loop. The verifier checks its body once per class instead of once per page.
#[inline(always)]
fn copy_pages<const CLASS: u64>(record: *mut StackRecord, sp: u64, wanted: u64) -> u64 {
    let first = unknown(PAGE - (sp & (PAGE - 1)));
    if first > PAGE {
        return 0;
    }
    copy_piece(record, 0, sp, first);
    let mut pages = Pages { record, sp, first, wanted };
    let most = const { CLASS / PAGE - 1 };
    // If a loop never runs, the verifier does not check its body, removes it, and then fails because it is missing.
    let copied = if const { CLASS > PAGE } {
        // SAFETY: the function has the type that the helper calls, and gets this context, which outlives the call.
        unsafe { bpf_loop(most as u32, copy_page::<CLASS> as *mut c_void, (&raw mut pages).cast(), 0) as u64 }
    } else {
        0
    };
    // Less than a page is left. The last bytes of the class include it.
    if copied == most && first + most * PAGE < wanted {
        copy_piece(record, CLASS - PAGE, sp, PAGE);
    }
    // SAFETY: the reservation begins with the header, which was written before.
    let end = unsafe { (&raw const (*record).copied_bytes).read_volatile() };
    if u64::from(end) > wanted { wanted } else { u64::from(end) }
}

/// Copies one whole page, after the first piece and `index` other pages.
///
/// # Safety
/// `context` points to [`Pages`].
unsafe extern "C" fn copy_page<const CLASS: u64>(index: u64, context: *mut c_void) -> i64 {
    // SAFETY: `copy_pages` passes `Pages`, which outlive the loop.
    let pages = unsafe { &*context.cast::<Pages>() };
    let offset = unknown(pages.first.wrapping_add(index.wrapping_mul(PAGE)));
    if offset >= pages.wanted || offset > CLASS - PAGE {
        return STOP;
    }
    copy_piece(pages.record, offset, pages.sp, PAGE);
    // SAFETY: the reservation begins with the header, which was written before.
    let missing = unsafe { (&raw const (*pages.record).missing_pages).read_volatile() };
    if missing > MOST_MISSING_PAGES { STOP } else { GO_ON }
}

/// Copies `bytes`, at most a page, from this offset of the stack to the same offset of the copy. If they are present,
/// `copied_bytes` becomes their end. Otherwise the copy has zeros there, and they are counted as missing.
#[inline(always)]
fn copy_piece(record: *mut StackRecord, offset: u64, sp: u64, bytes: u64) {
    // SAFETY: the callers keep `offset + bytes` inside the reservation, as the verifier checks. The helper checks the
    // address itself.
    let status = unsafe {
        let to = record.cast::<u8>().add((HEADER + offset) as usize);
        bpf_probe_read_user(to.cast(), bytes as u32, (sp + offset) as *const c_void)
    };
    // All ones if it failed. The results are kept in the record, where the verifier does not track their values.
    let failed = (status >> 63) as u32;
    // SAFETY: the reservation begins with the header, which was written before.
    unsafe {
        let (end, missing) = (&raw mut (*record).copied_bytes, &raw mut (*record).missing_pages);
        end.write_volatile(end.read_volatile() & failed | (offset + bytes) as u32 & !failed);
        missing.write_volatile(missing.read_volatile().wrapping_sub(failed));
    }
}
