//! `heapbpf doctor --clean`: removes from processes what a killed heapbpf left in them. The cleaner process does the
//! same if its daemon is killed; until then, it stops other processes for the daemon.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use heapbpf_attach::inline::attempts::Attempts;
use heapbpf_attach::inline::cleaner::{WORD, serve};
use heapbpf_attach::inline::left::{Left, claim};
use heapbpf_attach::inline::objects::lead_back;
use heapbpf_attach::inline::removal::{COUNTS, leads_to_ours, look_after, may_pass, reason};
use heapbpf_attach::stop_limit;
use heapbpf_host::independent::independent_of;
use heapbpf_host::privileges::{hide_memory, restrict_cleaner};
use heapbpf_host::process::all_pids;
use heapbpf_remote::{Error, NAME_PREFIX, left_open};
use rustix::event::{PollFd, PollFlags, poll};

/// What was done, and whether anything remains.
#[derive(Debug, Default)]
pub struct Cleaned {
    /// One line for each thing that was found.
    pub lines: Vec<String>,
    /// Whether anything remains.
    pub something_stays: bool,
}

impl Cleaned {
    fn stays(&mut self, line: String) {
        self.lines.push(line);
        self.something_stays = true;
    }
}

/// Cleans these processes, or all if none are given.
#[must_use]
pub fn clean(pids: &[u32]) -> Cleaned {
    let mut cleaned = Cleaned::default();
    let all = if pids.is_empty() { all_pids().unwrap_or_default() } else { pids.to_vec() };
    let since = Instant::now();
    for pid in all {
        if has_ours(pid) {
            clean_one(pid, since, &mut cleaned);
        }
    }
    cleaned
}

/// Whether one of our memfds is mapped or was left open. A closer check takes longer. A running heapbpf holds
/// descriptors of the processes that it is hooking for moments, so its own descriptors do not count.
fn has_ours(pid: u32) -> bool {
    let ours = format!("/memfd:{NAME_PREFIX}");
    let is_mapped = fs::read(format!("/proc/{pid}/maps"))
        .is_ok_and(|maps| String::from_utf8_lossy(&maps).lines().any(|line| line.contains(&ours)));
    // The program's file is looked at last, because its server may not answer.
    is_mapped || left_open(pid).next().is_some() && !is_heapbpf(pid)
}

/// Whether a process runs this program.
fn is_heapbpf(pid: u32) -> bool {
    let program = |of: &str| fs::metadata(format!("/proc/{of}/exe")).map(|it| (it.dev(), it.ino())).ok();
    program(&pid.to_string()).is_some_and(|its| Some(its) == program("self"))
}

/// Cleans a process. If it is frozen, it is waited for, but not long after `since`.
fn clean_one(pid: u32, since: Instant, cleaned: &mut Cleaned) {
    let mut attempts = Attempts::default();
    loop {
        match try_to_clean(pid, (attempts, since), cleaned) {
            Ok(()) => return,
            Err(why) => match attempts.failed() {
                Some(pause) => std::thread::sleep(pause),
                None => return cleaned.stays(format!("process {pid} still has inline hooks: {why}")),
            },
        }
    }
}

/// Tries to clean a process. `Err` means that another attempt may succeed.
fn try_to_clean(pid: u32, (attempts, since): (Attempts, Instant), cleaned: &mut Cleaned) -> Result<(), String> {
    let target = match look_after(attempts, pid) {
        Ok(target) => target,
        // Memory that no jump leads to may stay.
        Err(_) if !leads_to_ours(pid) && left_open(pid).next().is_none() => return Ok(()),
        Err(refusal) => {
            let error = Error::from(refusal);
            if may_pass(&error, Some(since)) {
                return Err(error.to_string());
            }
            cleaned.stays(format!("process {pid} has memory of inline hooks but cannot be stopped: {error}"));
            return Ok(());
        }
    };
    for found in target.found() {
        // While this exists, nobody else starts to use what is being removed.
        let claim = claim(pid, &found);
        match claim.as_ref().map_or_else(|left| *left, |_| Left::Abandoned) {
            Left::InUse => {
                cleaned.stays(format!("process {pid} has inline hooks that are in use by a running heapbpf"))
            }
            Left::Foreign(why) => cleaned.stays(format!(
                "process {pid} has memory named like that of inline hooks, which was not touched: {why}"
            )),
            // The next recording will use it again.
            Left::Abandoned if found.is_inert() => {}
            Left::Abandoned => {
                let had_hooks = if found.is_hooked() { "inline hooks" } else { "memory of inline hooks" };
                let back = lead_back(&target, &found);
                let out = back.and_then(|()| target.take_out(&found, &COUNTS, stop_limit()));
                match out.map_err(|error| reason(pid, error)) {
                    Ok(out) => cleaned.lines.push(format!(
                        "process {pid} had {had_hooks} left by a heapbpf that has ended: removed (stopped it for {:.1} ms)",
                        out.time.as_secs_f64() * 1e3
                    )),
                    Err(error) if may_pass(&error, Some(since)) => return Err(error.to_string()),
                    Err(error) => cleaned.stays(format!("process {pid} still has {had_hooks}: {error}")),
                }
            }
        }
    }
    Ok(())
}

/// Number of scans of all processes, and the time between them. A process that forks during a scan passes its hooks on.
const ROUNDS: usize = 10;
const PAUSE: Duration = Duration::from_millis(50);

/// Returns the daemon's PID, if the arguments ask for a cleaner.
pub fn asked_for(arguments: impl Iterator<Item = OsString>) -> Option<i32> {
    let mut arguments = arguments.skip(1);
    arguments.next().filter(|word| word == WORD).and(arguments.next())?.to_str()?.parse().ok()
}

/// Runs as the cleaner of a daemon, with the connection to it as standard input.
///
/// # Errors
/// It cannot detach itself from the daemon, or cannot wait for it.
pub fn run(daemon: i32) -> io::Result<()> {
    let daemon = match independent_of(daemon, c"hb-cleaner") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        daemon => Some(daemon?),
    };
    hide_memory();
    restrict_cleaner();
    if serve(io::stdin().as_fd()) {
        return Ok(());
    }
    // The daemon's locks are held until it has ended.
    if let Some(daemon) = daemon {
        poll(&mut [PollFd::new(&daemon, PollFlags::IN)], None)?;
    }
    for _ in 0..ROUNDS {
        if clean(&[]).lines.is_empty() {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_its_own_arguments_make_a_cleaner() {
        let asked = |words: &[&str]| asked_for(words.iter().map(OsString::from));
        assert_eq!(asked(&["x", WORD, "12"]), Some(12));
        for none in [&["x"][..], &["x", WORD], &["x", WORD, "y"], &["x", "--pid", "12"], &[WORD, "12"]] {
            assert_eq!(asked(none), None, "{none:?}");
        }
    }
}
