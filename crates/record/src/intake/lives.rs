//! The lives of processes in the recording: which process generations there are, and how each ended. This is the one
//! place that decides that a life is over.
//!
//! Two channels report ends. Records in the events ring are exact and in order, but are lost when the ring is full. The
//! host's events name processes by id and time only, and have rings of their own. An end that the host reported and no
//! record did is looked up in the kernel's list of processes, a [`Census`], which settles it.

use std::collections::HashMap;

use sampler_ebpf::abi::ProcessKey;

/// How a process generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its process ended.
    Exit,
    /// Its process executed another program.
    Exec,
}

/// The processes that lived at one moment, by the kernel's list.
#[derive(Debug, Default)]
pub struct Census {
    /// CLOCK_MONOTONIC before the list was read.
    pub time_ns: u64,
    /// CLOCK_BOOTTIME at the same moment.
    boottime_ns: u64,
    /// `exec_id` of each process, by start and id.
    processes: HashMap<(u64, u32), u32>,
    /// Process generations whose counts the kernel already kept before the list was read.
    counted: Vec<ProcessKey>,
    /// Number of process events that did not fit into the events ring before that.
    events_lost: u64,
}

/// Minimum age of a process that counts as ended if it is missing in a census: one that is just being created is not in
/// the list yet.
const LEAST_AGE_NS: u64 = 100_000_000;

impl Census {
    /// A census of `processes`, read after CLOCK_MONOTONIC `time_ns` and CLOCK_BOOTTIME `boottime_ns`.
    pub fn new(time_ns: u64, boottime_ns: u64, processes: impl IntoIterator<Item = ProcessKey>) -> Self {
        let mut census = Self { time_ns, boottime_ns, ..Self::default() };
        for process in processes {
            let exec_id = census.processes.entry((process.start_ns, process.tgid)).or_default();
            *exec_id = process.exec_id.max(*exec_id);
        }
        census
    }

    /// Adds what was read before the list: process generations whose counts the kernel keeps, and the number of lost
    /// process events.
    #[must_use]
    pub fn with_counted(self, counted: Vec<ProcessKey>, events_lost: u64) -> Self {
        Self { counted, events_lost, ..self }
    }

    /// Whether a process generation is so young that it may be missing because it was just being created.
    fn is_too_young(&self, process: &ProcessKey) -> bool {
        !self.processes.contains_key(&(process.start_ns, process.tgid))
            && (self.boottime_ns.saturating_sub(LEAST_AGE_NS)..=self.boottime_ns).contains(&process.start_ns)
    }

    /// How a process generation had ended by then. `None` if it lived, or may have begun later.
    fn end_of(&self, process: &ProcessKey) -> Option<End> {
        match self.processes.get(&(process.start_ns, process.tgid)) {
            Some(exec_id) => (process.exec_id < *exec_id).then_some(End::Exec),
            None => (process.start_ns.saturating_add(LEAST_AGE_NS) < self.boottime_ns).then_some(End::Exit),
        }
    }
}

/// An ended process generation.
#[derive(Clone, Copy, Debug)]
struct Ended {
    how: End,
    /// CLOCK_MONOTONIC when this became known.
    known_ns: u64,
    /// Whether a census found it, and no record has reported it yet.
    by_census: bool,
}

/// The lives of processes.
#[derive(Debug, Default)]
pub struct Lives {
    /// Process generations with samples that have not ended, by process id, with the time of their first sample.
    living: HashMap<u32, Vec<(ProcessKey, u64)>>,
    /// Process generations that ended, for as long as data about them may still arrive.
    ended: HashMap<ProcessKey, Ended>,
    /// Ends that the host reported and that were not compared with records yet: process id and time.
    heard: Vec<(u32, u64)>,
    /// Whether a record of an end is missing, as far as the host knows.
    doubtful: bool,
    /// Lost process events that a census has settled.
    events_lost: u64,
    found: u64,
}

impl Lives {
    /// Notes a sample of a process generation, or in its address space (CLOCK_MONOTONIC). A generation that has ended
    /// does not start again: reconciliation may find samples of it late.
    pub fn begin(&mut self, process: ProcessKey, time_ns: u64) {
        if self.ended.contains_key(&process) {
            return;
        }
        let living = self.living.entry(process.tgid).or_default();
        if !living.iter().any(|(known, _)| *known == process) {
            living.push((process, time_ns));
        }
    }

