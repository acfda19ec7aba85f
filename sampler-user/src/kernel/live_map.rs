//! The kernel's map of tracked live samples: the truth about what is live.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use aya::maps::{HashMap, MapData, MapError};
use sampler_ebpf::abi::{LiveKey, LiveValue};

use super::filter::Filter;
use super::loader::Loader;
use super::{KernelError, sys};

/// Entries read per call: a millisecond's worth, between two looks at the rings.
const BATCH: usize = 4096;

/// The live map.
pub struct LiveMap {
    map: OwnedFd,
    keys: Vec<u8>,
    values: Vec<u8>,
}

impl LiveMap {
    /// Opens the map.
    ///
    /// # Errors
    /// The object has no such map.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        let map = loader
            .map("LIVE")?
            .try_clone_to_owned()
            .map_err(|source| KernelError::Read { what: "the live map", source })?;
        Ok(Self { map, keys: Vec::new(), values: Vec::new() })
    }

    /// Calls `piece` with some entries at a time, so that the caller can look at rings in between: in all with every entry
    /// that is there from the beginning to the end of the call, and some of the others.
    ///
    /// # Errors
    /// The kernel refuses to read the map.
    pub fn scan(
        &mut self,
        mut piece: impl FnMut(&mut dyn Iterator<Item = (LiveKey, LiveValue)>),
    ) -> Result<(), KernelError> {
        let mut room = BATCH;
        let mut cursor = None;
        loop {
            self.keys.resize(room * size_of::<LiveKey>(), 0);
            self.values.resize(room * size_of::<LiveValue>(), 0);
            let before = cursor;
            let batch = match sys::lookup_batch(self.map.as_fd(), &mut cursor, &mut self.keys, &mut self.values, room) {
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && room < 1 << 24 => {
                    // One bucket has more entries than there is room for.
                    room *= 2;
                    cursor = before;
                    continue;
                }
                other => other.map_err(|source| KernelError::Read { what: "the live map", source })?,
            };
            let keys = self.keys.chunks_exact(size_of::<LiveKey>());
            let values = self.values.chunks_exact(size_of::<LiveValue>());
            let entries = keys.zip(values).take(batch.count);
            piece(&mut entries.map(|(key, value)| (read_plain(key), read_plain(value))));
            if batch.last {
                return Ok(());
            }
        }
    }
}

/// Reads a plain value of the ABI from bytes of its size.
pub(super) fn read_plain<T: Copy + Default + Plain>(bytes: &[u8]) -> T {
    debug_assert_eq!(bytes.len(), size_of::<T>());
    // SAFETY: `T` is `repr(C)` with integer fields only, so any bytes are a value; the length was checked.
    unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
}

/// Types of the ABI: `repr(C)`, integers only.
///
/// # Safety
/// Any bytes must be a valid value.
pub(super) unsafe trait Plain {}
// SAFETY: see the types.
unsafe impl Plain for LiveKey {}
// SAFETY: see the types.
unsafe impl Plain for LiveValue {}
// SAFETY: see the types.
unsafe impl Plain for sampler_ebpf::abi::ThreadRecord {}

/// A wrapper that makes an ABI type usable as a map's key or value in the library's typed maps.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abi<T>(pub T);

// SAFETY: `Plain` promises that any bytes are a value; the wrapper is transparent.
unsafe impl<T: Plain + Copy + 'static> aya::Pod for Abi<T> {}
// SAFETY: see the types.
unsafe impl Plain for sampler_ebpf::abi::ProcessKey {}
// SAFETY: see the types.
unsafe impl Plain for sampler_ebpf::abi::Counters {}
// SAFETY: see the types.
unsafe impl Plain for sampler_ebpf::abi::Control {}
// SAFETY: see the types.
unsafe impl Plain for sampler_ebpf::abi::Progress {}
// SAFETY: see the types.
unsafe impl Plain for sampler_ebpf::abi::Site {}
// SAFETY: see the types.
unsafe impl Plain for sampler_ebpf::abi::FileRanges {}

/// Takes entries of ended address spaces out of the live map.
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

    /// An entry; `None` if there is none.
    pub fn get(&self, key: LiveKey) -> Option<LiveValue> {
        self.map.get(&Abi(key), 0).ok().map(|value| value.0)
    }

    /// Removes an entry. `false`: it was gone already.
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
