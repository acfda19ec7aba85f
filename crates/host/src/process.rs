//! Processes as /proc describes them, and the rules that select targets.

use std::collections::{HashMap, HashSet};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::{fs, io};

use globset::{Glob, GlobMatcher};
use heapbpf_profile::model::Placement;
use heapbpf_remote::Status;

use super::cgroup::{self, Cgroup};
use super::placement;

/// Length of the longest thread name that the kernel keeps, in bytes.
pub const MAX_COMM_BYTES: usize = 15;
/// The kernel's flag for its own threads.
const PF_KTHREAD: u32 = 0x0020_0000;
/// The user id that no user has.
pub const NO_USER: u32 = u32::MAX;

/// A process as /proc describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessInfo {
    /// PID in our PID namespace.
    pub pid: u32,
    /// PID in its own PID namespace, if that differs.
    pub namespace_pid: Option<u32>,
    /// The parent's PID.
    pub parent_pid: u32,
    /// Effective user id, which owns the files that the process creates. [`NO_USER`] if it is unknown.
    pub uid: u32,
    /// Name of the main thread.
    pub comm: Arc<str>,
    /// Path of the executable as the process sees it, without ` (deleted)`. Empty if it cannot be read.
    pub exe: Arc<str>,
    /// Whether the executable was deleted (or replaced) on disk.
    pub exe_deleted: bool,
    /// Version 2 control group. Empty if unknown.
    pub cgroup: Arc<str>,
    /// Container, pod and systemd unit that it runs in.
    pub placement: Arc<Placement>,
    /// Start time, CLOCK_BOOTTIME in nanoseconds, rounded down to a clock tick (10 ms).
    pub start_ns: u64,
    /// Number of threads.
    pub threads: u32,
    /// Whether it is a kernel thread or a zombie.
    pub without_memory: bool,
}

/// Maximum number of attempts to read a process without an exec in between.
const READS_MAX: usize = 3;

impl ProcessInfo {
    /// Reads /proc/PID. The executable is left empty if reading it is not permitted.
    ///
    /// # Errors
    /// `NotFound` (or ESRCH) if there is no such process.
    pub fn read(pid: u32) -> io::Result<Self> {
        let mut stat = Stat::read(pid)?;
        let mut exe = PathBuf::new();
        // An exec between the two reads would combine one program's name with another's path.
        for _ in 0..READS_MAX {
            exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            let before = std::mem::replace(&mut stat, Stat::read(pid)?);
            if before.comm == stat.comm {
                break;
            }
        }
        let status = read_text(pid, "status")?;
        let (namespace_pid, uid) = parse_status(&status);
        let exe = String::from_utf8_lossy(exe.as_os_str().as_bytes());
        let (exe, exe_deleted) = exe.strip_suffix(" (deleted)").map_or((&*exe, false), |exe| (exe, true));
        let cgroup = read_text(pid, "cgroup").unwrap_or_default();
        Ok(Self {
            pid,
            namespace_pid: namespace_pid.filter(|inner| *inner != pid),
            uid,
            exe: exe.into(),
            exe_deleted,
            placement: placement::of_process(&cgroup).into(),
            cgroup: cgroup::parse(&cgroup).unwrap_or_default().into(),
            parent_pid: stat.parent_pid,
            start_ns: stat.start_ns,
            threads: stat.threads,
            without_memory: stat.without_memory,
            comm: stat.comm.into(),
        })
    }
}

/// The part of /proc/PID/stat that heapbpf uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Name of the main thread.
    pub comm: String,
    /// The parent's PID.
    pub parent_pid: u32,
    /// Number of threads.
    pub threads: u32,
    /// Start time, CLOCK_BOOTTIME in nanoseconds, rounded down to a clock tick.
    pub start_ns: u64,
    /// Whether it is a kernel thread, a zombie or a dead process.
    pub without_memory: bool,
    /// Whether it has had children that exited and that it has waited for.
    pub had_children: bool,
}

