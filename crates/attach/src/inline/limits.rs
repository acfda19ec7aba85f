//! Checks the resource limits of a process, and what else its memory and its control group forbid. Mappings that we add
//! count against its limits, so its own requests might fail.

use std::fs;
use std::path::{Path, PathBuf};

use heapbpf_host::{cgroup, translation};
use heapbpf_inline::abi::ENTRY_BYTES;
use heapbpf_remote::Refusal;
use procfs::process::{LimitValue, Process};
use procfs::{Current as _, Meminfo};

use super::Refused;

/// What must remain of a limit beside what we take: this share of it, and at least these amounts.
const SHARE_LEFT: u64 = 16;
const BYTES_LEFT: u64 = 16 << 20;
const MAPPINGS_LEFT: u64 = 1000;
/// Memory that is touched in addition to the set of sampled blocks: slots, and copies of changed pages.
const TOUCHED_BYTES: u64 = 4 << 20;
/// The set of sampled blocks takes at most this share of a memory limit.
const SET_SHARE: u64 = 64;
/// Number of mappings that are added, including those that result from splitting.
const MAPPINGS_TAKEN: u64 = 64;
/// Names of the limits that also bound the set of sampled blocks.
const ADDRESSES: &str = "bytes of its address space (RLIMIT_AS)";
const DATA: &str = "bytes of its data (RLIMIT_DATA)";
const GROUP: &str = "bytes of its control group's memory";
/// `READ_IMPLIES_EXEC` of personality(2).
const READ_IMPLIES_EXEC: u32 = 0x0040_0000;

/// A limit: its name, how much it allows, and how much is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limit {
    name: &'static str,
    allowed: u64,
    used: u64,
}

impl Limit {
    /// Checks that a fair margin remains after using `taken`. If not, the error says how much is left now.
    fn check(self, taken: u64, least: u64) -> Result<(), Refused> {
        let Self { name, allowed, used } = self;
        let left = allowed.saturating_sub(used);
        let margin = least.max(allowed / SHARE_LEFT);
        if left >= taken.saturating_add(margin) { Ok(()) } else { Err(Refused::Limit { name, left, allowed }) }
    }
}

/// Checks whether `bytes` of addresses can be mapped into a process that has this many mappings, without affecting the
/// process itself. The set of sampled blocks has 2^`set_log2` entries. A process that has exited passes.
pub(super) fn check(pid: u32, (bytes, set_log2): (u64, u32), mappings: usize) -> Result<(), Refused> {
    let Ok(process) = Process::new(pid.cast_signed()) else { return Ok(()) };
    let status = process.status().ok();
    if status.as_ref().and_then(|status| status.vmlck).is_some_and(|locked| locked > 0) {
        return Err(Refused::LocksMemory);
    }
    let text = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let personality = u32::from_str_radix(text("personality").trim(), 16).unwrap_or(0);
    if personality & READ_IMPLIES_EXEC != 0 {
        return Err(Refused::ExecutesAll);
    }
    if let Some(translator) = translation::translator_of(pid) {
        return Err(Refused::Translated(translator));
    }
    let groups = text("cgroup");
    if is_in_frozen_group(&groups) {
        return Err(Refusal::Frozen.into());
    }
    let limits = process.limits().ok();
    let allowed = limits.as_ref().map(|limits| limits.max_address_space.soft_limit);
    if let (Some(LimitValue::Value(allowed)), Some(used)) = (allowed, status.as_ref().and_then(|status| status.vmsize))
    {
        Limit { name: ADDRESSES, allowed, used: used << 10 }.check(bytes, BYTES_LEFT)?;
    }
    let allowed = limits.map(|limits| limits.max_data_size.soft_limit);
    let touched = TOUCHED_BYTES + (ENTRY_BYTES << set_log2);
    if let (Some(LimitValue::Value(allowed)), Some(used)) = (allowed, status.and_then(|status| status.vmdata)) {
        Limit { name: DATA, allowed, used: used << 10 }.check(touched, TOUCHED_BYTES)?;
    }
    if let Some(allowed) = number(Path::new("/proc/sys/vm/max_map_count")) {
        let limit = Limit { name: "mappings (vm.max_map_count)", allowed, used: mappings as u64 };
        limit.check(MAPPINGS_TAKEN, MAPPINGS_LEFT)?;
    }
    let mode = number(Path::new("/proc/sys/vm/overcommit_memory"));
    if let Some(limit) = Meminfo::current().ok().and_then(|memory| of_host(mode, &memory)) {
        limit.check(bytes, BYTES_LEFT)?;
    }
    for dir in memory_groups(&groups) {
        if let Some((allowed, used)) = used_in_group(&dir) {
            Limit { name: GROUP, allowed, used }.check(touched, TOUCHED_BYTES)?;
        }
    }
    Ok(())
}

