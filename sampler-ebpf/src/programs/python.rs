//! Python frames of a sampled call, read from the calling thread's own interpreter state.
//!
//! The target may have written anything there. Reads are checked and bounded, and the daemon judges the results.

use core::ffi::c_void;
use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::bindings::BPF_RB_NO_WAKEUP;
use aya_ebpf::helpers::generated::{bpf_loop, bpf_probe_read_user, bpf_ringbuf_submit};
use sampler_ebpf::abi::{
    MOST_PYTHON_FRAMES, MOST_PYTHON_THREADS, PYTHON_FRAME_BYTES, PYTHON_FRAMES_PER_RECORD, PYTHON_IDENTITY_BYTES,
    ProcessKey, PythonFrame, PythonProcess, PythonRecord, check, python_walk,
};

use crate::config::config;
use crate::maps::{self, PYTHON};
use crate::memory::{read_kernel, read_user};
use crate::process::current_task;
use crate::python_code;
use crate::steps::{GO_ON, STOP};
use crate::thread::ThreadState;

/// A walk through the interpreter's thread states.
struct Search {
    layout: &'static PythonProcess,
    interpreter: u64,
    /// `pthread_self()` of the calling thread.
    thread_id: u64,
    thread: u64,
    found: u64,
}

/// A walk through a thread's frames.
struct Walk {
    layout: &'static PythonProcess,
    space: ProcessKey,
    record: *mut PythonRecord,
    frame: u64,
    outcome: u64,
}

/// Reports the Python frames of a sampled call, if its process is known to run Python. Returns 1 if there was space for
/// them, otherwise 0. (A global function: the verifier checks it once, separately.)
#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn report_python(state: *const ThreadState, sample: u64, time_ns: u64) -> u32 {
    // SAFETY: the caller passes a reference.
    let Some(state) = (unsafe { state.as_ref() }) else { return 1 };
    // SAFETY: the daemon sets a process's value once, before it is used.
    let Some(layout) = (unsafe { PYTHON.get(state.space.tgid) }) else { return 1 };
    let Some(ring) = maps::stacks() else { return 0 };
    let (first, mut outcome) = newest_frame(layout);
    let mut frame = first;
    let mut i = 0;
    while i < MOST_PYTHON_FRAMES / PYTHON_FRAMES_PER_RECORD {
        let record = ring.reserve(size_of::<PythonRecord>() as u64).cast::<PythonRecord>();
        if record.is_null() {
            return 0;
        }
        let is_last = i + 1 == MOST_PYTHON_FRAMES / PYTHON_FRAMES_PER_RECORD;
        let mut walk = Walk { layout, space: state.space, record, frame, outcome: u64::from(outcome) };
        // The count is kept in the record, where the verifier does not track its values one by one.
        // SAFETY: the reservation has the record's size.
        unsafe { write_volatile(&raw mut (*record).count, 0) };
        if frame != 0 {
            run(PYTHON_FRAMES_PER_RECORD as u32, step as *mut c_void, (&raw mut walk).cast());
        }
        // SAFETY: the callback changes both. The volatile reads keep the compiler from assuming otherwise.
        unsafe {
            frame = read_volatile(&raw const walk.frame);
            outcome = read_volatile(&raw const walk.outcome) as u32;
        }
        if frame != 0 && is_last {
            outcome = python_walk::TOO_DEEP;
        }
        let continues = frame != 0 && !is_last;
        // SAFETY: the reservation has the record's size, and is submitted here and nowhere else.
        unsafe {
            (*record).mark = PythonRecord::MARK;
            (*record).sample = sample;
            (*record).time_ns = time_ns;
            (*record).space = state.space;
            (*record).walk = outcome;
            (*record).continues = u32::from(continues);
            (*record).reserved = 0;
            bpf_ringbuf_submit(record.cast(), u64::from(BPF_RB_NO_WAKEUP));
        }
        if !continues {
            return 1;
        }
        i += 1;
    }
    1
}

#[inline(always)]
fn run(times: u32, step: *mut c_void, context: *mut c_void) {
    // SAFETY: `step` has the type that the helper calls, and gets this context, which outlives the call.
    unsafe { bpf_loop(times, step, context, 0) };
}

/// Returns the newest frame of the calling thread; 0 if there is none, with the reason.
#[inline(always)]
fn newest_frame(layout: &'static PythonProcess) -> (u64, u32) {
    let at = |base: u64, offset: u32| read_user::<u64>(base.wrapping_add(u64::from(offset)));
    let interpreter = match at(layout.runtime, layout.interpreters_head) {
        Some(0) => return (0, python_walk::NOT_RUNNING),
        Some(interpreter) => interpreter,
        None => return (0, python_walk::UNREADABLE),
    };
    if at(interpreter, layout.interpreter_next) != Some(0) {
        return (0, python_walk::SUBINTERPRETERS);
    }
    let thread_id: u64 = read_kernel(current_task() + config!(offsets.task_thread_pointer));
    let running = if layout.lock == PythonProcess::ABSENT {
        at(layout.runtime, layout.running)
    } else {
        at(interpreter, layout.lock).and_then(|lock| at(lock, layout.running))
    };
    let mut search = Search { layout, interpreter, thread_id, thread: running.unwrap_or(0), found: 0 };
    if !is_of_caller(&search) {
        search.thread = at(interpreter, layout.threads_head).unwrap_or(0);
        run(MOST_PYTHON_THREADS, search_step as *mut c_void, (&raw mut search).cast());
        // SAFETY: the callback changes it. The volatile read keeps the compiler from assuming otherwise.
        if unsafe { read_volatile(&raw const search.found) } == 0 {
            return (0, python_walk::NO_THREAD);
        }
    }
    // SAFETY: as above.
    let thread = unsafe { read_volatile(&raw const search.thread) };
    let mut frame = at(thread, layout.thread_frame);
    if layout.indirect_frame != PythonProcess::ABSENT {
        frame = frame.and_then(|indirect| at(indirect, layout.indirect_frame));
    }
    frame.map_or((0, python_walk::UNREADABLE), |frame| (frame, python_walk::COMPLETE))
}

