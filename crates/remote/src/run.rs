//! Stops a process, does something to it, and lets it go.

use std::fs;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Busy, Error};
use crate::failure::Failure;
use crate::found::Found;
use crate::inject::{Injection, NO_QUESTION};
use crate::outcome::{FileId, Hooked, Mapped, Stopped};
use crate::plan::{Pages, Plan};
use crate::remove;
use crate::stop::Stop;
use crate::sys;
use crate::target::Target;

/// For how long a process should be stopped at most.
pub const STOP_LIMIT: Duration = Duration::from_millis(20);
/// When to give up on a kernel that does not come back: a process may have another one handle its page faults.
const PATIENCE: Duration = Duration::from_secs(10);
/// When to look for threads that ended while they were being stopped.
const REAPING: Duration = Duration::from_millis(10);

impl Target {
    /// Stops the process twice and carries out a plan. The time is that of the longer stop.
    ///
    /// # Errors
    /// If it cannot be stopped, has changed, or its kernel refuses a step. It runs on as before. If the limit was over in the
    /// middle ([`Busy::Late`]), some of the plan may have been carried out: it is harmless, [`Target::found`] by another look,
    /// and to be taken out before the next attempt.
    pub fn hook(&self, plan: &Plan, limit: Duration) -> Result<Stopped<Hooked>, Error> {
        let mapped = self.map(plan, limit)?;
        let hooked = self.replace(plan, &mapped.outcome, limit)?;
        Ok(Stopped { time: mapped.time.max(hooked.time), ..hooked })
    }

    /// Maps what the plan needs, the first of two steps. Nothing leads to it until [`Target::replace`], so it can be looked at, written
    /// to, and linked to before. If that never comes, it stays, to be used again. Whoever has made the plan by [`Plan::again`] sees to it
    /// that nobody else uses the same meanwhile.
    ///
    /// # Errors
    /// As [`Target::hook`].
    pub fn map(&self, plan: &Plan, limit: Duration) -> Result<Stopped<Mapped>, Error> {
        self.carry_out(plan, limit, |injection, stop| injection.map(stop))
    }

    /// Replaces the pages of text, the second step. May be tried again after a [`Busy`] other than [`Busy::Late`].
    ///
    /// # Errors
    /// As [`Target::hook`]. What is mapped stays.
    pub fn replace(&self, plan: &Plan, mapped: &Mapped, limit: Duration) -> Result<Stopped<Hooked>, Error> {
        let mapped = mapped.clone();
        self.carry_out(plan, limit, move |injection, stop| injection.replace(stop, &mapped, NO_QUESTION))
    }

    /// The same, if `is_moment` agrees: it is asked once all threads are stopped, and before anything is replaced. It gets each
    /// thread's id with the addresses at which it and code that signals interrupted in it will go on. After it agreed, little time
    /// is needed; only a kernel that does not come back leaves it half done.
    ///
    /// # Errors
    /// As [`Target::replace`]; [`Busy::NotNow`] if it does not agree.
    pub fn replace_if(
        &self,
        plan: &Plan,
        mapped: &Mapped,
        limit: Duration,
        is_moment: impl FnOnce(&[(i32, u64)]) -> bool + Send + 'static,
    ) -> Result<Stopped<Hooked>, Error> {
        let mapped = mapped.clone();
        self.carry_out(plan, limit, move |injection, stop| injection.replace(stop, &mapped, Some(is_moment)))
    }

    fn carry_out<T: Send + 'static>(
        &self,
        plan: &Plan,
        limit: Duration,
        work: impl FnOnce(&Injection<'_>, &mut Stop) -> Result<T, Failure> + Send + 'static,
    ) -> Result<Stopped<T>, Error> {
        let file = |mapping| FileId::of(self.pid(), mapping).ok_or(Failure::Busy(Busy::Changed));
        let files: Result<Vec<_>, _> = plan.mappings().iter().map(file).collect();
        let files = files.map_err(|failure| failure.stopped(Duration::ZERO))?;
        let memfd_flags = sys::memfd_flags();
        let pages = plan.draft().pages.iter().map(Pages::range);
        let (target, pages, plan) = (self.copy()?, pages.collect(), plan.clone());
        stopped(self, limit, pages, move |stop| {
            work(&Injection { target: &target, plan: &plan, files: &files, memfd_flags }, stop)
        })
    }

