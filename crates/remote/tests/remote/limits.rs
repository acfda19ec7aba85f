//! Effects of time limits.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use heapbpf_remote::{Busy, Error, STOP_LIMIT, Stopper, Target, perform, stop_through};

use crate::program::{self, Program, compiled};

/// How long the process gets no CPU: longer than the limit, and shorter than the extended limit.
const TAKEN: Duration = Duration::from_millis(40);
/// The least time after which an extended stop is abandoned.
const EXTENDED: Duration = Duration::from_millis(80);
/// When the kernel ends a process that is stuck in a stop.
const STUCK: Duration = Duration::from_millis(250);
/// How long the process gets no CPU when it is waited for: longer than that, and shorter than a second.
const TAKEN_FOR_LONG: Duration = Duration::from_millis(500);
/// Descriptors of a process. Looking through them takes longer than a stop may last.
const DESCRIPTORS: usize = 15_000;

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
    is_bound && (is_first() || (fs::write(ROOT_GROUP, "0").is_ok() && is_first()))
}

/// Gives this thread a real-time priority. Returns whether that worked.
fn is_first() -> bool {
    let first = libc::sched_param { sched_priority: 50 };
    // SAFETY: the kernel only reads the parameters; 0 is this thread.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const first) == 0 }
}

/// Makes a thread occupy these CPUs for this time. Returns whether it could, as soon as it has them.
fn take(processors: libc::cpu_set_t, time: Duration) -> bool {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let has_taken = takes(&processors);
        let _ = sender.send(has_taken);
        let start = Instant::now();
        while has_taken && start.elapsed() < time {
            std::hint::spin_loop();
        }
    });
    receiver.recv().is_ok_and(|has_taken| has_taken)
}

/// Removes what a failed attempt left. A completely mapped blob stays, and the next plan uses it again.
fn take_all_out(pid: u32) {
    program::take_out(pid);
}

/// Starts a program that may only run on the CPUs that [`take`] can take; `None` if it cannot take any.
fn on_one_processor(name: &str, arguments: &[&str]) -> Option<Program> {
    if !std::thread::spawn(|| takes(&one_processor())).join().expect("it does not panic") {
        heapbpf_testing::skipped("threads may not have a real-time priority here");
        return None;
    }
    let processors = one_processor();
    let mut command = Command::new(compiled(name));
    command.args(arguments);
    // SAFETY: one system call, which only reads.
    unsafe {
        command.pre_exec(move || match libc::sched_setaffinity(0, size_of_val(&processors), &raw const processors) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        });
    }
    Some(Program::run(&mut command))
}

/// Has each stop made by a child process, which takes the CPUs from the target once it is asked whether this is the
/// moment.
struct Child(libc::cpu_set_t);

impl Stopper for Child {
    fn stop(
        &self,
        request: &[u8],
        with: [BorrowedFd<'_>; 3],
        _: &mut dyn FnMut() -> bool,
    ) -> io::Result<Option<Vec<u8>>> {
        let (mut here, mut there) = UnixStream::pair()?;
        let (with, processors) = (with.map(|fd| fd.try_clone_to_owned().expect("it is open")), self.0);
        // SAFETY: the C library makes its own locks available to the child, and no other thread holds one of ours.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let _ = there.write_all(&perform(request, with, move || take(processors, TAKEN_FOR_LONG)));
            // SAFETY: the child ends here, without running the parent's exit handlers.
            unsafe { libc::_exit(0) }
        }
        assert!(child > 0, "a child");
        drop(there);
        let mut answer = Vec::new();
        here.read_to_end(&mut answer)?;
        // SAFETY: our child; the kernel gets no address to write a status to.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        if answer.is_empty() { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(Some(answer)) }
    }
}

/// Once pages are being replaced, the earlier counter sees no calls, so the process is not released as early as it
/// would be before.
#[test]
fn a_process_without_a_processor_has_more_time_once_it_is_the_moment() {
    let Some(_turn) = program::turn() else { return };
    let Some(program) = on_one_processor("torture", &["1", "0"]) else { return };
    let processors = one_processor();
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
        match target.replace_if(&plan, &mapped, STOP_LIMIT, move || take(processors, TAKEN)) {
            Ok(hooked) => break hooked.time,
            // Something else occupied the CPUs for longer, or before the moment came.
            Err(Error::Busy { why: Busy::Late, stopped }) if stopped > EXTENDED => {}
            Err(Error::Busy { why: Busy::Slow | Busy::Position, .. }) => {}
            Err(error) => panic!("{error}"),
        }
        take_all_out(program.pid());
    };
    assert!(stopped >= TAKEN - Duration::from_millis(1), "it was stopped for {stopped:?} only: it had a processor");
    program::await_more_than(&program, 0);
    program::take_out(program.pid());
    program.finish();
}

