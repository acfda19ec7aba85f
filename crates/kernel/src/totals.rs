//! Exact counts. A kernel iterator reads those of running threads; those of exited threads are kept per process.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd as _;

use aya::maps::{Array, HashMap as KernelHashMap, MapData, MapError};
use heapbpf_host::clock::monotonic_ns;
use sampler_ebpf::abi::{Counters, MAX_IN_FLIGHT_CALLS, ProcessKey, Progress, ThreadRecord};
use zerocopy::FromBytes as _;

use super::KernelError;
use super::generations;
use super::loader::{Abi, Loader};
use super::programs::Programs;
use super::sys::{self, HashMapFd, read_all};

/// The reading end of all counters.
pub struct Totals {
    /// The map of [`Self::processes`], to be read in batches. The longer a read takes, the more threads end during it.
    batches: HashMapFd<ProcessKey, Counters>,
    processes: KernelHashMap<MapData, Abi<ProcessKey>, Abi<Counters>>,
    unattributed: Array<MapData, Abi<Counters>>,
    progress: Array<MapData, Abi<Progress>>,
}

/// Counters of each process, and of hits that belong to no process.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// By process generation.
    pub processes: HashMap<ProcessKey, Counters>,
    /// Hits for which the kernel had no thread state, and hits of processes that did not fit into the kernel's map.
    pub unattributed: Counters,
    /// CLOCK_MONOTONIC before the first thread's counters were read, and after the last thread's were. Each thread was
    /// read at some moment in between.
    pub read_ns: (u64, u64),
    /// Samples that in-flight reallocs took out of the live map. They are live until these calls return.
    pub reallocated: HashSet<u64>,
}

impl Counts {
    /// The sum over everything.
    pub fn total(&self) -> Counters {
        let mut sum = self.unattributed;
        self.processes.values().for_each(|counters| sum.add(counters));
        sum
    }
}

/// Maximum number of passes over the threads. Another pass is made while threads of some process ended in each pass so
/// far.
const PASSES: usize = 8;

impl Totals {
    /// Opens the maps.
    ///
    /// # Errors
    /// The object lacks a map.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        let batches = loader.map("TOTALS")?.try_clone_to_owned().and_then(HashMapFd::new).map_err(unreadable)?;
        Ok(Self {
            batches,
            processes: loader.typed_map("TOTALS")?,
            unattributed: loader.typed_map("UNATTRIBUTED")?,
            progress: loader.typed_map("PROGRESS")?,
        })
    }

    /// Number of allocations, frees and unmappings so far whose records did not fit into the events ring. Cheaper than
    /// reading all counts.
    ///
    /// # Errors
    /// The read fails.
    pub fn records_lost(&self) -> Result<u64, KernelError> {
        Ok(self.progress()?.records_lost)
    }

    /// Number of process events so far that did not fit into the events ring, or that the programs may have missed.
    ///
    /// # Errors
    /// The read fails.
    pub fn process_events_lost(&self, programs: &Programs) -> Result<u64, KernelError> {
        Ok(self.unattributed()?.process_events_lost + programs.lifecycle.skipped()?.runs)
    }

    /// Process generations for which counts of exited threads are kept.
    pub fn processes_counted(&self) -> Vec<ProcessKey> {
        self.processes.keys().flatten().map(|process| process.0).collect()
    }

    /// Reads all counts. They are exact for threads that do not run during the read. A running thread is read at some
    /// moment within [`Counts::read_ns`].
    ///
    /// # Errors
    /// The read fails.
    pub fn read(&self, programs: &Programs) -> Result<Counts, KernelError> {
        let mut passes = Passes::default();
        let mut flushed = self.progress()?.threads_flushed;
        let mut unattributed = self.unattributed()?;
        let mut ended = self.ended()?;
        let mut read_ns = None;
        for _ in 0..PASSES {
            // From now on, what has been read changes only when a thread ends.
            let begun_ns = monotonic_ns();
            let threads = sys::read_iterator(programs.iterator.as_fd()).map_err(unreadable)?;
            let running = Running::of(&threads);
            read_ns = Some((read_ns.map_or(begun_ns, |(first_ns, _)| first_ns), monotonic_ns()));
            let flushed_by_now = self.progress()?.threads_flushed;
            if flushed_by_now == flushed {
                passes.add(&ended, &running, &ended);
                break;
            }
            let before = std::mem::replace(&mut ended, self.ended()?);
            passes.add(&before, &running, &ended);
            if passes.are_enough() {
                break;
            }
            flushed = flushed_by_now;
            unattributed = self.unattributed()?;
        }
        let Running { counters, reallocated } = passes.finish();
        let reallocated = reallocated.into_values().flatten().collect();
        Ok(Counts { processes: counters, unattributed, read_ns: read_ns.unwrap_or_default(), reallocated })
    }

    /// What the programs count over all threads.
    ///
    /// # Errors
    /// The read fails.
    pub fn progress(&self) -> Result<Progress, KernelError> {
        Ok(self.progress.get(&0, 0)?.0)
    }

    fn unattributed(&self) -> Result<Counters, KernelError> {
        Ok(self.unattributed.get(&0, 0)?.0)
    }

    /// The counts that ended threads left, by process.
    fn ended(&self) -> Result<HashMap<ProcessKey, Counters>, KernelError> {
        let mut ended = HashMap::new();
        read_all(&self.batches, &mut ended).map_err(unreadable)?;
        Ok(ended)
    }

    /// Removes an exited process's counts from the kernel's map and returns them. `None` if it has none.
    ///
    /// # Errors
    /// The map cannot be read or written. The counts are still in it.
    pub fn take(&mut self, process: ProcessKey) -> Result<Option<Counters>, KernelError> {
        let counters = match self.processes.get(&Abi(process), 0) {
            Ok(counters) => counters.0,
            Err(MapError::KeyNotFound) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        self.processes.remove(&Abi(process))?;
        Ok(Some(counters))
    }
}