impl Stat {
    /// Reads /proc/PID/stat.
    ///
    /// # Errors
    /// `NotFound` (or ESRCH) if there is no such process; `InvalidData` if the text is malformed.
    pub fn read(pid: u32) -> io::Result<Self> {
        let stat = Self::parse(&read_text(pid, "stat")?, procfs::ticks_per_second());
        stat.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Parses `pid (comm) state ppid …`. The name may contain anything, including parentheses.
    fn parse(text: &str, ticks_per_second: u64) -> Option<Self> {
        let (start, end) = (text.find('(')?, text.rfind(')')?);
        let comm = text.get(start + 1..end)?.to_owned();
        let fields: Vec<&str> = text.get(end + 1..)?.split_ascii_whitespace().collect();
        // proc_pid_stat(5) counts fields from 1. The third is the first after the name.
        let field = |number: usize| fields.get(number - 3).copied();
        let flags: u32 = field(9)?.parse().ok()?;
        let ticks: u64 = field(22)?.parse().ok()?;
        Some(Self {
            comm,
            parent_pid: field(4)?.parse().ok()?,
            threads: field(20)?.parse().ok()?,
            start_ns: ticks.saturating_mul(1_000_000_000 / ticks_per_second),
            without_memory: flags & PF_KTHREAD != 0 || matches!(field(3)?, "Z" | "X"),
            // Every process causes page faults. These fields are the faults of its children.
            had_children: field(11)? != "0" || field(13)? != "0",
        })
    }
}

/// PIDs of all processes in heapbpf's PID namespace.
///
/// # Errors
/// If /proc cannot be read.
pub fn all_pids() -> io::Result<Vec<u32>> {
    numbered(fs::read_dir("/proc")?)
}

/// Processes that descend from `roots`. Those that heapbpf itself started, and those that started heapbpf, are left
/// out: they exist because of the recording, and end with it.
///
/// # Errors
/// If /proc cannot be read.
pub fn descendants(roots: &[u32]) -> io::Result<Vec<u32>> {
    let parent_of = |pid| Some((pid, Stat::read(pid).ok()?.parent_pid));
    Ok(descendants_among(&all_pids()?.into_iter().filter_map(parent_of).collect(), roots, std::process::id()))
}

/// The same for processes given as a map from PID to parent. `own` is heapbpf's PID.
fn descendants_among(parents: &HashMap<u32, u32>, roots: &[u32], own: u32) -> Vec<u32> {
    // /proc is not read at one moment, so parents may form a cycle.
    let ancestors = |pid: &u32| {
        std::iter::successors(parents.get(pid).copied(), |pid| parents.get(pid).copied()).take(parents.len())
    };
    let left_out: HashSet<u32> = ancestors(&own).chain([own]).chain(roots.iter().copied()).collect();
    let descends = |pid: &&u32| ancestors(pid).take_while(|ancestor| *ancestor != own).any(|it| roots.contains(&it));
    let mut found: Vec<u32> = parents.keys().filter(|pid| !left_out.contains(pid)).filter(descends).copied().collect();
    found.sort_unstable();
    found
}

/// Thread ids of a process.
///
/// # Errors
/// `NotFound` if there is no such process.
pub fn threads(pid: u32) -> io::Result<Vec<u32>> {
    numbered(fs::read_dir(format!("/proc/{pid}/task"))?)
}

fn numbered(entries: fs::ReadDir) -> io::Result<Vec<u32>> {
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

fn read_text(pid: u32, name: &str) -> io::Result<String> {
    // Thread names need not be UTF-8.
    Ok(String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/{name}"))?).into_owned())
}

/// Returns the innermost PID and the effective user id.
fn parse_status(text: &str) -> (Option<u32>, u32) {
    let words = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)).map(str::split_ascii_whitespace);
    let inner = words("NSpid:").and_then(Iterator::last).and_then(|pid| pid.parse().ok());
    // Real, effective, saved, file system.
    let uid = words("Uid:").and_then(|mut ids| ids.nth(1)).and_then(|uid| uid.parse().ok());
    (inner, uid.unwrap_or(NO_USER))
}

/// A pattern for process names, with `*`, `?`, `[…]` and `{a,b}`.
#[derive(Clone, Debug)]
pub struct CommGlob {
    matcher: GlobMatcher,
}

impl CommGlob {
    /// The pattern.
    pub fn pattern(&self) -> &str {
        self.matcher.glob().glob()
    }

    /// Compiles a pattern. A plain name is truncated to [`MAX_COMM_BYTES`], as the kernel does.
    ///
    /// # Errors
    /// If the pattern is malformed.
    pub fn new(pattern: &str) -> Result<Self, globset::Error> {
        let plain = !pattern.contains(['*', '?', '[', '{', '\\']);
        let pattern = if plain { &pattern[..pattern.floor_char_boundary(MAX_COMM_BYTES)] } else { pattern };
        Ok(Self { matcher: Glob::new(pattern)?.compile_matcher() })
    }

