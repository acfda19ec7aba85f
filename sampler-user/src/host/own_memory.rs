//! The daemon's own memory: it follows processes that come and go for weeks, and must be no larger after a storm of
//! them than before.

/// Free memory at the end of a heap is given back from this size on.
const TRIM_BYTES: libc::c_int = 4 << 20;

/// Blocks from this size on are mappings of their own, so that what has grown leaves no hole between small blocks.
const MAPPING_BYTES: libc::c_int = 2 << 20;

/// Makes the C library give memory back as it becomes free. Left alone, glibc raises its limits with the largest block
/// that was ever freed, and keeps up to 64 MiB at the end of each thread's heap for good. To be called at the start.
pub fn return_what_is_free() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no preconditions.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPING_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, TRIM_BYTES);
    }
}

/// Gives back whole pages that are free between blocks: after large debug information, many files, or many processes
/// that would be most of our memory.
pub fn give_memory_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no preconditions.
    unsafe {
        libc::malloc_trim(0);
    }
}
