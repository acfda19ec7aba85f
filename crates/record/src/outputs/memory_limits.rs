//! How close targets are to an out-of-memory kill, by the limits of their cgroups (versions 1 and 2) and of the host,
//! and whether they stall for lack of memory (pressure stall information).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use heapbpf_host::cgroup;

/// Time between checks. A process that touches 1 GiB/s touches 20 MiB in that time.
const PAUSE: Duration = Duration::from_millis(20);
/// Time between checks of the targets' cgroup membership.
const REFRESH: Duration = Duration::from_secs(1);
/// Maximum number of cgroups that are watched.
const MOST_GROUPS: usize = 256;
/// Share of the limit at which the first snapshot is due.
const FIRST_MARK: f64 = 0.9;
/// Below this share the first mark applies again.
const REARM: f64 = 0.8;
/// A snapshot is due when all tasks stalled for memory for this percentage of the last ten seconds …
const PRESSURE: f64 = 10.0;
/// … and the trigger is armed again below this percentage.
const PRESSURE_REARM: f64 = 5.0;
/// Limits above this mean "no limit": version 1 expresses that as a number near 2^63.
const NO_LIMIT: u64 = 1 << 60;

/// Share of the limit at which the next snapshot is due: first 90 %, then whenever half of the remaining memory is used
/// up. So the last snapshot before a kill is close to it, and there are few snapshots.
#[derive(Clone, Copy, Debug)]
struct Mark(f64);

impl Default for Mark {
    fn default() -> Self {
        Self(FIRST_MARK)
    }
}

impl Mark {
    /// Whether the mark was passed.
    fn passed(&mut self, used: u64, limit: u64) -> bool {
        let share = used as f64 / limit.max(1) as f64;
        if share < REARM {
            *self = Self::default();
        }
        // Beyond 99.99 % the remaining memory is not worth halving.
        if share < self.0 || self.0 > 0.9999 {
            return false;
        }
        self.0 = 1.0 - (1.0 - share.min(1.0)) / 2.0;
        true
    }
}

/// Trigger for a stall of all tasks for lack of memory.
#[derive(Clone, Copy, Debug, Default)]
struct Pressure {
    told: bool,
}

impl Pressure {
    /// Whether a stall began now.
    fn passed(&mut self, percent: f64) -> bool {
        let passed = !self.told && percent >= PRESSURE;
        self.told = passed || self.told && percent >= PRESSURE_REARM;
        passed
    }
}

/// File names of a cgroup hierarchy: bytes used, bytes allowed, the field of `memory.stat` with the memory that is
/// reclaimed first, and pressure if there is such a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Names {
    used: &'static str,
    limit: &'static str,
    inactive: &'static str,
    pressure: Option<&'static str>,
}

const VERSION_2: Names =
    Names { used: "memory.current", limit: "memory.max", inactive: "inactive_file", pressure: Some("memory.pressure") };
const VERSION_1: Names = Names {
    used: "memory.usage_in_bytes",
    limit: "memory.limit_in_bytes",
    inactive: "total_inactive_file",
    pressure: None,
};

/// A cgroup with a memory limit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Group {
    directory: PathBuf,
    names: Names,
}

impl Group {
    /// Bytes used and allowed; `None` if there is no limit (any more). Inactive cached files do not count: if they did,
    /// a cgroup could stay near its limit for years.
    fn read(&self) -> Option<(u64, u64)> {
        let text = |name| std::fs::read_to_string(self.directory.join(name)).ok();
        let number = |name| text(name)?.trim().parse::<u64>().ok();
        // "max" is not a number.
        let limit = number(self.names.limit).filter(|limit| *limit < NO_LIMIT)?;
        let used = number(self.names.used)?;
        if (used as f64) < limit as f64 * REARM {
            // Far from the limit even with cached files, so `memory.stat`, a long file, need not be read.
            return Some((used, limit));
        }
        let cached = text("memory.stat").and_then(|stat| field(&stat, self.names.inactive)).unwrap_or(0);
        Some((used.saturating_sub(cached), limit))
    }

    /// Percent of time in which all tasks of the cgroup stalled for memory.
    fn pressure(&self) -> Option<f64> {
        stalled(&std::fs::read_to_string(self.directory.join(self.names.pressure?)).ok()?)
    }
}

