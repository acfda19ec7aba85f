//! Maps: creation, sizes, values, and scans of whole hash maps, one batch of entries at a time.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use aya_obj::generated::{bpf_cmd, bpf_map_info, bpf_map_type};
use zerocopy::FromBytes;

use super::{call, call_fd, copy_name, object_info, zeroed};

/// The properties of a map to create.
#[derive(Default)]
pub struct MapSpec<'a> {
    /// The name that `bpftool map` shows.
    pub name: &'a str,
    /// `BPF_MAP_TYPE_*`.
    pub map_type: u32,
    /// Bytes per key.
    pub key_bytes: u32,
    /// Bytes per value.
    pub value_bytes: u32,
    /// Maximum number of entries (for ring buffers: bytes).
    pub max_entries: u32,
    /// `BPF_F_*`.
    pub flags: u32,
    /// Type information: descriptor, key type, value type.
    pub btf: Option<(BorrowedFd<'a>, u32, u32)>,
    /// For a map of maps: a map of the kind that it holds.
    pub inner: Option<BorrowedFd<'a>>,
}

/// Creates a map.
pub fn create_map(spec: &MapSpec<'_>) -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    // SAFETY: all variants of the union are integers, and all its bytes are initialised (zero).
    let create = unsafe { &mut attr.__bindgen_anon_1 };
    create.map_type = spec.map_type;
    create.key_size = spec.key_bytes;
    create.value_size = spec.value_bytes;
    create.max_entries = spec.max_entries;
    create.map_flags = spec.flags;
    copy_name(&mut create.map_name, spec.name);
    if let Some((btf, key, value)) = spec.btf {
        create.btf_fd = btf.as_raw_fd() as u32;
        create.btf_key_type_id = key;
        create.btf_value_type_id = value;
    }
    if let Some(inner) = spec.inner {
        create.inner_map_fd = inner.as_raw_fd() as u32;
    }
    // SAFETY: the command takes no pointers and returns a new descriptor.
    unsafe { call_fd(bpf_cmd::BPF_MAP_CREATE, &mut attr) }
}

/// Puts a map into an array of maps. When this returns, no running program still uses the previous map: the kernel
/// waits for them.
///
/// # Errors
/// `InvalidInput` if `array` is not an array of maps, or the kernel's error.
pub fn set_inner_map(array: BorrowedFd<'_>, index: u32, map: BorrowedFd<'_>) -> io::Result<()> {
    set_value(array, bpf_map_type::BPF_MAP_TYPE_ARRAY_OF_MAPS, index, &map.as_raw_fd().to_ne_bytes())
}

/// Sets a value of an array of this type. Fails if the map is another one, or if its values have another size.
fn set_value(map: BorrowedFd<'_>, map_type: bpf_map_type, index: u32, value: &[u8]) -> io::Result<()> {
    let expected = MapInfo { map_type: map_type as u32, key_bytes: size_of_val(&index), value_bytes: value.len() };
    if map_info(map)? != expected {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut attr = zeroed();
    // SAFETY: all variants of the union are integers, and all its bytes are initialised (zero).
    let update = unsafe { &mut attr.__bindgen_anon_2 };
    update.map_fd = map.as_raw_fd() as u32;
    update.key = &raw const index as u64;
    update.__bindgen_anon_1.value = value.as_ptr() as u64;
    // SAFETY: the command reads a key and a value of the map's sizes, which were just compared with those of `index`
    // and `value`. The map is not per-CPU, so the command reads one value only.
    unsafe { call(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr) }.map(drop)
}

/// The properties of an existing map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapInfo {
    /// `BPF_MAP_TYPE_*`.
    pub map_type: u32,
    /// Bytes per key.
    pub key_bytes: usize,
    /// Bytes per value. For a per-CPU map: bytes of one CPU's value.
    pub value_bytes: usize,
}

/// Asks the kernel for a map's type and sizes.
pub fn map_info(map: BorrowedFd<'_>) -> io::Result<MapInfo> {
    // SAFETY: the structure consists of integers. If the descriptor is of a program or of type information instead, the
    // kernel writes another structure of integers, which is valid too.
    let info: bpf_map_info = unsafe { object_info(map) }?;
    Ok(MapInfo { map_type: info.type_, key_bytes: info.key_size as usize, value_bytes: info.value_size as usize })
}

/// Sets the single value of a data-section map. Freezes the map if `freeze` is set.
///
/// # Errors
/// `InvalidInput` if the map is not an array whose values have the data's size.
pub fn set_section(map: BorrowedFd<'_>, data: &[u8], freeze: bool) -> io::Result<()> {
    set_value(map, bpf_map_type::BPF_MAP_TYPE_ARRAY, 0, data)?;
    if freeze {
        let mut attr = zeroed();
        attr.__bindgen_anon_2.map_fd = map.as_raw_fd() as u32;
        // SAFETY: the command takes no pointers.
        unsafe { call(bpf_cmd::BPF_MAP_FREEZE, &mut attr) }?;
    }
    Ok(())
}

