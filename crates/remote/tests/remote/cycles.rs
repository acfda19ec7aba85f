//! Hooking and letting go again, many times, while the program checks itself.

use std::time::{Duration, Instant};

use crate::program::{self, Program};

/// Hooks and takes out until the time is over; cycles, and how often something had to be moved.
fn cycle(program: &mut Program, time: Duration) {
    let (mut hooks, mut alone, mut removals) = (Vec::new(), Vec::new(), Vec::new());
    let (mut moved_threads, mut moved_frames, mut kept) = (0, 0, 0);
    let start = Instant::now();
    while start.elapsed() < time {
        let hooked = program::hook(program.pid(), program.hooked);
        moved_threads += hooked.outcome.moved_threads;
        moved_frames += hooked.outcome.moved_frames;
        hooks.push(hooked.time);
        alone.push(hooked.alone);
        std::thread::sleep(Duration::from_millis(2));
        let out = program::take_out(program.pid());
        removals.push(out.time);
        if !out.outcome {
            kept += 1;
            assert!(!program::found(program.pid()).is_hooked());
            while !program::take_out(program.pid()).outcome {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        program.assert_runs();
    }
    eprintln!("moved: {moved_threads} threads, {moved_frames} handlers; kept mapped for a while: {kept}");
    program::tell("hooking", hooks);
    program::tell("hooking, one thread before the others", alone);
    program::tell("taking out", removals);
    program::tell_vain();
}

#[test]
pub fn a_single_thread_comes_to_no_harm() {
    let _turn = program::turn();
    if !program::can_trace() {
        return;
    }
    let mut program = Program::start("torture", &["1", "0"]);
    cycle(&mut program, program::repeated(4));
    assert_eq!(program::traces(program.pid()), [""; 0]);
    eprintln!("{}", program.finish().trim());
}

#[test]
pub fn two_hundred_threads_are_stopped() {
    let _turn = program::turn();
    if !program::can_trace() {
        return;
    }
    let mut program = Program::start("torture", &["200", "0", "20000"]);
    cycle(&mut program, program::repeated(5));
    eprintln!("{}", program.finish().trim());
}

#[test]
fn calls_are_counted_while_hooked_and_children_start_empty() {
    let _turn = program::turn();
    if !program::can_trace() {
        return;
    }
    let program = Program::start("torture", &["2", "0"]);
    program::hook(program.pid(), program.hooked);
    let first = program::counted(program.pid());
    std::thread::sleep(Duration::from_millis(50));
    assert!(program::counted(program.pid()) > first);
    let found = program::found(program.pid());
    assert!(found.is_hooked() && found.text.is_some());
    assert!(found.replaced().eq(std::iter::once(program.hooked..program.hooked + program::REPLACED)));
    // The memfd is closed.
    assert!(program::traces(program.pid()).iter().all(|line| !line.starts_with("/memfd")));
    program.finish();
}

/// Hooks until handlers were met that return to displaced instructions.
fn meet_handlers(arguments: &[&str]) {
    let program = Program::start("handlers", arguments);
    let start = Instant::now();
    let (mut cycles, mut moved) = (0, 0);
    while moved < 5 && start.elapsed() < Duration::from_secs(9) {
        moved += program::hook(program.pid(), program.hooked).outcome.moved_frames;
        cycles += 1;
        // Long enough for the handler to return.
        std::thread::sleep(Duration::from_millis(8));
        while !program::take_out(program.pid()).outcome {
            std::thread::sleep(Duration::from_millis(1));
        }
        program.assert_runs();
    }
    assert!(moved > 0, "no handler was met in {cycles} cycles");
    eprintln!("{cycles} cycles, {moved} handlers moved: {}", program.finish().trim());
}

#[test]
fn handlers_return_to_the_copies_of_displaced_instructions() {
    let _turn = program::turn();
    if !program::can_trace() {
        return;
    }
    meet_handlers(&[]);
    meet_handlers(&["alternate"]);
}

/// A thread makes our calls under a frame below its stack pointer. What is there may be another's, if it is not on the stack that it
/// was given.
#[test]
pub fn data_below_small_stacks_comes_to_no_harm() {
    let _turn = program::turn();
    if !program::can_trace() {
        return;
    }
    for stacks in ["all", "sleeping"] {
        let mut program = Program::start("small_stacks", &[stacks]);
        cycle(&mut program, program::repeated(3));
        assert_eq!(program::traces(program.pid()), [""; 0]);
        eprintln!("{stacks}: {}", program.finish().trim());
    }
}
