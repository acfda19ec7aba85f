//! Triggers of snapshots during a recording: after a time, at a size, at a peak, and before an out-of-memory kill. Such
//! a kill is near by the limits of the targets' cgroups (versions 1 and 2) and of the host, or if all tasks stall for
//! lack of memory (pressure stall information).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use heapbpf_host::cgroup;
use heapbpf_profile::units;
use procfs::{Current as _, Meminfo};

use crate::plan::TriggerOptions;

/// Below this share of the threshold, the trigger is armed again.
const REARM_SHARE: f64 = 0.9;
/// A new peak triggers a snapshot if it is this many times the last peak that did.
const PEAK_STEP: f64 = 1.1;
/// Minimum time between snapshots of peaks: while memory grows, peaks follow each other closely.
const PEAK_PAUSE: Duration = Duration::from_secs(1);

/// A threshold that triggers when it is passed upwards.
#[derive(Clone, Copy, Debug)]
struct Threshold {
    from: f64,
    /// Below this it is armed again.
    again_below: f64,
    armed: bool,
}

impl Threshold {
    const fn new(from: f64, again_below: f64) -> Self {
        Self { from, again_below, armed: true }
    }

    fn passed(&mut self, value: f64) -> bool {
        let passed = self.armed && value >= self.from;
        self.armed = if self.armed { !passed } else { value < self.again_below };
        passed
    }
}

/// Peaks that trigger snapshots.
#[derive(Clone, Copy, Debug)]
struct Peaks {
    bytes: f64,
    next: Instant,
}

impl Peaks {
    fn passed(&mut self, inuse_bytes: f64, now: Instant) -> bool {
        let passed = now >= self.next && inuse_bytes > self.bytes * PEAK_STEP;
        if passed {
            *self = Self { bytes: inuse_bytes, next: now + PEAK_PAUSE };
        }
        passed
    }
}

/// All triggers of a recording.
pub struct Triggers {
    every: Option<(Duration, Instant)>,
    at_bytes: Option<Threshold>,
    peaks: Option<Peaks>,
    limits: Option<MemoryLimits>,
}

impl Triggers {
    /// Creates the triggers. The clock starts now.
    pub fn new(options: TriggerOptions, now: Instant) -> Self {
        Self {
            every: options.every.map(|every| (every, now + every)),
            at_bytes: options.at_bytes.map(|bytes| Threshold::new(bytes as f64, REARM_SHARE * bytes as f64)),
            peaks: options.at_peak.then_some(Peaks { bytes: 0.0, next: now + PEAK_PAUSE }),
            limits: options.at_limit.then(MemoryLimits::new),
        }
    }

    /// The reason for a snapshot, if one is due now. Several triggers at once make one snapshot, and only the last is
    /// reported. `inuse`: estimated bytes in use; `targets`: process ids of live targets.
    pub fn due(&mut self, inuse: f64, targets: impl Iterator<Item = u32>, now: Instant) -> Option<String> {
        let mut why = None;
        if let Some((every, next)) = &mut self.every
            && now >= *next
        {
            // After a pause of heapbpf, the next snapshot comes a whole interval later.
            *next = (*next).max(now - *every) + *every;
            why = Some("on schedule (--every)".to_owned());
        }
        if self.peaks.as_mut().is_some_and(|peaks| peaks.passed(inuse, now)) {
            why = Some(format!("at a new peak: {} in use", units::bytes(inuse)));
        }
        if self.at_bytes.as_mut().is_some_and(|threshold| threshold.passed(inuse)) {
            why = Some(format!("at the threshold: {} in use", units::bytes(inuse)));
        }
        if let Some(limits) = &mut self.limits {
            why = limits.due(now, targets).map(|how| format!("under memory pressure: {how}")).or(why);
        }
        why
    }

    /// The latest time for the next check.
    pub fn next_look(&self) -> Option<Instant> {
        let limits = self.limits.as_ref().map(|limits| limits.next);
        [self.every.map(|(_, next)| next), limits].into_iter().flatten().min()
    }
}

