//! Targets about which nothing was recorded, and warnings about processes that should be hooked inline and are not: one
//! per reason. The report counts those that come later. Pure.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use crate::remarks::first_of;

/// A target that ended before its hooks were noted.
#[derive(Clone, Debug, Default)]
struct MissedProcess {
    name: Arc<str>,
    /// The parent that it was forked from. The parent's hooks count the child if they were in place by then.
    forked: Option<Forked>,
}

/// When and by whom a process that still runs its parent's program was forked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forked {
    /// Process id of the parent.
    pub parent: u32,
    /// CLOCK_MONOTONIC of the fork.
    pub since_ns: u64,
}

/// Targets that ended before one of their allocators was hooked, or soon after. They are missing from the profile
/// unless their figures arrive later.
#[derive(Clone, Debug, Default)]
pub struct Missed {
    processes: BTreeMap<u32, MissedProcess>,
    /// Processes in which an allocator was certainly not hooked in time. In the other ones, no allocator was known to
    /// be hooked when they ended.
    certain: BTreeSet<u32>,
    /// Targets for which another remark says why nothing is seen of them.
    explained: BTreeSet<u32>,
    /// Names of programs that targets executed, and how many runs of each were over before they were hooked.
    programs: BTreeMap<Arc<str>, u64>,
    /// Processes whose programs are judged one by one.
    judged: BTreeSet<u32>,
}

impl Missed {
    /// Maximum number of remembered targets. Beyond that, the remark says enough.
    const MOST: usize = 1 << 16;
    /// Maximum number of names in a remark.
    const NAMES: usize = 5;

    /// Adds such a process, with its name if known.
    pub fn note(&mut self, pid: u32, comm: Arc<str>) {
        if self.processes.len() < Self::MOST && !self.explained.contains(&pid) {
            let missed = self.processes.entry(pid).or_default();
            if !comm.is_empty() {
                missed.name = comm;
            }
        }
    }

    /// Adds such a process that was forked and kept its parent's program.
    pub fn note_forked(&mut self, pid: u32, comm: Arc<str>, forked: Forked) {
        self.note(pid, comm);
        if let Some(missed) = self.processes.get_mut(&pid) {
            missed.forked = Some(forked);
        }
    }

    /// Adds a process that has an allocator which was not hooked in time, whatever happens to its other allocators.
    pub fn note_certain(&mut self, pid: u32, comm: Arc<str>) {
        self.note(pid, comm);
        if self.processes.contains_key(&pid) {
            self.certain.insert(pid);
        }
    }

    /// Adds a program that a target executed and that was over before it was hooked. Other programs of the same process
    /// may have been counted.
    pub fn note_program(&mut self, comm: Arc<str>) {
        if self.programs.len() < Self::MOST {
            *self.programs.entry(comm).or_default() += 1;
        }
    }

    /// Notes that missed programs of this process are reported one by one.
    pub fn knows_programs_of(&mut self, pid: u32) {
        if self.judged.len() < Self::MOST {
            self.judged.insert(pid);
        }
    }

    /// Removes a process in which an allocator was hooked in time, unless another was not.
    pub fn has_one_hooked(&mut self, pid: u32) {
        if !self.certain.contains(&pid) {
            self.processes.remove(&pid);
        }
    }

    /// Notes that another remark says why nothing is seen of a process.
    pub fn is_explained(&mut self, pid: u32) {
        self.forget(pid);
        self.explained.insert(pid);
    }

    /// Removes a process whose figures have arrived after all.
    pub fn forget(&mut self, pid: u32) {
        self.processes.remove(&pid);
        self.certain.remove(&pid);
    }

    /// The remarks in the profile. `seen`: processes that have a line in it. `had_hooks`: whether the hooks of a parent
    /// counted the child from its fork on.
    pub fn remarks(&self, seen: &HashSet<u32>, had_hooks: impl Fn(Forked) -> bool) -> Vec<String> {
        let is_missed = |pid: &u32, missed: &MissedProcess| {
            let is_reported = self.judged.contains(pid) || missed.forked.is_some_and(&had_hooks);
            !seen.contains(pid) && (self.certain.contains(pid) || !is_reported)
        };
        let missed = self.processes.iter().filter(|(pid, missed)| is_missed(pid, missed));
        let missed: Vec<&str> = missed.map(|(_, missed)| &*missed.name).collect();
        let processes = remark(missed.len() as u64, ["process", "processes"], &missed, "ended");
        let programs: Vec<&str> = self.programs.keys().map(|name| &**name).collect();
        let programs =
            remark(self.programs.values().sum(), ["program", "programs"], &programs, "ended or executed another one");
        processes.into_iter().chain(programs).collect()
    }
}