/// The number in a line `NAME NUMBER` of `memory.stat`.
fn field(stat: &str, name: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Percent of the last ten seconds in which all tasks stalled.
fn stalled(pressure: &str) -> Option<f64> {
    let line = pressure.lines().find_map(|line| line.strip_prefix("full "))?;
    line.split(' ').find_map(|part| part.strip_prefix("avg10=")?.parse().ok())
}

/// Watches the memory limits of targets and of the host.
pub struct MemoryLimits {
    hierarchies: Vec<(PathBuf, &'static str, Names)>,
    groups: BTreeMap<Group, (Mark, Pressure)>,
    host: (Mark, Pressure),
    next: Instant,
    refreshed: Option<Instant>,
}

impl MemoryLimits {
    /// Creates the state; nothing has been read yet.
    pub fn new() -> Self {
        let mut hierarchies = Vec::new();
        if let Some(mount) = cgroup::mount_point() {
            hierarchies.push((mount, "", VERSION_2));
        }
        let version_1 = Path::new("/sys/fs/cgroup/memory");
        if version_1.join(VERSION_1.used).exists() {
            hierarchies.push((version_1.into(), "memory", VERSION_1));
        }
        Self { hierarchies, groups: BTreeMap::new(), host: Default::default(), next: Instant::now(), refreshed: None }
    }

    /// When to check again.
    pub fn next_look(&self) -> Instant {
        self.next
    }

    /// The reason for a snapshot, if one is due now. `pids`: the targets.
    pub fn due(&mut self, now: Instant, pids: impl Iterator<Item = u32>) -> Option<String> {
        if now < self.next {
            return None;
        }
        self.next = now + PAUSE;
        let refresh = self.refreshed.is_none_or(|at| now - at >= REFRESH);
        if refresh {
            self.refreshed = Some(now);
            self.refresh(pids);
        }
        // Averages over ten seconds need not be read more often.
        let mut why = if refresh { self.pressure() } else { None };
        for (group, (mark, _)) in &mut self.groups {
            if let Some((used, limit)) = group.read()
                && mark.passed(used, limit)
            {
                why = Some(format!("{used} of {limit} bytes used in {}", group.directory.display()));
            }
        }
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        if let Some((used, total)) = host_memory(&meminfo)
            && self.host.0.passed(used, total)
        {
            why = Some(format!("{used} of {total} bytes of the host's memory used"));
        }
        why
    }

    /// The reason for a snapshot because all tasks stall, if a stall began now.
    fn pressure(&mut self) -> Option<String> {
        let mut why = None;
        for (group, (_, pressure)) in &mut self.groups {
            if let Some(percent) = group.pressure().filter(|percent| pressure.passed(*percent)) {
                why = Some(format!("all tasks in {} stall {percent} % of the time", group.directory.display()));
            }
        }
        let host = std::fs::read_to_string("/proc/pressure/memory").ok().and_then(|text| stalled(&text));
        if let Some(percent) = host.filter(|percent| self.host.1.passed(*percent)) {
            why = Some(format!("all tasks of the host stall {percent} % of the time"));
        }
        why
    }

    fn refresh(&mut self, pids: impl Iterator<Item = u32>) {
        let mut found = BTreeSet::new();
        for pid in pids {
            let Ok(text) = std::fs::read_to_string(format!("/proc/{pid}/cgroup")) else { continue };
            for (mount, controller, names) in &self.hierarchies {
                let Some(path) = path_of(&text, controller) else { continue };
                // A limit may be set at any level: a pod's limit applies to its containers.
                for path in Path::new(path).ancestors() {
                    let directory = mount.join(path.strip_prefix("/").unwrap_or(path));
                    let group = Group { directory, names: *names };
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

/// Bytes that are not available without swapping, and bytes in total.
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
        // At the limit and beyond, the mark is passed once.
        let mut mark = Mark::default();
        assert_eq!((0..9).filter(|_| mark.passed(1001, 1000)).count(), 1);
    }

    #[test]
    fn standing_still_is_told_once() {
        let text = "some avg10=20.00 avg60=1.00 avg300=0.24 total=2\nfull avg10=12.50 avg60=0.02 avg300=0.05 total=4\n";
        assert_eq!((stalled(text), stalled("some avg10=9.00 total=1"), stalled("")), (Some(12.5), None, None));
        let mut pressure = Pressure::default();
        let passed = [0.0, 9.9, 12.5, 50.0, 7.0, 11.0, 4.0, 8.0, 10.0].map(|percent| pressure.passed(percent));
        assert_eq!(passed, [false, false, true, false, false, false, false, false, true]);
    }

    #[test]
    fn cached_files_do_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let group = Group { directory: dir.path().into(), names: VERSION_2 };
        write("memory.max", "1000\n");
        write("memory.current", "950\n");
        assert_eq!(group.read(), Some((950, 1000)));
        write("memory.stat", "anon 100\ninactive_file_x 7\ninactive_file 400\n");
        assert_eq!(group.read(), Some((550, 1000)));
        write("memory.current", "700\n");
        assert_eq!(group.read(), Some((700, 1000)), "far away even with them");
        write("memory.max", "max\n");
        assert_eq!(group.read(), None);
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
