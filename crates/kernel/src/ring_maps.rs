//! Defines the rings, creates them, and reads their records in memory. A ring cannot be resized, so a larger one takes
//! its place in an array of maps.
//!
//! The kernel maps a ring's records twice, one mapping after the other, so that a record that wraps around the end is
//! contiguous (Linux, kernel/bpf/ringbuf.c). Of the second mapping we map only what the longest record needs, because
//! twice the memory would count as this process's own.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use aya_obj::generated::{BPF_RINGBUF_BUSY_BIT, BPF_RINGBUF_DISCARD_BIT, bpf_map_type};
use sampler_ebpf::abi::{AllocationRecord, LARGEST_STACK_COPY, StackRecord, ring};

use super::{KernelError, sys};

/// Name of the array of rings.
pub const RINGS: &str = "RINGS";

/// One of the rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingId {
    /// Small records: every sample, every free of a sample, every process event.
    Events = ring::EVENTS as isize,
    /// Stack copies.
    Stacks = ring::STACKS as isize,
    /// Execs of targets.
    Execs = ring::EXECS as isize,
}

impl RingId {
    /// Its name, in messages and for `bpftool map`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Events => "EVENTS",
            Self::Stacks => "STACKS",
            Self::Execs => "EXECS",
        }
    }

    /// Length of its longest record in bytes.
    pub const fn longest_bytes(self) -> u64 {
        match self {
            Self::Events => size_of::<AllocationRecord>() as u64,
            Self::Stacks => size_of::<StackRecord>() as u64 + LARGEST_STACK_COPY,
            Self::Execs => size_of::<u32>() as u64,
        }
    }
}

/// A ring that was created.
pub struct NewRing {
    /// The map.
    pub fd: OwnedFd,
    /// Its size in bytes.
    pub bytes: u64,
}

/// The size of a ring if this many bytes are requested: a power of two, and whole pages, which are larger on some
/// machines.
pub fn whole_size(bytes: u64) -> u64 {
    bytes.max(procfs::page_size()).next_power_of_two()
}

/// Creates a ring.
///
/// # Errors
/// The kernel refuses: it has no memory for the ring, or this user lacks permission.
pub fn create(name: &str, bytes: u64) -> Result<NewRing, KernelError> {
    let bytes = whole_size(bytes);
    let spec = sys::MapSpec {
        name,
        map_type: bpf_map_type::BPF_MAP_TYPE_RINGBUF as u32,
        max_entries: u32::try_from(bytes).unwrap_or(u32::MAX),
        ..sys::MapSpec::default()
    };
    let fd = sys::create_map(&spec).map_err(|source| KernelError::of_map(name, source))?;
    Ok(NewRing { fd, bytes })
}

/// Creates a ring, and makes the programs write to it from now on.
///
/// # Errors
/// As for [`create`].
pub fn put_new(rings: BorrowedFd<'_>, id: RingId, bytes: u64) -> Result<NewRing, KernelError> {
    let ring = create(id.name(), bytes)?;
    put(rings, id, ring.fd.as_fd())?;
    Ok(ring)
}

/// Makes the programs write to a ring. When this returns, none of them still writes to the previous one.
///
/// # Errors
/// The kernel's error.
pub fn put(rings: BorrowedFd<'_>, id: RingId, ring: BorrowedFd<'_>) -> Result<(), KernelError> {
    sys::set_inner_map(rings, id as u32, ring).map_err(|source| KernelError::of_map(id.name(), source))
}

/// Bytes before each record: its length, with two flag bits, and its page.
const RECORD_HEADER_BYTES: u64 = 8;
/// Records begin at multiples of this.
const ALIGNMENT: u64 = 8;

/// A ring in memory.
pub struct RingMemory {
    ring: OwnedFd,
    /// Size of the ring in bytes.
    bytes: u64,
    /// The page with the consumer position, which only we write.
    consumer: Mapping,
    /// The page with the producer position, then the records, then the beginning of the records again.
    records: Mapping,
}

impl RingMemory {
    /// Maps a ring of this size. `longest_bytes` is the length of its longest record.
    ///
    /// # Errors
    /// Errors of mmap(2).
    pub fn map(ring: OwnedFd, bytes: u64, longest_bytes: u64) -> io::Result<Self> {
        let page = procfs::page_size();
        let again = (longest_bytes + RECORD_HEADER_BYTES).next_multiple_of(page).min(bytes);
        let consumer = Mapping::of(ring.as_fd(), 0, page, libc::PROT_READ | libc::PROT_WRITE)?;
        let records = Mapping::of(ring.as_fd(), page, page + bytes + again, libc::PROT_READ)?;
        Ok(Self { ring, bytes, consumer, records })
    }

