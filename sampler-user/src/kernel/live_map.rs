//! The kernel's map of tracked live samples: the authoritative record of what is live.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use aya::maps::{HashMap, MapData, MapError};
use sampler_ebpf::abi::{LiveKey, LiveValue};

use super::KernelError;
use super::abi_value::Abi;
use super::filter::Filter;
use super::loader::Loader;
use super::sys::{Batch, Cursor, HashMapFd};

/// Entries read per call: about a millisecond's work between two looks at the rings.
const BATCH: usize = 4096;

/// Largest batch that room is made for. No bucket has more entries.
const LARGEST_BATCH: usize = 1 << 24;

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

    /// Calls `piece` with one batch of entries after another, so that the caller can look at the rings in between.
    /// Entries that exist during the whole call are all passed; entries that are added or removed meanwhile may be
    /// missing.
    ///
    /// # Errors
    /// The kernel refuses to read the map.
    pub fn scan(
        &mut self,
        piece: impl FnMut(&mut dyn Iterator<Item = (LiveKey, LiveValue)>),
    ) -> Result<(), KernelError> {
        let read = |cursor, keys: &mut [_], values: &mut [_]| self.map.lookup_batch(cursor, keys, values);
        scan_batches(&mut self.keys, &mut self.values, read, piece).map_err(unreadable)
    }
}

fn unreadable(source: io::Error) -> KernelError {
    KernelError::Read { what: "the live map", source }
}

/// Calls `read` for one batch after another, and `piece` with the entries of each. If a bucket does not fit, the next
/// read has more room.
fn scan_batches<K: Copy + Default, V: Copy + Default>(
    keys: &mut Vec<K>,
    values: &mut Vec<V>,
    mut read: impl FnMut(Option<Cursor>, &mut [K], &mut [V]) -> io::Result<Batch>,
    mut piece: impl FnMut(&mut dyn Iterator<Item = (K, V)>),
) -> io::Result<()> {
    let mut room = BATCH;
    let mut cursor = None;
    loop {
        keys.resize(room, K::default());
        values.resize(room, V::default());
        match read(cursor, keys, values) {
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && room < LARGEST_BATCH => room *= 2,
            Err(error) => return Err(error),
            Ok(batch) => {
                piece(&mut keys.iter().copied().zip(values.iter().copied()).take(batch.count));
                let Some(next) = batch.next else { return Ok(()) };
                cursor = Some(next);
            }
        }
    }
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

    /// An entry, or `None` if there is none.
    pub fn get(&self, key: LiveKey) -> Option<LiveValue> {
        self.map.get(&Abi(key), 0).ok().map(|value| value.0)
    }

    /// Removes the entry of a sample, unless another sample has its address by now.
    pub fn remove_sample(&mut self, key: LiveKey, sample: u64) {
        if self.get(key).is_some_and(|there| there.sample == sample) {
            self.remove(key);
        }
    }

    /// Removes an entry. Returns `false` if it was gone already.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a map with these buckets as the kernel does: whole buckets only, as many as fit.
    fn read(buckets: &[Vec<u64>], at: usize, keys: &mut [u64], values: &mut [u64]) -> io::Result<(usize, usize)> {
        let (mut next, mut count) = (at, 0);
        for bucket in &buckets[at..] {
            if count + bucket.len() > keys.len().min(values.len()) {
                break;
            }
            for entry in bucket {
                (keys[count], values[count]) = (*entry, entry * 2);
                count += 1;
            }
            next += 1;
        }
        if next == at && at < buckets.len() {
            Err(io::Error::from_raw_os_error(libc::ENOSPC))
        } else {
            Ok((count, next))
        }
    }

    /// All entries in the order in which they are passed, and the room that each read had.
    fn scanned(buckets: &[Vec<u64>]) -> (io::Result<Vec<(u64, u64)>>, Vec<usize>) {
        let (mut entries, mut rooms, mut at) = (Vec::new(), Vec::new(), 0);
        let result = scan_batches(
            &mut Vec::new(),
            &mut Vec::new(),
            |cursor, keys, values| {
                assert_eq!(cursor.is_some(), at > 0, "the first batch is read from the beginning");
                rooms.push(keys.len());
                let (count, next) = read(buckets, at, keys, values)?;
                at = next;
                Ok(Batch { count, next: (next < buckets.len()).then(Cursor::default) })
            },
            |piece| entries.extend(piece),
        );
        (result.map(|()| entries), rooms)
    }

    #[test]
    fn every_entry_comes_once_whatever_the_batches() {
        let batch = BATCH as u64;
        // Two buckets fill a batch exactly; the third does not fit.
        let buckets = [(0..batch - 1).collect(), vec![batch - 1], vec![batch], vec![]];
        let (entries, rooms) = scanned(&buckets);
        assert_eq!(entries.unwrap(), (0..=batch).map(|key| (key, key * 2)).collect::<Vec<_>>());
        assert_eq!(rooms, [BATCH, BATCH]);
        let (entries, _) = scanned(&[]);
        assert_eq!(entries.unwrap(), []);
    }

    #[test]
    fn a_bucket_larger_than_a_batch_gets_more_room() {
        let buckets = [vec![1], (0..3 * BATCH as u64).collect(), vec![2]];
        let (entries, rooms) = scanned(&buckets);
        assert_eq!(entries.unwrap().len(), 3 * BATCH + 2);
        assert_eq!(rooms, [BATCH, BATCH, 2 * BATCH, 4 * BATCH]);
    }

    #[test]
    fn what_never_fits_ends_with_the_kernels_error() {
        let full = |_, _: &mut [u8], _: &mut [u8]| Err(io::Error::from_raw_os_error(libc::ENOSPC));
        let error = scan_batches(&mut Vec::new(), &mut Vec::new(), full, |_| panic!("no entry")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    }
}
