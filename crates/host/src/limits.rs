//! What this kernel and heapbpf's privileges allow.

use std::os::unix::fs::MetadataExt;
use std::{fs, io};

use heapbpf_audit::LinkKind;
use procfs::KernelVersion;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::capabilities;

use crate::resident::bytes_of;

/// Inode of the initial PID namespace, fixed by the kernel (`PROC_PID_INIT_INO`).
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;
/// The limit on open files that is requested: enough for two files per module on a host with many containers.
const OPEN_FILES: u64 = 65_536;
/// Minimum limit on open files for a recording. A recording of a small process needs between 192 and 256 while it loads
/// its programs.
const FEWEST_FILES: u64 = 256;
/// Advice for a limit that is too low.
const RAISE_FILES: &str = "raise the hard limit (ulimit -Hn 4096; LimitNOFILE=4096 in a systemd unit; --ulimit nofile=4096 for a \
                           container)";
/// Number of CAP_SYS_ADMIN. It implies the capabilities that Linux 5.8 and 5.9 split off from it.
const CAP_SYS_ADMIN: u32 = 21;
/// Numbers of CAP_SYS_PTRACE and CAP_DAC_OVERRIDE.
const CAP_SYS_PTRACE: u32 = 19;
const CAP_DAC_OVERRIDE: u32 = 1;

/// A capability, and what it is needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Name.
    pub name: &'static str,
    /// What it is needed for.
    pub needed_for: &'static str,
    bit: u32,
    /// Number of a stronger capability that implies it.
    implied_by: Option<u32>,
}

impl Capability {
    /// Whether no recording works without it. The others are needed only for some processes, whose audits report them.
    #[must_use]
    pub fn is_always_needed(&self) -> bool {
        ["CAP_BPF", "CAP_PERFMON"].contains(&self.name)
    }

    /// What to say if it is missing.
    #[must_use]
    pub fn if_missing(&self) -> String {
        format!("missing, needed for {}: run as root or grant it", self.needed_for)
    }
}

/// The capabilities needed to profile any process of the host.
pub const CAPABILITIES: [Capability; 5] = {
    const fn of(name: &'static str, bit: u32, implied_by: Option<u32>, needed_for: &'static str) -> Capability {
        Capability { name, needed_for, bit, implied_by }
    }
    [
        of("CAP_BPF", 39, Some(CAP_SYS_ADMIN), "loading BPF programs"),
        of("CAP_PERFMON", 38, Some(CAP_SYS_ADMIN), "probes and process events"),
        of("CAP_SYS_PTRACE", CAP_SYS_PTRACE, None, "reading other users' processes in /proc"),
        of("CAP_DAC_READ_SEARCH", 2, Some(CAP_DAC_OVERRIDE), "reading the files of containers"),
        of("CAP_CHECKPOINT_RESTORE", 40, Some(CAP_SYS_ADMIN), "opening deleted or replaced files of running processes"),
    ]
};

/// Whether the kernel requires CAP_SYS_ADMIN for links of this kind (`None`: the best kind available). It does before
/// Linux 6.6, and for perf events.
#[must_use]
pub fn links_need_admin(kind: Option<LinkKind>) -> bool {
    let version = Limits::read().version;
    kind == Some(LinkKind::Perf) || version.is_none_or(|version| (version.major, version.minor) < (6, 6))
}

/// Why no process can be hooked inline, which stops processes and writes into them. `None` if it is possible.
#[must_use]
pub fn forbid_inline_hooks() -> Option<&'static str> {
    if cfg!(not(target_arch = "x86_64")) {
        return Some("this machine is not x86-64");
    }
    let effective = effective_capabilities();
    let lacks = |bit: u32| effective >> bit & 1 == 0;
    (lacks(CAP_SYS_PTRACE) || lacks(CAP_DAC_OVERRIDE)).then_some(
        "heapbpf lacks CAP_SYS_PTRACE or CAP_DAC_OVERRIDE, which it needs to stop processes and write into them",
    )
}

/// What the kernel and heapbpf's privileges allow; `None` where that is unknown.
#[derive(Clone, Debug)]
pub struct Limits {
    /// As `uname -r` prints it.
    pub release: String,
    /// The same release, parsed.
    pub version: Option<KernelVersion>,
    /// Capabilities that heapbpf lacks.
    pub missing: Vec<Capability>,
    /// Lockdown mode, if the kernel supports it: `none`, `integrity` or `confidentiality`.
    pub lockdown: Option<String>,
    /// `kernel.perf_event_paranoid`.
    pub perf_event_paranoid: Option<i32>,
    /// Whether the kernel's type information (BTF) can be read.
    pub btf: bool,
    /// Whether the kernel has uprobes.
    pub uprobes: bool,
    /// Whether heapbpf runs in the initial PID namespace, so that its PIDs are the kernel's.
    pub initial_pid_namespace: bool,
}

