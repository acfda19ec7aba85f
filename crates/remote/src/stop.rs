//! Stops all threads of a process for a moment, and lets them go.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::Busy;
use crate::failure::Failure;
use crate::interrupted::{self, SYSCALL_BYTES};
use crate::memory::Memory;
use crate::priority::Raised;
use crate::seccomp::{Answer, Call, Filters};
use crate::sleeping_call::Sleeping;
use crate::status::Status;
use crate::sys::{self, Registers, Report};

/// When to look whether threads are still there.
const PATIENCE: Duration = Duration::from_millis(2);
/// How long to wait for threads that did not stop in time.
const LATEST: Duration = Duration::from_secs(1);
/// Most threads that are stopped.
const MAX_THREADS: usize = 1 << 16;
/// Links of a folder without folders.
const FOLDER_LINKS: u64 = 2;

/// What a traced thread is doing.
#[derive(Clone, Copy)]
enum State {
    Running,
    Stopped,
    Gone,
}

/// A traced thread.
pub(crate) struct Thread {
    pub(crate) tid: i32,
    state: State,
    /// Those with which it goes on, once it is stopped; none if it is being killed.
    registers: Option<Registers>,
    is_interrupted: bool,
}

impl Thread {
    /// Takes in what the thread did. Whether it stopped with its process, by job control.
    fn take(&mut self, report: Report) -> bool {
        match report {
            Report::Ended => self.state = State::Gone,
            Report::Interrupted | Report::JobControl => {
                self.state = State::Stopped;
                self.registers = if report == Report::Interrupted { repaired(self.tid) } else { None };
            }
            // The request to stop stays pending. The signal may be one that nobody would have noticed if the thread were not
            // traced, so its call must not end by it; the kernel ends the call if a handler runs.
            Report::Signal(signal) => {
                repaired(self.tid);
                let _ = sys::cont(self.tid, signal);
            }
            Report::SystemCall => drop(sys::cont(self.tid, 0)),
        }
        report == Report::JobControl
    }
}

/// The threads of a process that the calling thread traces. When that thread ends, however it ends, the kernel lets all of
/// them go.
pub(crate) struct Stop {
    pub(crate) pid: i32,
    pub(crate) threads: Vec<Thread>,
    /// Threads that were looked at, and their places in `threads`.
    known: HashMap<i32, Option<usize>>,
    /// When the first thread was asked to stop.
    since: Option<Instant>,
    limit: Duration,
    /// How much later the kernel ends this process.
    grace: Option<Duration>,
    /// That of the program which the process ran when it was looked at.
    memory: Arc<Memory>,
    /// Whether nobody is stopped while a thread is in a call that would return a part of what it was to do.
    spares_calls: bool,
    has_job_control: bool,
    /// The priority of the calling thread meanwhile.
    raised: Option<Raised>,
}

impl Stop {
    /// Of a process, for at most `limit`. Nothing is stopped so far. If it takes `grace` longer, the kernel ends this process.
    pub(crate) fn new(
        pid: i32,
        memory: Arc<Memory>,
        spares_calls: bool,
        limit: Duration,
        grace: Option<Duration>,
    ) -> Self {
        let (threads, known, has_job_control) = (Vec::new(), HashMap::new(), false);
        Self { pid, threads, known, since: None, limit, grace, memory, spares_calls, has_job_control, raised: None }
    }

    /// Stops all threads.
    pub(crate) fn stop_all(&mut self) -> Result<(), Failure> {
        self.raised.get_or_insert_with(Raised::begin);
        // Before anybody is traced: signals that are ignored wake whoever is. A call may begin between this look and the stop.
        if self.spares_calls && self.since.is_none() && self.would_end_a_call()? {
            return Err(Failure::Busy(Busy::InCall));
        }
        // Becoming the tracer stops nobody, so as much of it as possible is done before the clock starts.
        while self.seize_new()? {
            self.take_reports()?;
        }
        if let Some(grace) = self.grace.filter(|_| self.since.is_none()) {
            sys::end_after(self.limit + grace).map_err(|error| Failure::Trace("setting a time limit", error))?;
        }
        self.since.get_or_insert_with(Instant::now);
        self.wait_for_all()?;
        while !self.is_complete() && self.seize_new()? {
            self.wait_for_all()?;
        }
        let first = self.stopped_threads().next().ok_or(Failure::Ended)?;
        // One of them may have run another program meanwhile, which ends all others. The id of the first thread is its own then. Only
        // what is stopped now has registers, and of what is stopped, a new program's thread has other memory.
        if sys::registers(first).is_err() || !self.memory.is_there() {
            return Err(Failure::Busy(Busy::Changed));
        }
        Ok(())
    }

    /// Whether a thread is in a call that a stop may end early.
    fn would_end_a_call(&self) -> Result<bool, Failure> {
        let mut sleeping = self.all_threads()?.into_iter().filter_map(|tid| Sleeping::look(self.pid, tid));
        Ok(sleeping.any(|sleeping| sleeping.may_return_a_part()))
    }

