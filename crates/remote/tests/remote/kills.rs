//! When an injector is killed at any moment, the program goes on, and what is left can be found and removed.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use heapbpf_remote::{STOP_LIMIT, Target};

use crate::program::{self, Program};

const VARIABLE: &str = "HEAPBPF_TEST_INJECTOR";

/// Not a test: the injector that the tests below start and kill. Hooks and unhooks forever.
#[test]
fn as_the_injector() {
    let Ok(target) = std::env::var(VARIABLE) else { return };
    let mut numbers = target.split(' ').map(|number| number.parse::<u64>().expect("a number"));
    let (pid, hooked) = (numbers.next().expect("a process") as u32, numbers.next().expect("an address"));
    loop {
        let Ok(target) = Target::look(pid) else { continue };
        for found in target.found() {
            let _ = target.take_out(&found, &program::EMPTIED, STOP_LIMIT);
        }
        let Ok(target) = Target::look(pid) else { continue };
        if target.found().iter().all(heapbpf_remote::FoundBlob::is_inert) {
            let _ = target.hook(&program::plan(&target, hooked), STOP_LIMIT);
        }
    }
}

/// Starts injectors and kills them. Returns how many.
fn kill_injectors(program: &mut Program, time: Duration) -> u32 {
    let start = Instant::now();
    let mut kills = 0;
    let mut random = 88_172_645_463_325_252u64;
    while start.elapsed() < time {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let mut command = Command::new(std::env::current_exe().expect("this test has a file"));
        command.args(["--exact", "kills::as_the_injector", "--nocapture"]);
        command
            .env(VARIABLE, format!("{} {}", program.pid(), program.hooked))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        program::ends_with_us(&mut command);
        let mut injector = command.spawn().expect("it starts");
        // Starting takes some milliseconds; after that it works without a pause.
        std::thread::sleep(Duration::from_micros(6000 + random % 25_000));
        injector.kill().expect("it can be killed");
        injector.wait().expect("it can be waited for");
        kills += 1;
        program.assert_runs();
    }
    kills
}

/// Removes what the last injector left, and checks that all of it is gone.
fn clean(program: &Program) {
    program::take_out(program.pid());
    program::assert_inert(program.pid());
}

#[test]
pub fn a_killed_injector_leaves_a_program_that_goes_on() {
    let Some(_turn) = program::turn() else { return };
    let mut program = Program::start("torture", &["4", "1"]);
    let kills = kill_injectors(&mut program, program::repeated(12));
    clean(&program);
    eprintln!("{kills} injectors killed: {}", program.finish().trim());
}
