//! What was looked at may be somebody else's when it is stopped.

use std::process::{Command, Stdio};

use heapbpf_remote::{Error, Mapped, Plan, STOP_LIMIT, Target};

use crate::program::{self, Program, compiled};

/// A thread ends after the look, and a child of the process gets its id: the child is not made to call for its parent.
#[test]
fn a_thread_whose_id_another_process_got_is_left_alone() {
    let _turn = program::turn();
    if !program::can_trace() {
        return;
    }
    let mut program = Program::run(Command::new(compiled("reused")).stdin(Stdio::piped()));
    let target = Target::look(program.pid()).expect("it can be looked at");
    let plan = program::plan(&target, program.hooked);
    program.tell("go\n");
    let line = program.line();
    assert!(line.starts_with("READY "), "{line:?}");
    let mut mapped = 0;
    for _ in 0..20 {
        match target.map(&plan, STOP_LIMIT) {
            Ok(done) => {
                unmap(&target, &plan, &done.outcome);
                mapped += 1;
            }
            Err(Error::Busy { .. }) => {}
            // It has made a call for us, whose result is looked for in its parent.
            Err(error) => panic!("{error}"),
        }
    }
    assert!(mapped > 0, "its other thread can make the calls");
    program.finish();
}

/// On a busy machine, the one thread that may be taken does not always stop in time.
fn unmap(target: &Target, plan: &Plan, mapped: &Mapped) {
    for _ in 0..100 {
        match target.unmap(plan, mapped, STOP_LIMIT) {
            Err(Error::Busy { .. }) => {}
            result => return result.map(drop).expect("it can be unmapped"),
        }
    }
    panic!("it was not unmapped in 100 attempts");
}
