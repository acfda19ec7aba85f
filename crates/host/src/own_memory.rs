//! Manages the daemon's own memory. The daemon may run for weeks, and must shrink again after a burst of short-lived
//! processes.

use procfs::process::{MMPermissions, MMapPath, MemoryMap, Process};

/// `M_TRIM_THRESHOLD`: the number of free bytes at the end of a heap from which on they are returned to the kernel.
const TRIM_BYTES: libc::c_int = 4 << 20;

/// `M_MMAP_THRESHOLD`: blocks of at least this many bytes get mappings of their own, so that a large table that grows
/// leaves no holes between small blocks.
const MAPPING_BYTES: libc::c_int = 2 << 20;

/// `M_ARENA_MAX`: one arena for the event path, which is the main thread, and one for all other threads. Memory that a
/// scrape or the analysis of a file has freed can then be reused by the next one, whichever thread it runs in.
const ARENAS: libc::c_int = 2;

/// Makes glibc return freed memory to the kernel. By default glibc raises its thresholds to fit the largest block ever
/// freed, and then keeps up to 64 MiB at the end of each thread's heap forever. Must be called at the start.
pub fn return_what_is_free() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `mallopt` takes plain integers and is safe to call at any time.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPING_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, TRIM_BYTES);
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
    }
}

/// Returns memory that is not needed at the moment to the kernel: whole free pages between live blocks, and pages of
/// code. Worthwhile after symbolizing large debug information (up to hundreds of MiB of working memory), analysing many
/// files, or a burst of processes.
pub fn give_memory_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` takes a plain integer and never touches live blocks.
    unsafe {
        libc::malloc_trim(0);
    }
    give_code_back();
}

/// Gives back the pages of code and constants. Most of them were used once, to attach or to look up names. The kernel
/// keeps them cached. Those that are used again are mapped again, sixteen at a time.
fn give_code_back() {
    let mappings = Process::myself().and_then(|own| own.smaps());
    for mapping in mappings.iter().flatten().filter(|mapping| is_only_read(mapping)) {
        let (start, end) = mapping.address;
        // SAFETY: the pages hold unmodified file contents, because none was written to. They stay mapped, and reading
        // them again yields the same bytes.
        unsafe {
            libc::madvise(start as *mut libc::c_void, (end - start) as usize, libc::MADV_DONTNEED);
        }
    }
}

/// Whether a mapping belongs to a file, is not writable, and was never written to: its pages have no relocations and no
/// breakpoints.
fn is_only_read(mapping: &MemoryMap) -> bool {
    let sizes = &mapping.extension.map;
    matches!(mapping.pathname, MMapPath::Path(_))
        && !mapping.perms.intersects(MMPermissions::WRITE | MMPermissions::SHARED)
        && ["Anonymous", "Swap"].iter().all(|name| sizes.get(*name) == Some(&0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_bytes() -> u64 {
        let status = Process::myself().and_then(|own| own.status()).expect("our own state can be read");
        status.rssfile.expect("a figure") * 1024
    }

    /// Other tests run at the same time and use code, so only a large change counts.
    #[test]
    fn code_is_given_back_and_runs_on() {
        let before = file_bytes();
        give_memory_back();
        let after = file_bytes();
        assert!(after < before * 3 / 4, "{after} of {before} bytes are left");
        let sum: u64 = (0..1000).map(std::hint::black_box).sum();
        assert_eq!(sum, 499_500);
    }
}