/// The limit on what all processes may map, in this mode of `vm.overcommit_memory`. Only mode 2 has one.
fn of_host(mode: Option<u64>, memory: &Meminfo) -> Option<Limit> {
    let allowed = memory.commit_limit.filter(|_| mode == Some(2))?;
    Some(Limit { name: "bytes of the host's memory (vm.overcommit_memory)", allowed, used: memory.committed_as })
}

/// Maximum size in bytes of the set of sampled blocks in a process with these limits, and what the limit is on; `None`
/// without limits. The set takes memory as the process allocates, when nothing checks the limits any more.
pub(super) fn most_set_bytes(pid: u32) -> Option<(&'static str, u64)> {
    let limits = Process::new(pid.cast_signed()).and_then(|process| process.limits()).ok();
    let soft = |limit: LimitValue| if let LimitValue::Value(bytes) = limit { Some(bytes) } else { None };
    let own = limits
        .into_iter()
        .flat_map(|it| [(ADDRESSES, it.max_address_space.soft_limit), (DATA, it.max_data_size.soft_limit)]);
    let groups = memory_groups(&fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default());
    let groups = groups.iter().filter_map(|dir| used_in_group(dir)).map(|(allowed, _)| (GROUP, allowed));
    let all = own.filter_map(|(name, limit)| Some((name, soft(limit)?))).chain(groups);
    all.min_by_key(|(_, allowed)| *allowed).map(|(name, allowed)| (name, allowed / SET_SHARE))
}

/// Whether a process may wait by spinning: not if its time without a blocking system call is limited (RLIMIT_RTTIME).
pub(super) fn may_wait(pid: u32) -> bool {
    let limits = Process::new(pid.cast_signed()).and_then(|process| process.limits());
    limits.is_ok_and(|limits| matches!(limits.max_realtime_timeout.soft_limit, LimitValue::Unlimited))
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Whether a process makes no call until something continues it: its control group is frozen, or a signal stopped it.
pub(super) fn is_at_rest(pid: u32) -> bool {
    let is_stopped = || Process::new(pid.cast_signed()).and_then(|it| it.stat()).is_ok_and(|stat| stat.state == 'T');
    is_frozen(pid) || is_stopped()
}

/// Whether the control group of a process is frozen, or about to be. Such a process can be stopped, but would finish no
/// call. (In version 1, it cannot even be stopped.)
pub(super) fn is_frozen(pid: u32) -> bool {
    is_in_frozen_group(&fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default())
}

/// The same, from its `/proc/PID/cgroup`.
fn is_in_frozen_group(text: &str) -> bool {
    let legacy = legacy_groups(text, "freezer").unwrap_or_default();
    unified_groups(text).iter().chain(&legacy).any(|dir| is_group_frozen(dir))
}

/// Whether a control group is frozen, or about to be, with all groups below it.
fn is_group_frozen(dir: &Path) -> bool {
    let says = |file: &str, line: &str| {
        let text = fs::read_to_string(dir.join(file));
        text.is_ok_and(|text| text.lines().any(|it| it == line))
    };
    // Groups that are frozen may lie above those that are visible here: only the state shows it.
    says("cgroup.freeze", "1")
        || says("cgroup.events", "frozen 1")
        || says("freezer.state", "FROZEN")
        || says("freezer.state", "FREEZING")
}

/// The directories of the control groups that a process's memory is charged to, from its `/proc/PID/cgroup`: its own
/// group and those above it.
fn memory_groups(text: &str) -> Vec<PathBuf> {
    legacy_groups(text, "memory").unwrap_or_else(|| unified_groups(text))
}

/// The groups of a controller of version 1, likewise; `None` if it has none.
fn legacy_groups(text: &str, controller: &str) -> Option<Vec<PathBuf>> {
    let path = text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        controllers.split(',').any(|it| it == controller).then_some(path)
    });
    Some(and_those_above(&Path::new("/sys/fs/cgroup").join(controller), path?))
}

/// The groups of version 2, likewise.
fn unified_groups(text: &str) -> Vec<PathBuf> {
    let found = cgroup::mount_point().zip(cgroup::parse(text));
    found.map(|(mount, path)| and_those_above(&mount, path)).unwrap_or_default()
}

