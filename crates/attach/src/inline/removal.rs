//! Removes our hooks from a process.

use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use heapbpf_inline::abi::{MAX_SET_LOG2, STATE, mapped_bytes};
use heapbpf_remote::{Busy, Error, FoundBlob, Refusal, Target, blob_range};

use super::attempts::Attempts;
use super::left::{self, Left};
use super::may_be_hooked::Refused;
use super::{limits, objects};
use crate::stop_limit;

/// Memory that is freed once no jump leads to the code: all counts.
pub const COUNTS: Range<u64> = STATE..mapped_bytes(MAX_SET_LOG2);

/// What a process keeps if its inline hooks could not be removed.
const COUNT_ON: &str = "keeps its inline hooks until the next recording or heapbpf doctor --clean removes them";
/// The same if a system call failed. Those calls are made after the jumps were removed.
const STAYS: &str = "keeps copies of its allocator's pages (without hooks) until the next recording or heapbpf doctor \
                     --clean puts the originals back";
/// The same if the kernel never allows the call, for example after `mseal(2)`.
const SEALED: &str = "keeps copies of its allocator's pages (without hooks) until it ends";

/// The same if something else has changed its code.
const PATCHED: &str = "keeps its inline hooks, which no longer sample anything";

/// How long to wait for frozen processes, for all of them together.
const THAWED_WITHIN: Duration = Duration::from_secs(13);

/// Whether another attempt may remove what this one could not.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// It may, or there is nothing left.
    May,
    /// It may once the process goes on: it is frozen, or stopped by a signal.
    AtRest,
    /// The kernel never allows it, or it would harm the process.
    Never,
}

/// Removes from a process what is ours and unused, if it is still running. Waits for a moment when that is possible,
/// and up to two seconds for one when no call of the process ends early.
pub(super) fn take_out(pid: u32) {
    try_to_take_out(pid, Some(Instant::now()));
}

/// Removes what is ours and unused, but only if that is possible now. Returns whether it was.
pub(super) fn take_out_now(pid: u32) -> bool {
    look(pid).is_ok_and(|target| take_out_found(&target, &[]).is_ok())
}

/// Removes what is ours and unused. Frozen processes are waited for together, from `since` on; without it, none is that
/// is at rest, which keeps its hooks for now. Returns whether another attempt may succeed.
pub(super) fn try_to_take_out(pid: u32, since: Option<Instant>) -> Next {
    let mut attempts = Attempts::default();
    loop {
        let error = match look_after(attempts, pid) {
            Ok(target) => match take_out_found(&target, &[]) {
                Ok(()) => return Next::May,
                Err(error) => error,
            },
            // The process has exited, or runs another program.
            Err(_) if !leads_to_ours(pid) => return Next::May,
            Err(refusal) => refusal.into(),
        };
        if since.is_none() && is_at_rest(&error) {
            return Next::AtRest;
        }
        let Some(pause) = attempts.failed().filter(|_| may_pass(&error, since)) else {
            let (what, next) = left_by(&error);
            log::warn!("process {pid} {what}: {error}");
            return next;
        };
        log::info!("process {pid}: inline hooks are not removed yet: {error}; retrying");
        std::thread::sleep(pause);
    }
}

/// What a process keeps after this error, and whether another attempt may remove it.
fn left_by(error: &Error) -> (&'static str, Next) {
    match error {
        Error::Call { source, .. } if source.raw_os_error() == Some(libc::EPERM) => (SEALED, Next::Never),
        Error::Call { .. } => (STAYS, Next::May),
        Error::Patched(_) => (PATCHED, Next::Never),
        _ => (COUNT_ON, Next::May),
    }
}

/// Whether a process makes no calls until something continues it.
const fn is_at_rest(error: &Error) -> bool {
    matches!(error, Error::Refused(Refusal::Frozen | Refusal::JobControl) | Error::Busy { why: Busy::JobControl, .. })
}

/// Whether what could not be removed because of this error may be within seconds. Frozen processes are waited for from
/// `since` on, or not at all.
#[must_use]
pub fn may_pass(error: &Error, since: Option<Instant>) -> bool {
    match error {
        // A child of vfork gets its own memory soon. A debugger may stay for hours.
        Error::Refused(refusal) => match refusal {
            Refusal::SharedMemory(_) | Refusal::Heapbpf(_) => true,
            Refusal::Frozen => since.is_some_and(|since| since.elapsed() < THAWED_WITHIN),
            _ => false,
        },
        // Stopping it again could take just as long.
        Error::Stuck(_) | Error::Damaged(_) => false,
        error => left_by(error).1 == Next::May,
    }
}

/// The true reason why a stop came to nothing: a process that was frozen meanwhile looks slow.
#[must_use]
pub fn reason(pid: u32, error: Error) -> Error {
    match error {
        Error::Busy { why: Busy::Slow | Busy::Late, .. } if limits::is_frozen(pid) => Refusal::Frozen.into(),
        error => error,
    }
}

/// Examines a process from which something is to be removed, after these attempts. The first attempts spare calls that
/// a stop may end early.
///
/// # Errors
/// The process cannot be examined, or must not be stopped.
pub fn look_after(attempts: Attempts, pid: u32) -> Result<Target, Refusal> {
    look(pid).map(|target| if attempts.spares_calls() { target } else { target.at_any_moment() })
}

/// Examines a process from which something is to be removed. A frozen one is not touched: the jumps could be removed,
/// but no thread would finish the calls that follow, and each attempt would leave a frame below a stack.
fn look(pid: u32) -> Result<Target, Refusal> {
    let target = Target::look(pid)?;
    let is_to_be_touched = target.found().iter().any(|found| !found.is_inert());
    if is_to_be_touched && limits::is_frozen(pid) { Err(Refusal::Frozen) } else { Ok(target) }
}