impl Limits {
    /// Reads the limits of this machine.
    #[must_use]
    pub fn read() -> Self {
        let text = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned());
        let release = text("/proc/sys/kernel/osrelease").unwrap_or_default();
        let namespace = fs::metadata("/proc/self/ns/pid").map(|metadata| metadata.ino());
        Self {
            version: release.parse().ok(),
            release,
            missing: missing_capabilities(effective_capabilities()),
            lockdown: text("/sys/kernel/security/lockdown").ok().and_then(|modes| chosen_mode(&modes)),
            perf_event_paranoid: text("/proc/sys/kernel/perf_event_paranoid").ok().and_then(|level| level.parse().ok()),
            btf: fs::metadata("/sys/kernel/btf/vmlinux").is_ok(),
            uprobes: fs::metadata("/sys/bus/event_source/devices/uprobe/type").is_ok(),
            initial_pid_namespace: namespace.is_ok_and(|inode| inode == INITIAL_PID_NAMESPACE),
        }
    }

    /// What heapbpf cannot work without, besides capabilities: its name, and what was found, or what to do if it is
    /// missing.
    pub fn needs(&self) -> [(&'static str, Result<&str, &'static str>); 4] {
        let lockdown = match self.lockdown.as_deref() {
            Some("confidentiality") => {
                Err("confidentiality: BPF programs may not read memory; boot with lockdown=integrity or none")
            }
            mode => Ok(mode.unwrap_or("not built in, or not readable")),
        };
        let or = |ok: bool, why| if ok { Ok("") } else { Err(why) };
        [
            ("lockdown", lockdown),
            ("uprobes", or(self.uprobes, "no uprobes (CONFIG_UPROBE_EVENTS), or /sys is not mounted")),
            ("BTF", or(self.btf, "no /sys/kernel/btf/vmlinux: a kernel with CONFIG_DEBUG_INFO_BTF is needed")),
            (
                "process ids of the host",
                or(
                    self.initial_pid_namespace,
                    "this container has its own process ids: run it with the host's (--pid=host)",
                ),
            ),
        ]
    }

    /// What prevents heapbpf from working at all. Each entry is a sentence that says what to do.
    #[must_use]
    pub fn blockers(&self) -> Vec<String> {
        let capabilities = self.missing.iter().filter(|missing| missing.is_always_needed());
        let capabilities = capabilities.map(|missing| format!("{}: {}", missing.name, missing.if_missing()));
        let others = self.needs().into_iter().filter_map(|(name, found)| Some(format!("{name}: {}", found.err()?)));
        capabilities.chain(others).collect()
    }
}

/// Raises heapbpf's limits on open files and locked memory as far as permitted and useful. Kernels before 5.11 charge
/// maps to the latter. Returns the maximum number of open files.
#[must_use]
pub fn raise() -> u64 {
    raise_one(Resource::Memlock, u64::MAX);
    raise_one(Resource::Nofile, OPEN_FILES)
}

/// The limit on open files is too low for a recording.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("heapbpf may open {may} files, and needs at least {FEWEST_FILES}: {RAISE_FILES}")]
pub struct TooFewFiles {
    /// The limit.
    may: u64,
}

/// Raises the limits as [`raise`] does. Fails if the limit on open files is too low to begin a recording.
///
/// # Errors
/// [`TooFewFiles`].
pub fn raise_for_recording() -> Result<(), TooFewFiles> {
    let may = raise();
    if may < FEWEST_FILES { Err(TooFewFiles { may }) } else { Ok(()) }
}

/// Maximum number of module files to keep open: half of the limit on open files, 4,096 at most.
#[must_use]
pub fn module_files() -> usize {
    usize::try_from(raise() / 2).unwrap_or(usize::MAX).min(4096)
}

/// Number of open files that remain for hooked processes, beside modules and what any recording needs.
#[must_use]
pub fn process_files() -> usize {
    usize::try_from(raise().saturating_sub(FEWEST_FILES)).unwrap_or(usize::MAX).saturating_sub(module_files())
}

/// Returns advice if a message says that too many files are open. `None` for other messages.
#[must_use]
pub fn advice(message: &str) -> Option<String> {
    let error = io::Error::from_raw_os_error(libc::EMFILE).to_string();
    if !message.contains(&error) || message.contains(RAISE_FILES) {
        return None;
    }
    let may = raise();
    Some(format!("heapbpf may open {may} files, too few for these targets: {RAISE_FILES}"))
}

