//! The two ring buffers: small records of events, and stack copies.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use aya::maps::{MapData, RingBuf};
use bytes::{Bytes, BytesMut};

use super::KernelError;
use super::loader::Loader;

/// A ring buffer's reading end.
pub struct Ring {
    ring: RingBuf<MapData>,
    consumer: Position,
    producer: Position,
    slab: BytesMut,
    ends: Vec<usize>,
}

/// Bytes copied out of a ring in one go, before the ring's room is given back and the records are worked on.
const SLAB_BYTES: usize = 1 << 20;

impl Ring {
    /// Opens a ring by the name of its map.
    ///
    /// # Errors
    /// There is no such map, or it cannot be mapped into memory.
    pub fn open(loader: &Loader, name: &'static str) -> Result<Self, KernelError> {
        let ring = RingBuf::try_from(loader.typed_map(name)?)
            .map_err(|error| KernelError::Object(format!("{name}: {error}")))?;
        // Two pages before the records hold the positions: the consumer's first, then the producer's
        // (Linux, kernel/bpf/ringbuf.c, struct bpf_ringbuf).
        let [consumer, producer] = [0, 1].map(|page| Position::map(ring.as_fd(), page));
        let unreadable = |source| KernelError::Read { what: "the positions of a ring", source };
        let (consumer, producer) = (consumer.map_err(unreadable)?, producer.map_err(unreadable)?);
        Ok(Self { ring, consumer, producer, slab: BytesMut::new(), ends: Vec::with_capacity(SLAB_BYTES / 64) })
    }

    /// Where the next record will be reserved: all that were reserved before this call lie before it. In bytes since the
    /// ring was made.
    pub fn reserved_up_to(&self) -> u64 {
        self.producer.get()
    }

    /// Where the next record will be read: all before it were handed out.
    pub fn read_up_to(&self) -> u64 {
        self.consumer.get()
    }

    /// Copies what is there, up to a slab's worth, and hands out each record. Returns the number of records: 0 when the
    /// ring is empty, or its next record is still being written. One copy per record; the slab is used again once all
    /// records of it are gone.
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

    /// Gives the slab back, which may have grown with a large record.
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

/// One of a ring's two positions, in a page of its own that the kernel shares.
struct Position(NonNull<AtomicU64>);

impl Position {
    /// Maps the page, for reading.
    fn map(ring: BorrowedFd<'_>, page: usize) -> std::io::Result<Self> {
        let bytes = procfs::page_size() as usize;
        // SAFETY: a new mapping at an address of the kernel's choice.
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
        // SAFETY: the page begins with a counter of the machine's word (64 bits on all that are supported), which its
        // writers change in one piece, and stays mapped as long as `self`.
        unsafe { self.0.as_ref() }.load(Ordering::Acquire)
    }
}

impl Drop for Position {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length; nothing refers to it any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), procfs::page_size() as usize) };
    }
}
