//! Stops all threads of a process for a moment, and releases them.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Busy, Failure, Refusal};
use crate::interrupted::{self, SYSCALL_BYTES, Sleeping};
use crate::memory::Memory;
use crate::priority::Raised;
use crate::seccomp::{Answer, Call, Filters};
use crate::status::{Status, is_io_worker};
use crate::sys::{self, Registers, Report};
use crate::target::traced_by;

/// Maximum time that a process should be stopped.
pub const STOP_LIMIT: Duration = Duration::from_millis(20);
/// When to start checking whether threads still exist.
const PATIENCE: Duration = Duration::from_millis(2);
/// How long to wait for threads that did not stop in time.
const LATEST: Duration = Duration::from_secs(1);
/// Most threads that are stopped.
const MAX_THREADS: usize = 1 << 16;
/// How often threads are listed and seized before the first one is asked to stop.
const MAX_ROUNDS: usize = 3;
/// Link count of a directory without subdirectories.
const DIR_LINKS: u64 = 2;

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
    /// The registers with which it goes on; `None` unless it was stopped by us and is not being killed.
    registers: Option<Registers>,
    is_interrupted: bool,
}

impl Thread {
    /// Records what the thread did. Returns whether it stopped with its process, by job control.
    fn take(&mut self, report: Report) -> bool {
        match report {
            Report::Ended => self.state = State::Gone,
            Report::Interrupted | Report::JobControl => {
                self.state = State::Stopped;
                self.registers = if report == Report::Interrupted { repaired(self.tid) } else { None };
            }
            // The request to stop stays pending. Without a tracer the signal might have been discarded unnoticed, so it
            // must not end the thread's call. If a handler runs, the kernel ends the call.
            Report::Signal(signal) => {
                repaired(self.tid);
                let _ = sys::cont(self.tid, signal);
            }
            Report::SystemCall => drop(sys::cont(self.tid, 0)),
        }
        report == Report::JobControl
    }
}

/// The threads of a process that the calling thread traces. When the calling thread ends, for whatever reason, the
/// kernel releases all of them.
pub(crate) struct Stop {
    pub(crate) pid: i32,
    pub(crate) threads: Vec<Thread>,
    /// Threads that were examined, and their places in `threads`; `None` for those that are not traced.
    known: HashMap<i32, Option<usize>>,
    /// When the first thread was asked to stop.
    since: Option<Instant>,
    limit: Duration,
    /// How long after the limit the kernel ends the calling process.
    grace: Option<Duration>,
    /// Memory of the program that the process ran when it was examined.
    memory: Arc<Memory>,
    /// Whether the process is left alone while a thread is in a call that would return a part of its work.
    spares_calls: bool,
    has_job_control: bool,
    /// The calling thread's priority during the stop.
    raised: Option<Raised>,
}

impl Stop {
    /// Prepares a stop of at most `limit`. Nothing is stopped yet. If the stop takes `grace` longer, the kernel ends
    /// the calling process.
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
        // This comes before any thread is traced, because ignored signals wake traced threads. A call may still begin
        // between this check and the stop.
        if self.spares_calls && self.since.is_none() && self.would_end_a_call()? {
            return Err(Failure::Busy(Busy::InCall));
        }
        // Seizing a thread does not stop it, so most of it is done before the clock starts. Threads that create others
        // without end do so until they are stopped.
        for _ in 0..MAX_ROUNDS {
            if !self.seize_new()? {
                break;
            }
            self.take_reports()?;
        }
        // If the stop exceeds the limit by the grace, the kernel ends the calling process.
        if let Some(grace) = self.grace.filter(|_| self.since.is_none()) {
            sys::end_after(self.limit + grace).map_err(|error| Failure::Trace("setting a time limit", error))?;
        }
        self.since.get_or_insert_with(Instant::now);
        self.wait_for_all()?;
        while !self.is_complete() && self.seize_new()? {
            self.wait_for_all()?;
            self.check_time(Busy::Slow)?;
        }
        let first = self.stopped_threads().next().ok_or(Failure::Ended)?;
        // A thread may have called exec in the meantime, which ends all others and gives it the first thread's id. Only
        // a stopped thread's registers can be read, and a stopped thread of a new program has other memory.
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