/// Says how many were missed, with some names.
fn remark(n: u64, [one, many]: [&str; 2], names: &[&str], ended: &str) -> Option<String> {
    let names: BTreeSet<&str> = names.iter().copied().filter(|name| !name.is_empty()).collect();
    let named = if names.is_empty() { String::new() } else { format!(" ({})", first_of(names, Missed::NAMES)) };
    let (they, what) = if n == 1 { ("it", one) } else { ("they", many) };
    (n > 0)
        .then(|| format!("{n} {what}{named} {ended} before {they} could be counted: what {they} allocated is missing"))
}

/// Maximum number of reported reasons, and of processes that a warning names.
const MOST_REASONS: usize = 64;
const MOST_NAMED: usize = 3;

/// Processes that are not hooked inline.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    /// By reason; `None` once it has been reported.
    unreported: BTreeMap<String, Option<BTreeSet<u32>>>,
}

impl Refusals {
    /// Notes why a process is not hooked inline.
    pub(super) fn note(&mut self, pid: u32, why: &str) {
        if let Some(unreported) = self.unreported.get_mut(why) {
            unreported.iter_mut().for_each(|pids| {
                pids.insert(pid);
            });
        } else if self.unreported.len() < MOST_REASONS {
            self.unreported.insert(why.to_owned(), Some(BTreeSet::from([pid])));
        }
    }

    /// The warnings that are due: one per reason that has not been reported yet.
    pub(super) fn take(&mut self) -> Vec<String> {
        let line = |(why, pids): (&String, &mut Option<BTreeSet<u32>>)| {
            let pids = pids.take()?;
            let named = first_of(&pids, MOST_NAMED);
            let who = match pids.len() {
                1 => format!("process {named} uses"),
                number => format!("{number} processes ({named}) use"),
            };
            Some(format!("{who} probes: {why}"))
        };
        self.unreported.iter_mut().filter_map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_missed_are_counted_and_named() {
        let mut missed = Missed::default();
        let nobody = HashSet::new();
        let never = |_| false;
        assert_eq!(missed.remarks(&nobody, never), [] as [&str; 0]);
        for pid in 1..=7 {
            missed.note(pid, format!("n{pid}").into());
        }
        missed.forget(1);
        let remark = missed.remarks(&nobody, never).pop().unwrap();
        assert!(remark.starts_with("6 processes (n2, n3, n4, n5, n6, …) ended before"), "{remark}");
        let remark = missed.remarks(&HashSet::from([2, 3, 4, 5, 6]), never).pop().unwrap();
        assert!(remark.starts_with("1 process (n7) ended before"), "{remark}");
        missed.note_certain(6, "n6".into());
        missed.has_one_hooked(6);
        missed.has_one_hooked(7);
        let remark = missed.remarks(&HashSet::from([2, 3, 4, 5]), never).pop().unwrap();
        assert!(remark.starts_with("1 process (n6) ended before"), "{remark}");
        missed.forget(6);
        missed.note(6, "n6".into());
        missed.has_one_hooked(6);
        missed.is_explained(7);
        missed.note(7, "n7".into());
        assert_eq!(missed.remarks(&HashSet::from([2, 3, 4, 5, 6]), never), [] as [&str; 0]);
    }

    /// A child may start and end before the files that its parent maps are known.
    #[test]
    fn a_child_of_a_hooked_parent_is_not_missed() {
        let mut missed = Missed::default();
        let nobody = HashSet::new();
        let forked = Forked { parent: 1, since_ns: 50 };
        missed.note_forked(2, "child".into(), forked);
        assert!(!missed.remarks(&nobody, |_| false).is_empty());
        assert_eq!(missed.remarks(&nobody, |it| it == forked), [] as [&str; 0]);
        missed.note_certain(2, "child".into());
        assert!(!missed.remarks(&nobody, |_| true).is_empty(), "another of its allocators was hooked too late");
    }

    /// The process has a line in the profile, from another program.
    #[test]
    fn programs_that_were_over_at_once_are_told_although_their_process_is_seen() {
        let mut missed = Missed::default();
        for _ in 0..3 {
            missed.note_program("sh".into());
        }
        missed.note_program("env".into());
        missed.note(2, "env".into());
        missed.knows_programs_of(2);
        let remarks = missed.remarks(&HashSet::from([1]), |_| false);
        let all = "4 programs (env, sh) ended or executed another one before they could be counted: what they allocated is missing";
        assert_eq!(remarks, [all]);
    }

    #[test]
    fn each_reason_is_told_once_with_the_number_of_processes() {
        let mut refusals = Refusals::default();
        assert_eq!(refusals.take(), [""; 0]);
        for pid in [4, 3, 2, 1, 1] {
            refusals.note(pid, "it is traced");
        }
        refusals.note(7, "it is busy");
        assert_eq!(
            refusals.take(),
            ["process 7 uses probes: it is busy", "4 processes (1, 2, 3, …) use probes: it is traced"]
        );
        refusals.note(9, "it is traced");
        assert_eq!(refusals.take(), [""; 0]);
        (0..1000).for_each(|pid| refusals.note(pid, &format!("reason {pid}")));
        assert_eq!(refusals.take().len(), MOST_REASONS - 2);
    }
}