    /// Stops the process and has no jump lead to what was found in it. That stays mapped, and is used again by [`Plan::again`]; its memory
    /// in `emptied`, offsets from its beginning, is given back. What was mapped in part only, so that nothing has led to it, is unmapped.
    ///
    /// # Errors
    /// If it cannot be stopped, or what was found is not what its name says. It runs on as before, or nearly so: pages that
    /// were put back stay back.
    pub fn take_out(&self, found: &Found, emptied: &Range<u64>, limit: Duration) -> Result<Stopped<()>, Error> {
        if !found.is_sound {
            return Err(Error::Damaged(found.range.start));
        }
        if found.is_inert() {
            return Ok(Stopped { time: Duration::ZERO, threads: 0, outcome: () });
        }
        let all = found.pages.iter().chain(&found.put_back);
        let pages = all.flat_map(|kept| [kept.start, kept.spare].map(|start| start..start + kept.bytes)).collect();
        let (target, found, emptied) = (self.copy()?, found.clone(), emptied.clone());
        stopped(self, limit, pages, move |stop| remove::remove(&target, &found, &emptied, stop))
    }
}

/// A thread that execs waits for all others to be gone, and those that are traced are there until their tracer waits for them. But who
/// wants to trace one more thread waits for the exec (`cred_guard_mutex`). So another thread than that waits for the dead.
fn reap(pid: i32) {
    let list = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().map_while(Result::ok);
    for tid in list.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(|tid| *tid != pid) {
        sys::reap(tid);
    }
}

/// Stops the process and does something to it, in a thread of its own: however that ends, the kernel lets the process go. These pages
/// are fetched into memory before, and those below the stack pointers of threads that wait.
pub(crate) fn stopped<T: Send + 'static>(
    target: &Target,
    limit: Duration,
    mut pages: Vec<Range<u64>>,
    work: impl FnOnce(&mut Stop) -> Result<T, Failure> + Send + 'static,
) -> Result<Stopped<T>, Error> {
    // Its new program would be stopped in vain.
    if !target.memory.is_there() {
        return Err(Failure::Busy(Busy::Changed).stopped(Duration::ZERO));
    }
    let (sender, receiver) = mpsc::channel();
    let (pid, memory) = (target.pid(), Arc::clone(&target.memory));
    pages.extend(target.needed());
    let run = move || {
        pages.iter().for_each(|range| memory.fetch(range));
        let mut stop = Stop::new(pid, Arc::clone(&memory), limit);
        let result = work(&mut stop).map_err(|failure| match failure {
            // Its threads were gone.
            Failure::Trace(..) if !memory.is_there() => Failure::Busy(Busy::Changed),
            failure => failure,
        });
        let threads = stop.threads.len();
        let time = stop.release();
        // Nobody listens any more if this took too long.
        let _ = sender.send(match result {
            Ok(outcome) => Ok(Stopped { time, threads, outcome }),
            Err(failure) => Err(failure.stopped(time)),
        });
    };
    let thread = thread::Builder::new().name("heapbpf-stop".into()).spawn(run);
    let thread = thread.map_err(|source| Error::Trace { what: "starting a thread", source })?;
    let since = Instant::now();
    let result = loop {
        match receiver.recv_timeout(REAPING) {
            Ok(result) => break result,
            Err(RecvTimeoutError::Timeout) if since.elapsed() < PATIENCE => reap(pid),
            Err(_) => return Err(Error::Stuck(PATIENCE)),
        }
    };
    // Threads that did not stop are let go by its end.
    let _ = thread.join();
    result
}