    /// The threads that the process has now.
    fn all_threads(&self) -> Result<Vec<i32>, Failure> {
        let list = match fs::read_dir(format!("/proc/{}/task", self.pid)) {
            Ok(list) => list,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Failure::Ended),
            Err(source) => return Err(Failure::Trace("listing its threads", source)),
        };
        let list = list.map_while(Result::ok).take(MAX_THREADS + 1);
        let threads: Vec<i32> = list.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        if threads.len() > MAX_THREADS { Err(Failure::Refused(Refusal::Threads)) } else { Ok(threads) }
    }

    /// Whether the process has no threads except the stopped ones. The kernel counts threads in this directory's link
    /// count (`proc_task_getattr`), and reading that is quicker than listing them.
    fn is_complete(&self) -> bool {
        let links = fs::metadata(format!("/proc/{}/task", self.pid)).map(|dir| dir.nlink());
        links.is_ok_and(|links| links == DIR_LINKS + self.stopped_threads().count() as u64)
    }

    /// Waits until all traced threads are stopped.
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

    /// Seizes threads that are not known yet. Returns whether there were any: even one that ended before it was seized
    /// may have created another one. The first thread is seized last and released first: while it is traced, the kernel
    /// does not discard ignored signals to the process when they are sent, and these would end a call of any thread
    /// that is not traced.
    fn seize_new(&mut self) -> Result<bool, Failure> {
        let mut is_new = false;
        for tid in self.all_threads()?.into_iter().rev() {
            is_new |= self.seize(tid)?;
        }
        Ok(is_new)
    }

    /// Seizes a thread, if it still exists. Returns whether it was not known yet.
    fn seize(&mut self, tid: i32) -> Result<bool, Failure> {
        if self.known.contains_key(&tid) {
            return Ok(false);
        }
        self.known.insert(tid, None);
        // A worker of io_uring runs no code of the program, and a stop would end the request that it works on.
        let stat = fs::read_to_string(format!("/proc/{}/task/{tid}/stat", self.pid));
        if stat.is_ok_and(|stat| is_io_worker(&stat)) {
            return Ok(true);
        }
        match sys::seize(tid, libc::PTRACE_O_TRACESYSGOOD) {
            Ok(()) => {
                self.known.insert(tid, Some(self.threads.len()));
                self.threads.push(Thread { tid, state: State::Running, registers: None, is_interrupted: false });
            }
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(_) if self.status(tid).is_none_or(|status| status.is_dead()) => {}
            Err(error) => {
                // A debugger may have come since the process was examined.
                let tracer = self.status(tid).map_or(0, |status| status.tracer);
                return Err(match tracer {
                    0 => Failure::Trace("tracing a thread", error),
                    tracer => Failure::Refused(traced_by(tracer)),
                });
            }
        }
        Ok(true)
    }

    /// Asks threads that have not been asked yet to stop: the first one first, so that it is late least often (see
    /// `see_off_late_ones`).
    fn interrupt_new(&mut self) -> Result<(), Failure> {
        for thread in self.threads.iter_mut().rev().filter(|thread| !thread.is_interrupted) {
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

    /// Records what threads did before they were asked to stop.
    fn take_reports(&mut self) -> Result<(), Failure> {
        while let Some((tid, report)) = look(-1)? {
            if let Some(place) = self.known.get(&tid).copied().flatten() {
                self.has_job_control |= self.threads[place].take(report);
            }
        }
        Ok(())
    }

    /// Records what threads that are to stop did. Returns whether there was anything. Each thread is polled separately,
    /// because the kernel goes through all threads of the tracer to find any of them.
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

    /// Marks threads that have vanished: a thread that another one's exec replaced is never reported.
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

    /// When the limit ends.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.since.and_then(|since| since.checked_add(self.limit))
    }

    /// Fails if the limit has passed.
    pub(crate) fn check_time(&self, why: Busy) -> Result<(), Failure> {
        if self.since.is_some_and(|since| since.elapsed() > self.limit) { Err(Failure::Busy(why)) } else { Ok(()) }
    }

    /// Extends the limit for a step that must not be left half done, if at least half of the time is left.
    pub(crate) fn extend(&mut self, more: Duration) -> Result<(), Failure> {
        if self.since.is_some_and(|since| since.elapsed() > self.limit / 2) {
            return Err(Failure::Busy(Busy::Slow));
        }
        self.limit += more;
        Ok(())
    }

    /// Gives threads that got no CPU in time a last while. Returns when it ends; the kernel does not end the calling
    /// process before.
    pub(crate) fn last_deadline(&self) -> Instant {
        if self.grace.is_some() {
            // If that cannot be set, this process ends sooner.
            let _ = sys::end_after(2 * LATEST);
        }
        Instant::now() + LATEST
    }

    /// Stopped threads, beginning with the first one.
    pub(crate) fn stopped_threads(&self) -> impl Iterator<Item = i32> {
        self.threads.iter().rev().filter(|thread| matches!(thread.state, State::Stopped)).map(|thread| thread.tid)
    }

    /// The registers with which the stopped threads go on.
    pub(crate) fn registers(&self) -> impl Iterator<Item = (i32, Registers)> {
        let stopped = self.threads.iter().rev().filter(|thread| matches!(thread.state, State::Stopped));
        stopped.filter_map(|thread| Some((thread.tid, thread.registers?)))
    }

    /// Makes threads that are about to make a call, according to their registers, go on behind it.
    pub(crate) fn skip_calls(&mut self, is_about_to: impl Fn(i32, &Registers) -> bool) -> Result<(), Failure> {
        for thread in self.threads.iter_mut().filter(|thread| matches!(thread.state, State::Stopped)) {
            let Some(registers) = thread.registers.as_mut().filter(|registers| is_about_to(thread.tid, registers))
            else {
                continue;
            };
            registers.rip += SYSCALL_BYTES;
            sys::set_registers(thread.tid, registers)
                .map_err(|error| Failure::Trace("skipping a system call", error))?;
        }
        Ok(())
    }

    /// What `/proc` says about a thread.
    pub(crate) fn status(&self, tid: i32) -> Option<Status> {
        Status::read(&format!("/proc/{}/task/{tid}/status", self.pid)).ok()
    }

    /// Releases all threads. Returns how long the process was stopped.
    pub(crate) fn release(mut self) -> Duration {
        // Threads with their ids now run another program. The kernel releases them when the calling thread ends, with
        // any signal that they may be about to get.
        if !self.memory.is_there() {
            self.threads.clear();
        }
        // While the first thread is traced, the others stay so (see `seize_new`): they only go on.
        let is_first_late = !self.has_job_control && self.is_first_late();
        for thread in self.threads.iter_mut().rev().filter(|thread| matches!(thread.state, State::Stopped)) {
            if is_first_late {
                let _ = sys::cont(thread.tid, 0);
            } else {
                thread.state = State::Gone;
                let _ = sys::detach(thread.tid, 0);
            }
        }
        let stopped = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        self.raised = None;
        self.see_off_late_ones();
        stopped
    }

    fn is_first_late(&self) -> bool {
        self.threads.iter().any(|thread| thread.tid == self.pid && matches!(thread.state, State::Running))
    }

    /// Releases threads that did not stop in time as soon as they do stop, because the system call they were in may
    /// need repair. Until the first thread stops, the others go on. They are asked to stop once more before it is
    /// released: it may take the signal that has just woken one of them, whose call would end. Threads that take too
    /// long are released when the calling thread ends.
    fn see_off_late_ones(&mut self) {
        let (start, deadline) = (Instant::now(), self.last_deadline());
        while self.threads.iter().any(|thread| matches!(thread.state, State::Running)) && Instant::now() < deadline {
            let (tid, report) = match sys::look(-1) {
                Ok(Some(found)) => found,
                Ok(None) => {
                    sys::pause(start);
                    continue;
                }
                Err(_) => break,
            };
            let signal = if let Report::Signal(signal) = report { signal } else { 0 };
            if matches!(report, Report::Interrupted | Report::Signal(_)) {
                repaired(tid);
            }
            let goes_on = tid != self.pid && report != Report::JobControl && self.is_first_late();
            if tid == self.pid {
                for thread in self.threads.iter_mut().filter(|thread| matches!(thread.state, State::Stopped)) {
                    thread.state = if sys::interrupt(thread.tid).is_ok() { State::Running } else { State::Gone };
                }
            }
            let _ = if goes_on { sys::cont(tid, signal) } else { sys::detach(tid, signal) };
            if let Some(place) = self.known.get(&tid).copied().flatten() {
                self.threads[place].state = if goes_on { State::Stopped } else { State::Gone };
            }
        }
    }
}

fn look(tid: i32) -> Result<Option<(i32, Report)>, Failure> {
    sys::look(tid).map_err(|error| Failure::Trace("waiting", error))
}

/// Lets the kernel restart a system call that only the stop interrupted. This happens at once, so that it is done
/// should we die. Returns the registers with which the thread goes on; `None` if the thread was killed in the meantime.
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

/// Whether the thread's seccomp filters let the kernel resume an interrupted call. The kernel does so by another call,
/// restart_syscall(2), which some filters forget; then the call has to start anew.
fn may_restart(tid: i32, registers: &Registers) -> bool {
    let r = registers;
    let call = Call {
        number: libc::SYS_restart_syscall as u32,
        next_instruction: r.rip,
        arguments: [r.rdi, r.rsi, r.rdx, r.r10, r.r8, r.r9],
    };
    // Filters that cannot be read may forget it, too. They have allowed the call that was interrupted.
    let is_unfiltered = || Status::read(&format!("/proc/{tid}/status")).is_ok_and(|status| status.seccomp == 0);
    let filters = sys::seccomp_filters(tid).map(Filters::new);
    filters.map_or_else(|_| is_unfiltered(), |filters| filters.answer(&call) == Answer::Made)
}
