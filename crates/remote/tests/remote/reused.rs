//! Ids may have been reused between the examination and the stop.

use std::process::{Command, Stdio};

use heapbpf_remote::{Busy, Error, STOP_LIMIT, Target};

use crate::program::{self, Program, compiled};

/// A thread ends after the examination, and a child of the process gets its id. The child is not made to call for its
/// parent.
#[test]
fn a_thread_whose_id_another_process_got_is_left_alone() {
    let Some(_turn) = program::turn() else { return };
    let mut program = Program::run(Command::new(compiled("reused")).stdin(Stdio::piped()));
    let target = Target::look(program.pid()).expect("it can be looked at");
    let mut plan = program::plan(&target, program.hooked);
    program.send("go\n");
    let line = program.line();
    assert!(line.starts_with("READY "), "{line:?}");
    let mut mapped = 0;
    // On a busy machine, most attempts come too late.
    for attempt in 0..500 {
        if attempt >= 20 && mapped > 0 {
            break;
        }
        match target.map(&plan, STOP_LIMIT) {
            Ok(_) => {
                mapped += 1;
                plan = program::plan(&Target::look(program.pid()).expect("it can be looked at"), program.hooked);
            }
            Err(Error::Busy { .. }) => {}
            // The child has made a call for us, whose result was expected in its parent.
            Err(error) => panic!("{error}"),
        }
    }
    assert!(mapped > 0, "its other thread can make the calls");
    program.finish();
}

/// A thread other than the first calls exec while the process is being stopped. From then on, the first thread's id
/// belongs to a thread of a new program, here at the same addresses. It is not made to call for the old one, and does
/// not get its registers. Nor is there a deadlock: the exec waits until the tracers of the other threads have reaped
/// them.
#[test]
fn a_process_that_another_thread_replaces_goes_on() {
    let Some(_turn) = program::turn() else { return };
    let mut program = Program::run(Command::new(compiled("replaced")).arg("3000").stdin(Stdio::piped()));
    // No plan can be made while the process is being replaced.
    let plan = program::plan(&Target::look(program.pid()).expect("it can be looked at"), program.hooked);
    program.send("go\n");
    let (mut hooked, mut changed, mut others) = (0, 0, 0);
    for _ in 0..20_000 {
        match Target::look(program.pid()).map_err(Error::from).and_then(|target| target.hook(&plan, STOP_LIMIT)) {
            Ok(_) => hooked += 1,
            Err(Error::Busy { why: Busy::Changed, .. }) => changed += 1,
            Err(stuck @ Error::Stuck(_)) => panic!("{stuck}"),
            Err(_) => others += 1,
        }
        program.assert_runs();
        if hooked >= 5 && changed >= 100 {
            break;
        }
    }
    eprintln!("hooked {hooked} times; {changed} times it was another program by then; {others} times otherwise not");
    assert!(hooked > 0 && changed > 0);
}