fn unreadable(source: std::io::Error) -> KernelError {
    KernelError::Read { what: "the threads' counters", source }
}

/// The live generations of all processes on the host, each listed once per thread.
///
/// # Errors
/// The read fails.
pub fn living(programs: &Programs) -> Result<Vec<ProcessKey>, KernelError> {
    generations::living(programs.process_iterator_link())
}

/// The live generation of a process. `None` if it has exited.
///
/// # Errors
/// The read fails.
pub fn program_of(programs: &Programs, pid: u32) -> Result<Option<ProcessKey>, KernelError> {
    Ok(living(programs)?.into_iter().find(|process| process.tgid == pid))
}

/// Counters of running threads, by process.
#[derive(Debug, Default)]
pub(super) struct Running {
    /// The sum of the counters.
    pub(super) counters: HashMap<ProcessKey, Counters>,
    /// Samples that reallocs in flight took out of the live map.
    pub(super) reallocated: HashMap<ProcessKey, Vec<u64>>,
}

impl Running {
    /// Parses the thread iterator's output, a sequence of [`ThreadRecord`]s. An incomplete record at the end is
    /// ignored.
    pub(super) fn of(bytes: &[u8]) -> Self {
        let mut running = Self::default();
        let records = bytes.chunks_exact(size_of::<ThreadRecord>());
        for record in records.flat_map(ThreadRecord::read_from_bytes) {
            running.counters.entry(record.process).or_default().add(&with_calls_under_way(record.counters));
            let reallocated = record.reallocated.into_iter().filter(|sample| *sample != 0);
            running.reallocated.entry(record.process).or_default().extend(reallocated);
        }
        running
    }
}

/// Passes over the running threads, combined: each process counts as of the first pass during which none of its threads
/// ended. If a thread ends during a pass, it is unknown whether the pass found it. A process that has exited is settled
/// by the next pass, no matter how many others end during it.
#[derive(Default)]
pub(super) struct Passes {
    settled: Running,
    /// Processes whose threads ended during the last pass, with what that pass found of them. `None` before the first
    /// pass.
    unsettled: Option<Running>,
}

