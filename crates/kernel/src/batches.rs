//! Scans whole hash maps of the kernel, one batch of entries at a time.

use std::io;

use zerocopy::FromBytes;

use super::sys::{Batch, Cursor, HashMapFd};

/// Capacity in entries for the first batch of [`read_all`].
const BATCH: usize = 256;

/// Largest batch that is tried. No bucket has more entries.
const LARGEST_BATCH: usize = 1 << 24;

/// Calls `read` for one batch after another, and `piece` with the entries of each. If a bucket does not fit, the
/// capacity is doubled. `capacity` is the initial one, in entries per batch. `keys` and `values` are buffers that may be
/// kept for the next scan.
pub(super) fn scan_batches<K: Copy + Default, V: Copy + Default>(
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
pub(super) fn read_all<K, V>(map: &HashMapFd<K, V>, into: &mut impl Extend<(K, V)>) -> io::Result<()>
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