    /// Size of the ring in bytes.
    pub const fn size_bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of bytes that were ever reserved.
    pub fn reserved_up_to(&self) -> u64 {
        self.records.position().load(Ordering::Acquire)
    }

    /// Number of bytes that were ever read.
    pub fn read_up_to(&self) -> u64 {
        // Nothing else writes it.
        self.consumer.position().load(Ordering::Relaxed)
    }

    /// Whether everything that was reserved has been read.
    pub fn is_empty(&self) -> bool {
        self.read_up_to() == self.reserved_up_to()
    }

    /// Passes the next record to `each` in place, and then releases its space. `None` if the ring is empty or its next
    /// record is still being written.
    pub fn read<R>(&mut self, each: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let (start, bytes) = self.next_submitted()?;
        // No record is longer than what was mapped. The check is for memory safety.
        let result = each(self.records.bytes(start, bytes).unwrap_or_default());
        self.release(bytes);
        Some(result)
    }

    /// Offset in the mapping, and length, of the next submitted record. Releases discarded records before it.
    fn next_submitted(&self) -> Option<(u64, u64)> {
        while !self.is_empty() {
            let header = procfs::page_size() + (self.read_up_to() & (self.bytes - 1));
            let length = self.records.word_at(header).load(Ordering::Acquire);
            if length & BPF_RINGBUF_BUSY_BIT != 0 {
                return None;
            }
            if length & BPF_RINGBUF_DISCARD_BIT == 0 {
                return Some((header + RECORD_HEADER_BYTES, u64::from(length)));
            }
            self.release(u64::from(length & !BPF_RINGBUF_DISCARD_BIT));
        }
        None
    }

    /// Releases the space of the next record, which has this length.
    fn release(&self, bytes: u64) {
        let next = self.read_up_to() + (RECORD_HEADER_BYTES + bytes).next_multiple_of(ALIGNMENT);
        self.consumer.position().store(next, Ordering::Release);
    }
}

impl AsFd for RingMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

/// Memory shared with the kernel.
pub(super) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory belongs to the process, not to a thread, and is changed through a shared reference only by atomic
// operations.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps this many bytes of a BPF map from an offset on.
    pub(super) fn of(map: BorrowedFd<'_>, offset: u64, bytes: u64, protection: libc::c_int) -> io::Result<Self> {
        let (offset, bytes) = (offset as libc::off_t, bytes as usize);
        // SAFETY: with a null address the kernel chooses an unused range, so the call changes no memory that is in use.
        let memory =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_SHARED, map.as_raw_fd(), offset) };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(memory.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        // Stack copies are private, so they are kept out of dumps of heapbpf's memory.
        // SAFETY: the range was just mapped; the call changes what is dumped, not what is in memory.
        unsafe { libc::madvise(memory, bytes, libc::MADV_DONTDUMP) };
        Ok(Self { start, bytes })
    }

    /// The position at the start of this mapping.
    fn position(&self) -> &AtomicU64 {
        // SAFETY: each mapping begins with a page that begins with a position: one machine word (64 bits on all
        // supported machines), which is read and written as a whole. It stays mapped as long as `self`.
        unsafe { self.start.cast().as_ref() }
    }

    /// The 32-bit word at an offset, a multiple of 4 within the mapping: the length of a record, which begins with it,
    /// or a count.
    pub(super) fn word_at(&self, offset: u64) -> &AtomicU32 {
        // SAFETY: the callers pass an aligned offset within what is mapped. The kernel and the programs read and write
        // such a word as a whole.
        unsafe { self.start.add(offset as usize).cast().as_ref() }
    }

    /// Bytes at an offset. `None` if they are not all mapped.
    fn bytes(&self, offset: u64, bytes: u64) -> Option<&[u8]> {
        (offset + bytes <= self.bytes as u64).then(|| {
            // SAFETY: the range is mapped. Nothing writes to a submitted record until its space is released, which
            // needs `&mut RingMemory`.
            unsafe { std::slice::from_raw_parts(self.start.add(offset as usize).as_ptr(), bytes as usize) }
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `of` made this mapping with this length, and no reference into it outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