/// Where the next batch of a hash map's entries begins: a bucket number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor(u32);

/// A batch of a hash map's entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Number of entries read.
    pub count: usize,
    /// Where the next batch begins. `None` after the last entries.
    pub next: Option<Cursor>,
}

/// A hash map whose keys and values have the sizes of `K` and `V`.
pub struct HashMapFd<K, V> {
    map: OwnedFd,
    entry: PhantomData<fn() -> (K, V)>,
}

impl<K: FromBytes, V: FromBytes> HashMapFd<K, V> {
    /// Wraps a map, after checking its type and sizes with the kernel.
    ///
    /// # Errors
    /// `InvalidInput` if it is not a hash map, is per-CPU, or has keys or values of other sizes.
    pub fn new(map: OwnedFd) -> io::Result<Self> {
        let expected = MapInfo {
            map_type: bpf_map_type::BPF_MAP_TYPE_HASH as u32,
            key_bytes: size_of::<K>(),
            value_bytes: size_of::<V>(),
        };
        if map_info(map.as_fd())? != expected {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self { map, entry: PhantomData })
    }

    /// Reads entries from `cursor` on (`None`: from the beginning), as many as fit into both `keys` and `values`.
    ///
    /// # Errors
    /// `ENOSPC` if the first bucket has more entries than fit.
    pub fn lookup_batch(&self, cursor: Option<Cursor>, keys: &mut [K], values: &mut [V]) -> io::Result<Batch> {
        let capacity = keys.len().min(values.len());
        let mut next = Cursor::default();
        let mut attr = zeroed();
        attr.batch.in_batch = cursor.as_ref().map_or(0, |cursor| &raw const cursor.0 as u64);
        attr.batch.out_batch = &raw mut next.0 as u64;
        attr.batch.keys = keys.as_mut_ptr() as u64;
        attr.batch.values = values.as_mut_ptr() as u64;
        attr.batch.count = u32::try_from(capacity).unwrap_or(u32::MAX);
        attr.batch.map_fd = self.map.as_raw_fd() as u32;
        // SAFETY: the command writes at most `count` keys and values of the map's sizes, which `new` compared with
        // those of `K` and `V`. Both slices have that many elements, and any bytes are valid elements (`FromBytes`).
        // The map is a plain hash map, so it has one value per key, and the cursors that the command reads and writes
        // are 4 bytes long.
        let last = match unsafe { call(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr) } {
            Ok(_) => false,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
            Err(error) => return Err(error),
        };
        // SAFETY: all variants of the union are integers, and all its bytes are initialised.
        let count = unsafe { attr.batch.count } as usize;
        Ok(Batch { count, next: (!last).then_some(next) })
    }
}

impl<K, V> AsFd for HashMapFd<K, V> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }
}

/// Capacity in entries for the first batch of [`read_all`].
const BATCH: usize = 256;

/// Largest batch that is tried. No bucket has more entries.
const LARGEST_BATCH: usize = 1 << 24;

/// Calls `read` for one batch after another, and `piece` with the entries of each. If a bucket does not fit, the
/// capacity is doubled. `capacity` is the initial one, in entries per batch. `keys` and `values` are buffers that may be
/// kept for the next scan.
pub(crate) fn scan_batches<K: Copy + Default, V: Copy + Default>(
    mut capacity: usize,
    (keys, values): (&mut Vec<K>, &mut Vec<V>),
    mut read: impl FnMut(Option<Cursor>, &mut [K], &mut [V]) -> io::Result<Batch>,
    mut piece: impl FnMut(&mut dyn Iterator<Item = (K, V)>),
) -> io::Result<()> {
    let mut cursor = None;
    loop {
        keys.resize(capacity, K::default());
        values.resize(capacity, V::default());
        match read(cursor, keys, values) {
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && capacity < LARGEST_BATCH => capacity *= 2,
            Err(error) => return Err(error),
            Ok(batch) => {
                piece(&mut keys.iter().copied().zip(values.iter().copied()).take(batch.count));
                let Some(next) = batch.next else { return Ok(()) };
                cursor = Some(next);
            }
        }
    }
}

