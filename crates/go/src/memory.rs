//! Cached reads from the memory of a process, or from the bytes of a file.

use heapbpf_elf::{Image, Memory};

/// The bytes of a file, by file offset.
pub(crate) struct FileBytes<'a>(pub(crate) &'a dyn Image);

impl Memory for FileBytes<'_> {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.0.read_at(address, buffer).is_ok()
    }
}

/// Number of bytes per read: the next bytes needed are usually nearby.
const WINDOW_BYTES: u64 = 64 << 10;

/// Reads memory in pieces, and caches the last one.
pub(crate) struct Window<'a, M: Memory + ?Sized> {
    memory: &'a M,
    start: u64,
    bytes: Vec<u8>,
}

impl<'a, M: Memory + ?Sized> Window<'a, M> {
    pub(crate) const fn new(memory: &'a M) -> Self {
        Self { memory, start: 0, bytes: Vec::new() }
    }

    /// Returns `count` bytes at `address`; `None` if they cannot be read.
    pub(crate) fn bytes(&mut self, address: u64, count: usize) -> Option<&[u8]> {
        let end = address.checked_add(count as u64)?;
        if address < self.start || end > self.start + self.bytes.len() as u64 {
            self.read(address, end, count)?;
        }
        let at = usize::try_from(address - self.start).ok()?;
        self.bytes.get(at..at.checked_add(count)?)
    }

    /// Reads the pieces that contain a range, or only the range if they are not fully readable.
    fn read(&mut self, address: u64, end: u64, count: usize) -> Option<()> {
        let start = address & !(WINDOW_BYTES - 1);
        let whole = end.checked_next_multiple_of(WINDOW_BYTES)?;
        self.bytes.clear();
        self.bytes.resize(usize::try_from(whole - start).ok()?, 0);
        self.start = start;
        if self.memory.read(start, &mut self.bytes) {
            return Some(());
        }
        self.bytes.truncate(count);
        self.start = address;
        if self.memory.read(address, &mut self.bytes) {
            return Some(());
        }
        self.bytes.clear();
        None
    }

    pub(crate) fn u32(&mut self, address: u64) -> Option<u32> {
        self.bytes(address, 4)?.try_into().ok().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, address: u64) -> Option<u64> {
        self.bytes(address, 8)?.try_into().ok().map(u64::from_le_bytes)
    }
}

/// Returns the 64-bit numbers in `bytes`.
pub(crate) fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let word = |word: &[u8]| word.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
    bytes.chunks_exact(8).map(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that starts at an address.
    struct From(u64, Vec<u8>);

    impl Memory for From {
        fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
            address.checked_sub(self.0).is_some_and(|at| self.1.as_slice().read_at(at, buffer).is_ok())
        }
    }

    #[test]
    fn what_is_near_the_end_of_memory_is_read_without_what_follows() {
        let memory = From(WINDOW_BYTES, (0..100u8).collect());
        let mut window = Window::new(&memory);
        assert_eq!(window.bytes(WINDOW_BYTES + 90, 10), Some(&(90..100).collect::<Vec<u8>>()[..]));
        assert_eq!(window.bytes(WINDOW_BYTES + 90, 11), None);
        assert_eq!(window.u32(WINDOW_BYTES), Some(0x0302_0100));
        assert_eq!((window.u64(8), window.u64(u64::MAX)), (None, None));
        assert_eq!(words(&[1, 0, 0, 0, 0, 0, 0, 2, 9]).collect::<Vec<_>>(), [0x0200_0000_0000_0001]);
    }
}