/// Time between checks of the memory limits. A process that touches 1 GiB/s touches 20 MiB in that time.
const LIMITS_PAUSE: Duration = Duration::from_millis(20);
/// Time between checks of the targets' cgroup membership.
const GROUPS_PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of cgroups that are watched.
const MOST_GROUPS: usize = 256;
/// Share of the limit at which the first snapshot is due.
const FIRST_MARK: f64 = 0.9;
/// Below this share the first mark applies again.
const FIRST_MARK_AGAIN: f64 = 0.8;
/// A snapshot is due when all tasks stalled for memory for the first of these percentages of the last ten seconds, and
/// again once they have stalled for less than the second.
const STALL: Threshold = Threshold::new(10.0, 5.0);
/// Limits above this mean "no limit": version 1 expresses that as a number near 2^63.
const NO_LIMIT: u64 = 1 << 60;

/// Share of the limit at which the next snapshot is due: first 90 %, then whenever half of the remaining memory is used
/// up. So the last snapshot before a kill is close to it, and there are few snapshots.
#[derive(Clone, Copy, Debug)]
struct Mark(f64);

impl Mark {
    /// Whether the mark was passed.
    fn passed(&mut self, used: u64, limit: u64) -> bool {
        let share = used as f64 / limit.max(1) as f64;
        if share < FIRST_MARK_AGAIN {
            self.0 = FIRST_MARK;
        }
        // Beyond 99.99 % the remaining memory is not worth halving.
        if share < self.0 || self.0 > 0.9999 {
            return false;
        }
        self.0 = 1.0 - (1.0 - share.min(1.0)) / 2.0;
        true
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
        if (used as f64) < limit as f64 * FIRST_MARK_AGAIN {
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
struct MemoryLimits {
    hierarchies: Vec<(PathBuf, &'static str, Names)>,
    groups: BTreeMap<Group, (Mark, Threshold)>,
    host: (Mark, Threshold),
    /// When to check again.
    next: Instant,
    refreshed: Option<Instant>,
    /// Whether a cgroup was left out, which is reported once.
    left_out: bool,
}

impl MemoryLimits {
    /// Creates the state; nothing has been read yet.
    fn new() -> Self {
        let mut hierarchies = Vec::new();
        if let Some(mount) = cgroup::mount_point() {
            hierarchies.push((mount, "", VERSION_2));
        }
        let version_1 = Path::new("/sys/fs/cgroup/memory");
        if version_1.join(VERSION_1.used).exists() {
            hierarchies.push((version_1.into(), "memory", VERSION_1));
        }
        let (host, next) = ((Mark(FIRST_MARK), STALL), Instant::now());
        Self { hierarchies, groups: BTreeMap::new(), host, next, refreshed: None, left_out: false }
    }

    /// The reason for a snapshot, if one is due now. `pids`: the targets.
    fn due(&mut self, now: Instant, pids: impl Iterator<Item = u32>) -> Option<String> {
        if now < self.next {
            return None;
        }
        self.next = now + LIMITS_PAUSE;
        let refresh = self.refreshed.is_none_or(|at| now - at >= GROUPS_PAUSE);
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
        if let Ok(Meminfo { mem_total: total, mem_available: Some(available), .. }) = Meminfo::current() {
            // What is not available without swapping.
            let used = total.saturating_sub(available);
            if self.host.0.passed(used, total) {
                why = Some(format!("{used} of {total} bytes of the host's memory used"));
            }
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
                    add(&mut found, Group { directory, names: *names }, &mut self.left_out);
                }
            }
        }
        self.groups.retain(|group, _| found.contains(group));
        for group in found {
            self.groups.entry(group).or_insert((Mark(FIRST_MARK), STALL));
        }
    }
}

/// Adds a cgroup that has a limit. Reports the first one beyond the maximum, and does not read the limits of others.
fn add(found: &mut BTreeSet<Group>, group: Group, left_out: &mut bool) {
    let is_full = found.len() >= MOST_GROUPS;
    if found.contains(&group) || (is_full && *left_out) || group.read().is_none() {
        return;
    }
    if is_full {
        *left_out = true;
        let first = group.directory.display();
        log::warn!("at most {MOST_GROUPS} cgroups are watched: limits of others, such as {first}, cause no snapshot");
    } else {
        found.insert(group);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_counts_again_after_it_was_left() {
        let mut threshold = Threshold::new(100.0, 90.0);
        let passed = [50.0, 100.0, 150.0, 95.0, 101.0, 80.0, 100.0].map(|bytes| threshold.passed(bytes));
        assert_eq!(passed, [false, true, false, false, false, false, true]);
    }

    #[test]
    fn peaks_are_a_step_apart_in_bytes_and_time() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut peaks = Peaks { bytes: 0.0, next: start };
        let passed = [(0, 10.0), (10, 50.0), (1000, 10.5), (1001, 50.0), (5000, 54.0), (5001, 56.0)]
            .map(|(ms, bytes)| peaks.passed(bytes, at(ms)));
        assert_eq!(passed, [true, false, false, true, false, true]);
    }

    #[test]
    fn several_triggers_at_once_are_one_snapshot_and_the_last_one_is_reported() {
        let start = Instant::now();
        let options = TriggerOptions {
            every: Some(Duration::from_secs(10)),
            at_bytes: Some(1 << 20),
            at_peak: true,
            ..TriggerOptions::default()
        };
        let mut triggers = Triggers::new(options, start);
        let due = |triggers: &mut Triggers, seconds: u64, inuse| {
            triggers.due(inuse, std::iter::empty(), start + Duration::from_secs(seconds))
        };
        assert_eq!(due(&mut triggers, 0, 0.0), None);
        let why = due(&mut triggers, 10, 2.0 * 1_048_576.0).unwrap();
        assert_eq!(why, "at the threshold: 2.00 MiB in use");
        assert_eq!(due(&mut triggers, 11, 2.0 * 1_048_576.0), None, "each of them was served");
        assert_eq!(triggers.next_look(), Some(start + Duration::from_secs(20)));
        // After a pause of heapbpf, the next snapshot comes a whole interval later.
        assert_eq!(due(&mut triggers, 47, 0.0).as_deref(), Some("on schedule (--every)"));
        assert_eq!(triggers.next_look(), Some(start + Duration::from_secs(47)));
    }

    #[test]
    fn marks_come_nearer_to_the_limit_and_are_set_again() {
        let mut mark = Mark(FIRST_MARK);
        let mut passed = Vec::new();
        for used in (0..1000).chain(500..1000) {
            if mark.passed(used, 1000) {
                passed.push(used);
            }
        }
        assert_eq!(passed, [900, 950, 975, 988, 994, 997, 999, 900, 950, 975, 988, 994, 997, 999]);
        // At the limit and beyond, the mark is passed once.
        let mut mark = Mark(FIRST_MARK);
        assert_eq!((0..9).filter(|_| mark.passed(1001, 1000)).count(), 1);
    }

    #[test]
    fn standing_still_is_told_once() {
        let text = "some avg10=20.00 avg60=1.00 avg300=0.24 total=2\nfull avg10=12.50 avg60=0.02 avg300=0.05 total=4\n";
        assert_eq!((stalled(text), stalled("some avg10=9.00 total=1"), stalled("")), (Some(12.5), None, None));
        let mut pressure = STALL;
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
    fn the_first_cgroup_too_many_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let (mut found, mut left_out) = (BTreeSet::new(), false);
        for number in 0..=MOST_GROUPS {
            assert!(!left_out, "{number}");
            let directory = dir.path().join(number.to_string());
            std::fs::create_dir(&directory).unwrap();
            std::fs::write(directory.join("memory.max"), "1000\n").unwrap();
            std::fs::write(directory.join("memory.current"), "7\n").unwrap();
            add(&mut found, Group { directory, names: VERSION_2 }, &mut left_out);
            // One that is watched already needs no place.
            let first = found.first().unwrap().clone();
            add(&mut found, first, &mut left_out);
        }
        assert_eq!((found.len(), left_out), (MOST_GROUPS, true));
    }

    #[test]
    fn hierarchies_of_both_versions() {
        let text = "9:name=systemd:/x\n4:cpu,memory:/a/b:c\n0::/z\n";
        assert_eq!((path_of(text, "memory"), path_of(text, "")), (Some("/a/b:c"), Some("/z")));
        assert_eq!(path_of("4:memory_recursive:/y\n", "memory"), None);
    }
}
