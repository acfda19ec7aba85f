//! The filter before the live map, in the daemon's memory: entries that the daemon removes must leave it too.

use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use sampler_ebpf::filter::{SLOTS, slot_of};

use super::KernelError;
use super::loader::Loader;

/// From one count to the next: the kernel pads elements of an array to eight bytes (kernel/bpf/arraymap.c).
const STRIDE: usize = size_of::<u64>();
const BYTES: usize = SLOTS * STRIDE;

/// The filter's counts, shared with the programs.
pub struct Filter(NonNull<u8>);

impl Filter {
    /// Maps it.
    ///
    /// # Errors
    /// The object has no such map, or the kernel does not let it be mapped.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        let map = loader.map("FILTER")?;
        // SAFETY: a new mapping at an address of the kernel's choice.
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

    /// A block that the daemon took out of the live map has left it.
    pub fn remove(&self, address: u64) {
        // SAFETY: the mapping holds SLOTS counts, aligned, which all its users change atomically; it lives as long as
        // `self`.
        let count = unsafe { self.0.add(slot_of(address) as usize * STRIDE).cast::<AtomicU32>().as_ref() };
        count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        // SAFETY: mapped in `open` with this length; nothing refers to it any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), BYTES) };
    }
}
