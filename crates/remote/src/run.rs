//! Stops a process, does something to it, and releases it.

use std::fs;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Busy, Error, Failure};
use crate::found::FoundBlob;
use crate::inject::Injection;
use crate::plan::Plan;
use crate::remove;
use crate::stop::Stop;
use crate::stopper;
use crate::sys;
use crate::target::{Target, check_files};
use crate::work::{FileId, Hooked, Mapped, Outcome, Planned, Stopped, Word, Work};

/// When to give up on a kernel request that does not return: another process may handle the target's page faults.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// How often to reap threads that ended while they were being stopped.
const REAPING: Duration = Duration::from_millis(10);

/// Asked in the middle of a stop whether to go on now.
pub(crate) type IsMoment = Box<dyn FnOnce() -> bool + Send>;

impl Target {
    /// Stops the process twice and carries out a plan. The time is that of the longer stop.
    ///
    /// # Errors
    /// The process cannot be stopped, has changed, or the kernel refuses a step. It runs on as before. If the limit ran
    /// out halfway ([`Busy::Late`]), part of the plan may have been carried out. That part is harmless. After another
    /// [`Target::look`], [`Target::found`] reports it, and it has to be removed before the next attempt.
    pub fn hook(&self, plan: &Plan, limit: Duration) -> Result<Stopped<Hooked>, Error> {
        let mapped = self.map(plan, limit)?;
        let hooked = self.replace(plan, &mapped.outcome, limit)?;
        Ok(Stopped { time: mapped.time.max(hooked.time), ..hooked })
    }

    /// Maps what the plan needs: the first of two steps. Nothing leads there until [`Target::replace`], so it can be
    /// examined, written to and linked to first. If the second step never comes, it stays mapped and can be used again.
    /// The caller makes sure that no other user of [`Plan::again`] takes the same mapping in between.
    ///
    /// # Errors
    /// As for [`Target::hook`].
    pub fn map(&self, plan: &Plan, limit: Duration) -> Result<Stopped<Mapped>, Error> {
        check_files(self.pid()).map_err(Error::Refused)?;
        let Stopped { time, threads, outcome } = self.stop_for(Work::Map(self.planned(plan)?), limit, None)?;
        let outcome = outcome.mapped.ok_or(Error::Busy { why: Busy::Changed, stopped: time })?;
        Ok(Stopped { time, threads, outcome })
    }

    /// Replaces the pages of text: the second step. It may be tried again after a [`Busy`] other than [`Busy::Late`].
    ///
    /// # Errors
    /// As for [`Target::hook`]. What is mapped stays.
    pub fn replace(&self, plan: &Plan, mapped: &Mapped, limit: Duration) -> Result<Stopped<Hooked>, Error> {
        self.replace_when(plan, mapped, limit, None)
    }

    /// The same, if `is_moment` agrees. It is called once all threads are stopped, before anything is replaced. After
    /// that little time is needed, and only a kernel request that does not return leaves the step half done.
    ///
    /// # Errors
    /// As for [`Target::replace`]; [`Busy::NotNow`] if it does not agree.
    pub fn replace_if(
        &self,
        plan: &Plan,
        mapped: &Mapped,
        limit: Duration,
        is_moment: impl FnOnce() -> bool + Send + 'static,
    ) -> Result<Stopped<Hooked>, Error> {
        self.replace_when(plan, mapped, limit, Some(Box::new(is_moment)))
    }

    fn replace_when(
        &self,
        plan: &Plan,
        mapped: &Mapped,
        limit: Duration,
        is_moment: Option<IsMoment>,
    ) -> Result<Stopped<Hooked>, Error> {
        let (planned, mapped) = (self.planned(plan)?, mapped.clone());
        let work = Work::Replace { planned, mapped, is_asked: is_moment.is_some() };
        let Stopped { time, threads, outcome } = self.stop_for(work, limit, is_moment)?;
        Ok(Stopped { time, threads, outcome: outcome.hooked })
    }

    fn planned(&self, plan: &Plan) -> Result<Planned, Error> {
        let file = |mapping| FileId::of(self.pid(), mapping).ok_or(Failure::Busy(Busy::Changed));
        let files: Result<Vec<_>, _> = plan.mappings().iter().map(file).collect();
        let files = files.map_err(|failure| failure.stopped(Duration::ZERO))?;
        Ok(Planned { plan: plan.clone(), files, memfd_flags: sys::memfd_flags() })
    }

    /// Stops the process and removes the jumps to what was found in it. The blob stays mapped, for [`Plan::again`] to
    /// use. Its memory in `emptied`, as offsets from its beginning, is freed. A blob that was only mapped in part, so
    /// that nothing has led to it, is unmapped.
    ///
    /// # Errors
    /// The process cannot be stopped, or what was found is not what its name says. The process runs on as before, or
    /// nearly so: pages that were put back stay back.
    pub fn take_out(&self, found: &FoundBlob, emptied: &Range<u64>, limit: Duration) -> Result<Stopped<()>, Error> {
        if !found.is_sound {
            return Err(Error::Damaged(found.range.start));
        }
        if found.is_inert() {
            return Ok(Stopped { time: Duration::ZERO, threads: 0, outcome: () });
        }
        let work = Work::TakeOut { found: found.clone(), emptied: emptied.clone() };
        let Stopped { time, threads, .. } = self.stop_for(work, limit, None)?;
        Ok(Stopped { time, threads, outcome: () })
    }