    /// Handles a record of an end, at `now_ns`. Returns `false` if the end was known.
    pub fn end(&mut self, process: ProcessKey, how: End, now_ns: u64) -> bool {
        self.remove_living(&process);
        if let Some(ended) = self.ended.get_mut(&process) {
            // The process was over before its record was written.
            self.found -= u64::from(std::mem::take(&mut ended.by_census));
            return false;
        }
        self.ended.insert(process, Ended { how, known_ns: now_ns, by_census: false });
        true
    }

    fn remove_living(&mut self, process: &ProcessKey) {
        let Some(living) = self.living.get_mut(&process.tgid) else { return };
        living.retain(|(known, _)| known != process);
        if living.is_empty() {
            self.living.remove(&process.tgid);
        }
    }

    /// Notes that the host reported an exec or an exit of a process at `time_ns`.
    pub fn heard(&mut self, pid: u32, time_ns: u64) {
        self.heard.push((pid, time_ns));
    }

    /// Compares the host's reports with the records, all of which have been taken in up to `up_to_ns`. Returns whether
    /// a census is needed. `events_lost`: number of process events so far that did not fit into the events ring.
    pub fn needs_census(&mut self, up_to_ns: u64, events_lost: u64) -> bool {
        let (living, doubtful) = (&self.living, &mut self.doubtful);
        self.heard.retain(|(pid, time_ns)| {
            let is_due = *time_ns <= up_to_ns;
            let lives_on = |lives: &Vec<(ProcessKey, u64)>| lives.iter().any(|(_, since_ns)| since_ns <= time_ns);
            *doubtful |= is_due && living.get(pid).is_some_and(lives_on);
            !is_due
        });
        self.doubtful || self.lacks_events(events_lost)
    }

    /// Whether a record of an end may be missing, or still be on its way.
    pub fn may_lack_ends(&self, events_lost: u64) -> bool {
        self.doubtful || !self.heard.is_empty() || self.lacks_events(events_lost)
    }

    /// Settles which lives are over, once all records up to the census have been taken in. Returns those that no record
    /// reported, which have now ended. `now_ns`: the present.
    pub fn settle(&mut self, census: &Census, now_ns: u64) -> Vec<(ProcessKey, End)> {
        let living = self.living.values().flatten().map(|(process, _)| process);
        let counted = census.counted.iter().filter(|process| !self.ended.contains_key(process));
        let known: Vec<ProcessKey> = living.chain(counted).copied().collect();
        let is_settled = !known.iter().any(|process| census.is_too_young(process));
        let mut gone: Vec<(ProcessKey, End)> =
            known.into_iter().filter_map(|process| Some((process, census.end_of(&process)?))).collect();
        gone.sort_unstable_by_key(|(process, _)| *process);
        gone.dedup_by_key(|(process, _)| *process);
        for (process, how) in &gone {
            self.remove_living(process);
            self.ended.insert(*process, Ended { how: *how, known_ns: now_ns, by_census: true });
        }
        self.found += gone.len() as u64;
        self.heard.retain(|(_, time_ns)| *time_ns > census.time_ns);
        // A process that was too young for this census is looked up in another one.
        self.doubtful = !is_settled;
        if is_settled {
            self.events_lost = self.events_lost.max(census.events_lost);
        }
        gone
    }

    /// Whether process events were lost that no census has settled.
    pub const fn lacks_events(&self, events_lost: u64) -> bool {
        events_lost > self.events_lost
    }

    /// How a process generation ended, and since when that is known (CLOCK_MONOTONIC), if it is known and still
    /// remembered.
    pub fn end_of(&self, process: &ProcessKey) -> Option<(End, u64)> {
        self.ended.get(process).map(|ended| (ended.how, ended.known_ns))
    }

    /// Forgets ends that became known before `before_ns`.
    pub fn forget(&mut self, before_ns: u64) {
        self.ended.retain(|_, ended| ended.known_ns >= before_ns);
        if self.ended.len() < self.ended.capacity() / 4 {
            self.ended.shrink_to(2 * self.ended.len());
        }
    }