/// Reads all entries of a map. If an error occurs, `into` contains the entries read so far.
pub(crate) fn read_all<K, V>(map: &HashMapFd<K, V>, into: &mut impl Extend<(K, V)>) -> io::Result<()>
where
    K: FromBytes + Copy + Default,
    V: FromBytes + Copy + Default,
{
    let read = |cursor, keys: &mut [K], values: &mut [V]| map.lookup_batch(cursor, keys, values);
    scan_batches(BATCH, (&mut Vec::new(), &mut Vec::new()), read, |entries| into.extend(entries))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A map with one entry. `None`, with a printed notice, if this user may not create maps.
    fn map(map_type: bpf_map_type, key_bytes: u32, value_bytes: u32) -> Option<OwnedFd> {
        if heapbpf_testing::is_emulated("no bpf(2)") {
            return None;
        }
        let map_type = map_type as u32;
        let spec = MapSpec { name: "test", map_type, key_bytes, value_bytes, max_entries: 1, ..MapSpec::default() };
        match create_map(&spec) {
            Ok(map) => Some(map),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                heapbpf_testing::skipped("making BPF maps needs root");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn batches_are_read_only_from_plain_hash_maps_with_entries_of_the_types() {
        let Some(fitting) = map(bpf_map_type::BPF_MAP_TYPE_HASH, 4, 8) else { return };
        let map_of = |map_type, key, value| map(map_type, key, value).expect("made one before");
        assert!(HashMapFd::<u32, u64>::new(fitting.try_clone().unwrap()).is_ok());
        assert!(HashMapFd::<u64, u64>::new(fitting.try_clone().unwrap()).is_err());
        assert!(HashMapFd::<u32, u32>::new(fitting).is_err());
        for other in [bpf_map_type::BPF_MAP_TYPE_PERCPU_HASH, bpf_map_type::BPF_MAP_TYPE_ARRAY] {
            assert!(HashMapFd::<u32, u64>::new(map_of(other, 4, 8)).is_err(), "{other:?}");
        }
        let empty = HashMapFd::<u32, u64>::new(map_of(bpf_map_type::BPF_MAP_TYPE_HASH, 4, 8)).unwrap();
        let batch = empty.lookup_batch(None, &mut [0; 4], &mut [0; 3]).unwrap();
        assert_eq!(batch, Batch { count: 0, next: None });
    }

    #[test]
    fn a_sections_data_must_be_of_the_size_of_its_map() {
        let Some(section) = map(bpf_map_type::BPF_MAP_TYPE_ARRAY, 4, 8) else { return };
        for wrong in [&[0_u8; 7][..], &[0; 9]] {
            let error = set_section(section.as_fd(), wrong, false).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
        set_section(section.as_fd(), &[1; 8], false).unwrap();
        let per_cpu = map(bpf_map_type::BPF_MAP_TYPE_PERCPU_ARRAY, 4, 8).expect("made one before");
        assert!(set_section(per_cpu.as_fd(), &[1; 8], false).is_err());
    }
}

#[cfg(test)]
mod batch_tests {
    use super::*;

    /// Reads a map with these buckets as the kernel does: only whole buckets, as many as fit.
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

    /// All entries in the order in which they are passed, and the capacity of each read.
    fn scanned(buckets: &[Vec<u64>]) -> (io::Result<Vec<(u64, u64)>>, Vec<usize>) {
        let (mut entries, mut capacities, mut at) = (Vec::new(), Vec::new(), 0);
        let result = scan_batches(
            BATCH,
            (&mut Vec::new(), &mut Vec::new()),
            |cursor, keys, values| {
                assert_eq!(cursor.is_some(), at > 0, "the first batch is read from the beginning");
                capacities.push(keys.len());
                let (count, next) = read(buckets, at, keys, values)?;
                at = next;
                Ok(Batch { count, next: (next < buckets.len()).then(Cursor::default) })
            },
            |piece| entries.extend(piece),
        );
        (result.map(|()| entries), capacities)
    }

    #[test]
    fn every_entry_comes_once_whatever_the_batches() {
        let batch = BATCH as u64;
        // Two buckets fill a batch exactly. The third does not fit.
        let buckets = [(0..batch - 1).collect(), vec![batch - 1], vec![batch], vec![]];
        let (entries, capacities) = scanned(&buckets);
        assert_eq!(entries.unwrap(), (0..=batch).map(|key| (key, key * 2)).collect::<Vec<_>>());
        assert_eq!(capacities, [BATCH, BATCH]);
        let (entries, _) = scanned(&[]);
        assert_eq!(entries.unwrap(), []);
    }

    #[test]
    fn a_bucket_larger_than_a_batch_gets_more_capacity() {
        let buckets = [vec![1], (0..3 * BATCH as u64).collect(), vec![2]];
        let (entries, capacities) = scanned(&buckets);
        assert_eq!(entries.unwrap().len(), 3 * BATCH + 2);
        assert_eq!(capacities, [BATCH, BATCH, 2 * BATCH, 4 * BATCH]);
    }

    #[test]
    fn what_never_fits_ends_with_the_kernels_error() {
        let full = |_, _: &mut [u8], _: &mut [u8]| Err(io::Error::from_raw_os_error(libc::ENOSPC));
        let error = scan_batches(BATCH, (&mut Vec::new(), &mut Vec::new()), full, |_| panic!("no entry")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    }
}