    /// The threads that it has now.
    fn all_threads(&self) -> Result<Vec<i32>, Failure> {
        let list = match fs::read_dir(format!("/proc/{}/task", self.pid)) {
            Ok(list) => list,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Failure::Ended),
            Err(source) => return Err(Failure::Trace("listing its threads", source)),
        };
        let list = list.map_while(Result::ok).take(MAX_THREADS);
        Ok(list.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
    }

    /// Whether the process has no other threads than those that are stopped: the kernel counts them among the links of this
    /// folder (`proc_task_getattr`). That is quicker than to list them.
    fn is_complete(&self) -> bool {
        let links = fs::metadata(format!("/proc/{}/task", self.pid)).map(|folder| folder.nlink());
        links.is_ok_and(|links| links == FOLDER_LINKS + self.stopped_threads().count() as u64)
    }

    /// Stops all threads that are traced.
    fn wait_for_all(&mut self) -> Result<(), Failure> {
        self.interrupt_new()?;
        let mut last = Instant::now();
        while self.threads.iter().any(|thread| matches!(thread.state, State::Running)) {
            if self.take_reports_of_running()? {
                last = Instant::now();
            } else {
                self.check_time(Busy::Slow)?;
                sys::pause(last);
                self.forget_vanished();
            }
        }
        if self.has_job_control { Err(Failure::Busy(Busy::JobControl)) } else { Ok(()) }
    }

    /// Becomes the tracer of threads that are not traced yet. Whether there were any. The first thread is traced last, and let go first:
    /// while it is traced, signals to the process that it ignores are not thrown away where they are sent, and would end a call of any
    /// thread that is not traced.
    fn seize_new(&mut self) -> Result<bool, Failure> {
        let mut is_new = false;
        for tid in self.all_threads()?.into_iter().rev() {
            is_new |= self.seize(tid)?;
        }
        Ok(is_new)
    }

    /// Becomes the tracer of a thread. Whether it is there, and was not traced yet.
    fn seize(&mut self, tid: i32) -> Result<bool, Failure> {
        if self.known.contains_key(&tid) {
            return Ok(false);
        }
        self.known.insert(tid, None);
        match sys::seize(tid, libc::PTRACE_O_TRACESYSGOOD) {
            Ok(()) => {
                self.known.insert(tid, Some(self.threads.len()));
                self.threads.push(Thread { tid, state: State::Running, registers: None, is_interrupted: false });
                Ok(true)
            }
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(false),
            Err(_) if self.status(tid).is_none_or(|status| status.is_dead()) => Ok(false),
            Err(error) => Err(Failure::Trace("tracing a thread", error)),
        }
    }

    fn interrupt_new(&mut self) -> Result<(), Failure> {
        for thread in self.threads.iter_mut().filter(|thread| !thread.is_interrupted) {
            thread.is_interrupted = true;
            match sys::interrupt(thread.tid) {
                Ok(()) => {}
                // The end of the thread will be reported.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(error) => return Err(Failure::Trace("stopping a thread", error)),
            }
        }
        Ok(())
    }

    /// Takes in what threads did that were not asked to stop so far.
    fn take_reports(&mut self) -> Result<(), Failure> {
        while let Some((tid, report)) = look(-1)? {
            if let Some(place) = self.known.get(&tid).copied().flatten() {
                self.has_job_control |= self.threads[place].take(report);
            }
        }
        Ok(())
    }

    /// Takes in what threads did that are to stop. Whether there was anything. Each is asked for by itself: the kernel goes
    /// through all threads of its tracer to find any of them.
    fn take_reports_of_running(&mut self) -> Result<bool, Failure> {
        let mut is_any = false;
        for thread in self.threads.iter_mut().filter(|thread| matches!(thread.state, State::Running)) {
            while let Some((_, report)) = look(thread.tid)? {
                is_any = true;
                self.has_job_control |= thread.take(report);
                if !matches!(thread.state, State::Running) {
                    break;
                }
            }
        }
        Ok(is_any)
    }

    /// A thread that another one's exec replaced is never reported.
    fn forget_vanished(&mut self) {
        if self.since.is_none_or(|since| since.elapsed() < PATIENCE) {
            return;
        }
        let pid = self.pid;
        for thread in self.threads.iter_mut().filter(|thread| matches!(thread.state, State::Running)) {
            if !fs::exists(format!("/proc/{pid}/task/{}", thread.tid)).unwrap_or(true) {
                thread.state = State::Gone;
            }
        }
    }

