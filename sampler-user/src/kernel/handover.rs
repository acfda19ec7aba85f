//! What hands a running process over from probes to inline hooks: the blocks that probes sample meanwhile, and calls that they
//! have begun to count.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use aya::maps::{Array, MapData, MapError};
use sampler_ebpf::abi::inline::Handover;
use sampler_ebpf::abi::{ProcessKey, ThreadRecord};
use zerocopy::{FromBytes as _, FromZeros as _};

use super::abi_value::Abi;
use super::loader::Loader;
use super::programs::Programs;
use super::{KernelError, sys};

type Map = Array<MapData, Abi<Handover>>;

/// The programs' list of blocks, for one process at a time.
pub struct HandoverMap {
    map: Map,
    seen: Arc<Seen>,
}

/// What the programs have seen of a process. To be read while the process is stopped.
pub struct Seen {
    map: Map,
    threads: OwnedFd,
}

/// Calls of a thread that probes have begun to count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    /// Thread id.
    pub tid: u32,
    /// Bit by bit ([`ThreadRecord::in_flight`]).
    pub in_flight: u32,
}

impl HandoverMap {
    /// Opens the map.
    ///
    /// # Errors
    /// The object has no such map.
    pub fn open(loader: &Loader, programs: &Programs) -> Result<Self, KernelError> {
        let open = || Map::try_from(loader.typed_map("HANDOVER")?).map_err(refused);
        let threads = programs.iterator_link().try_clone_to_owned();
        let threads = threads.map_err(|source| KernelError::Read { what: "the threads' counters", source })?;
        Ok(Self { map: open()?, seen: Arc::new(Seen { map: open()?, threads }) })
    }

    /// Has the programs list the blocks that they sample in a process from now on; 0 for none.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn list_blocks_of(&mut self, tgid: u32) -> Result<(), KernelError> {
        let mut none: Box<Abi<Handover>> = Box::new(Abi(Handover::new_zeroed()));
        none.0.tgid = tgid;
        self.map.set(0, *none, 0).map_err(refused)
    }

    /// What they have seen.
    pub fn seen(&self) -> Arc<Seen> {
        Arc::clone(&self.seen)
    }
}

impl Seen {
    /// The blocks that were sampled since; `None` if there were more than fit, or they cannot be read.
    pub fn blocks(&self) -> Option<Vec<u64>> {
        let listed = self.map.get(&0, 0).ok()?.0;
        let count = usize::try_from(listed.count).ok()?;
        Some(listed.blocks.get(..count)?.to_vec())
    }

    /// The calls of a process that probes have begun to count, by thread.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn begun(&self, process: ProcessKey) -> io::Result<Vec<Begun>> {
        let bytes = sys::read_iterator(self.threads.as_fd())?;
        let records = bytes.chunks_exact(size_of::<ThreadRecord>()).flat_map(ThreadRecord::read_from_bytes);
        let begun = records.filter(|record| record.process == process && record.in_flight != 0);
        Ok(begun.map(|record| Begun { tid: record.tid, in_flight: record.in_flight }).collect())
    }
}

fn refused(error: MapError) -> KernelError {
    KernelError::Object(format!("HANDOVER: {error}"))
}