fn and_those_above(mount: &Path, path: &str) -> Vec<PathBuf> {
    let own = mount.join(path.trim_start_matches('/'));
    own.ancestors().take_while(|dir| dir.starts_with(mount)).map(Path::to_owned).collect()
}

/// How many bytes of memory a control group allows and uses, without the page cache, which can be reclaimed. `None` if
/// there is no limit.
fn used_in_group(dir: &Path) -> Option<(u64, u64)> {
    let file = |names: [&str; 2]| names.iter().find_map(|name| number(&dir.join(name)));
    let allowed = file(["memory.max", "memory.limit_in_bytes"])?;
    let used = file(["memory.current", "memory.usage_in_bytes"])?;
    let parts = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let part = |name: &str| parts.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    let cache = part("total_cache ").or_else(|| part("file ")).unwrap_or(0);
    Some((allowed, used.saturating_sub(cache)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fair_margin_is_left() {
        let limit = |allowed, used| Limit { name: "x", allowed, used };
        assert!(limit(1 << 30, 100 << 20).check(4 << 20, BYTES_LEFT).is_ok());
        // A sixteenth of the limit is more than the minimum.
        assert!(limit(1 << 30, (1 << 30) - (60 << 20)).check(4 << 20, BYTES_LEFT).is_err());
        assert!(limit(64 << 20, 44 << 20).check(4 << 20, BYTES_LEFT).is_ok());
        assert!(limit(64 << 20, 45 << 20).check(4 << 20, BYTES_LEFT).is_err());
        let refused = limit(10, 20).check(u64::MAX, 0).expect_err("nothing is left");
        assert!(matches!(refused, Refused::Limit { name: "x", left: 0, allowed: 10 }));
    }

    #[test]
    fn the_host_limits_what_is_mapped_in_mode_2_alone() {
        let mut memory = Meminfo::current().expect("the kernel tells it");
        (memory.commit_limit, memory.committed_as) = (Some(1 << 30), 900 << 20);
        let refused =
            of_host(Some(2), &memory).expect("a limit").check(64 << 20, BYTES_LEFT).expect_err("124 MiB left");
        assert!(matches!(refused, Refused::Limit { left, allowed, .. } if (left, allowed) == (124 << 20, 1 << 30)));
        assert!(refused.to_string().contains("vm.overcommit_memory"), "{refused}");
        assert!(of_host(Some(2), &memory).is_some_and(|limit| limit.check(32 << 20, BYTES_LEFT).is_ok()));
        for mode in [None, Some(0), Some(1)] {
            assert_eq!(of_host(mode, &memory), None);
        }
    }

    #[test]
    fn control_groups_and_those_above_them_are_found() {
        let groups = memory_groups("5:cpu,cpuacct:/\n4:memory:/a/b\n0::/c\n");
        let expected = ["/sys/fs/cgroup/memory/a/b", "/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/memory"];
        assert_eq!(groups, expected.map(PathBuf::from));
        assert_eq!(legacy_groups("4:memory:/a\n0::/c\n", "freezer"), None);
    }

    #[test]
    fn a_group_says_whether_it_is_frozen() {
        let dir = tempfile::tempdir().expect("a directory");
        assert!(!is_group_frozen(dir.path()), "older kernels do not say");
        for (file, text, is_so) in [
            ("cgroup.events", "populated 1\nfrozen 0\n", false),
            ("cgroup.events", "populated 1\nfrozen 1\n", true),
            ("cgroup.events", "populated 1\nfrozen 0\n", false),
            // Some of its threads are on their way.
            ("cgroup.freeze", "1\n", true),
            ("cgroup.freeze", "0\n", false),
            ("freezer.state", "FREEZING\n", true),
            ("freezer.state", "FROZEN\n", true),
            ("freezer.state", "THAWED\n", false),
        ] {
            fs::write(dir.path().join(file), text).expect("writes");
            assert_eq!(is_group_frozen(dir.path()), is_so, "{file}: {text}");
        }
    }

    #[test]
    fn the_page_cache_of_a_group_counts_as_free() {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |name, text| fs::write(dir.path().join(name), text).expect("writes");
        write("memory.max", "max\n");
        assert_eq!(used_in_group(dir.path()), None);
        write("memory.max", "1000000\n");
        write("memory.current", "900000\n");
        write("memory.stat", "anon 100000\nfile 700000\nfile_mapped 5\n");
        assert_eq!(used_in_group(dir.path()), Some((1_000_000, 200_000)));
    }
}
