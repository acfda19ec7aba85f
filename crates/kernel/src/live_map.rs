//! The kernel's map of tracked live samples, the authoritative record of what is live, and the filter in front of it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use aya::maps::{HashMap, MapData, MapError};
use sampler_ebpf::abi::{LiveKey, LiveValue};
use sampler_ebpf::filter::{SLOTS, slot_of};

use super::KernelError;
use super::loader::{Abi, Loader};
use super::ring_maps::Mapping;
use super::sys::{HashMapFd, scan_batches};

/// Entries to read per call: about a millisecond's work between two polls of the rings.
const BATCH: usize = 4096;

/// The live map.
pub struct LiveMap {
    map: HashMapFd<LiveKey, LiveValue>,
    keys: Vec<LiveKey>,
    values: Vec<LiveValue>,
}

impl LiveMap {
    /// Opens the map.
    ///
    /// # Errors
    /// The object has no such map, or its keys and values have other sizes.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        let map = loader.map("LIVE")?.try_clone_to_owned().and_then(HashMapFd::new).map_err(unreadable)?;
        Ok(Self { map, keys: Vec::new(), values: Vec::new() })
    }

    /// Calls `piece` with one batch of entries after another, so that the caller can poll the rings in between. All
    /// entries that exist during the whole call are passed. Entries that are added or removed during the call may be
    /// missing.
    ///
    /// # Errors
    /// The kernel refuses to read the map.
    pub fn scan(
        &mut self,
        piece: impl FnMut(&mut dyn Iterator<Item = (LiveKey, LiveValue)>),
    ) -> Result<(), KernelError> {
        let read = |cursor, keys: &mut [_], values: &mut [_]| self.map.lookup_batch(cursor, keys, values);
        scan_batches(BATCH, (&mut self.keys, &mut self.values), read, piece).map_err(unreadable)
    }
}

fn unreadable(source: io::Error) -> KernelError {
    KernelError::Read { what: "the live map", source }
}

/// Removes entries of exited address spaces from the live map.
pub struct LiveEntries {
    map: HashMap<MapData, Abi<LiveKey>, Abi<LiveValue>>,
    filter: Filter,
}

impl LiveEntries {
    /// Opens the map.
    ///
    /// # Errors
    /// The object has no such map.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        Ok(Self { map: loader.typed_map("LIVE")?, filter: Filter::open(loader)? })
    }

    /// Returns an entry. `None` if there is none.
    pub fn get(&self, key: LiveKey) -> Option<LiveValue> {
        self.map.get(&Abi(key), 0).ok().map(|value| value.0)
    }

    /// Removes the entry of a sample, unless its address belongs to another sample by now.
    pub fn remove_sample(&mut self, key: LiveKey, sample: u64) {
        if self.get(key).is_some_and(|there| there.sample == sample) {
            self.remove(key);
        }
    }

    /// Removes an entry. Returns `false` if it was already gone.
    pub fn remove(&mut self, key: LiveKey) -> bool {
        match self.map.remove(&Abi(key)) {
            Ok(()) => {
                self.filter.remove(key.address);
                true
            }
            Err(MapError::SyscallError(error)) => error.io_error.raw_os_error() != Some(libc::ENOENT),
            Err(_) => true,
        }
    }
}

impl AsFd for LiveMap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }
}

/// Distance between two counts: the kernel pads array elements to eight bytes (kernel/bpf/arraymap.c).
const STRIDE: u64 = 8;

/// The filter's counts, in memory shared with the BPF programs.
pub struct Filter(Mapping);

impl Filter {
    /// Maps the filter into memory.
    ///
    /// # Errors
    /// The object has no such map, or the kernel refuses the mapping.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        let (map, bytes) = (loader.map("FILTER")?, SLOTS as u64 * STRIDE);
        let counts = Mapping::of(map, 0, bytes, libc::PROT_READ | libc::PROT_WRITE);
        counts.map(Self).map_err(|source| KernelError::Read { what: "the live map's filter", source })
    }

    /// Removes a block from the filter. Call it for each block that the daemon removed from the live map.
    pub fn remove(&self, address: u64) {
        self.0.word_at(u64::from(slot_of(address)) * STRIDE).fetch_sub(1, Ordering::Relaxed);
    }
}
