//! How near targets are to being killed for want of memory: their cgroups' limits (versions 1 and 2), and the host's.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::host::cgroup;

/// Time between looks: a process that touches 1 GiB/s takes that long for 20 MiB.
const PAUSE: Duration = Duration::from_millis(20);
/// Time between looks at which groups the targets are in.
const REFRESH: Duration = Duration::from_secs(1);
/// Most groups that are watched.
const MOST_GROUPS: usize = 256;
/// Share of the limit at which the first snapshot is due.
const FIRST_MARK: f64 = 0.9;
/// Below this share the first mark is set again.
const REARM: f64 = 0.8;
/// Limits above this are none (version 1 says "no limit" by a number near 2^63).
const NO_LIMIT: u64 = 1 << 60;

/// When the next snapshot is due: at 90 % of the limit, then whenever half of what was left then is used up. So the last
/// one before a kill is near it, and there are few of them.
#[derive(Clone, Copy, Debug)]
struct Mark(f64);

impl Default for Mark {
    fn default() -> Self {
        Self(FIRST_MARK)
    }
}

impl Mark {
    /// Whether a mark was passed.
    fn passed(&mut self, used: u64, limit: u64) -> bool {
        let share = used as f64 / limit.max(1) as f64;
        if share < REARM {
            *self = Self::default();
        }
        // The last ten thousandth: no room left that would be worth halving.
        if share < self.0 || self.0 > 0.9999 {
            return false;
        }
        self.0 = 1.0 - (1.0 - share.min(1.0)) / 2.0;
        true
    }
}

/// A limited group: its files with what is used and what may be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Group {
    directory: PathBuf,
    used: &'static str,
    limit: &'static str,
}

/// The names of these files in version 2 and version 1.
const VERSION_2: (&str, &str) = ("memory.current", "memory.max");
const VERSION_1: (&str, &str) = ("memory.usage_in_bytes", "memory.limit_in_bytes");

impl Group {
    /// Bytes used and allowed; `None` if there is no limit (any more).
    fn read(&self) -> Option<(u64, u64)> {
        let number = |name| std::fs::read_to_string(self.directory.join(name)).ok()?.trim().parse::<u64>().ok();
        // "max" is no number.
        let limit = number(self.limit).filter(|limit| *limit < NO_LIMIT)?;
        Some((number(self.used)?, limit))
    }
}

/// Watches the limits of targets and of the host.
pub struct MemoryLimits {
    hierarchies: Vec<(PathBuf, &'static str, (&'static str, &'static str))>,
    groups: BTreeMap<Group, Mark>,
    host: Mark,
    next: Instant,
    refreshed: Option<Instant>,
}

impl MemoryLimits {
    /// Nothing is known yet.
    pub fn new() -> Self {
        let mut hierarchies = Vec::new();
        if let Some(mount) = cgroup::mount_point() {
            hierarchies.push((mount, "", VERSION_2));
        }
        let version_1 = Path::new("/sys/fs/cgroup/memory");
        if version_1.join(VERSION_1.0).exists() {
            hierarchies.push((version_1.into(), "memory", VERSION_1));
        }
        Self { hierarchies, groups: BTreeMap::new(), host: Mark::default(), next: Instant::now(), refreshed: None }
    }

    /// When to look again.
    pub fn next_look(&self) -> Instant {
        self.next
    }

    /// Why a snapshot is due now, if it is. `pids`: the targets.
    pub fn due(&mut self, now: Instant, pids: impl Iterator<Item = u32>) -> Option<String> {
        if now < self.next {
            return None;
        }
        self.next = now + PAUSE;
        if self.refreshed.is_none_or(|at| now - at >= REFRESH) {
            self.refreshed = Some(now);
            self.refresh(pids);
        }
        let mut why = None;
        for (group, mark) in &mut self.groups {
            if let Some((used, limit)) = group.read()
                && mark.passed(used, limit)
            {
                why = Some(format!("{used} of {limit} bytes used in {}", group.directory.display()));
            }
        }
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        if let Some((used, total)) = host_memory(&meminfo)
            && self.host.passed(used, total)
        {
            why = Some(format!("{used} of {total} bytes of the host's memory used"));
        }
        why
    }

    fn refresh(&mut self, pids: impl Iterator<Item = u32>) {
        let mut found = BTreeSet::new();
        for pid in pids {
            let Ok(text) = std::fs::read_to_string(format!("/proc/{pid}/cgroup")) else { continue };
            for (mount, controller, (used, limit)) in &self.hierarchies {
                let Some(path) = path_of(&text, controller) else { continue };
                // A limit may be on any level: a pod's holds for its containers.
                for path in Path::new(path).ancestors() {
                    let directory = mount.join(path.strip_prefix("/").unwrap_or(path));
                    let group = Group { directory, used, limit };
                    if found.len() < MOST_GROUPS && !found.contains(&group) && group.read().is_some() {
                        found.insert(group);
                    }
                }
            }
        }
        self.groups.retain(|group, _| found.contains(group));
        for group in found {
            self.groups.entry(group).or_default();
        }
    }
}

/// The path of a process in the hierarchy with this controller (empty: version 2).
fn path_of<'a>(text: &'a str, controller: &str) -> Option<&'a str> {
    if controller.is_empty() {
        return cgroup::parse(text);
    }
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        controllers.split(',').any(|name| name == controller).then_some(path)
    })
}

/// Bytes that cannot be had without swapping, of all bytes.
fn host_memory(meminfo: &str) -> Option<(u64, u64)> {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let total = field("MemTotal")?;
    Some((total.saturating_sub(field("MemAvailable")?), total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_come_nearer_to_the_limit_and_are_set_again() {
        let mut mark = Mark::default();
        let mut passed = Vec::new();
        for used in (0..1000).chain(500..1000) {
            if mark.passed(used, 1000) {
                passed.push(used);
            }
        }
        assert_eq!(passed, [900, 950, 975, 988, 994, 997, 999, 900, 950, 975, 988, 994, 997, 999]);
        // At the limit and beyond, it is once.
        let mut mark = Mark::default();
        assert_eq!((0..9).filter(|_| mark.passed(1001, 1000)).count(), 1);
    }

    #[test]
    fn hierarchies_of_both_versions() {
        let text = "9:name=systemd:/x\n4:cpu,memory:/a/b:c\n0::/z\n";
        assert_eq!((path_of(text, "memory"), path_of(text, "")), (Some("/a/b:c"), Some("/z")));
        assert_eq!(path_of("4:memory_recursive:/y\n", "memory"), None);
    }

    #[test]
    fn the_hosts_memory() {
        let text = "MemTotal:        1000 kB\nMemFree: 1 kB\nMemAvailable:    200 kB\n";
        assert_eq!(host_memory(text), Some((800 * 1024, 1000 * 1024)));
        assert_eq!(host_memory("MemTotal: 5 kB"), None);
        assert!(host_memory(&std::fs::read_to_string("/proc/meminfo").unwrap()).is_some());
    }
}