    /// When the limit is over.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.since.and_then(|since| since.checked_add(self.limit))
    }

    /// Fails if the limit is over.
    pub(crate) fn check_time(&self, why: Busy) -> Result<(), Failure> {
        if self.since.is_some_and(|since| since.elapsed() > self.limit) { Err(Failure::Busy(why)) } else { Ok(()) }
    }

    /// Allows more time for what must not be left half done, if most of the time is left.
    pub(crate) fn extend(&mut self, more: Duration) -> Result<(), Failure> {
        if self.since.is_some_and(|since| since.elapsed() > self.limit / 2) {
            return Err(Failure::Busy(Busy::Slow));
        }
        self.limit += more;
        Ok(())
    }

    /// Threads that are stopped, the first one first.
    pub(crate) fn stopped_threads(&self) -> impl Iterator<Item = i32> {
        self.threads.iter().rev().filter(|thread| matches!(thread.state, State::Stopped)).map(|thread| thread.tid)
    }

    /// The registers with which they go on.
    pub(crate) fn registers(&self) -> impl Iterator<Item = (i32, Registers)> {
        let stopped = self.threads.iter().rev().filter(|thread| matches!(thread.state, State::Stopped));
        stopped.filter_map(|thread| Some((thread.tid, thread.registers?)))
    }

    /// Has threads that are about to make a call, as their registers tell, go on behind it.
    pub(crate) fn skip_calls(&mut self, is_about_to: impl Fn(i32, &Registers) -> bool) -> Result<(), Failure> {
        for thread in self.threads.iter_mut().filter(|thread| matches!(thread.state, State::Stopped)) {
            let Some(registers) = thread.registers.as_mut().filter(|registers| is_about_to(thread.tid, registers))
            else {
                continue;
            };
            registers.rip += SYSCALL_BYTES;
            sys::set_registers(thread.tid, registers)
                .map_err(|error| Failure::Trace("having it skip a call", error))?;
        }
        Ok(())
    }

    /// What `/proc` says of a thread.
    pub(crate) fn status(&self, tid: i32) -> Option<Status> {
        let text = fs::read_to_string(format!("/proc/{}/task/{tid}/status", self.pid)).ok()?;
        Some(Status::parse(&text))
    }

    /// Lets all threads go; how long the process was stopped.
    pub(crate) fn release(mut self) -> Duration {
        // What has their ids by now runs another program. The kernel lets it go when the calling thread ends, with a signal that it may
        // be about to get.
        if !self.memory.is_there() {
            self.threads.clear();
        }
        for thread in self.threads.iter_mut().rev() {
            if matches!(thread.state, State::Stopped) {
                thread.state = State::Gone;
                let _ = sys::detach(thread.tid, 0);
            }
        }
        let stopped = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        self.raised = None;
        if self.grace.is_some() {
            // If that cannot be set, it is ended sooner.
            let _ = sys::end_after(2 * LATEST);
        }
        self.see_off_late_ones();
        stopped
    }

    /// Threads that did not stop in time are let go as soon as they do, because the system call that they were in may need
    /// repair. Those that take too long are let go when the calling thread ends.
    fn see_off_late_ones(&self) {
        let start = Instant::now();
        let mut late = self.threads.iter().filter(|thread| matches!(thread.state, State::Running)).count();
        while late > 0 && start.elapsed() < LATEST {
            match sys::look(-1) {
                Ok(Some((tid, report))) => {
                    late -= 1;
                    let signal = if let Report::Signal(signal) = report { signal } else { 0 };
                    if matches!(report, Report::Interrupted | Report::Signal(_)) {
                        repaired(tid);
                    }
                    let _ = sys::detach(tid, signal);
                }
                Ok(None) => sys::pause(start),
                Err(_) => break,
            }
        }
    }
}

fn look(tid: i32) -> Result<Option<(i32, Report)>, Failure> {
    sys::look(tid).map_err(|error| Failure::Trace("waiting", error))
}

/// Lets the kernel restart a system call that only the stop interrupted. At once: should we die, it is done. The registers with
/// which the thread goes on; a thread that was killed meanwhile has none.
fn repaired(tid: i32) -> Option<Registers> {
    let mut registers = sys::registers(tid).ok()?;
    if interrupted::has_restart_block(&registers) && !may_restart(tid, &registers) {
        interrupted::begin_anew(&mut registers);
    } else if !interrupted::repair(&mut registers) {
        return Some(registers);
    }
    sys::set_registers(tid, &registers).ok()?;
    Some(registers)
}

/// Whether the thread's seccomp filters let the kernel go on with an interrupted call. It does so by another call,
/// restart_syscall(2), which some filters forget: then the call has to begin anew.
fn may_restart(tid: i32, registers: &Registers) -> bool {
    let r = registers;
    let call = Call {
        number: libc::SYS_restart_syscall as u32,
        next_instruction: r.rip,
        arguments: [r.rdi, r.rsi, r.rdx, r.r10, r.r8, r.r9],
    };
    // What cannot be read is treated as any other stop treats it.
    sys::seccomp_filters(tid).map_or(true, |filters| Filters::new(filters).answer(&call) == Answer::Made)
}
