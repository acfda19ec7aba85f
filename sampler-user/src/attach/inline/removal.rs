//! Takes what is ours out of a process again.

use std::time::Duration;

use heapbpf_remote::{Error, Found, Refusal, TakeOut, Target, blob_range};

use crate::attach::stop_limit;

use super::attempts::Attempts;
use super::left::{self, Left};
use super::objects;
use super::refused::Refused;

/// How often, and how far apart, it is tried to unmap what no jump leads to any more: a thread may come back to it.
const ATTEMPTS: usize = 8;
const PAUSE: Duration = Duration::from_millis(5);

/// What a process keeps of inline hooks that could not be taken out.
const COUNT_ON: &str =
    "keeps its inline hooks, which count on until the next recording, or heapbpf doctor --clean, takes them out";
/// The same if a system call failed: these are made after the jumps were taken out.
const STAYS: &str = "keeps memory of its inline hooks, which do not count any more, until the next recording, or heapbpf doctor \
                     --clean, takes it out";
/// The same if the kernel never allows the call, as after `mseal(2)`.
const SEALED: &str = "keeps memory of its inline hooks, which do not count any more, until it ends";

/// The same if somebody else has changed its code.
const PATCHED: &str = "keeps its inline hooks, which sample nothing any more";

/// Whether another attempt may take out of a process what this one could not.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    /// It may, or there is nothing left.
    May,
    /// The kernel never allows it, or it would harm the process.
    Never,
}

/// Takes out of a process what is ours and nobody's any more, if it still runs. Waits for a moment at which that is possible.
pub(super) fn take_out(pid: u32) {
    try_to_take_out(pid);
}

/// The same. Whether there may be another moment.
fn try_to_take_out(pid: u32) -> Next {
    let mut attempts = Attempts::default();
    let mut kept = 0;
    let mut fails = |why: &dyn std::fmt::Display, what, may_pass| {
        let pause = attempts.failed().filter(|_| may_pass);
        match pause {
            Some(pause) => {
                log::info!("process {pid}: inline hooks are not taken out yet: {why}");
                std::thread::sleep(pause);
            }
            None => log::warn!("process {pid} {what}: {why}"),
        }
        pause.is_some()
    };
    loop {
        let target = match Target::look(pid) {
            Ok(target) => target,
            // It has ended, or runs another program.
            Err(_) if !has_mapped_ours(pid) => return Next::May,
            Err(why) => {
                // A child of vfork goes its own way soon; a debugger may stay for hours.
                let may_pass = matches!(why, Refusal::SharedMemory(_));
                if !fails(&why, COUNT_ON, may_pass) {
                    return Next::May;
                }
                continue;
            }
        };
        match take_out_found(&target, &[]) {
            Ok(true) => return Next::May,
            // It leads nowhere any more.
            Ok(false) if kept < ATTEMPTS => {
                kept += 1;
                std::thread::sleep(PAUSE);
            }
            Ok(false) => {
                log::info!("process {pid} keeps memory of its inline hooks: a thread may still come back to it");
                return Next::May;
            }
            Err(error) => {
                let (what, next) = match &error {
                    Error::Call { source, .. } if source.raw_os_error() == Some(libc::EPERM) => (SEALED, Next::Never),
                    Error::Call { .. } => (STAYS, Next::May),
                    Error::Patched(_) => (PATCHED, Next::Never),
                    _ => (COUNT_ON, Next::May),
                };
                if !fails(&error, what, next == Next::May) {
                    return next;
                }
            }
        }
    }
}

/// Whether code of inline hooks is mapped into a process.
fn has_mapped_ours(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| is_any_ours(&maps))
}

/// Whether a process runs that has no code of inline hooks.
pub(super) fn has_none_of_ours(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| !maps.is_empty() && !is_any_ours(&maps))
}

fn is_any_ours(maps: &str) -> bool {
    maps.lines().any(|line| line.find("/memfd:").is_some_and(|at| blob_range(&line[at..]).is_some()))
}

/// Looks at a process, and takes out what a heapbpf that was killed left in it. `is_ours` tells what this one has mapped, which
/// stays.
///
/// # Errors
/// It cannot be looked at, or is hooked, by whomever.
pub fn without_what_was_left(pid: u32, is_ours: &dyn Fn(&Found) -> bool) -> Result<Target, Refused> {
    let target = Target::look(pid)?;
    let mut is_any = false;
    for found in target.found().into_iter().filter(|found| !is_ours(found)) {
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
    let next = try_to_take_out(pid);
    let target = Target::look(pid)?;
    if target.found().iter().any(|found| !is_ours(found) && found.is_hooked()) {
        return Err(if next == Next::Never { Refused::Sealed } else { Refused::Stays });
    }
    log::info!("process {pid}: what a heapbpf that was killed left was taken out");
    Ok(target)
}

/// Takes out of a child the hooks that it inherited from a process of ours, where they are at `bases`, if that is possible now.
/// Whether it leads to none of them any more.
pub(super) fn take_out_inherited(pid: u32, bases: &[u64]) -> bool {
    let Ok(target) = Target::look(pid) else { return true };
    let taken = take_out_found(&target, bases);
    taken.inspect_err(|error| log::debug!("process {pid}: inherited hooks are not taken out yet: {error}")).is_ok()
}

/// Takes out what is found in a process, if it is nobody's or at `bases`. Whether all of it is unmapped.
fn take_out_found(target: &Target, bases: &[u64]) -> Result<bool, Error> {
    let pid = target.pid().unsigned_abs();
    target.found().iter().try_fold(true, |all, found| {
        // Nobody begins to use it meanwhile.
        let claim = left::claim(pid, found);
        if claim.is_err() && !bases.contains(&found.range.start) {
            return Ok(all);
        }
        objects::lead_back(target, found)?;
        let taken = target.take_out(found, TakeOut::All, stop_limit())?;
        Ok(taken.outcome && all)
    })
}
