//! Stacks of Rust code, threads, cuts, the cache.

use std::sync::Arc;

use crate::unwind::dwarf::{Capture, Limits, Unwinder};
use crate::unwind::own_process::{OwnCapture, OwnProcess, capture_here, take_capture};
use crate::unwind::raw::{Completeness, RawStack, Reason};

/// Captures at the bottom of `depth` further calls.
#[inline(never)]
pub fn descend(depth: u32) -> u32 {
    if depth == 0 {
        capture_here();
        return 0;
    }
    std::hint::black_box(descend(depth - 1)) + 1
}

pub fn captured(depth: u32) -> OwnCapture {
    descend(depth);
    take_capture().expect("x86-64 with /proc")
}

pub fn unwind(process: &OwnProcess, capture: &OwnCapture) -> Arc<RawStack> {
    let capture = Capture { registers: &capture.registers, stack: &capture.stack };
    Unwinder::default().unwind(process, &process.space(), capture)
}

#[test]
fn own_thread_is_complete_and_recursion_is_counted() {
    let process = OwnProcess::read().expect("/proc");
    let (shallow, deep) = (unwind(&process, &captured(3)), unwind(&process, &captured(53)));
    assert_eq!(shallow.completeness, Completeness::Complete);
    assert_eq!(deep.completeness, Completeness::Complete);
    assert_eq!(deep.frames.len(), shallow.frames.len() + 50);
    // The frames in between are one and the same call.
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
fn a_short_copy_is_said_to_be_short() {
    let process = OwnProcess::read().expect("/proc");
    let mut capture = captured(40);
    let whole = unwind(&process, &capture);
    capture.stack.truncate(512);
    let cut = unwind(&process, &capture);
    assert_eq!(cut.completeness, Completeness::Cut(Reason::StackCopyTooSmall));
    assert!(cut.frames.len() < whole.frames.len());
    assert_eq!(cut.frames[..], whole.frames[..cut.frames.len()], "what is there is right");
}

#[test]
fn depth_is_limited() {
    let process = OwnProcess::read().expect("/proc");
    let capture = captured(40);
    let mut unwinder = Unwinder::new(Limits { max_depth: 10, ..Limits::default() });
    let stack =
        unwinder.unwind(&process, &process.space(), Capture { registers: &capture.registers, stack: &capture.stack });
    assert_eq!(stack.frames.len(), 10);
    assert_eq!(stack.completeness, Completeness::Cut(Reason::DepthLimit));
}

#[test]
fn an_empty_copy_gives_the_caller() {
    let process = OwnProcess::read().expect("/proc");
    let mut capture = captured(2);
    let whole = unwind(&process, &capture);
    capture.stack.clear();
    let cut = unwind(&process, &capture);
    assert_eq!(cut.frames[..], whole.frames[..1]);
    assert_eq!(cut.completeness, Completeness::Cut(Reason::StackCopyTooSmall));
}

#[test]
fn repetition_is_recognized_exactly() {
    let process = OwnProcess::read().expect("/proc");
    let mut unwinder = Unwinder::default();
    let mut capture = captured(20);
    let mut unwind = |capture: &OwnCapture| {
        let stack = Capture { registers: &capture.registers, stack: &capture.stack };
        let stack = unwinder.unwind(&process, &process.space(), stack);
        (stack, unwinder.statistics().repeated)
    };
    let (first, repeated) = unwind(&capture);
    assert_eq!(repeated, 0);
    let (second, repeated) = unwind(&capture);
    assert_eq!(repeated, 1);
    assert!(Arc::ptr_eq(&first, &second));

    // Any word that the walk looked at makes a difference, no other word does.
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
    // Less than any module has: each is read again when its turn comes, and the stack is right all the same.
    let mut unwinder = Unwinder::new(Limits { section_bytes: 1, ..Limits::default() });
    let stack =
        unwinder.unwind(&process, &process.space(), Capture { registers: &capture.registers, stack: &capture.stack });
    assert_eq!(stack.completeness, Completeness::Complete);
    assert_eq!(unwinder.statistics().modules, 1);
}
