//! Exact counts. A kernel iterator reads those of running threads; those of exited threads are kept per process.

use std::collections::{HashMap, HashSet};
use std::io::Read;

use aya::maps::{Array, HashMap as KernelHashMap, MapData, MapError};
use sampler_ebpf::abi::{Counters, MAX_IN_FLIGHT_CALLS, ProcessKey, Progress, ThreadRecord};
use zerocopy::FromBytes as _;

use super::KernelError;
use super::abi_value::Abi;
use super::incarnations;
use super::loader::Loader;
use super::programs::Programs;
use super::sys;
use crate::clock::monotonic_ns;

/// The reading end of all counters.
pub struct Totals {
    processes: KernelHashMap<MapData, Abi<ProcessKey>, Abi<Counters>>,
    unattributed: Array<MapData, Abi<Counters>>,
    progress: Array<MapData, Abi<Progress>>,
}

/// Counters of each process, and of hits that belong to no process.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// By process.
    pub processes: HashMap<ProcessKey, Counters>,
    /// Hits for which the kernel had no thread state, and hits of processes that did not fit into its map.
    pub unattributed: Counters,
    /// CLOCK_MONOTONIC before the first thread's counters were read and after the last thread's were. Each thread was
    /// read at some moment in between.
    pub read_ns: (u64, u64),
    /// Samples that in-flight reallocs took out of the live map. They are live until these calls return.
    pub reallocated: HashSet<u64>,
}

impl Counts {
    /// The sum over everything.
    pub fn total(&self) -> Counters {
        let mut sum = self.unattributed;
        for counters in self.processes.values() {
            sum.add(counters);
        }
        sum
    }

    /// Adds the thread iterator's output, a sequence of [`ThreadRecord`]s. An incomplete record at the end is
    /// ignored.
    fn add_threads(&mut self, bytes: &[u8]) {
        let records = bytes.chunks_exact(size_of::<ThreadRecord>());
        for record in records.flat_map(ThreadRecord::read_from_bytes) {
            self.processes.entry(record.process).or_default().add(&with_calls_under_way(record.counters));
            self.reallocated.extend(record.reallocated.iter().filter(|sample| **sample != 0));
        }
    }
}

/// Maximum number of reads. A thread that exits during a read may be counted twice or not at all, so the read is
/// repeated.
const ATTEMPTS: usize = 8;

impl Totals {
    /// Opens the maps.
    ///
    /// # Errors
    /// The object lacks a map.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        let failed = |error: aya::maps::MapError| KernelError::Object(error.to_string());
        Ok(Self {
            processes: KernelHashMap::try_from(loader.typed_map("TOTALS")?).map_err(failed)?,
            unattributed: Array::try_from(loader.typed_map("UNATTRIBUTED")?).map_err(failed)?,
            progress: Array::try_from(loader.typed_map("PROGRESS")?).map_err(failed)?,
        })
    }

    /// Number of allocations, frees and unmappings so far whose records did not fit into the events ring. Cheaper than reading
    /// all counts.
    ///
    /// # Errors
    /// The read fails.
    pub fn records_lost(&self) -> Result<u64, KernelError> {
        Ok(self.progress()?.records_lost)
    }

    /// Number of process events so far that did not fit into the events ring, or may have been missed by the programs.
    ///
    /// # Errors
    /// The read fails.
    pub fn process_events_lost(&self, programs: &Programs) -> Result<u64, KernelError> {
        Ok(self.unattributed()?.process_events_lost + programs.lifecycle.skipped()?.runs)
    }

    /// Incarnations whose exited threads' counts are kept.
    pub fn processes_counted(&self) -> Vec<ProcessKey> {
        self.processes.keys().flatten().map(|process| process.0).collect()
    }

    /// The incarnations that live, of all processes of the host; each as often as it has threads.
    ///
    /// # Errors
    /// The read fails.
    pub fn living(&self, programs: &Programs) -> Result<Vec<ProcessKey>, KernelError> {
        living(programs)
    }

    /// Reads all counts. They are exact for threads that do not run during the read; a running thread is read at some
    /// moment within [`Counts::read_ns`].
    ///
    /// # Errors
    /// The read fails.
    pub fn read(&self, programs: &Programs) -> Result<Counts, KernelError> {
        let mut counts = Counts::default();
        for _ in 0..ATTEMPTS {
            let flushed = self.progress()?.threads_flushed;
            counts = self.read_once(programs)?;
            if self.progress()?.threads_flushed == flushed {
                break;
            }
        }
        Ok(counts)
    }

    fn progress(&self) -> Result<Progress, KernelError> {
        self.progress.get(&0, 0).map(|progress| progress.0).map_err(|error| KernelError::Object(error.to_string()))
    }

    fn unattributed(&self) -> Result<Counters, KernelError> {
        self.unattributed.get(&0, 0).map(|counters| counters.0).map_err(|error| KernelError::Object(error.to_string()))
    }

    fn read_once(&self, programs: &Programs) -> Result<Counts, KernelError> {
        let failed = |source| KernelError::Read { what: "the threads' counters", source };
        let mut counts = Counts { unattributed: self.unattributed()?, ..Counts::default() };
        for entry in self.processes.iter() {
            let (process, counters) = entry.map_err(|error| KernelError::Object(error.to_string()))?;
            counts.processes.insert(process.0, counters.0);
        }
        let mut bytes = Vec::new();
        let mut iterator = sys::start_iterator(programs.iterator_link()).map_err(failed)?;
        // Everything read before this point changes only when a thread exits.
        let begun_ns = monotonic_ns();
        iterator.read_to_end(&mut bytes).map_err(failed)?;
        counts.read_ns = (begun_ns, monotonic_ns());
        counts.add_threads(&bytes);
        Ok(counts)
    }

    /// Removes an exited process's counts from the kernel's map and returns them; `None` if it has none.
    ///
    /// # Errors
    /// The map cannot be read or written. The counts are still in it.
    pub fn take(&mut self, process: ProcessKey) -> Result<Option<Counters>, KernelError> {
        let failed = |error: MapError| KernelError::Object(error.to_string());
        let counters = match self.processes.get(&Abi(process), 0) {
            Ok(counters) => counters.0,
            Err(MapError::KeyNotFound) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        self.processes.remove(&Abi(process)).map_err(failed)?;
        Ok(Some(counters))
    }
}

