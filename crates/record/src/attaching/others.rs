//! What is known about inline hooks that another heapbpf has in targets.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use heapbpf_remote::blob_range;

/// Shortest and longest time between two checks of the mappings of processes with hooks of others, ns. The time doubles
/// from check to check while all that is found is code that nothing leads to, in processes without probes.
const SHORTEST_PAUSE_NS: u64 = 100_000_000;
const LONGEST_PAUSE_NS: u64 = 1_600_000_000;
/// Minimum of that time as a multiple of how long a check takes.
const SHARE_OF_TIME: u64 = 500;
/// Maximum number of processes whose names are kept, and that a remark names.
const MOST_NAMES: usize = 4096;
const MOST_NAMED: usize = 3;

/// Inline hooks of other heapbpfs in targets.
#[derive(Debug, Default)]
pub struct OthersHooks {
    /// Processes that have mapped code of another heapbpf, and when their mappings were last checked (CLOCK_MONOTONIC).
    pub(super) watched: HashMap<u32, u64>,
    /// When all of them were last checked (CLOCK_MONOTONIC).
    looked_ns: u64,
    /// Time until the next check, ns, and its minimum because of what a check takes.
    pause_ns: u64,
    least_pause_ns: u64,
    /// Names of the targets that probes did not see for a while.
    names: BTreeMap<u32, String>,
}

impl OthersHooks {
    /// Time until the mappings of processes with hooks of others must be checked; `None` if there are no such
    /// processes.
    pub(super) fn until_look(&self, now_ns: u64) -> Option<Duration> {
        let next_ns = self.looked_ns.saturating_add(self.pause_ns.max(self.least_pause_ns));
        (!self.watched.is_empty()).then(|| Duration::from_nanos(next_ns.saturating_sub(now_ns)))
    }

    /// Watches a process, unless it is watched already, and has all checked soon. `since_ns`: when its mappings were
    /// last known (CLOCK_MONOTONIC).
    pub(super) fn watch(&mut self, pid: u32, since_ns: u64) {
        self.watched.entry(pid).or_insert(since_ns);
        self.pause_ns = SHORTEST_PAUSE_NS;
    }

    /// Sets the time of the next check, after one that took from `begun_ns` to `now_ns`. `is_unused`: it found nothing
    /// but code that nothing leads to, in processes without probes.
    pub(super) fn looked(&mut self, begun_ns: u64, now_ns: u64, is_unused: bool) {
        let doubled_ns = (2 * self.pause_ns).clamp(SHORTEST_PAUSE_NS, LONGEST_PAUSE_NS);
        self.pause_ns = if is_unused { doubled_ns } else { SHORTEST_PAUSE_NS };
        self.least_pause_ns = now_ns.saturating_sub(begun_ns).saturating_mul(SHARE_OF_TIME);
        self.looked_ns = now_ns;
    }

    /// Notes the name of a target that probes do not see.
    pub(super) fn name(&mut self, pid: u32, comm: String) {
        if self.names.len() < MOST_NAMES || self.names.contains_key(&pid) {
            self.names.insert(pid, comm);
        }
    }

    /// Targets that probes did not see for a while.
    pub(super) fn hidden(&self) -> impl Iterator<Item = u32> + '_ {
        self.names.keys().copied()
    }

    /// Reports targets that were not seen for a while and have no line in the profile to report it on. `seen`:
    /// processes that have one.
    pub(super) fn remark(&self, seen: &HashSet<u32>) -> Option<String> {
        let unlisted: Vec<_> = self.names.iter().filter(|(pid, _)| !seen.contains(pid)).collect();
        let named = unlisted.iter().take(MOST_NAMED).map(|(pid, comm)| format!("{pid} ({comm})"));
        let named = named.collect::<Vec<_>>().join(", ");
        let more = if unlisted.len() > MOST_NAMED { ", …" } else { "" };
        match unlisted.len() {
            0 => None,
            1 => Some(format!("process {named}: what it allocated while another recording counted it is missing")),
            n => Some(format!(
                "{n} processes: what they allocated while another recording counted them is missing: {named}{more}"
            )),
        }
    }
}

/// Code of inline hooks in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Code {
    /// It is mapped, but nothing leads there.
    Mapped,
    /// It replaces pages of the allocator.
    InPlace,
}