impl Passes {
    /// Adds a pass. `before` and `after` are the counts of ended threads right before and right after it. Processes
    /// that only a later pass finds began after the first pass, and are left out.
    pub(super) fn add(
        &mut self,
        before: &HashMap<ProcessKey, Counters>,
        running: &Running,
        after: &HashMap<ProcessKey, Counters>,
    ) {
        let found: HashSet<ProcessKey> = match self.unsettled.take() {
            None => before.keys().chain(after.keys()).chain(running.counters.keys()).copied().collect(),
            Some(unsettled) => unsettled.counters.into_keys().collect(),
        };
        let mut unsettled = Running::default();
        for process in found {
            let (then, now) = (before.get(&process), after.get(&process));
            let to = if then == now { &mut self.settled } else { &mut unsettled };
            let mut counters = then.copied().unwrap_or_default();
            counters.add(&running.counters.get(&process).copied().unwrap_or_default());
            to.counters.insert(process, counters);
            to.reallocated.insert(process, running.reallocated.get(&process).cloned().unwrap_or_default());
        }
        self.unsettled = Some(unsettled);
    }

    /// Whether another pass would find nothing new.
    pub(super) fn are_enough(&self) -> bool {
        self.unsettled.as_ref().is_some_and(|unsettled| unsettled.counters.is_empty())
    }

    /// Returns the counts. For processes whose threads ended in every pass, these are the counts of the last pass,
    /// without those threads.
    pub(super) fn finish(self) -> Running {
        let mut all = self.settled;
        let last = self.unsettled.unwrap_or_default();
        all.counters.extend(last.counters);
        all.reallocated.extend(last.reallocated);
        all
    }
}

/// Maximum number of in-flight sampled calls of one thread when its counters are read: those with a return probe, and
/// the one that is being counted.
const MOST_IN_FLIGHT: u64 = MAX_IN_FLIGHT_CALLS as u64 + 1;

/// Maximum number of undecided calls of one thread when its counters are read. The programs decide one at a time. The
/// iterator reads a thread's counters between its calls, unless the thread makes them faster than that.
const MOST_UNDECIDED: u64 = 4;

