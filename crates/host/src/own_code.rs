//! Maps the code of our own C library from a copy instead of its file.
//!
//! Probes of a whole host are on the C library's file, so each of our own allocations would trap as well, only to be
//! recognised as not a target's. That takes a quarter of the daemon's time. Pages that do not belong to the file have
//! no probes (`crates/inline` relies on that, too).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use procfs::process::{MMPermissions, MMapPath, Process};
use rustix::fs::{MemfdFlags, memfd_create};

/// Maximum number of bytes to copy. A C library has two million; a statically linked program perhaps a hundred million.
const MOST_BYTES: u64 = 8 << 20;

/// Maps a copy of the code that contains `malloc` over the original. Must be called before there are probes. Threads
/// that are running in this code find the same instructions at every moment.
///
/// # Errors
/// The code does not belong to a file of moderate size that still exists, or the kernel refuses. Nothing is changed
/// then.
pub fn leave_the_file() -> io::Result<()> {
    let unfit = |why: &str| io::Error::other(why.to_owned());
    let malloc = libc::malloc as *const () as u64;
    let maps = Process::myself().and_then(|process| process.maps()).map_err(io::Error::other)?;
    let found = maps.into_iter().find(|map| (map.address.0..map.address.1).contains(&malloc));
    let map = found.ok_or_else(|| unfit("malloc is in no mapping"))?;
    let MMapPath::Path(path) = &map.pathname else { return Err(unfit("malloc is in no file")) };
    let (start, bytes) = (map.address.0, map.address.1 - map.address.0);
    let wanted = MMPermissions::READ | MMPermissions::EXECUTE | MMPermissions::PRIVATE;
    if map.perms != wanted || bytes > MOST_BYTES {
        return Err(unfit("its mapping is not as that of a library's code"));
    }
    // From the file, not from memory: another tool's breakpoints may already be in memory.
    let file = File::open(path)?;
    if file.metadata()?.ino() != map.inode {
        return Err(unfit("the file has been replaced"));
    }
    let mut code = vec![0; usize::try_from(bytes).map_err(io::Error::other)?];
    file.read_exact_at(&mut code, map.offset)?;
    let copy = File::from(memfd_create(c"heapbpf-libc", MemfdFlags::CLOEXEC)?);
    copy.write_all_at(&code, 0)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
    let access = libc::PROT_READ | libc::PROT_EXEC;
    // SAFETY: the range is one mapping of ours, and gets the same bytes and access as before. The kernel replaces it in
    // one step.
    let mapped = unsafe { libc::mmap(start as *mut _, code.len(), access, flags, copy.as_raw_fd(), 0) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_runs_on_in_its_copy() {
        let name = "own_code::tests::in_a_process_of_its_own";
        let test = std::env::current_exe().unwrap();
        let output = std::process::Command::new(test).args(["--exact", name, "--ignored"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    #[test]
    #[ignore = "it changes its process, so another test runs it in one of its own"]
    fn in_a_process_of_its_own() {
        leave_the_file().expect("a test has a C library of its own");
        let malloc = libc::malloc as *const () as u64;
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps.lines().find(|line| {
            let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            (u64::from_str_radix(start, 16).unwrap()..u64::from_str_radix(end, 16).unwrap()).contains(&malloc)
        });
        assert!(line.is_some_and(|line| line.contains(" r-xp ") && line.contains("/memfd:heapbpf-libc")), "{line:?}");
        let blocks: Vec<Vec<u8>> = (1..1000).map(|bytes| vec![7; bytes]).collect();
        assert!(std::thread::spawn(move || blocks.concat().iter().all(|byte| *byte == 7)).join().unwrap());
        assert!(leave_the_file().is_err(), "it is no file's any more");
    }
}
