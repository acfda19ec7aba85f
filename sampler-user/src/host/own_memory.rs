//! The daemon's own memory. It may run for weeks, and must shrink again after a burst of short-lived processes.

/// `M_TRIM_THRESHOLD`: free bytes at the end of a heap from which on they are returned to the kernel.
const TRIM_BYTES: libc::c_int = 4 << 20;

/// `M_MMAP_THRESHOLD`: blocks of at least this many bytes get mappings of their own, so that a large table that grows
/// leaves no holes between small blocks.
const MAPPING_BYTES: libc::c_int = 2 << 20;

/// `M_ARENA_MAX`: one arena for the event path, which is the main thread, and one for all other threads. What a scrape or
/// the examination of a file has freed serves the next one, whatever thread that runs in.
const ARENAS: libc::c_int = 2;

/// Makes glibc return freed memory to the kernel. By default glibc raises its thresholds to fit the largest block ever
/// freed, and then keeps up to 64 MiB at the end of each thread's heap for good. To be called at the start.
pub fn return_what_is_free() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `mallopt` takes plain integers and is safe to call at any time.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPING_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, TRIM_BYTES);
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
    }
}

/// Returns whole free pages between live blocks to the kernel. Worthwhile after symbolizing large debug information (up to
/// hundreds of MiB of working memory), examining many files, or a burst of processes.
pub fn give_memory_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` takes a plain integer and never touches live blocks.
    unsafe {
        libc::malloc_trim(0);
    }
}