fn raise_one(resource: Resource, wanted: u64) -> u64 {
    let limit = getrlimit(resource);
    let [current, maximum] = [limit.current, limit.maximum].map(|limit| limit.unwrap_or(u64::MAX));
    if current >= wanted {
        return current;
    }
    let finite = |limit: u64| Some(limit).filter(|limit| *limit < u64::MAX);
    let is_raised = |most: u64| {
        let raised = Rlimit { current: finite(wanted.min(most)), maximum: finite(most) };
        setrlimit(resource, raised).is_ok()
    };
    let most = [maximum.max(wanted), maximum].into_iter().find(|most| is_raised(*most));
    most.map_or(current, |most| wanted.min(most))
}

fn effective_capabilities() -> u64 {
    capabilities(None).map_or(0, |sets| sets.effective.bits())
}

fn missing_capabilities(effective: u64) -> Vec<Capability> {
    let has = |bit: u32| effective >> bit & 1 != 0;
    let missing = |it: &Capability| !has(it.bit) && !it.implied_by.is_some_and(has);
    CAPABILITIES.into_iter().filter(missing).collect()
}

/// The bracketed word of `[none] integrity confidentiality`.
fn chosen_mode(modes: &str) -> Option<String> {
    let (_, rest) = modes.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// Maximum number of bytes of memory that the kernel would grant, according to `/proc/sys/vm/overcommit_memory`: memory
/// and swap in heuristic mode (0), the commit limit in strict mode (2).
#[must_use]
pub fn memory_bytes() -> u64 {
    let rule = fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    memory_by_rule(rule.trim(), &fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

/// Bound without an overcommit limit, in bytes: half of a 47-bit address space, more than any allocator can get.
const MOST_MEMORY: u64 = 1 << 46;

fn memory_by_rule(rule: &str, meminfo: &str) -> u64 {
    let bytes = |name| bytes_of(meminfo, name);
    let bytes = match rule {
        "0" => bytes("MemTotal").map(|total| total.saturating_add(bytes("SwapTotal").unwrap_or(0))),
        "2" => bytes("CommitLimit"),
        _ => None,
    };
    bytes.map_or(MOST_MEMORY, |bytes| bytes.min(MOST_MEMORY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_bound_follows_the_overcommit_mode() {
        let meminfo = "MemTotal:       1000 kB\nSwapTotal:       24 kB\nCommitLimit:    512 kB\n";
        assert_eq!(memory_by_rule("0", meminfo), 1 << 20);
        assert_eq!(memory_by_rule("2", meminfo), 1 << 19);
        assert_eq!(memory_by_rule("1", meminfo), MOST_MEMORY);
        assert_eq!(memory_by_rule("0", ""), MOST_MEMORY);
    }

    #[test]
    fn capabilities() {
        let names = |effective| missing_capabilities(effective).iter().map(|it| it.name).collect::<Vec<_>>();
        assert_eq!(names(u64::MAX), [] as [&str; 0]);
        assert_eq!(names(0).len(), CAPABILITIES.len());
        assert_eq!(names(1 << CAP_SYS_ADMIN), ["CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"]);
        assert_eq!(names(!(1 << 2)), [] as [&str; 0], "CAP_DAC_OVERRIDE is more");
    }

    #[test]
    fn lockdown_modes() {
        assert_eq!(chosen_mode("none [integrity] confidentiality").as_deref(), Some("integrity"));
        assert_eq!(chosen_mode(""), None);
    }

    #[test]
    fn each_blocker_is_named() {
        let fine = Limits {
            release: "6.1.0".into(),
            version: None,
            missing: Vec::new(),
            lockdown: None,
            perf_event_paranoid: Some(4),
            btf: true,
            uprobes: true,
            initial_pid_namespace: true,
        };
        assert_eq!(fine.blockers(), [] as [String; 0]);
        let bad = Limits {
            missing: missing_capabilities(0),
            lockdown: Some("confidentiality".into()),
            btf: false,
            uprobes: false,
            initial_pid_namespace: false,
            ..fine
        };
        assert_eq!(bad.blockers().len(), 6);
    }

    #[test]
    fn a_limit_on_files_is_told_with_what_to_do() {
        let message = TooFewFiles { may: 64 }.to_string();
        assert!(message.contains("64 files") && message.contains("LimitNOFILE"), "{message}");
        let emfile = format!("cannot open /x: {}", io::Error::from_raw_os_error(libc::EMFILE));
        assert!(advice(&emfile).is_some_and(|message| message.contains("ulimit -Hn")));
        assert_eq!(advice(&format!("{emfile}: {message}")), None, "once is enough");
        assert_eq!(advice("cannot open /x: No such file or directory (os error 2)"), None);
    }

    #[test]
    fn this_machine() {
        let limits = Limits::read();
        assert!(limits.version.is_some_and(|version| version.major >= 4), "{limits:?}");
        let raised = raise();
        assert_eq!(raise(), raised, "raising twice changes nothing");
    }
}
