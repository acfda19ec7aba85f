//! System calls in progress behave as without us.

use std::time::{Duration, Instant};

use heapbpf_remote::Target;

use crate::program::{self, Program};

#[test]
fn blocking_calls_are_unaffected() {
    let _turn = program::turn();
    if !program::can_trace() {
        return;
    }
    let mut program = Program::start("blocking", &[]);
    let start = Instant::now();
    let (mut cycles, mut times) = (0, Vec::new());
    while start.elapsed() < Duration::from_secs(8) {
        times.push(program::hook(program.pid(), program.hooked).time);
        // Stops too often would keep calls whose time-outs begin anew from ever ending.
        std::thread::sleep(Duration::from_millis(23));
        program::take_out(program.pid());
        std::thread::sleep(Duration::from_millis(7));
        program.assert_runs();
        cycles += 1;
    }
    program::tell("hooking blocked threads", times);
    program::tell_vain();
    eprintln!("{cycles} cycles: {}", program.finish().trim());
}

#[test]
fn a_seccomp_filter_is_suspended_for_our_calls() {
    let _turn = program::turn();
    if !program::can_trace() {
        return;
    }
    let mut program = Program::start("sandboxed", &["filter"]);
    assert_eq!(program.line(), "IN\n");
    assert!(Target::look(program.pid()).expect("it runs").is_filtered());
    for _ in 0..50 {
        program::hook(program.pid(), program.hooked);
        while !program::take_out(program.pid()).outcome {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    program.assert_runs();
    program.finish();
}