/// Whether the code of a process contains jumps of inline hooks: pages of ours are mapped outside the range in their
/// name.
pub fn leads_to_ours(pid: u32) -> bool {
    let read = |path: PathBuf| std::fs::read_to_string(path).ok().filter(|maps| !maps.is_empty());
    // The main thread has no mappings once it has exited, although other threads continue.
    let of_threads = || {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        threads.into_iter().find_map(|thread| read(thread.path().join("maps")))
    };
    let maps = read(format!("/proc/{pid}/maps").into()).or_else(of_threads).unwrap_or_default();
    maps.lines().any(|line| {
        let range = line.find("/memfd:").and_then(|at| blob_range(&line[at..]));
        let start = line.split('-').next().and_then(|start| u64::from_str_radix(start, 16).ok());
        range.zip(start).is_some_and(|(range, start)| !range.contains(&start))
    })
}

/// Examines a process, and removes what a killed heapbpf left in it. `is_ours` identifies what this heapbpf has mapped,
/// which stays.
///
/// # Errors
/// The process cannot be examined, or has hooks of another heapbpf.
pub fn without_what_was_left(pid: u32, is_ours: &dyn Fn(&FoundBlob) -> bool) -> Result<Target, Refused> {
    let target = Target::look(pid)?;
    let mut is_any = false;
    for found in target.found().into_iter().filter(|found| !found.is_inert() && !is_ours(found)) {
        match left::judge(pid, &found) {
            Left::InUse => return Err(Refused::Hooked),
            Left::Foreign(why) if found.is_hooked() => return Err(Refused::Left(why)),
            Left::Foreign(_) => {}
            Left::Abandoned => is_any = true,
        }
    }
    if !is_any {
        return Ok(target);
    }
    if limits::is_frozen(pid) {
        // Probes see nothing of a process with hooks.
        let has_hooks = target.found().iter().any(|found| !is_ours(found) && found.is_hooked());
        return Err(if has_hooks { Refused::Stays } else { Refusal::Frozen.into() });
    }
    let next = try_to_take_out(pid, Some(Instant::now()));
    let target = Target::look(pid)?;
    if target.found().iter().any(|found| !is_ours(found) && found.is_hooked()) {
        return Err(if next == Next::Never { Refused::Sealed } else { Refused::Stays });
    }
    log::info!("process {pid}: inline hooks that a killed heapbpf left were removed");
    Ok(target)
}

/// Removes our hooks at `bases`, although we use them, from one of the processes that have them, if that is possible
/// now. Returns whether none of them is left.
pub(super) fn take_out_at(pid: u32, bases: &[u64]) -> bool {
    let log_why = |why: &dyn std::fmt::Display| log::debug!("process {pid}: its hooks are not removed yet: {why}");
    match look(pid) {
        Ok(target) => take_out_found(&target, bases).inspect_err(|error| log_why(error)).is_ok(),
        Err(why) => {
            log_why(&why);
            // It may have exited, or run another program.
            !leads_to_ours(pid)
        }
    }
}

/// Removes what is found in a process if it is abandoned or at `bases`.
fn take_out_found(target: &Target, bases: &[u64]) -> Result<(), Error> {
    let pid = target.pid().unsigned_abs();
    let is_out = target.found().iter().try_for_each(|found| {
        // With the claim, nothing starts to use it during the removal.
        let claim = left::claim(pid, found);
        if claim.is_err() && !bases.contains(&found.range.start) {
            return Ok(());
        }
        objects::lead_back(target, found)?;
        target.take_out(found, &COUNTS, stop_limit()).map(drop)
    });
    is_out.map_err(|error| reason(pid, error))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn what_passes_is_waited_for_and_what_is_at_rest_only_until_a_time() {
        let now = Instant::now();
        let long_ago = now.checked_sub(THAWED_WITHIN).expect("the machine has run for longer");
        let busy = |why| Error::Busy { why, stopped: Duration::ZERO };
        let call = |code| Error::Call { call: "mmap".into(), source: io::Error::from_raw_os_error(code) };
        let passing = [Refusal::Heapbpf(7), Refusal::SharedMemory(7)].map(Error::Refused);
        for error in passing.into_iter().chain([busy(Busy::Slow), call(libc::ENOMEM)]) {
            assert!(may_pass(&error, Some(long_ago)) && !is_at_rest(&error), "{error}");
        }
        let [traced, frozen, stopped] = [Refusal::Traced(7), Refusal::Frozen, Refusal::JobControl].map(Error::Refused);
        for error in [traced, Error::Patched(1), Error::Stuck(THAWED_WITHIN), call(libc::EPERM)] {
            assert!(!may_pass(&error, Some(now)) && !is_at_rest(&error), "{error}");
        }
        assert_eq!([Some(now), Some(long_ago), None].map(|since| may_pass(&frozen, since)), [true, false, false]);
        assert!([frozen, stopped, busy(Busy::JobControl)].iter().all(is_at_rest));
        assert_eq!([call(libc::EPERM), call(libc::ENOMEM)].map(|error| left_by(&error).0), [SEALED, STAYS]);
    }

    #[test]
    fn a_process_that_is_not_frozen_is_slow_for_another_reason() {
        let slow = Error::Busy { why: Busy::Slow, stopped: Duration::ZERO };
        assert!(matches!(reason(u32::MAX, slow), Error::Busy { why: Busy::Slow, .. }));
    }
}
