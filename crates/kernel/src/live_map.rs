//! The kernel's map of tracked live samples. It is the authoritative record of what is live.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use aya::maps::{HashMap, MapData, MapError};
use sampler_ebpf::abi::{LiveKey, LiveValue};

use super::KernelError;
use super::abi_value::Abi;
use super::batches::scan_batches;
use super::filter::Filter;
use super::loader::Loader;
use super::sys::HashMapFd;

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
        let map = HashMap::try_from(loader.typed_map("LIVE")?)
            .map_err(|error| KernelError::Object(format!("LIVE: {error}")))?;
        Ok(Self { map, filter: Filter::open(loader)? })
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
