//! Tests of the size and field offsets of every ABI type. The kernel side and the daemon are compiled separately, for
//! different targets, and must agree on the layout.

use core::mem::{align_of, offset_of, size_of};

use super::inline::{InlineProcess, SlotSums};
use super::*;
use crate::geometric::DrawConstants;

/// Compares each type's size and the offset of each of its fields with the expected bytes. If the list lacks a field,
/// it does not compile.
macro_rules! assert_layouts {
    ($($structure:ident: $size:literal { $($field:ident: $offset:literal),+ })+) => {$(
        let _all_fields_are_listed = |$structure { $($field: _),+ }: $structure| ();
        assert_eq!(size_of::<$structure>(), $size, stringify!($structure));
        assert_eq!(align_of::<$structure>(), 8, stringify!($structure));
        $(assert_eq!(offset_of!($structure, $field), $offset, "{}.{}", stringify!($structure), stringify!($field));)+
    )+};
}

#[test]
fn sizes_and_offsets_are_those_of_the_abi() {
    assert_layouts! {
        ProcessKey: 16 { start_ns: 0, tgid: 8, exec_id: 12 }
        LivingThread: 40 { process: 0, memory_users: 16, cpu_ns: 24, syscall_work: 32 }
        LiveKey: 24 { space: 0, address: 16 }
        LiveValue: 56 { sample: 0, time_ns: 8, thread_calls: 16, size_bytes: 24, trials: 32, interval: 40, offset: 44, tid: 48, site: 52 }
        Config: 264 { target_rules: 0, follow: 4, live: 8, stack_kind: 12, self_tgid: 16, faults: 20, criterion: 24, stack_bytes: 32, seed: 40, wake_share: 48, cgroup_id: 56, cgroup_level: 64, memory_bytes: 72, page_bytes: 80, began_ns: 88, comm_pattern: 96, offsets: 112 }
        KernelOffsets: 152 { task_mm: 0, task_group_leader: 8, task_start_boottime: 16, task_self_exec_id: 24, task_tgid: 32, task_comm: 40, task_signal: 48, task_thread_pointer: 56, signal_live: 64, mm_owner: 72, mm_start_stack: 80, mm_brk: 88, mm_total_vm: 96, mm_data_vm: 104, signal_rlim: 112, mm_users: 120, task_cpu: 128, signal_cpu: 136, task_syscall_work: 144 }
        Control: 16 { draw: 0, targets_generation: 8 }
        Progress: 48 { threads: 0, threads_flushed: 8, records_lost: 16, ended_uncounted: 24, ended_uncounted_ns: 32, ended_counted_ns: 40 }
        Counters: 328 { calls: 0, unsampled: 8, unsampled_bytes: 16, frees_seen: 24, frees_matched: 32, reentrant: 40, zero_reallocs: 48, sampled: 56, sampled_bytes: 64, unsampled_failed: 72, submitted: 80, failed: 88, lost_ring_full: 96, lost_abandoned: 104, lost_in_flight: 112, lost_undecided: 120, lost_no_thread_state: 128, lost_result_unreadable: 136, untracked: 144, untracked_bytes: 152, lost_ring_full_bytes: 160, lost_call_bytes: 168, frees_lost: 176, frees_lost_bytes: 184, mappings_lost: 192, mappings_lost_bytes: 200, unmaps_lost: 208, unmaps_lost_bytes: 216, stacks_lost: 224, process_events_lost: 232, stale_replaced: 240, frees_no_thread_state: 248, system_calls_lost: 256, removals_refused: 264, threads: 272, inline_sampled: 280, counted_inside: 288, inline_frees: 296, announced: 304, inline_sampled_bytes: 312, set_full: 320 }
        ThreadRecord: 384 { process: 0, tid: 16, in_flight: 20, counters: 24, reallocated: 352 }
        AllocationRecord: 136 { kind: 0, tid: 4, process: 8, space: 24, sample: 40, time_ns: 48, address: 56, size_bytes: 64, interval: 72, trials: 80, offset: 88, caller: 96, site: 104, stack_kind: 108, stack_id: 112, untracked: 116, thread_name: 120 }
        FreeRecord: 56 { kind: 0, tid: 4, space: 8, sample: 24, time_ns: 32, size_bytes: 40, temporary: 48, reserved: 52 }
        UnmapRecord: 48 { kind: 0, tid: 4, space: 8, start: 24, end: 32, time_ns: 40 }
        ProcessRecord: 48 { kind: 0, cpu_us: 4, time_ns: 8, process: 16, next: 32 }
        Registers: 32 { ip: 0, sp: 8, fp: 16, lr: 24 }
        InFlightCall: 16 { sp: 0, caller: 8 }
        StackRecord: 152 { sample: 0, time_ns: 8, space: 16, registers: 32, in_flight: 64, copied_bytes: 128, ends_at: 132, missing_pages: 136, pieces: 140, top: 144 }
        StackPiece: 16 { start: 0, bytes: 8 }
        StackKey: 24 { space: 0, top: 16 }
        OuterFrames: 160 { slots: 0, pieces: 32 }
        StackSlot: 16 { address: 0, return_address: 8 }
        OuterCopy: 8320 { pieces: 0, bytes: 128 }
        PythonProcess: 112 { runtime: 0, code_tags: 8, interpreters_head: 16, interpreter_next: 20, threads_head: 24, lock: 28, running: 32, thread_next: 36, thread_interpreter: 40, thread_id: 44, thread_frame: 48, indirect_frame: 52, frame_bytes: 56, frame_code: 60, frame_previous: 64, frame_instruction: 68, instruction_is_index: 72, frame_owner: 76, frame_is_entry: 80, code_identity: 84, code_first_line: 88, code_bytes: 92, code_name: 96, code_file: 100, code_lines: 104, reserved: 108 }
        PythonFrame: 24 { code: 0, check: 8, instruction: 16, flags: 20 }
        PythonRecord: 1728 { mark: 0, sample: 8, time_ns: 16, space: 24, count: 40, walk: 44, continues: 48, reserved: 52, scratch: 56, frames: 192 }
        PythonCodeRecord: 2400 { mark: 0, space: 8, check: 24, head: 32, name: 304, file: 832, lines: 1360 }
        Site: 64 { offset: 0, reentrant_start: 8, reentrant_end: 16, file: 24, function: 28, size_argument: 30, times_argument: 31, old_argument: 32, out_argument: 33, flags: 34, reserved: 35, operands: 40 }
        FileRanges: 520 { count: 0, ranges: 8 }
        InlineProcess: 192 { bases: 0, state: 32, unread_pages: 36, memory_of: 40, hooked: 56, counts: 72 }
        SlotSums: 120 { threads: 0, countdown: 8, calls: 16, bytes: 24, sampled: 32, reported: 40, failed: 48, unsampled_failed: 56, interval: 64, random: 72, reserved: 80, frees_matched: 88, zero_reallocs: 96, sampled_call: 104, sampled_bytes: 112 }
        DrawConstants: 24 { interval: 0, multiplier: 8, shift: 16 }
    }
}

/// The array view of the counters has them in declaration order.
#[test]
fn counters_are_an_array() {
    let mut counters = Counters { calls: 1, threads: 3, ..Counters::default() };
    counters.as_mut_array()[1] = 2;
    assert_eq!(counters.unsampled, 2);
    assert_eq!((counters.as_array()[0], counters.as_array()[COUNTERS - 7]), (1, 3));
}
