//! The two ring buffers: small records of events, and stack copies.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use aya::maps::{MapData, RingBuf};
use bytes::{Bytes, BytesMut};

use super::KernelError;
use super::loader::Loader;

/// The reading end of a ring buffer.
pub struct Ring {
    ring: RingBuf<MapData>,
    consumer: Position,
    producer: Position,
    slab: BytesMut,
    ends: Vec<usize>,
}

/// Bytes copied out of a ring before its space is released and the records are processed.
const SLAB_BYTES: usize = 1 << 20;

impl Ring {
    /// Opens a ring by the name of its map.
    ///
    /// # Errors
    /// There is no such map, or it cannot be mapped into memory.
    pub fn open(loader: &Loader, name: &'static str) -> Result<Self, KernelError> {
        let ring = RingBuf::try_from(loader.typed_map(name)?)
            .map_err(|error| KernelError::Object(format!("{name}: {error}")))?;
        // The positions are in the two pages before the records: first the consumer's, then the producer's (Linux,
        // kernel/bpf/ringbuf.c, struct bpf_ringbuf).
        let [consumer, producer] = [0, 1].map(|page| Position::map(ring.as_fd(), page));
        let unreadable = |source| KernelError::Read { what: "the positions of a ring", source };
        let (consumer, producer) = (consumer.map_err(unreadable)?, producer.map_err(unreadable)?);
        Ok(Self { ring, consumer, producer, slab: BytesMut::new(), ends: Vec::with_capacity(SLAB_BYTES / 64) })
    }

    /// The producer position, in bytes since the ring was created. Every record reserved before this call is below
    /// it.
    pub fn reserved_up_to(&self) -> u64 {
        self.producer.get()
    }

    /// The consumer position. Every record below it was handed out.
    pub fn read_up_to(&self) -> u64 {
        self.consumer.get()
    }

    /// Copies the available records, up to about one slab, and passes each to `each`. Returns the number of records:
    /// 0 if the ring is empty or its next record is still being written. Each record is copied once. The slab's
    /// memory is reused once all records in it are dropped.
    pub fn drain(&mut self, mut each: impl FnMut(Bytes)) -> usize {
        self.ends.clear();
        while self.slab.len() < SLAB_BYTES {
            let Some(record) = self.ring.next() else { break };
            if self.ends.is_empty() {
                self.slab.reserve(SLAB_BYTES);
            }
            self.slab.extend_from_slice(&record);
            self.ends.push(self.slab.len());
        }
        let mut records = self.slab.split().freeze();
        let mut start = 0;
        for end in &self.ends {
            each(records.split_to(end - start));
            start = *end;
        }
        self.ends.len()
    }

    /// Passes available records below the position `up_to` to `each`, at most `most` of them. They are read in place: what
    /// `each` does not look at is not touched. The space of each is released after its call. Returns their number.
    pub fn visit(&mut self, up_to: u64, most: usize, mut each: impl FnMut(&[u8])) -> usize {
        let mut count = 0;
        while count < most && self.read_up_to() < up_to {
            let Some(record) = self.ring.next() else { break };
            each(&record);
            count += 1;
        }
        count
    }

    /// Releases the slab, which a large record may have enlarged.
    pub fn shrink(&mut self) {
        self.slab = BytesMut::new();
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

impl AsRawFd for Ring {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// One of a ring's two positions. The kernel shares it in a page of its own.
struct Position(NonNull<AtomicU64>);

impl Position {
    /// Maps the page read-only.
    fn map(ring: BorrowedFd<'_>, page: usize) -> std::io::Result<Self> {
        let bytes = procfs::page_size() as usize;
        // SAFETY: with a null address the kernel chooses an unused range, so the call changes no memory that is in
        // use.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED,
                ring.as_raw_fd(),
                (page * bytes) as libc::off_t,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        NonNull::new(memory.cast()).map(Self).ok_or_else(|| std::io::ErrorKind::AddrNotAvailable.into())
    }

    fn get(&self) -> u64 {
        // SAFETY: the page begins with a counter of one machine word (64 bits on all supported machines), which its
        // writers update in a single store. We only read it: the mapping is read-only. It stays mapped as long as
        // `self`.
        unsafe { self.0.as_ref() }.load(Ordering::Acquire)
    }
}

impl Drop for Position {
    fn drop(&mut self) {
        // SAFETY: `map` made this mapping with this length, and no reference into it outlives a call of `get`.
        unsafe { libc::munmap(self.0.as_ptr().cast(), procfs::page_size() as usize) };
    }
}
