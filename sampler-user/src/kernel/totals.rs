//! Exact counts: of the threads that live, by an iterator in the kernel; of those that ended, from their process.

use std::collections::{HashMap, HashSet};
use std::io::Read;

use aya::maps::{Array, HashMap as KernelHashMap, MapData};
use sampler_ebpf::abi::{AWAITED_CALLS, Counters, ProcessKey, Progress, ThreadRecord};

use super::KernelError;
use super::live_map::{Abi, read_plain};
use super::loader::Loader;
use super::programs::Programs;
use super::sys;
use crate::host::events::monotonic_ns;

/// Reading end of all counters.
pub struct Totals {
    processes: KernelHashMap<MapData, Abi<ProcessKey>, Abi<Counters>>,
    unattributed: Array<MapData, Abi<Counters>>,
    progress: Array<MapData, Abi<Progress>>,
}

/// Counters of each process, and of hits that belong to none.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// By process.
    pub processes: HashMap<ProcessKey, Counters>,
    /// Of hits for which the kernel had no thread state, and of processes that did not fit into its map.
    pub unattributed: Counters,
    /// CLOCK_MONOTONIC before the first thread's counters were read, and after the last one's: each was read at some moment
    /// between.
    pub read_ns: (u64, u64),
    /// Samples that reallocs in flight took out of the live map: they live until these return.
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
}

/// A thread that ends while the threads are read would be counted twice or not at all: then they are read again.
const ATTEMPTS: usize = 8;

impl Totals {
    /// Opens the maps.
    ///
    /// # Errors
    /// The object lacks one.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        let failed = |error: aya::maps::MapError| KernelError::Object(error.to_string());
        Ok(Self {
            processes: KernelHashMap::try_from(loader.typed_map("TOTALS")?).map_err(failed)?,
            unattributed: Array::try_from(loader.typed_map("UNATTRIBUTED")?).map_err(failed)?,
            progress: Array::try_from(loader.typed_map("PROGRESS")?).map_err(failed)?,
        })
    }

    /// Allocations and frees so far whose records did not fit into the events ring: cheaper than all counts.
    ///
    /// # Errors
    /// The kernel refuses to read.
    pub fn records_lost(&self) -> Result<u64, KernelError> {
        Ok(self.progress()?.records_lost)
    }

    /// All counts. Exact for threads that stand still; a thread that runs meanwhile is read at some moment of
    /// [`Counts::read_ns`].
    ///
    /// # Errors
    /// The kernel refuses to read.
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

    fn read_once(&self, programs: &Programs) -> Result<Counts, KernelError> {
        let failed = |source| KernelError::Read { what: "the threads' counters", source };
        let mut counts = Counts {
            unattributed: self.unattributed.get(&0, 0).map_err(|error| KernelError::Object(error.to_string()))?.0,
            ..Counts::default()
        };
        for (process, counters) in self.processes.iter().flatten() {
            counts.processes.insert(process.0, counters.0);
        }
        let mut bytes = Vec::new();
        let mut iterator = sys::start_iterator(programs.iterator_link()).map_err(failed)?;
        // What is read before this does not change unless a thread ends.
        let begun_ns = monotonic_ns();
        iterator.read_to_end(&mut bytes).map_err(failed)?;
        counts.read_ns = (begun_ns, monotonic_ns());
        for record in bytes.chunks_exact(size_of::<ThreadRecord>()) {
            let record: ThreadRecord = read_plain(record);
            counts.processes.entry(record.process).or_default().add(&with_calls_in_flight(record.counters));
            counts.reallocated.extend(record.reallocated.iter().filter(|sample| **sample != 0));
        }
        Ok(counts)
    }

    /// Takes the counts of a process that has ended out of the kernel's map.
    pub fn take(&mut self, process: ProcessKey) -> Option<Counters> {
        let counters = self.processes.get(&Abi(process), 0).ok()?.0;
        let _ = self.processes.remove(&Abi(process));
        Some(counters)
    }
}

/// Sampled calls of one thread that may lack an end when its counters are read: those that are awaited, and the one that
/// is being counted.
const MOST_IN_FLIGHT: u64 = AWAITED_CALLS as u64 + 1;

/// A thread that runs is read between the two ends of its calls: those are told apart. What cannot be explained so is left
/// as it is, for the accounting identity to show.
fn with_calls_in_flight(counters: Counters) -> Counters {
    let ended = counters.sampled_ended();
    match counters.sampled.checked_sub(ended) {
        Some(open) if open <= MOST_IN_FLIGHT => Counters { lost_in_flight: open, ..counters },
        // Its end was counted between the readings of the two counters.
        None if ended - counters.sampled <= MOST_IN_FLIGHT => Counters { sampled: ended, ..counters },
        _ => counters,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_in_flight_are_told_apart_and_what_is_more_stays_visible() {
        let of = |sampled, submitted| {
            let counters = with_calls_in_flight(Counters { sampled, submitted, failed: 1, ..Counters::default() });
            (counters.sampled, counters.lost_in_flight)
        };
        assert_eq!(of(11, 10), (11, 0));
        assert_eq!(of(13, 10), (13, 2));
        assert_eq!(of(10, 10), (11, 0));
        assert_eq!(of(99, 10), (99, 0));
        assert_eq!(of(11, 99), (11, 0));
    }
}