/// Code of another heapbpf in `/proc/PID/maps`, if there is any. `is_ours` says by the address where code is mapped
/// whether it is our own.
pub(super) fn code_of_others(maps: &str, is_ours: impl Fn(u64) -> bool) -> Option<Code> {
    let code = |line: &str| {
        let range = line.find("/memfd:").and_then(|at| blob_range(&line[at..]))?;
        let start = line.split('-').next().and_then(|start| u64::from_str_radix(start, 16).ok())?;
        let code = if range.contains(&start) { Code::Mapped } else { Code::InPlace };
        (!is_ours(range.start)).then_some(code)
    };
    maps.lines().filter_map(code).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hooks_are_in_place_where_pages_outside_of_their_range_are_mapped() {
        let of = |lines: &[&str]| {
            let lines = lines.iter().map(|line| format!("{line} 00000000 00:01 1035"));
            let name = "/memfd:heapbpf-inline-7f0000000000-6000 (deleted)";
            lines.map(|line| format!("{line} {name}\n")).collect::<String>()
        };
        let libc = "7f1000000000-7f1000028000 r--p 00000000 fe:01 77 /usr/lib/libc.so.6\n";
        let mapped = of(&["7f0000000000-7f0000002000 r-xp", "7f0000002000-7f0000006000 rw-p"]);
        let in_place = of(&["7f1000028000-7f1000029000 r-xp"]);
        let code = |maps: &str| code_of_others(maps, |_| false);
        assert_eq!((code(""), code(libc)), (None, None));
        assert_eq!(code(&format!("{mapped}{libc}")), Some(Code::Mapped));
        assert_eq!(code(&format!("{mapped}{libc}{in_place}")), Some(Code::InPlace));
        assert_eq!(code_of_others(&format!("{mapped}{in_place}"), |base| base == 0x7f00_0000_0000), None, "ours");
    }

    #[test]
    fn code_that_nothing_leads_to_is_looked_at_less_and_less_often() {
        const MS: u64 = 1_000_000;
        let mut others = OthersHooks::default();
        assert_eq!(others.until_look(MS), None, "nothing is watched");
        others.watch(7, MS);
        assert_eq!(others.until_look(5_000 * MS), Some(Duration::ZERO), "the first look comes at once");
        let until = |others: &OthersHooks, now_ms: u64| others.until_look(now_ms * MS).unwrap().as_millis();
        let mut now_ms = 5_000;
        let pauses = [true; 6].map(|is_unused| {
            others.looked(now_ms * MS, now_ms * MS, is_unused);
            let pause_ms = until(&others, now_ms);
            now_ms += 10_000;
            pause_ms
        });
        assert_eq!(pauses, [200, 400, 800, 1_600, 1_600, 1_600]);
        others.looked(now_ms * MS, now_ms * MS, false);
        assert_eq!(until(&others, now_ms), 100, "hooks were found");
        others.looked(now_ms * MS, now_ms * MS, true);
        assert_eq!(until(&others, now_ms), 200);
        others.watch(8, now_ms * MS);
        assert_eq!(until(&others, now_ms), 100, "a new process");
        others.looked(now_ms * MS, (now_ms + 4) * MS, true);
        assert_eq!(until(&others, now_ms + 4), 2_000, "looking may take a five hundredth of the time");
        assert_eq!(others.watched[&7], MS);
    }

    #[test]
    fn processes_without_a_line_are_named() {
        let mut others = OthersHooks::default();
        assert_eq!(others.remark(&HashSet::new()), None);
        others.names.insert(7, "seven".into());
        assert_eq!(
            others.remark(&HashSet::new()).as_deref(),
            Some("process 7 (seven): what it allocated while another recording counted it is missing")
        );
        assert_eq!(others.remark(&HashSet::from([7])), None, "its line tells");
        others.names.extend((1..=4).map(|pid| (pid, "x".to_owned())));
        let remark = others.remark(&HashSet::from([2])).unwrap();
        assert!(
            remark.starts_with("4 processes: ") && remark.ends_with("is missing: 1 (x), 3 (x), 4 (x), …"),
            "{remark}"
        );
    }
}
