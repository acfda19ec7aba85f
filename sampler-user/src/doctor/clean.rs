//! `heapbpf doctor --clean`: removes from processes what a killed heapbpf left in them.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::Instant;

use heapbpf_attach::inline::attempts::Attempts;
use heapbpf_attach::inline::left::{Left, claim};
use heapbpf_attach::inline::objects::lead_back;
use heapbpf_attach::inline::removal::{COUNTS, leads_to_ours, look_after, may_pass, reason};
use heapbpf_attach::stop_limit;
use heapbpf_remote::{Error, NAME_PREFIX, left_open};

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
    let all = if pids.is_empty() { all_processes() } else { pids.to_vec() };
    let since = Instant::now();
    for pid in all {
        if has_ours(pid) {
            clean_one(pid, since, &mut cleaned);
        }
    }
    cleaned
}

fn all_processes() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Whether one of our memfds is mapped or was left open. A closer check takes longer. A running heapbpf holds
/// descriptors of the processes that it is hooking for moments, so its own descriptors do not count.
fn has_ours(pid: u32) -> bool {
    let ours = format!("/memfd:{NAME_PREFIX}");
    let is_mapped = fs::read(format!("/proc/{pid}/maps"))
        .is_ok_and(|maps| String::from_utf8_lossy(&maps).lines().any(|line| line.contains(&ours)));
    is_mapped || !is_heapbpf(pid) && left_open(pid).next().is_some()
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
