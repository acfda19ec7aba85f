//! The daemon's mapping of the filter in front of the live map. When the daemon removes an entry from the live map, it
//! must remove it from the filter, too.

use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use sampler_ebpf::filter::{SLOTS, slot_of};

use super::KernelError;
use super::loader::Loader;

/// Distance between two counts: the kernel pads array elements to eight bytes (kernel/bpf/arraymap.c).
const STRIDE: usize = size_of::<u64>();
const BYTES: usize = SLOTS * STRIDE;

/// The filter's counts, in memory shared with the BPF programs.
pub struct Filter(NonNull<u8>);

impl Filter {
    /// Maps the filter into memory.
    ///
    /// # Errors
    /// The object has no such map, or the kernel refuses the mapping.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        let map = loader.map("FILTER")?;
        // SAFETY: with a null address the kernel chooses an unused range, so the call changes no memory that is in
        // use.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                map.as_raw_fd(),
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            let source = std::io::Error::last_os_error();
            return Err(KernelError::Read { what: "the live map's filter", source });
        }
        NonNull::new(memory.cast()).map(Self).ok_or(KernelError::Object("the filter is at no address".into()))
    }

    /// Removes a block from the filter. Call it for each block that the daemon removed from the live map.
    pub fn remove(&self, address: u64) {
        // SAFETY: `slot_of` is below SLOTS, so the count lies inside the mapping's `BYTES`, and STRIDE keeps it
        // aligned. The programs and the daemon change it only atomically. The mapping lives as long as `self`; the
        // reference ends with this call.
        let count = unsafe { self.0.add(slot_of(address) as usize * STRIDE).cast::<AtomicU32>().as_ref() };
        count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        // SAFETY: `open` made this mapping with this length, and no reference into it outlives a call of `remove`.
        unsafe { libc::munmap(self.0.as_ptr().cast(), BYTES) };
    }
}
