//! What the rows of `cargo xtask torture` share: how often and how long, with which hooks, the program that checks
//! itself, and where results are written.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::cgroup::Cgroup;
use crate::doctor::clean;
use crate::environment::{libc_file, skipped};
use crate::guardian::changed_bytes_of_libc;
use crate::inline::{Hook, is_hooked};
use crate::kernel::{holders_of_links_to, orphaned_links};
use crate::output::Stats;
use crate::program::{library, program};
use crate::recorder::{Outcome, Recording};
use crate::target::{Target, until};

/// Variable that sets how often a row is repeated. By default, each row decides.
const TIMES: &str = "HEAPBPF_TORTURE_TIMES";
/// Variable that sets how long a state lasts, in seconds.
const SECONDS: &str = "HEAPBPF_TORTURE_SECONDS";
/// Variable that selects the hooks: `probe` or `inline`. If it is not set, both.
const HOOK: &str = "HEAPBPF_TORTURE_HOOK";
/// Variable that names a file. It gets a line per row: fault, hook, times, result, separated by tabs.
const SEEN: &str = "HEAPBPF_TORTURE_SEEN";

fn number(variable: &str) -> Option<u32> {
    std::env::var(variable).ok()?.parse().ok()
}

/// How often a row is repeated: `HEAPBPF_TORTURE_TIMES`, or `usual` by default.
pub fn times(usual: u32) -> u32 {
    number(TIMES).unwrap_or(usual)
}

/// How long a state lasts: `HEAPBPF_TORTURE_SECONDS`, or `usual` seconds by default.
pub fn lasting(usual: u32) -> Duration {
    Duration::from_secs(number(SECONDS).unwrap_or(usual).into())
}

/// The ways of hooking to test.
///
/// # Panics
/// If `HEAPBPF_TORTURE_HOOK` names another one.
pub fn hooks() -> Vec<Hook> {
    let all = if cfg!(target_arch = "x86_64") { vec![Hook::Probe, Hook::Inline] } else { vec![Hook::Probe] };
    match std::env::var(HOOK).as_deref() {
        Err(_) => all,
        Ok("probe") => vec![Hook::Probe],
        Ok("inline") => vec![Hook::Inline],
        Ok(other) => panic!("{HOOK}={other}: probe or inline"),
    }
}

/// The value for `--hook`.
pub fn name_of(hook: Hook) -> &'static str {
    if hook == Hook::Inline { "inline" } else { "probe" }
}

/// Reports the result of a fault on standard output, and in the file that `HEAPBPF_TORTURE_SEEN` names.
///
/// # Panics
/// If the file cannot be written.
pub fn seen(fault: &str, hook: &str, times: u32, what: &str) {
    println!("{fault}, {hook}, {times} times: {what}");
    let Some(file) = std::env::var_os(SEEN) else { return };
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file).expect("our own file");
    // A single call, so that no line is ever written in part.
    file.write_all(format!("{fault}\t{hook}\t{times}\t{what}\n").as_bytes()).expect("there is space");
}

/// Tests a target with each way of hooking: starts it, calls `round`, checks that no link is left, lets the target end,
/// and reports what `round` and the target returned. Ends if `round` returns `None`, because something is missing here.
///
/// # Panics
/// If a link is left, or as [`seen`].
pub fn with_each_hook<T>(
    (fault, times): (&str, u32),
    start: impl Fn() -> T,
    ends_well: impl Fn(T) -> String,
    mut round: impl FnMut(Hook, &mut T) -> Option<String>,
) {
    for hook in hooks() {
        let before = orphaned_links();
        let mut target = start();
        let Some(what) = round(hook, &mut target) else { return };
        no_link_is_orphaned(&before);
        let answer = ends_well(target);
        seen(fault, name_of(hook), times, &format!("{what}; nothing left, target right ({answer})"));
    }
}

/// Reports that a part of a row did not run, both as a skipped test and in the rows.
///
/// # Panics
/// As [`seen`].
pub fn not_run(fault: &str, hook: &str, why: &str) {
    skipped(fault, why);
    seen(fault, hook, 0, &format!("not run: {why}"));
}

