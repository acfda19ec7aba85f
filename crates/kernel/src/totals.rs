//! Exact counts. A kernel iterator reads those of running threads; those of exited threads are kept per process.

use std::collections::{HashMap, HashSet};

use aya::maps::{Array, HashMap as KernelHashMap, MapData, MapError};
use heapbpf_host::clock::monotonic_ns;
use sampler_ebpf::abi::{Counters, ProcessKey, Progress};

use super::KernelError;
use super::abi_value::Abi;
use super::batches::read_all;
use super::generations;
use super::loader::Loader;
use super::passes::{Passes, Running};
use super::programs::Programs;
use super::sys::{self, HashMapFd};

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
        for counters in self.processes.values() {
            sum.add(counters);
        }
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
        let failed = |error: aya::maps::MapError| KernelError::Object(error.to_string());
        let batches = loader.map("TOTALS")?.try_clone_to_owned().and_then(HashMapFd::new).map_err(unreadable)?;
        Ok(Self {
            batches,
            processes: KernelHashMap::try_from(loader.typed_map("TOTALS")?).map_err(failed)?,
            unattributed: Array::try_from(loader.typed_map("UNATTRIBUTED")?).map_err(failed)?,
            progress: Array::try_from(loader.typed_map("PROGRESS")?).map_err(failed)?,
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
            let running = Running::of(&read_threads(programs)?);
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
        self.progress.get(&0, 0).map(|progress| progress.0).map_err(|error| KernelError::Object(error.to_string()))
    }

    fn unattributed(&self) -> Result<Counters, KernelError> {
        self.unattributed.get(&0, 0).map(|counters| counters.0).map_err(|error| KernelError::Object(error.to_string()))
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

/// The running threads' counters: a sequence of [`ThreadRecord`](sampler_ebpf::abi::ThreadRecord)s.
fn read_threads(programs: &Programs) -> Result<Vec<u8>, KernelError> {
    sys::read_iterator(programs.iterator_link()).map_err(unreadable)
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
