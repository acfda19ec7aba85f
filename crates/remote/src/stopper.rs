//! Lets a helper process stop processes for this one. The helper can be ended whatever it waits for in the kernel, and
//! the target then goes on. This process itself needs no privileges for it.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, PoisonError, RwLock};

/// Carries requests to helper processes that stop others.
pub trait Stopper: Send + Sync {
    /// Has a helper process carry out a request by [`perform`], and returns its answer; `None` if no helper is
    /// available. The three descriptors go with the request. `ask` is called if the helper asks, and its answer is
    /// returned to the helper.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`] if the helper ended without an answer; otherwise why it could not be asked.
    fn stop(
        &self,
        request: &[u8],
        with: [BorrowedFd<'_>; 3],
        ask: &mut dyn FnMut() -> bool,
    ) -> io::Result<Option<Vec<u8>>>;
}

static CURRENT: RwLock<Option<Arc<dyn Stopper>>> = RwLock::new(None);

/// From now on, processes are stopped through `stopper`; with `None`, by threads of this process.
pub fn stop_through(stopper: Option<Arc<dyn Stopper>>) {
    *CURRENT.write().unwrap_or_else(PoisonError::into_inner) = stopper;
}

#[cfg(target_arch = "x86_64")]
pub(crate) use here::ask;
#[cfg(target_arch = "x86_64")]
pub use here::perform;

/// The stopper to use, if any.
#[cfg(target_arch = "x86_64")]
pub(crate) fn current() -> Option<Arc<dyn Stopper>> {
    CURRENT.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Returns an empty answer: there are no requests on this machine.
#[cfg(not(target_arch = "x86_64"))]
pub fn perform(_: &[u8], _: [OwnedFd; 3], _: impl FnOnce() -> bool + Send + 'static) -> Vec<u8> {
    Vec::new()
}

#[cfg(target_arch = "x86_64")]
mod here {
    use std::time::Duration;

    use super::{OwnedFd, Stopper, io};
    use crate::error::Error;
    use crate::run::{IsMoment, PATIENCE, stopped};
    use crate::sys;
    use crate::target::Target;
    use crate::work::{Outcome, Request, Stopped, Work};

    /// How far a stop may exceed its limit before the helper process that stops the target is ended. The limit itself
    /// is only checked between two steps. Once it waits for a thread without a CPU, the helper has more time.
    const GRACE: Duration = Duration::from_millis(230);

    type Answer = Result<Stopped<Outcome>, Error>;

    /// Has a helper process stop the target. `None` if there is no helper; then a thread of this process has to do it.
    pub(crate) fn ask(
        stopper: &dyn Stopper,
        target: &Target,
        work: &Work,
        limit: Duration,
        is_moment: &mut Option<IsMoment>,
    ) -> Option<Answer> {
        let failed = |source| Error::Trace { what: "asking the helper that stops processes".into(), source };
        let request = match serde_json::to_vec(&target.request(work, limit)) {
            Ok(request) => request,
            Err(error) => return Some(Err(failed(error.into()))),
        };
        let mut ask = || is_moment.take().is_some_and(|is_moment| is_moment());
        let answer = stopper.stop(&request, target.descriptors(), &mut ask).transpose()?;
        Some(match answer {
            Ok(answer) => serde_json::from_slice(&answer).unwrap_or_else(|error| Err(failed(error.into()))),
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => Err(Error::Stuck(limit + GRACE)),
            Err(error) => Err(failed(error)),
        })
    }

    /// Carries out a request, and returns the answer. Call this in a helper process that does nothing else: the kernel
    /// ends it if it does not return from the stop in time. `ask` is called at most once, in the middle of the stop.
    pub fn perform(request: &[u8], with: [OwnedFd; 3], ask: impl FnOnce() -> bool + Send + 'static) -> Vec<u8> {
        // Before the stop, reading the target's memory may wait for another process that provides it.
        let is_limited =
            sys::end_after(PATIENCE).map_err(|source| Error::Trace { what: "setting a time limit".into(), source });
        let answer = is_limited.and_then(|()| read(request, with)).and_then(|(target, work, limit)| {
            let is_asked = matches!(work, Work::Replace { is_asked: true, .. });
            stopped(target, work, limit, is_asked.then(|| Box::new(ask) as IsMoment), Some(GRACE))
        });
        serde_json::to_vec(&answer).unwrap_or_default()
    }

    fn read(request: &[u8], with: [OwnedFd; 3]) -> Result<(Target, Work, Duration), Error> {
        let request: Request<Work> = serde_json::from_slice(request)
            .map_err(|error| Error::Trace { what: "reading a request".into(), source: error.into() })?;
        let target = Target::of(&request, with)?;
        Ok((target, request.work, request.limit))
    }
}