    /// Whether it matches all of `comm`.
    #[must_use]
    pub fn matches(&self, comm: &str) -> bool {
        self.matcher.is_match(comm)
    }
}

/// Which processes are profiled.
#[derive(Clone, Debug)]
pub enum Target {
    /// One process.
    Pid(u32),
    /// Every process.
    All,
    /// Processes whose main thread's name matches.
    Comm(CommGlob),
    /// The processes of a control group and of its descendants.
    Cgroup(Cgroup),
}

/// Why a process given by its PID cannot be a target.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// There is no such process.
    #[error("there is no process {0}: it may have ended, or {0} is its PID in a container (`ps -e` lists the host's)")]
    NoSuchProcess(u32),
    /// The number is the id of a thread.
    #[error("{tid} is a thread of process {pid}: give --pid {pid}")]
    Thread {
        /// The given number.
        tid: u32,
        /// The process of the thread.
        pid: u32,
    },
    /// It is a kernel thread or a zombie.
    #[error("process {pid} ({comm}) has no memory of its own: it is a kernel thread or has ended already")]
    WithoutMemory {
        /// The given PID.
        pid: u32,
        /// Its name.
        comm: Arc<str>,
    },
    /// It is heapbpf itself.
    #[error("process {0} is heapbpf itself, which never samples itself")]
    Ourselves(u32),
    /// Reading the process is not permitted.
    #[error(
        "process {pid} cannot be read: {source}; run as root, or with CAP_SYS_PTRACE (if you do, a sandbox or a \
         security module protects it)"
    )]
    Denied {
        /// The given PID.
        pid: u32,
        /// The kernel's reason.
        source: io::Error,
    },
}

impl Target {
    /// Whether `process` matches. Never true for heapbpf itself, kernel threads and zombies.
    #[must_use]
    pub fn matches(&self, process: &ProcessInfo) -> bool {
        let possible = process.pid != std::process::id() && !process.without_memory;
        possible
            && match self {
                Self::Pid(pid) => process.pid == *pid,
                Self::All => true,
                Self::Comm(glob) => glob.matches(&process.comm),
                Self::Cgroup(group) => group.contains(&process.cgroup),
            }
    }
}

/// The running processes that match any of `targets`, by PID. It is not an error if none match, because some may match
/// later.
///
/// # Errors
/// A process given by its PID does not exist or cannot be a target.
pub fn select(targets: &[Target]) -> Result<Vec<ProcessInfo>, TargetError> {
    let mut selected = Vec::new();
    for target in targets {
        if let Target::Pid(pid) = target {
            selected.push(named(*pid)?);
        }
    }
    if targets.iter().any(|target| !matches!(target, Target::Pid(_))) {
        // A process may exit after it was listed.
        let all = all_pids().unwrap_or_default().into_iter().filter_map(|pid| ProcessInfo::read(pid).ok());
        selected.extend(all.filter(|process| targets.iter().any(|target| target.matches(process))));
    }
    selected.sort_by_key(|process| process.pid);
    selected.dedup_by_key(|process| process.pid);
    Ok(selected)
}

fn named(pid: u32) -> Result<ProcessInfo, TargetError> {
    let process = ProcessInfo::read(pid).map_err(|source| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => TargetError::NoSuchProcess(pid),
        _ => TargetError::Denied { pid, source },
    })?;
    // /proc/TID exists for every thread, although it is not listed.
    let leader = Status::read(&format!("/proc/{pid}/status")).map_or(pid, |status| status.process);
    if leader != pid {
        return Err(TargetError::Thread { tid: pid, pid: leader });
    }
    if pid == std::process::id() {
        return Err(TargetError::Ourselves(pid));
    }
    if process.without_memory {
        return Err(TargetError::WithoutMemory { pid, comm: process.comm });
    }
    match fs::read_link(format!("/proc/{pid}/exe")) {
        Err(source) if source.kind() == io::ErrorKind::PermissionDenied => Err(TargetError::Denied { pid, source }),
        _ => Ok(process),
    }
}

#[cfg(test)]
mod tests;