/// Separates out the calls of a thread that are in progress: those in flight, and the one that is being decided. A
/// larger difference is left in place, so that the accounting identity exposes it.
fn with_calls_under_way(mut counters: Counters) -> Counters {
    let ended = counters.sampled_ended();
    match counters.sampled.checked_sub(ended) {
        Some(open) if open <= MOST_IN_FLIGHT => counters.lost_in_flight = open,
        // The end of the call was counted between the reads of the two counters.
        None if ended - counters.sampled <= MOST_IN_FLIGHT => counters.sampled = ended,
        _ => {}
    }
    let decided = counters.decided();
    match counters.calls.checked_sub(decided) {
        Some(open) if open <= MOST_UNDECIDED => counters.lost_undecided = open,
        // As above.
        None if decided - counters.calls <= MOST_UNDECIDED => counters.calls = decided,
        _ => {}
    }
    counters
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes as _;

    use super::*;

    #[test]
    fn calls_under_way_are_told_apart_and_what_is_more_stays_visible() {
        let of = |sampled, submitted| {
            let counters = with_calls_under_way(Counters { sampled, submitted, failed: 1, ..Counters::default() });
            (counters.sampled, counters.lost_in_flight)
        };
        assert_eq!(of(11, 10), (11, 0));
        assert_eq!(of(13, 10), (13, 2));
        assert_eq!(of(10, 10), (11, 0));
        assert_eq!(of(99, 10), (99, 0));
        assert_eq!(of(11, 99), (11, 0));
        let decided = Counters { unsampled: 90, reentrant: 7, zero_reallocs: 2, ..Counters::default() };
        let of = |calls| {
            let counters = with_calls_under_way(Counters { calls, ..decided });
            (counters.hits(), counters.lost_undecided)
        };
        assert_eq!((of(99), of(100), of(97)), ((90, 0), (91, 1), (90, 0)));
        assert_eq!((of(120), of(80)), ((111, 0), (71, 0)), "the identity does not hold");
    }

    fn process(tgid: u32) -> ProcessKey {
        ProcessKey { tgid, ..ProcessKey::default() }
    }

    fn thread(tgid: u32, unsampled: u64, reallocated: [u64; 4]) -> ThreadRecord {
        ThreadRecord { process: process(tgid), counters: of_calls(unsampled), reallocated, ..ThreadRecord::default() }
    }

    fn of_calls(unsampled: u64) -> Counters {
        Counters { calls: unsampled, unsampled, threads: 1, ..Counters::default() }
    }

    /// The counts that ended threads left: process, calls.
    fn ended<const N: usize>(of: [(u32, u64); N]) -> HashMap<ProcessKey, Counters> {
        of.into_iter().map(|(tgid, calls)| (process(tgid), of_calls(calls))).collect()
    }

    fn running<const N: usize>(threads: [ThreadRecord; N]) -> Running {
        Running::of(threads.as_bytes())
    }

    /// Calls by process.
    fn calls(passes: Passes) -> Vec<(u32, u64)> {
        let mut calls: Vec<_> = passes.finish().counters.iter().map(|(key, of)| (key.tgid, of.calls)).collect();
        calls.sort_unstable();
        calls
    }

    #[test]
    fn threads_are_added_up_by_process() {
        let records = [thread(1, 10, [0; 4]), thread(2, 20, [7, 0, 8, 0]), thread(1, 30, [0, 9, 0, 0])];
        let bytes = records.as_bytes();
        // Offset by one byte, because data read from a file is not aligned. The last record is incomplete.
        let unaligned = [&[0], bytes, &bytes[..100]].concat();
        let running = Running::of(&unaligned[1..]);
        assert_eq!(running.counters.len(), 2);
        let of = |tgid| (running.counters[&process(tgid)].unsampled, running.counters[&process(tgid)].threads);
        assert_eq!((of(1), of(2)), ((40, 2), (20, 1)));
        assert_eq!(
            (&running.reallocated[&process(1)][..], &running.reallocated[&process(2)][..]),
            (&[9][..], &[7, 8][..])
        );
    }

    #[test]
    fn a_pass_in_which_no_thread_ends_is_enough() {
        let mut passes = Passes::default();
        assert!(!passes.are_enough());
        let left = ended([(1, 100), (3, 5)]);
        passes.add(&left, &running([thread(1, 10, [0; 4]), thread(2, 20, [0; 4])]), &left);
        assert!(passes.are_enough());
        assert_eq!(calls(passes), [(1, 110), (2, 20), (3, 5)]);
    }

    #[test]
    fn processes_that_end_during_passes_are_counted_once() {
        let mut passes = Passes::default();
        // 1 keeps running. 2 ends before the pass finds it, and 3 after.
        let found = running([thread(1, 10, [0; 4]), thread(3, 30, [6, 0, 0, 0])]);
        passes.add(&ended([]), &found, &ended([(2, 20), (3, 31)]));
        assert!(!passes.are_enough());
        // 1 has been counted. Since then 4 began, and 5 both began and ended.
        let found = running([thread(1, 19, [0; 4]), thread(4, 40, [0; 4])]);
        passes.add(&ended([(2, 20), (3, 31)]), &found, &ended([(2, 20), (3, 31), (5, 50)]));
        assert!(passes.are_enough());
        let Running { counters, reallocated } = passes.finish();
        let mut calls: Vec<_> = counters.iter().map(|(key, of)| (key.tgid, of.calls)).collect();
        calls.sort_unstable();
        assert_eq!(calls, [(1, 10), (2, 20), (3, 31)]);
        assert!(reallocated.values().all(Vec::is_empty), "its realloc has ended: {reallocated:?}");
    }

    #[test]
    fn a_process_whose_threads_end_all_the_time_is_counted_as_of_the_last_pass() {
        let mut passes = Passes::default();
        passes.add(&ended([]), &running([thread(1, 10, [0; 4])]), &ended([(1, 5)]));
        passes.add(&ended([(1, 5)]), &running([thread(1, 12, [7, 0, 0, 0])]), &ended([(1, 9)]));
        assert!(!passes.are_enough());
        assert_eq!(calls(passes), [(1, 17)]);
    }
}