    /// Number of ends that no record reported.
    pub const fn found(&self) -> u64 {
        self.found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn key(tgid: u32, exec_id: u32) -> ProcessKey {
        ProcessKey { start_ns: 5 * SECOND, tgid, exec_id }
    }

    /// A census at 9 s, on a machine that has been suspended for 1 s.
    fn census(living: &[ProcessKey]) -> Census {
        Census::new(9 * SECOND, 10 * SECOND, living.iter().copied())
    }

    #[test]
    fn an_end_counts_once_whoever_tells_first() {
        let mut lives = Lives::default();
        lives.begin(key(1, 0), 6 * SECOND);
        assert!(lives.end(key(1, 0), End::Exit, 7 * SECOND) && !lives.end(key(1, 0), End::Exit, 7 * SECOND));
        lives.begin(key(2, 0), 6 * SECOND);
        assert_eq!(lives.settle(&census(&[]), 9 * SECOND), [(key(2, 0), End::Exit)]);
        assert_eq!((lives.found(), lives.end_of(&key(2, 0))), (1, Some((End::Exit, 9 * SECOND))));
        assert!(!lives.end(key(2, 0), End::Exit, 9 * SECOND), "its record was on the way");
        assert_eq!(lives.found(), 0);
        lives.begin(key(2, 0), 6 * SECOND);
        assert!(lives.settle(&census(&[]), 9 * SECOND).is_empty());
    }

    #[test]
    fn what_the_host_told_and_no_record_did_needs_a_census() {
        let mut lives = Lives::default();
        for tgid in 1..=3 {
            lives.begin(key(tgid, 0), 6 * SECOND);
        }
        lives.heard(1, 7 * SECOND);
        lives.heard(9, 7 * SECOND);
        // It began after the reported end: an exec started it.
        lives.heard(2, 6 * SECOND - 1);
        assert!(lives.may_lack_ends(0) && !lives.needs_census(7 * SECOND - 1, 0), "the record may be on its way");
        lives.end(key(1, 0), End::Exec, 7 * SECOND);
        assert!(!lives.needs_census(7 * SECOND, 0) && !lives.may_lack_ends(0));
        lives.heard(3, 8 * SECOND);
        assert!(lives.needs_census(8 * SECOND, 0) && lives.needs_census(8 * SECOND, 0), "until there is one");
        assert_eq!(lives.settle(&census(&[key(2, 0)]), 9 * SECOND), [(key(3, 0), End::Exit)]);
        assert!(!lives.needs_census(9 * SECOND, 0));
    }

    #[test]
    fn lost_process_events_need_a_census_of_all_that_was_counted() {
        let mut lives = Lives::default();
        assert!(lives.needs_census(9 * SECOND, 2));
        lives.end(key(4, 0), End::Exit, 9 * SECOND);
        let counted = vec![key(1, 0), key(1, 1), key(3, 0), key(4, 0)];
        let census = census(&[key(1, 1)]).with_counted(counted, 2);
        assert_eq!(lives.settle(&census, 9 * SECOND), [(key(1, 0), End::Exec), (key(3, 0), End::Exit)]);
        assert!(!lives.needs_census(9 * SECOND, 2) && lives.needs_census(9 * SECOND, 3));
    }

    #[test]
    fn a_life_that_began_after_the_census_is_not_missed_in_it() {
        let mut lives = Lives::default();
        let young = ProcessKey { start_ns: 10 * SECOND - LEAST_AGE_NS / 2, tgid: 2, exec_id: 0 };
        for process in [key(1, 4), young] {
            lives.begin(process, 9 * SECOND);
        }
        // Process 1 has called exec since.
        assert!(lives.settle(&census(&[key(1, 3)]), 9 * SECOND).is_empty());
    }

    #[test]
    fn a_life_too_short_for_one_census_is_settled_by_the_next() {
        let mut lives = Lives::default();
        let young = ProcessKey { start_ns: 10 * SECOND - LEAST_AGE_NS / 2, tgid: 2, exec_id: 0 };
        assert!(lives.needs_census(8 * SECOND, 1));
        assert!(lives.settle(&census(&[]).with_counted(vec![young], 1), 9 * SECOND).is_empty());
        assert!(lives.needs_census(9 * SECOND, 1), "it may have been over, or just being made");
        let later = Census::new(10 * SECOND, 11 * SECOND, []).with_counted(vec![young], 1);
        assert_eq!(lives.settle(&later, 10 * SECOND), [(young, End::Exit)]);
        assert!(!lives.needs_census(10 * SECOND, 1));
    }

    #[test]
    fn ends_are_remembered_for_a_while() {
        let mut lives = Lives::default();
        lives.end(key(1, 0), End::Exec, 7 * SECOND);
        lives.forget(7 * SECOND);
        assert_eq!(lives.end_of(&key(1, 0)), Some((End::Exec, 7 * SECOND)));
        lives.forget(7 * SECOND + 1);
        assert_eq!(lives.end_of(&key(1, 0)), None);
    }
}
