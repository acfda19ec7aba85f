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
use crate::inject::Injection;
use crate::outcome::{FileId, Hooked, Mapped, Stopped, Word};
use crate::plan::Plan;
use crate::stop::Stop;
use crate::stopper;
use crate::sys;
use crate::target::{Target, check_files};
use crate::work::{Outcome, Planned, Work};
use crate::{remove, words};

/// For how long a process should be stopped at most.
pub const STOP_LIMIT: Duration = Duration::from_millis(20);
/// When to give up on a kernel that does not come back: a process may have another one handle its page faults.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// When to look for threads that ended while they were being stopped.
const REAPING: Duration = Duration::from_millis(10);

/// Asked in the middle of a stop whether this is the moment.
pub(crate) type IsMoment = Box<dyn FnOnce() -> bool + Send>;

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
        check_files(self.pid()).map_err(Error::Refused)?;
        let Stopped { time, threads, outcome } = self.stop_for(Work::Map(self.planned(plan)?), limit, None)?;
        let outcome = outcome.mapped.ok_or(Error::Busy { why: Busy::Changed, stopped: time })?;
        Ok(Stopped { time, threads, outcome })
    }

    /// Replaces the pages of text, the second step. May be tried again after a [`Busy`] other than [`Busy::Late`].
    ///
    /// # Errors
    /// As [`Target::hook`]. What is mapped stays.
    pub fn replace(&self, plan: &Plan, mapped: &Mapped, limit: Duration) -> Result<Stopped<Hooked>, Error> {
        self.replace_when(plan, mapped, limit, None)
    }

    /// The same, if `is_moment` agrees: it is asked once all threads are stopped, and before anything is replaced. After it agreed,
    /// little time is needed; only a kernel that does not come back leaves it half done.
    ///
    /// # Errors
    /// As [`Target::replace`]; [`Busy::NotNow`] if it does not agree.
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
        let work = Work::TakeOut { found: found.clone(), emptied: emptied.clone() };
        let Stopped { time, threads, .. } = self.stop_for(work, limit, None)?;
        Ok(Stopped { time, threads, outcome: () })
    }

    /// Stops the process and writes words of its memory, each only where the word before, or the new one already, is found: all
    /// of them, or none. Also where the process itself may not write. Whether any was written.
    ///
    /// Threads may be anywhere: whatever a thread has read before must go well with what it reads afterwards.
    ///
    /// # Errors
    /// If it cannot be stopped, its memory is not as expected ([`Busy::Changed`]), or the kernel refuses.
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
        // Its new program would be stopped in vain.
        if !self.memory.is_there() {
            return Err(Failure::Busy(Busy::Changed).stopped(Duration::ZERO));
        }
        let stopper = stopper::current();
        match stopper.and_then(|stopper| stopper::ask(&*stopper, self, &work, limit, &mut is_moment)) {
            Some(answer) => answer,
            // Nobody is there for it.
            None => stopped(self.copy()?, work, limit, is_moment, None),
        }
    }
}

/// Does it.
fn carry_out(target: &Target, work: Work, stop: &mut Stop, is_moment: Option<IsMoment>) -> Result<Outcome, Failure> {
    let none = Outcome::default();
    let injection = |planned| Injection { target, planned };
    match work {
        Work::Map(planned) => injection(&planned).map(stop).map(|mapped| Outcome { mapped: Some(mapped), ..none }),
        Work::Replace { planned, mapped, .. } => {
            injection(&planned).replace(stop, &mapped, is_moment).map(|hooked| Outcome { hooked, ..none })
        }
        Work::TakeOut { found, emptied } => remove::remove(target, &found, &emptied, stop).map(|()| none),
        Work::Write(words) => words::write(target, &words, stop).map(|has_written| Outcome { has_written, ..none }),
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

/// Stops the process and does something to it, in a thread of its own: however that ends, the kernel lets the process go. What is read of
/// it is fetched into memory before, with what is below the stack pointers of threads that wait. `grace`: the kernel ends this whole
/// process if the stop takes so much longer than its limit; it is there for that stop alone.
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
    let thread = thread.map_err(|source| Error::Trace { what: "starting a thread".into(), source })?;
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