/// A program that ends itself if anything is not as it left it: eight threads that check all their blocks, forks,
/// exceptions, libraries that are loaded and unloaded, and a signal every millisecond.
pub struct Unharmed(pub Target);

impl Default for Unharmed {
    fn default() -> Self {
        Self::start()
    }
}

impl Unharmed {
    /// Starts the program, which works from then on.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start() -> Self {
        Self::start_as(&program("unharmed"))
    }

    /// Starts the program, built under another name.
    ///
    /// # Panics
    /// As [`Unharmed::start`].
    pub fn start_as(program: &Path) -> Self {
        let plugin = library("plugin", "plugin30.so", &["-DPLUGIN=30"]);
        Self(Target::start(program, [&plugin]))
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.0.pid()
    }

    /// Checks that the program has not ended.
    ///
    /// # Panics
    /// If it has ended. The message has its exit status and `last`, the last thing done to it.
    pub fn assert_runs(&mut self, last: &str) {
        self.0.assert_runs(last);
    }

    /// Checks that the program computed correctly, and that nothing is left in it. Returns its report of what it did.
    ///
    /// # Panics
    /// If it did not, or something stays.
    pub fn ends_well(mut self) -> String {
        nothing_stays_in(self.pid());
        self.0.go();
        let answer = self.0.line();
        assert!(answer.starts_with("OK "), "{answer}");
        assert!(self.0.end().success(), "it came to harm");
        answer
    }
}

/// Waits until a process has no probe in its C library and is not hooked inline. `doctor --clean` removes what a killed
/// heapbpf left.
///
/// # Panics
/// If something stays.
pub fn nothing_stays_in(pid: u32) {
    if is_hooked(pid) {
        until("doctor takes out what was left", || {
            clean(pid);
            !is_hooked(pid)
        });
    }
    // Another tool may be recording the whole host for a moment, or another heapbpf for longer.
    let others = || libc_file().map(|libc| holders_of_links_to(&libc)).unwrap_or_default();
    let mut is_clean = false;
    until("a target without probes", || {
        is_clean = changed_bytes_of_libc(pid) == Some(0);
        is_clean || !others().is_empty()
    });
    if !is_clean {
        println!("processes {:?} record the whole host: whether probes of ours stay cannot be told", others());
    }
}

/// Checks that no BPF links without a holder exist, except those that existed before.
///
/// # Panics
/// If there are any, and they stay.
pub fn no_link_is_orphaned(before: &std::collections::BTreeSet<u32>) {
    let left = || orphaned_links().difference(before).copied().collect::<Vec<_>>();
    until("links without a holder to go", || left().is_empty());
}

/// Checks what must hold after a recording was ended, whatever happened to it: it reports no panic, and each of its
/// samples is accounted for. Returns its statistics.
///
/// # Panics
/// If it does not hold.
pub fn accounted(outcome: &Outcome) -> Stats {
    readable(&outcome.stderr);
    outcome.results().1
}

/// Checks that heapbpf's output is meant for users: it has no panic and no request to report a bug.
///
/// # Panics
/// If it has one.
pub fn readable(said: &str) {
    assert!(!said.contains("panicked") && !said.contains("please report it"), "{said}");
}

/// Waits until heapbpf has ended, and returns whether SIGKILL ended it.
///
/// # Panics
/// If it does not end, or leaves links behind.
pub fn was_killed(recording: Recording) -> bool {
    use std::os::unix::process::ExitStatusExt as _;
    let outcome = recording.ends();
    readable(&outcome.stderr);
    outcome.status.signal() == Some(libc::SIGKILL)
}

/// A cgroup whose processes can all be killed at once. Removed when dropped.
pub struct Doomed {
    group: Cgroup,
    has_memory: bool,
}