/// The process that stops it is not ended while it waits for a thread without a processor: what the thread's signal
/// frame covers is other threads' data, and has to be put back.
#[test]
fn a_thread_without_a_processor_is_waited_for() {
    let Some(_turn) = program::turn() else { return };
    if std::thread::available_parallelism().is_ok_and(|processors| processors.get() < 2) {
        return heapbpf_testing::skipped("whoever stops the process needs another processor");
    }
    let Some(program) = on_one_processor("small_stacks", &["all"]) else { return };
    let is_waited_for = || {
        take_all_out(program.pid());
        let target = Target::look(program.pid()).expect("it can be looked at");
        let plan = program::plan(&target, program.hooked);
        let Ok(mapped) = target.map(&plan, STOP_LIMIT) else { return false };
        stop_through(Some(Arc::new(Child(one_processor()))));
        let replaced = target.replace_if(&plan, &mapped.outcome, STOP_LIMIT, || true);
        stop_through(None);
        match replaced {
            Err(Error::Busy { why: Busy::Late, stopped }) => stopped > STUCK,
            // Something else occupied the CPUs.
            Ok(_) | Err(Error::Busy { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    };
    assert!((0..50).any(|_| is_waited_for()));
    take_all_out(program.pid());
    program.finish();
}

/// A control group of version 2. It is removed when dropped.
struct Group(PathBuf);

impl Group {
    /// Creates a group that can be frozen; `None` if that is not possible here.
    fn new() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
        let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"))?.split(' ').nth(1)?;
        let path = Path::new(mount).join(format!("heapbpf-remote-{}", std::process::id()));
        fs::create_dir(&path).ok()?;
        Some(Self(path)).filter(|group| group.freezer().exists())
    }

    fn freezer(&self) -> PathBuf {
        self.0.join("cgroup.freeze")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Its group is frozen once all threads are stopped, so none of them gets to a call that it is to make. The thread that
/// was to make it has left the signal frame all the same: under the frame it would block all signals.
#[test]
fn a_process_that_is_frozen_during_the_stop_is_released_as_it_was() {
    /// The signals that a thread under the frame blocks: all but SIGKILL and SIGSTOP.
    const ALL: &str = "SigBlk:\tfffffffffffbfeff";
    let Some(_turn) = program::turn() else { return };
    let Some(group) = Group::new() else {
        return heapbpf_testing::skipped("there are no control groups that can be frozen");
    };
    let program = Program::start("torture", &["1", "0"]);
    let pid = program.pid();
    fs::write(group.0.join("cgroup.procs"), pid.to_string()).expect("root may move processes");
    let set_frozen = |word: &str| fs::write(group.freezer(), word).expect("our own group");
    let is_late = || {
        set_frozen("0");
        take_all_out(pid);
        let target = Target::look(pid).expect("it can be looked at");
        let plan = program::plan(&target, program.hooked);
        let Ok(mapped) = target.map(&plan, STOP_LIMIT) else { return false };
        let freezer = group.freezer();
        let freeze = move || fs::write(freezer, "1").is_ok();
        match target.replace_if(&plan, &mapped.outcome, STOP_LIMIT, freeze) {
            Err(Error::Busy { why: Busy::Late, .. }) => true,
            // Something else occupied the CPUs.
            Err(Error::Busy { .. }) => false,
            Ok(_) => panic!("a frozen process made calls"),
            Err(error) => panic!("{error}"),
        }
    };
    assert!((0..50).any(|_| is_late()));
    for tid in program.threads() {
        let status = fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).expect("it is frozen");
        assert!(!status.contains(ALL) && status.contains("TracerPid:\t0\n"), "thread {tid}: {status}");
    }
    set_frozen("0");
    take_all_out(pid);
    program.finish();
}

/// Its descriptors are looked through before the stop.
#[test]
fn a_process_with_many_descriptors_is_released_in_time() {
    let Some(_turn) = program::turn() else { return };
    let mut most = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call fills in the structure that it gets.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut most) }, 0);
    if most.rlim_max <= DESCRIPTORS as u64 + 1000 {
        return heapbpf_testing::skipped(format_args!("a process may have {} descriptors", most.rlim_max));
    }
    most.rlim_cur = most.rlim_max;
    let mut command = Command::new(compiled("torture"));
    command.args(["2", "0"]);
    // SAFETY: only system calls.
    unsafe {
        command.pre_exec(move || {
            let is_done = libc::setrlimit(libc::RLIMIT_NOFILE, &raw const most) == 0
                && (0..DESCRIPTORS).all(|_| libc::dup(0) >= 0);
            if is_done { Ok(()) } else { Err(io::Error::last_os_error()) }
        });
    }
    let program = Program::run(&mut command);
    let is_in_time = || {
        program::hook(program.pid(), program.hooked);
        let target = Target::look(program.pid()).expect("it can be looked at");
        match target.take_out(&program::found(program.pid()), &program::EMPTIED, STOP_LIMIT) {
            Ok(_) => true,
            Err(Error::Busy { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    };
    assert!((0..20).any(|_| is_in_time()));
    program::assert_inert(program.pid());
    program.finish();
}
