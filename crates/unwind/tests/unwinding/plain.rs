//! Stacks of Rust code and of threads, truncated stacks, the cache.

use std::sync::Arc;

use heapbpf_testing::own_process::{OwnCapture, OwnProcess, captured, unwind};
use heapbpf_unwind::AddressBits;
use heapbpf_unwind::dwarf::{Limits, Unwinder};
use heapbpf_unwind::raw::{Completeness, Reason};

#[test]
fn own_thread_is_complete_and_recursion_is_counted() {
    let process = OwnProcess::read().expect("/proc");
    let (shallow, deep) = (unwind(&process, &captured(3)), unwind(&process, &captured(53)));
    assert_eq!(shallow.completeness, Completeness::Complete);
    assert_eq!(deep.completeness, Completeness::Complete);
    assert_eq!(deep.frames.len(), shallow.frames.len() + 50);
    // All frames in between are the same call.
    let repeated = &deep.frames[1..50];
    assert!(repeated.iter().all(|frame| *frame == repeated[0]), "{repeated:#x?}");
}

#[test]
fn main_thread_like_and_spawned_threads_are_complete() {
    let handle = std::thread::spawn(|| captured(5));
    let capture = handle.join().expect("thread");
    let process = OwnProcess::read().expect("/proc");
    assert_eq!(unwind(&process, &capture).completeness, Completeness::Complete);
}

#[test]
fn a_short_copy_is_reported() {
    let process = OwnProcess::read().expect("/proc");
    let mut capture = captured(40);
    let whole = unwind(&process, &capture);
    capture.stack.truncate(512);
    let truncated = unwind(&process, &capture);
    assert_eq!(truncated.completeness, Completeness::Truncated(Reason::StackCopyTooSmall));
    assert!(truncated.frames.len() < whole.frames.len());
    assert_eq!(truncated.frames[..], whole.frames[..truncated.frames.len()], "what is there is right");
}

#[test]
fn depth_is_limited() {
    let process = OwnProcess::read().expect("/proc");
    let capture = captured(40);
    let mut unwinder = Unwinder::new(Limits { max_depth: 10, ..Limits::default() }, AddressBits::default());
    let stack = unwinder.unwind(&mut process.clone(), &process.space(), capture.input());
    assert_eq!(stack.frames.len(), 10);
    assert_eq!(stack.completeness, Completeness::Truncated(Reason::DepthLimit));
}

#[test]
fn an_empty_copy_gives_the_caller() {
    let process = OwnProcess::read().expect("/proc");
    let mut capture = captured(2);
    let whole = unwind(&process, &capture);
    capture.stack.clear();
    let truncated = unwind(&process, &capture);
    assert_eq!(truncated.frames[..], whole.frames[..1]);
    assert_eq!(truncated.completeness, Completeness::Truncated(Reason::StackCopyTooSmall));
}

#[test]
fn repetition_is_recognized_exactly() {
    let process = OwnProcess::read().expect("/proc");
    let mut unwinder = Unwinder::default();
    let mut capture = captured(20);
    let mut unwind = |capture: &OwnCapture| {
        let stack = unwinder.unwind(&mut process.clone(), &process.space(), capture.input());
        (stack, unwinder.statistics().repeated)
    };
    let (first, repeated) = unwind(&capture);
    assert_eq!(repeated, 0);
    let (second, repeated) = unwind(&capture);
    assert_eq!(repeated, 1);
    assert!(Arc::ptr_eq(&first, &second));

    // Only changes to words that the walk has read matter.
    let mut relevant = 0;
    for at in (0..capture.stack.len().min(4096) - 8).step_by(8) {
        let kept: [u8; 8] = capture.stack[at..at + 8].try_into().expect("8 bytes");
        capture.stack[at..at + 8].copy_from_slice(&[0xa5; 8]);
        let before = unwind(&capture).1;
        let fresh = self::unwind(&process, &capture);
        let (cached, after) = unwind(&capture);
        assert_eq!(fresh, cached);
        relevant += u32::from(fresh != first);
        assert!(after > before, "the second look is a repetition");
        capture.stack[at..at + 8].copy_from_slice(&kept);
    }
    assert!(relevant >= 20, "return addresses matter: {relevant}");
}

#[test]
fn sections_stay_within_their_budget() {
    let process = OwnProcess::read().expect("/proc");
    let capture = captured(5);
    // Less than any module needs: each is read again when needed, and the stack is the same.
    let mut unwinder = Unwinder::new(Limits { section_bytes: 1, ..Limits::default() }, AddressBits::default());
    let stack = unwinder.unwind(&mut process.clone(), &process.space(), capture.input());
    assert_eq!(stack.completeness, Completeness::Complete);
    assert_eq!(unwinder.statistics().modules, 1);
}

#[test]
fn a_return_probe_is_reported() {
    // The kernel's trampoline replaces one return address.
    let process = OwnProcess::read().expect("/proc");
    let mut capture = captured(10);
    let whole = unwind(&process, &capture);
    let target = (whole.frames[4].address + 1).to_le_bytes();
    let word_of = |at: &usize| capture.stack[*at..*at + 8] == target;
    // The calls are all alike: the fourth word with this value is the return address of the fourth.
    let at = (0..capture.stack.len() - 8).step_by(8).filter(word_of).nth(3).expect("on the stack");
    for offset in [0, 16] {
        // Within the address space of every kernel that the test may run on.
        let trampoline: u64 = 0x7f_ffff_e000;
        capture.stack[at..at + 8].copy_from_slice(&(trampoline + offset).to_le_bytes());
        let mut process = process.clone();
        process.add_mapping(trampoline..trampoline + 4096, "[uprobes]");
        let truncated = unwind(&process, &capture);
        assert_eq!(truncated.completeness, Completeness::Truncated(Reason::ReturnProbe), "{offset}");
        assert_eq!(truncated.frames[..], whole.frames[..4], "{offset}");
    }
}

/// Interrupted code that has no call frame information and saves nothing (the vDSO's, on arm64): unwinding by frame
/// pointer would skip its caller.
#[test]
fn what_has_no_frame_is_left_by_the_link_register() {
    if cfg!(not(target_arch = "aarch64")) {
        return;
    }
    let mut process = OwnProcess::read().expect("/proc");
    let mut capture = captured(10);
    let whole = unwind(&process, &capture);
    let uncovered: u64 = 0x7f_ffff_e000;
    process.add_mapping(uncovered..uncovered + 4096, "uncovered");
    capture.registers.lr = capture.registers.ip;
    capture.registers.ip = uncovered + 100;
    let through = unwind(&process, &capture);
    assert_eq!(through.completeness, Completeness::Complete);
    assert_eq!(through.frames[1..], whole.frames[..]);
    // If the code has a frame of its own, the frame pointer leads to the same return address.
    let frame = capture.registers.sp.wrapping_sub(16);
    let below = [capture.registers.fp.to_le_bytes(), capture.registers.lr.to_le_bytes()].concat();
    capture.stack.splice(..0, below);
    (capture.registers.sp, capture.registers.fp) = (frame, frame);
    assert_eq!(unwind(&process, &capture).frames[1], whole.frames[0]);
}