/// Whether `search.thread` is the state of the calling thread.
#[inline(always)]
fn is_of_caller(search: &Search) -> bool {
    let at = |offset: u32| read_user::<u64>(search.thread.wrapping_add(u64::from(offset)));
    search.thread != 0
        && at(search.layout.thread_id) == Some(search.thread_id)
        && at(search.layout.thread_interpreter) == Some(search.interpreter)
}

/// Checks one thread state.
///
/// # Safety
/// `context` points to a [`Search`] that nothing else uses during the call.
unsafe extern "C" fn search_step(_index: u64, context: *mut c_void) -> i64 {
    // SAFETY: `newest_frame` passes a `Search`, which outlives the loop.
    let search = unsafe { &mut *context.cast::<Search>() };
    if is_of_caller(search) {
        search.found = 1;
        return STOP;
    }
    let next = search.thread.wrapping_add(u64::from(search.layout.thread_next));
    search.thread = read_user(next).unwrap_or(0);
    if search.thread == 0 { STOP } else { GO_ON }
}

/// Adds one frame to the record.
///
/// # Safety
/// `context` points to a [`Walk`] that nothing else uses during the call.
unsafe extern "C" fn step(_index: u64, context: *mut c_void) -> i64 {
    // SAFETY: `report_python` passes a `Walk`, which outlives the loop.
    let walk = unsafe { &mut *context.cast::<Walk>() };
    let (layout, record) = (walk.layout, walk.record);
    let bytes = layout.frame_bytes;
    // SAFETY: `report_python` passes a record.
    let count = unsafe { read_volatile(&raw const (*record).count) };
    if bytes > PYTHON_FRAME_BYTES as u32 || count >= PYTHON_FRAMES_PER_RECORD as u32 {
        return STOP;
    }
    // SAFETY: the scratch space has at least `bytes` bytes. The helper checks the address itself.
    let status =
        unsafe { bpf_probe_read_user((&raw mut (*record).scratch).cast(), bytes, walk.frame as *const c_void) };
    if status != 0 {
        walk.outcome = u64::from(python_walk::UNREADABLE);
        walk.frame = 0;
        return STOP;
    }
    let code = scratch(record, layout.frame_code) & !layout.code_tags;
    let previous = scratch(record, layout.frame_previous);
    let instruction = scratch(record, layout.frame_instruction);
    let instruction = if layout.instruction_is_index != 0 { instruction } else { within(instruction, code) };
    let mut flags = 0;
    if layout.frame_owner != PythonProcess::ABSENT {
        flags = scratch(record, layout.frame_owner) & 0xff;
    }
    if layout.frame_is_entry != PythonProcess::ABSENT && scratch(record, layout.frame_is_entry) & 0xff != 0 {
        flags |= 0x100;
    }
    let frame = PythonFrame {
        code,
        check: check_of(layout, record, code),
        instruction: instruction as u32,
        flags: flags as u32,
    };
    // SAFETY: `count` was checked above.
    let to = unsafe { (&raw mut (*record).frames).cast::<PythonFrame>().add(count as usize) };
    // SAFETY: `to` is a place in the record, as is the count.
    unsafe {
        to.write(frame);
        write_volatile(&raw mut (*record).count, count + 1);
    }
    walk.frame = previous;
    // At the end, where the verifier has the fewest states to follow it with.
    // SAFETY: as above.
    unsafe { python_code::report(layout, &walk.space, to) };
    // SAFETY: it is a field of `walk`. The volatile read keeps the compiler from holding its value for so long.
    if unsafe { read_volatile(&raw const walk.frame) } == 0 { STOP } else { GO_ON }
}

/// Returns the distance from the code object to an address in it; all ones if the address is not in it.
#[inline(always)]
fn within(address: u64, code: u64) -> u64 {
    let offset = address.wrapping_sub(code);
    if offset >> 32 == 0 { offset } else { u64::MAX }
}

/// Returns a word of the scratch space.
#[inline(always)]
fn scratch(record: *const PythonRecord, offset: u32) -> u64 {
    let offset = (offset & (PYTHON_FRAME_BYTES as u32 - 1)) as usize;
    // SAFETY: the scratch space is a word longer than `PYTHON_FRAME_BYTES`.
    unsafe { read_volatile((&raw const (*record).scratch).cast::<u8>().add(offset).cast::<u64>()) }
}

/// Returns the checksum of a code object; 0 if it cannot be read.
#[inline(always)]
fn check_of(layout: &PythonProcess, record: *mut PythonRecord, code: u64) -> u64 {
    let identity = code.wrapping_add(u64::from(layout.code_identity));
    // SAFETY: the scratch space is longer than this. The helper checks the address itself.
    let status = unsafe {
        let to = (&raw mut (*record).scratch).cast();
        bpf_probe_read_user(to, PYTHON_IDENTITY_BYTES as u32, identity as *const c_void)
    };
    let Some(first_line) = read_user::<u32>(code.wrapping_add(u64::from(layout.code_first_line))) else { return 0 };
    if status != 0 {
        return 0;
    }
    check([scratch(record, 0), scratch(record, 8), scratch(record, 16), scratch(record, 24)], first_line)
}
