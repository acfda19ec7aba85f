//! Exact counts: of the threads that live, by an iterator in the kernel; of those that ended, from their process.

use std::collections::HashMap;
use std::io::Read;

use aya::maps::{Array, HashMap as KernelHashMap, MapData};
use sampler_ebpf::abi::{Counters, ProcessKey, Progress, ThreadRecord};

use super::KernelError;
use super::live_map::{Abi, read_plain};
use super::loader::Loader;
use super::programs::Programs;
use super::sys;

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

    /// All counts. Exact for threads that stand still; a thread that runs meanwhile is read at some moment of the call.
    ///
    /// # Errors
    /// The kernel refuses to read.
    pub fn read(&self, programs: &Programs) -> Result<Counts, KernelError> {
        let mut counts = Counts::default();
        for _ in 0..ATTEMPTS {
            let before = self.threads_flushed()?;
            counts = self.read_once(programs)?;
            if self.threads_flushed()? == before {
                break;
            }
        }
        Ok(counts)
    }

    fn threads_flushed(&self) -> Result<u64, KernelError> {
        let progress = self.progress.get(&0, 0).map_err(|error| KernelError::Object(error.to_string()))?;
        Ok(progress.0.threads_flushed)
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
        sys::start_iterator(programs.iterator_link()).map_err(failed)?.read_to_end(&mut bytes).map_err(failed)?;
        for record in bytes.chunks_exact(size_of::<ThreadRecord>()) {
            let record: ThreadRecord = read_plain(record);
            counts.processes.entry(record.process).or_default().add(&record.counters);
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
