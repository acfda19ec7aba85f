//! Effects of time limits.

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use heapbpf_remote::{Busy, Error, STOP_LIMIT, Target};

use crate::program::{self, Program, compiled};

/// How long the process gets no CPU: longer than the limit, and shorter than the extended limit.
const TAKEN: Duration = Duration::from_millis(40);
/// The least time after which an extended stop is abandoned.
const EXTENDED: Duration = Duration::from_millis(80);

/// The first CPU that this thread may run on.
fn one_processor() -> libc::cpu_set_t {
    // SAFETY: a CPU set is plain bits, and the kernel writes no more than its size.
    unsafe {
        let mut all: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of_val(&all), &raw mut all), 0);
        let first = (0..libc::CPU_SETSIZE as usize).find(|at| libc::CPU_ISSET(*at, &all)).expect("it runs on one");
        let mut one: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(first, &mut one);
        one
    }
}

/// The threads of the control group that has all real-time bandwidth, where version 1 groups divide it.
const ROOT_GROUP: &str = "/sys/fs/cgroup/cpu/tasks";

/// Binds this thread to these CPUs, ahead of all other threads there. Returns whether that worked. It may leave its
/// control group for that.
fn takes(processors: &libc::cpu_set_t) -> bool {
    // SAFETY: the kernel only reads the set; 0 is this thread.
    let is_bound = unsafe { libc::sched_setaffinity(0, size_of_val(processors), processors) } == 0;
    is_bound && (is_first() || (std::fs::write(ROOT_GROUP, "0").is_ok() && is_first()))
}

/// Gives this thread a real-time priority. Returns whether that worked.
fn is_first() -> bool {
    let first = libc::sched_param { sched_priority: 50 };
    // SAFETY: the kernel only reads the parameters; 0 is this thread.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const first) == 0 }
}

/// Makes a thread occupy these CPUs for a while. Returns whether it could, as soon as it has them.
fn take(processors: libc::cpu_set_t) -> bool {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let has_taken = takes(&processors);
        let _ = sender.send(has_taken);
        let start = Instant::now();
        while has_taken && start.elapsed() < TAKEN {
            std::hint::spin_loop();
        }
    });
    receiver.recv().is_ok_and(|has_taken| has_taken)
}

/// Removes what a failed attempt left. A completely mapped blob stays, and the next plan uses it again.
fn take_all_out(pid: u32) {
    program::take_out(pid);
}

/// Once pages are being replaced, the earlier counter sees no calls, so the process is not released as early as it
/// would be before.
#[test]
fn a_process_without_a_processor_has_more_time_once_it_is_the_moment() {
    let _turn = program::turn();
    if !program::can_trace() {
        return;
    }
    if !std::thread::spawn(|| takes(&one_processor())).join().expect("it does not panic") {
        return heapbpf_testing::skipped("threads may not have a real-time priority here");
    }
    let processors = one_processor();
    let mut command = Command::new(compiled("torture"));
    command.args(["1", "0"]);
    // SAFETY: one system call, which only reads.
    unsafe {
        command.pre_exec(move || match libc::sched_setaffinity(0, size_of_val(&processors), &raw const processors) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let program = Program::run(&mut command);
    let stopped = loop {
        let target = Target::look(program.pid()).expect("it can be looked at");
        let plan = program::plan(&target, program.hooked);
        let mapped = match target.map(&plan, STOP_LIMIT) {
            Ok(mapped) => mapped.outcome,
            Err(Error::Busy { .. }) => {
                take_all_out(program.pid());
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        match target.replace_if(&plan, &mapped, STOP_LIMIT, move || take(processors)) {
            Ok(hooked) => break hooked.time,
            // Something else occupied the CPUs for longer, or before the moment came.
            Err(Error::Busy { why: Busy::Late, stopped }) if stopped > EXTENDED => {}
            Err(Error::Busy { why: Busy::Slow | Busy::Position, .. }) => {}
            Err(error) => panic!("{error}"),
        }
        take_all_out(program.pid());
    };
    assert!(stopped >= TAKEN - Duration::from_millis(1), "it was stopped for {stopped:?} only: it had a processor");
    // On a busy machine, the program may get its next turn late.
    while program::counted(program.pid()) == 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    program::take_out(program.pid());
    program.finish();
}