/// The incarnations that live, of all processes of the host; each as often as it has threads.
///
/// # Errors
/// The read fails.
pub fn living(programs: &Programs) -> Result<Vec<ProcessKey>, KernelError> {
    incarnations::living(programs.process_iterator_link())
}

/// Maximum number of in-flight sampled calls of one thread when its counters are read: those with a return probe, and
/// the one that is being counted.
const MOST_IN_FLIGHT: u64 = MAX_IN_FLIGHT_CALLS as u64 + 1;

/// Maximum number of calls of one thread that are not decided yet when its counters are read. The programs decide one at
/// a time; the iterator reads a thread's counters while the thread makes no call, unless it makes them faster than that.
const MOST_UNDECIDED: u64 = 4;

/// Separates the calls of a thread that are under way: those in flight, and the one that is being decided. A larger
/// difference is left in place, so that the accounting identity exposes it.
fn with_calls_under_way(mut counters: Counters) -> Counters {
    let ended = counters.sampled_ended();
    match counters.sampled.checked_sub(ended) {
        Some(open) if open <= MOST_IN_FLIGHT => counters.lost_in_flight = open,
        // The call's end was counted between the reads of the two counters.
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

    #[test]
    fn threads_are_added_up_by_process_and_with_what_ended_threads_left() {
        use zerocopy::IntoBytes as _;
        let process = |tgid| ProcessKey { tgid, ..ProcessKey::default() };
        let thread = |tgid, unsampled, reallocated| ThreadRecord {
            process: process(tgid),
            counters: Counters { calls: unsampled, unsampled, threads: 1, ..Counters::default() },
            reallocated,
            ..ThreadRecord::default()
        };
        let records = [thread(1, 10, [0; 4]), thread(2, 20, [7, 0, 8, 0]), thread(1, 30, [0, 9, 0, 0])];
        let ended = Counters { calls: 100, unsampled: 100, threads: 5, ..Counters::default() };
        let mut counts = Counts {
            processes: HashMap::from([(process(1), ended)]),
            unattributed: Counters { lost_no_thread_state: 3, ..Counters::default() },
            ..Counts::default()
        };
        let bytes = records.as_bytes();
        // Offset by one byte, because data read from a file has no alignment; the last record is incomplete.
        let unaligned = [&[0], bytes, &bytes[..100]].concat();
        counts.add_threads(&unaligned[1..]);
        assert_eq!((counts.processes[&process(1)].unsampled, counts.processes[&process(1)].threads), (140, 7));
        assert_eq!((counts.processes[&process(2)].unsampled, counts.processes.len()), (20, 2));
        assert_eq!(counts.reallocated, HashSet::from([7, 8, 9]));
        let total = counts.total();
        assert_eq!((total.unsampled, total.threads, total.hits()), (160, 8, 163));
    }
}
