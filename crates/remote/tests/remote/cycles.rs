//! Hooking and unhooking, many times, while the program checks itself.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::program::{self, Program};

/// Hooks and unhooks until the time is over. Reports the number of cycles, and how often something had to be moved.
fn cycle(program: &mut Program, time: Duration) {
    let (mut hooks, mut removals) = (Vec::new(), Vec::new());
    let (mut moved_threads, mut moved_frames) = (0, 0);
    let start = Instant::now();
    while start.elapsed() < time {
        let hooked = program::hook(program.pid(), program.hooked);
        moved_threads += hooked.outcome.moved_threads;
        moved_frames += hooked.outcome.moved_frames;
        hooks.push(hooked.time);
        std::thread::sleep(Duration::from_millis(2));
        removals.push(program::take_out(program.pid()).time);
        program.assert_runs();
    }
    eprintln!("moved: {moved_threads} threads, {moved_frames} handlers");
    program::report("hooking", hooks);
    program::report("taking out", removals);
    program::report_futile();
}

/// Mappings of files; our resident and locked memory, kB; descriptors.
fn taken(pid: u32) -> (Vec<String>, Vec<String>, BTreeSet<String>) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
    // Threads allocate and free memory of their own.
    let maps = maps.lines().filter(|line| line.contains('/')).map(str::to_owned);
    let range = program::found(pid).range;
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).expect("it runs");
    let (mut is_ours, mut sizes) = (false, Vec::new());
    for line in smaps.lines() {
        let first = line.split([' ', '-']).next().and_then(|start| u64::from_str_radix(start, 16).ok());
        match first.filter(|_| !line.contains("kB")) {
            Some(start) => is_ours = range.contains(&start),
            None if is_ours && ["Rss:", "Locked:", "Private_Dirty:"].iter().any(|it| line.starts_with(it)) => {
                sizes.push(line.to_owned());
            }
            None => {}
        }
    }
    let descriptors = || -> BTreeSet<String> {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").flatten();
        open.map(|it| format!("{:?} {:?}", it.file_name(), std::fs::read_link(it.path()))).collect()
    };
    // What its C library opens for a moment is in one of them only.
    (maps.collect(), sizes, &descriptors() & &descriptors())
}

/// What is mapped stays, and is used again.
#[test]
fn a_process_has_the_same_after_the_first_and_the_tenth_cycle() {
    let Some(_turn) = program::turn() else { return };
    let program = Program::start("torture", &["2", "0"]);
    let cycle = || loop {
        program::hook(program.pid(), program.hooked);
        program::await_more_than(&program, 0);
        program::take_out(program.pid());
        program::assert_inert(program.pid());
        // Its memory was freed unless a thread was about to count there, which may get a processor late.
        let is_empty = || program::counted(program.pid()) == 0;
        if is_empty() {
            let taken = taken(program.pid());
            if is_empty() {
                break taken;
            }
        }
    };
    let first = cycle();
    (0..8).for_each(|_| drop(cycle()));
    assert_eq!(first, cycle());
    program.finish();
}

#[test]
pub fn a_single_thread_comes_to_no_harm() {
    let Some(_turn) = program::turn() else { return };
    let mut program = Program::start("torture", &["1", "0"]);
    cycle(&mut program, program::repeated(4));
    program::assert_inert(program.pid());
    eprintln!("{}", program.finish().trim());
}

#[test]
pub fn two_hundred_threads_are_stopped() {
    let Some(_turn) = program::turn() else { return };
    let mut program = Program::start("torture", &["200", "0", "20000"]);
    cycle(&mut program, program::repeated(5));
    eprintln!("{}", program.finish().trim());
}

/// Each list of its threads has new ones, until those that create them are stopped.
#[test]
pub fn a_process_that_creates_threads_without_end_is_stopped() {
    let Some(_turn) = program::turn() else { return };
    for mode in ["joined", "successive"] {
        let mut program = Program::start("storm", &[mode]);
        cycle(&mut program, program::repeated(4));
        program::assert_inert(program.pid());
        eprintln!("{mode}: {}", program.finish().trim());
    }
}

#[test]
fn calls_are_counted_while_hooked_and_children_start_empty() {
    let Some(_turn) = program::turn() else { return };
    let program = Program::start("torture", &["2", "0"]);
    program::hook(program.pid(), program.hooked);
    program::await_more_than(&program, program::counted(program.pid()));
    let found = program::found(program.pid());
    assert!(found.is_hooked() && found.text.is_some());
    assert!(found.replaced().eq(std::iter::once(program.hooked..program.hooked + program::REPLACED)));
    // The memfd is closed.
    assert!(program::traces(program.pid()).iter().all(|line| !line.starts_with("/memfd")));
    program.finish();
}

/// Hooks until a signal handler was found that returns to displaced instructions.
fn meet_handlers(arguments: &[&str]) {
    let program = Program::start("handlers", arguments);
    let start = Instant::now();
    let (mut cycles, mut moved) = (0, 0);
    while moved < 5 && start.elapsed() < Duration::from_secs(9) {
        moved += program::hook(program.pid(), program.hooked).outcome.moved_frames;
        cycles += 1;
        // Long enough for the handler to return.
        std::thread::sleep(Duration::from_millis(8));
        program::take_out(program.pid());
        program.assert_runs();
    }
    assert!(moved > 0, "no handler was met in {cycles} cycles");
    eprintln!("{cycles} cycles, {moved} handlers moved: {}", program.finish().trim());
}

#[test]
fn handlers_return_to_the_copies_of_displaced_instructions() {
    let Some(_turn) = program::turn() else { return };
    meet_handlers(&[]);
    meet_handlers(&["alternate"]);
}

/// A thread makes our calls under a frame below its stack pointer. The memory there may belong to something else.
#[test]
pub fn data_below_small_stacks_comes_to_no_harm() {
    let Some(_turn) = program::turn() else { return };
    for (program, stacks) in [
        ("small_stacks", "all"),
        ("small_stacks", "sleeping"),
        ("local_stack", "main"),
        ("local_stack", "thread"),
        ("local_stack", "alternate"),
    ] {
        let mut program = Program::start(program, &[stacks]);
        cycle(&mut program, program::repeated(3));
        program::assert_inert(program.pid());
        eprintln!("{stacks}: {}", program.finish().trim());
    }
}
