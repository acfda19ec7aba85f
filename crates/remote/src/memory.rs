//! The memory that a process has while it runs one program.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;

use crate::maps::PAGE_BYTES;

/// An address that no program maps: above all user-space addresses of x86-64.
const NOWHERE: u64 = 0x7fff_ffff_ffff_f000;

/// Bits of an entry of `/proc/PID/pagemap` (`Documentation/admin-guide/mm/pagemap.rst`): the page is in memory; it is
/// swapped out; a write to it waits for the process that handles its faults (userfaultfd).
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const WRITE_PROTECTED: u64 = 1 << 57;

/// The memory of a process as of when this was opened. An exec gives the process new memory, perhaps with the same code
/// at the same addresses.
///
/// A page that is not in memory may be provided by a thread of the process itself (userfaultfd) or by a server (FUSE,
/// NFS), so such pages are neither read nor written while the process is stopped.
#[derive(Debug)]
pub(crate) struct Memory {
    content: File,
    /// The kernel's description of each page; reading it faults nothing in.
    pages: File,
}

impl Memory {
    /// Opens the memory of the program that the process runs now.
    pub(crate) fn open(pid: i32) -> io::Result<Self> {
        let open = |name| File::open(format!("/proc/{pid}/{name}"));
        Ok(Self { content: open("mem")?, pages: open("pagemap")? })
    }

    /// The same from descriptors that another process has opened.
    pub(crate) fn of(content: OwnedFd, pages: OwnedFd) -> Self {
        Self { content: content.into(), pages: pages.into() }
    }

    /// Its descriptors, as [`Memory::of`] takes them.
    pub(crate) fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.content.as_fd(), self.pages.as_fd()]
    }

    /// Reads a byte of each page, so that it is in memory. This may wait for its provider, so it is not called while
    /// the process is stopped.
    pub(crate) fn fetch(&self, range: &Range<u64>) {
        for page in pages(range) {
            let _ = self.content.read_at(&mut [0], page.max(range.start));
        }
    }

    /// Reads those pages that are in memory, and leaves the other bytes as they are. Returns whether all could be read.
    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        let range = address..address.saturating_add(bytes.len() as u64);
        let mut is_all = true;
        for (page, entry) in pages(&range).zip(self.entries(&range)) {
            let (start, end) = (page.max(range.start), page.saturating_add(PAGE_BYTES).min(range.end));
            let bytes = &mut bytes[(start - address) as usize..(end - address) as usize];
            is_all &= entry & PRESENT != 0 && self.content.read_exact_at(bytes, start).is_ok();
        }
        is_all
    }

    /// Whether the page of an address is swapped out.
    pub(crate) fn is_swapped(&self, address: u64) -> bool {
        self.entries(&(address..address + 1)).any(|entry| entry & SWAPPED != 0)
    }

    /// Whether a write to the range waits for no other process.
    pub(crate) fn may_write(&self, range: &Range<u64>) -> bool {
        self.entries(range).all(|entry| entry & (PRESENT | WRITE_PROTECTED) == PRESENT)
    }

    /// The kernel's entries for the pages of a range; 0 where it has none.
    fn entries(&self, range: &Range<u64>) -> impl Iterator<Item = u64> {
        let mut entries = vec![0; pages(range).count() * size_of::<u64>()];
        let mut done = 0;
        let at = range.start / PAGE_BYTES * size_of::<u64>() as u64;
        while let Ok(read @ 1..) = self.pages.read_at(&mut entries[done..], at + done as u64) {
            done += read;
        }
        let (entries, _) = entries.as_chunks();
        entries.iter().map(|entry| u64::from_le_bytes(*entry)).collect::<Vec<_>>().into_iter()
    }

    /// Whether the process still runs this program. A read returns 0 once the last thread has left the address space
    /// (`mem_rw`); otherwise it fails, because nothing is mapped at this address.
    pub(crate) fn is_there(&self) -> bool {
        !matches!(self.content.read_at(&mut [0], NOWHERE), Ok(0))
    }
}

/// Addresses of the pages of a range.
fn pages(range: &Range<u64>) -> impl Iterator<Item = u64> + use<> {
    (range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES)).map(|page| page * PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn what_is_not_in_memory_is_not_read() {
        const PAGE: usize = PAGE_BYTES as usize;
        // SAFETY: new pages, which nobody else knows.
        let start = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), 3 * PAGE, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        let address = start as u64;
        // SAFETY: the second of these pages.
        unsafe { start.cast::<u8>().add(PAGE + 8).write_volatile(7) };
        let memory = Memory::open(std::process::id().cast_signed()).expect("it is ours");
        let mut bytes = [1; 3 * PAGE];
        assert!(!memory.read(address, &mut bytes));
        assert_eq!((bytes[PAGE - 1], bytes[PAGE], bytes[PAGE + 8], bytes[2 * PAGE]), (1, 0, 7, 1), "the second alone");
        let second = address + PAGE_BYTES..address + 2 * PAGE_BYTES;
        assert!(memory.read(second.start + 8, &mut bytes[..16]) && bytes[0] == 7);
        assert!(memory.may_write(&second) && !memory.may_write(&(address..second.end)) && !memory.is_swapped(address));
        memory.fetch(&(address + 5..address + 3 * PAGE_BYTES));
        assert!(memory.read(address, &mut bytes) && bytes[2 * PAGE] == 0);
        // SAFETY: as above.
        unsafe { libc::munmap(start, 3 * PAGE) };
        assert!(!memory.read(address, &mut bytes) && !memory.may_write(&second));
    }

    #[test]
    fn after_an_exec_there_is_none() {
        assert!(Memory::open(std::process::id().cast_signed()).expect("it is ours").is_there());
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", "read line; exec cat"]).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut shell = shell.spawn().expect("there is a shell");
        let mut input = shell.stdin.take().expect("it is piped");
        let program = || std::fs::read_link(format!("/proc/{}/exe", shell.id())).expect("it runs");
        // The child is ours for a moment before it is the shell.
        let own = std::env::current_exe().expect("it runs");
        until(|| program() != own);
        let (memory, before) = (Memory::open(shell.id().cast_signed()).expect("it is ours"), program());
        assert!(memory.is_there());
        io::Write::write_all(&mut input, b"\n").expect("it reads");
        until(|| program() != before);
        assert!(!memory.is_there());
        drop(input);
        shell.wait().expect("it ends");
    }

    fn until(is_so: impl Fn() -> bool) {
        let since = Instant::now();
        while !is_so() {
            assert!(since.elapsed() < Duration::from_secs(60), "it did not happen");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
