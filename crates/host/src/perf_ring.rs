//! One perf event and its memory-mapped ring, from which the kernel's records are copied out.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use perf_event_open_sys::bindings::{
    PERF_COUNT_SW_DUMMY, PERF_FLAG_FD_CLOEXEC, PERF_SAMPLE_TIME, PERF_TYPE_SOFTWARE, perf_event_attr,
    perf_event_mmap_page,
};

/// Size of a record's header.
const HEADER_BYTES: usize = 8;

/// Bytes for records in the ring of a CPU (about 7,000 mappings). If heapbpf is not scheduled, that lasts for more than
/// a second at 500 new processes a second.
const RING_BYTES: usize = 1 << 20;

/// The next content of a ring.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing.
    Empty,
    /// A record, which was copied out.
    Record,
    /// The ring's content is malformed; all of it was skipped.
    Corrupt,
}

/// A dummy software event on one CPU, for all processes, and its ring.
#[derive(Debug)]
pub struct PerfRing {
    event: File,
    /// The CPU that is watched.
    pub cpu: u32,
    map: NonNull<u8>,
    map_bytes: usize,
    page_bytes: usize,
    /// Position up to which records were consumed. [`PerfRing::release`] publishes it to the kernel.
    tail: u64,
    /// Position up to which the kernel had written at the last [`PerfRing::refresh`].
    head: u64,
}

// SAFETY: `map` is a mapping that only this value refers to, and mappings are not tied to a thread.
unsafe impl Send for PerfRing {}

impl PerfRing {
    /// Opens the event on `cpu` and maps its ring. Needs CAP_PERFMON (or CAP_SYS_ADMIN).
    ///
    /// # Errors
    /// Errors of perf_event_open(2) and mmap(2); `ENODEV` or `ENXIO` if the CPU is offline.
    pub fn open(cpu: u32) -> io::Result<Self> {
        let event = File::from(open_event(cpu)?);
        let page_bytes = procfs::page_size() as usize;
        let pages = RING_BYTES.div_ceil(page_bytes).max(1).next_power_of_two();
        let map_bytes = (pages + 1) * page_bytes;
        // SAFETY: the address is null, so the kernel picks a free range and no existing mapping is replaced.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                map_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                event.as_raw_fd(),
                0,
            )
        };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let map = NonNull::new(map.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { event, cpu, map, map_bytes, page_bytes, tail: 0, head: 0 })
    }

    /// Reads how far the kernel has written.
    pub fn refresh(&mut self) {
        self.head = self.position(std::mem::offset_of!(perf_event_mmap_page, data_head)).load(Ordering::Acquire);
    }

    /// Copies the next record (header included) into `record`, without consuming it.
    pub fn peek(&mut self, record: &mut Vec<u8>) -> Next {
        let unread = self.head.wrapping_sub(self.tail);
        if unread == 0 {
            return Next::Empty;
        }
        record.clear();
        let size = if unread >= HEADER_BYTES as u64 {
            self.copy_out(HEADER_BYTES, record);
            usize::from(u16::from_ne_bytes([record[6], record[7]]))
        } else {
            0
        };
        if size < HEADER_BYTES || size as u64 > unread || size > self.data_bytes() {
            self.tail = self.head;
            return Next::Corrupt;
        }
        record.clear();
        self.copy_out(size, record);
        Next::Record
    }

    /// Consumes a record of `bytes` bytes.
    pub fn advance(&mut self, bytes: usize) {
        self.tail = self.tail.wrapping_add(bytes as u64);
    }

    /// Returns the space of all consumed records to the kernel.
    pub fn release(&mut self) {
        self.position(std::mem::offset_of!(perf_event_mmap_page, data_tail)).store(self.tail, Ordering::Release);
    }

    fn data_bytes(&self) -> usize {
        self.map_bytes - self.page_bytes
    }

    /// Appends `bytes` bytes starting at `tail`, wrapping around at the ring's end. `bytes` is at most the ring's size.
    fn copy_out(&self, bytes: usize, into: &mut Vec<u8>) {
        let data_bytes = self.data_bytes();
        let bytes = bytes.min(data_bytes);
        let start = (self.tail % data_bytes as u64) as usize;
        let first = bytes.min(data_bytes - start);
        into.reserve(bytes);
        // SAFETY: `start + first` and `bytes - first` are at most `data_bytes`, so both pieces lie in the mapping's
        // data area; `reserve` made capacity for their sum; and the kernel does not write between `tail` and `head`.
        unsafe {
            let data = self.map.as_ptr().add(self.page_bytes);
            let end = into.as_mut_ptr().add(into.len());
            std::ptr::copy_nonoverlapping(data.add(start), end, first);
            std::ptr::copy_nonoverlapping(data, end.add(first), bytes - first);
            into.set_len(into.len() + bytes);
        }
    }

    /// A position in the ring's control page, shared with the kernel.
    fn position(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the callers pass the offset of an aligned `u64` field of `perf_event_mmap_page`, which lies at the
        // start of the mapping; the mapping lives as long as `self`, and the kernel accesses the field atomically.
        unsafe { AtomicU64::from_ptr(self.map.as_ptr().add(offset).cast()) }
    }
}

impl AsFd for PerfRing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Drop for PerfRing {
    fn drop(&mut self) {
        // SAFETY: `open` made this mapping with this length, and no reference into it outlives `self`.
        unsafe { libc::munmap(self.map.as_ptr().cast(), self.map_bytes) };
    }
}

fn open_event(cpu: u32) -> io::Result<OwnedFd> {
    let mut attr = perf_event_attr {
        type_: PERF_TYPE_SOFTWARE,
        size: size_of::<perf_event_attr>() as u32,
        config: u64::from(PERF_COUNT_SW_DUMMY),
        // The only field that `sample_id_all` appends to records: 8 bytes of time.
        sample_type: u64::from(PERF_SAMPLE_TIME),
        clockid: libc::CLOCK_MONOTONIC,
        ..Default::default()
    };
    attr.set_mmap(1);
    attr.set_mmap2(1);
    attr.set_comm(1);
    attr.set_comm_exec(1);
    attr.set_task(1);
    attr.set_sample_id_all(1);
    attr.set_use_clockid(1);
    attr.set_exclude_kernel(1);
    attr.set_exclude_hv(1);
    attr.set_watermark(1);
    // Every record wakes the reader.
    attr.__bindgen_anon_2.wakeup_watermark = 1;
    let cpu = i32::try_from(cpu).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: `attr` is fully initialised, carries its own size, and outlives the call.
    let fd =
        unsafe { perf_event_open_sys::perf_event_open(&raw mut attr, -1, cpu, -1, u64::from(PERF_FLAG_FD_CLOEXEC)) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `perf_event_open` just returned this descriptor, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