impl Doomed {
    /// Creates a cgroup. Returns `None` if there is no writable cgroup2 mount, or the kernel cannot kill groups (before
    /// Linux 5.14).
    pub fn new(name: &str) -> Option<Self> {
        let group = Cgroup::named(name)?;
        let has = |file: &str| group.path().join(file).exists();
        let has_memory = has("memory.oom.group") && has("memory.max");
        (has_memory || has("cgroup.kill")).then(|| Self { has_memory, group })
    }

    /// Words to put before a command line, so that it starts in the group.
    pub fn words(&self) -> [String; 4] {
        let script = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.group.path().display());
        ["sh".into(), "-c".into(), script, "sh".into()]
    }

    /// The group's processes.
    ///
    /// # Panics
    /// If they cannot be read.
    pub fn processes(&self) -> Vec<u32> {
        let list = std::fs::read_to_string(self.group.path().join("cgroup.procs")).expect("our own group");
        list.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Makes the kernel kill all of them, by running out of memory if the mount has a memory controller. Returns how
    /// they are killed.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn kill_all(&self) -> &'static str {
        let write = |file: &str, text: &str| std::fs::write(self.group.path().join(file), text).expect("our own group");
        if self.has_memory {
            write("memory.oom.group", "1");
            write("memory.max", "0");
            "memory.oom.group"
        } else {
            write("cgroup.kill", "1");
            "cgroup.kill"
        }
    }

    /// Allows processes in the group again.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn recover(&self) {
        if self.has_memory {
            std::fs::write(self.group.path().join("memory.max"), "max").expect("our own group");
        }
    }
}

/// A small file system in memory. Unmounted when dropped.
pub struct Small(PathBuf);

impl Small {
    /// Mounts the file system. Returns `None` if that is not allowed here.
    pub fn mount(at: &Path, bytes: u64) -> Option<Self> {
        let size = format!("size={bytes}");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(at).status();
        mounted.is_ok_and(|status| status.success()).then(|| Self(at.to_path_buf()))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// An overlay file system, like a container's. Unmounted when dropped.
pub struct Overlay(Small);

impl Overlay {
    /// Mounts the file system over `lower`. Its other directories are made in `dir`, and their names begin with `name`.
    /// Returns `None` if that is not allowed here.
    ///
    /// # Panics
    /// If the directories cannot be made.
    pub fn mount(dir: &Path, name: &str, lower: &Path) -> Option<Self> {
        let [upper, work, merged] = ["upper", "work", "merged"].map(|kind| dir.join(format!("{name}-{kind}")));
        for made in [&upper, &work, &merged] {
            std::fs::create_dir(made).expect("our own directory");
        }
        let options = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
        let mounted = Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(&merged).status();
        mounted.is_ok_and(|status| status.success()).then(|| Self(Small(merged)))
    }

    /// The path of a file in it.
    pub fn path(&self, file: &str) -> PathBuf {
        self.0.0.join(file)
    }
}

/// A memory cgroup (version 1 or 2). Removed when dropped.
pub struct Limited {
    dir: PathBuf,
    limit: &'static str,
    usage: &'static str,
}

impl Limited {
    /// Creates a cgroup without a limit. Returns `None` if that is not possible here.
    pub fn new(name: &str) -> Option<Self> {
        let versions = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
            ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ];
        versions.into_iter().find_map(|(mount, limit, usage)| {
            let group = Self { dir: Path::new(mount).join(name), limit, usage };
            // Without a memory controller this file does not exist.
            (std::fs::create_dir(&group.dir).is_ok() && group.dir.join(limit).exists()).then_some(group)
        })
    }

    /// Words to put before a command line, so that it starts in the group.
    pub fn words(&self) -> [String; 4] {
        let script = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.dir.display());
        ["sh".into(), "-c".into(), script, "sh".into()]
    }

    /// Limits the group's memory to this many bytes more than it uses now.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn leave_space(&self, bytes: u64) {
        let used = std::fs::read_to_string(self.dir.join(self.usage)).expect("our own group");
        let used: u64 = used.trim().parse().expect("bytes");
        std::fs::write(self.dir.join(self.limit), (used + bytes).to_string()).expect("our own group");
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        // Its last process may still be exiting.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.dir).is_ok() || !self.dir.exists() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