    /// Stops the process and writes words of its memory: all of them, or none. Each must hold its old value, or the new
    /// one already. The process itself need not have write access. Returns whether any word was written.
    ///
    /// Threads may be anywhere, so whatever a thread has read before must be consistent with what it reads afterwards.
    ///
    /// # Errors
    /// The process cannot be stopped, its memory is not as expected ([`Busy::Changed`]), or the kernel refuses.
    pub fn write_words(&self, words: &[Word], limit: Duration) -> Result<Stopped<bool>, Error> {
        let Stopped { time, threads, outcome } = self.stop_for(Work::Write(words.to_vec()), limit, None)?;
        Ok(Stopped { time, threads, outcome: outcome.has_written })
    }

    fn stop_for(
        &self,
        work: Work,
        limit: Duration,
        mut is_moment: Option<IsMoment>,
    ) -> Result<Stopped<Outcome>, Error> {
        // Stopping a new program would be useless.
        if !self.memory.is_there() {
            return Err(Failure::Busy(Busy::Changed).stopped(Duration::ZERO));
        }
        let stopper = stopper::current();
        match stopper.and_then(|stopper| stopper::ask(&*stopper, self, &work, limit, &mut is_moment)) {
            Some(answer) => answer,
            // There is no helper process for it.
            None => stopped(self.copy()?, work, limit, is_moment, None),
        }
    }
}

/// Carries out the work on the stopped process.
fn carry_out(target: &Target, work: Work, stop: &mut Stop, is_moment: Option<IsMoment>) -> Result<Outcome, Failure> {
    let none = Outcome::default();
    let injection = |planned| Injection { target, planned };
    match work {
        Work::Map(planned) => injection(&planned).map(stop).map(|mapped| Outcome { mapped: Some(mapped), ..none }),
        Work::Replace { planned, mapped, .. } => {
            injection(&planned).replace(stop, &mapped, is_moment).map(|hooked| Outcome { hooked, ..none })
        }
        Work::TakeOut { found, emptied } => remove::remove(target, &found, &emptied, stop).map(|()| none),
        Work::Write(words) => {
            remove::write_words(target, &words, stop).map(|has_written| Outcome { has_written, ..none })
        }
    }
}

/// Reaps threads of the process that have ended. A thread that calls exec waits until all others are gone, and traced
/// ones stay until their tracer reaps them. But the tracer may itself wait for the exec, to seize one more thread
/// (`cred_guard_mutex`). So another thread reaps them.
fn reap(pid: i32) {
    let list = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().map_while(Result::ok);
    for tid in list.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(|tid| *tid != pid) {
        sys::reap(tid);
    }
}

/// Stops the process and does the work, in a separate thread: however that thread ends, the kernel releases the
/// process. The memory to be read is faulted in first, including the memory below the stack pointers of waiting
/// threads. With `grace`, the kernel kills the calling process if the stop exceeds its limit by that much; the calling
/// process then exists for this stop only.
pub(crate) fn stopped(
    target: Target,
    work: Work,
    limit: Duration,
    is_moment: Option<IsMoment>,
    grace: Option<Duration>,
) -> Result<Stopped<Outcome>, Error> {
    let (sender, receiver) = mpsc::channel();
    let (pid, memory) = (target.pid(), Arc::clone(&target.memory));
    let run = move || {
        work.pages().iter().chain(&target.needed()).for_each(|range| memory.fetch(range));
        let mut stop = Stop::new(pid, Arc::clone(&memory), target.spares_calls, limit, grace);
        let result = carry_out(&target, work, &mut stop, is_moment).map_err(|failure| match failure {
            // Its threads had gone.
            Failure::Trace(..) if !memory.is_there() => Failure::Busy(Busy::Changed),
            failure => failure,
        });
        let threads = stop.threads.len();
        let time = stop.release();
        // The receiver is gone if this took too long.
        let _ = sender.send(match result {
            Ok(outcome) => Ok(Stopped { time, threads, outcome }),
            Err(failure) => Err(failure.stopped(time)),
        });
    };
    let thread = thread::Builder::new().name("heapbpf-stop".into()).spawn(run);
    let thread = thread.map_err(|source| Error::Trace { what: "starting a thread".into(), source })?;
    let since = Instant::now();
    let result = loop {
        match receiver.recv_timeout(REAPING) {
            Ok(result) => break result,
            Err(RecvTimeoutError::Timeout) if since.elapsed() < PATIENCE => reap(pid),
            Err(_) => return Err(Error::Stuck(PATIENCE)),
        }
    };
    // Its end releases threads that did not stop.
    let _ = thread.join();
    result
}
