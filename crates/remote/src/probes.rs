//! Kernel probes (uprobes) in pages that are put back.
//!
//! When a probe is added or removed, the kernel lists the mappings of its file and then walks that list. It misses a
//! page that moves in between (seen on Linux 6.18): the breakpoint of a removed probe stays in the page and kills the
//! process at the next call, by a SIGTRAP that is rarely logged. So pages that contain breakpoints are put back empty,
//! and the process reads the file's content anew. The kernel inserts the breakpoints of probes that still exist as in
//! any new mapping: when a mapping is split (`uprobe_mmap` in `vma_complete`).

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use crate::error::Failure;
use crate::maps::PAGE_BYTES;
use crate::plan::Kept;
use crate::remote::Remote;
use crate::same_code::is_same_code;

/// Pages at their spare place, before they are put back.
pub(crate) struct Spare {
    kept: Kept,
    /// The file's content there, if the pages are to be renewed.
    code: Option<Vec<u8>>,
}

impl Spare {
    /// Checks the pages for breakpoints, and has the process drop their content if there are any. This comes before the
    /// pages move, so no old breakpoint comes back even if the process makes a later call too late. Pages that hold
    /// other code than the file's stay as they are.
    pub(crate) fn empty(remote: &mut Remote, kept: Kept) -> Result<Self, Failure> {
        let Kept { spare, bytes, .. } = kept;
        let found = Self::found(remote, kept);
        let has_breakpoints = found.code.as_ref().is_some_and(|code| has_breakpoints(remote, spare, code));
        let is_emptied = has_breakpoints && advise(remote, spare, bytes, libc::MADV_DONTNEED)?;
        Ok(Self { code: found.code.filter(|_| is_emptied), ..found })
    }

    /// Pages that an earlier injector put back. It may have died, or have made one of its calls late, so they have to
    /// be renewed once more.
    pub(crate) fn found(remote: &Remote, kept: Kept) -> Self {
        let Kept { spare, bytes, offset, .. } = kept;
        let path = format!("/proc/{}/map_files/{spare:x}-{:x}", remote.pid(), spare + bytes);
        let mut code = vec![0; bytes as usize];
        // A mapping of one page cannot be split.
        let is_read =
            bytes > PAGE_BYTES && File::open(path).and_then(|file| file.read_exact_at(&mut code, offset)).is_ok();
        Self { kept, code: is_read.then_some(code) }
    }

    /// Gives the pages, which are back in place, the breakpoints of the probes that exist now. No thread may run in
    /// them during that.
    pub(crate) fn renew(self, remote: &mut Remote) -> Result<(), Failure> {
        let (Some(code), Kept { start, bytes, .. }) = (self.code, self.kept) else { return Ok(()) };
        // A probe that was added after the pages were dropped may be removed again by now.
        if has_breakpoints(remote, start, &code) {
            advise(remote, start, bytes, libc::MADV_DONTNEED)?;
        }
        // Advice for a part of a mapping splits it; undoing the advice merges the parts.
        advise(remote, start, PAGE_BYTES, libc::MADV_DONTDUMP)?;
        advise(remote, start, PAGE_BYTES, libc::MADV_DODUMP)?;
        Ok(())
    }
}

/// Whether memory differs from this code only by breakpoints.
fn has_breakpoints(remote: &Remote, start: u64, code: &[u8]) -> bool {
    // A page that is not in memory has the file's content.
    let mut memory = code.to_vec();
    remote.memory().read(start, &mut memory);
    memory != code && is_same_code(code, &memory)
}

/// Has the process call madvise(2). Returns whether the kernel and the process's filters allowed it.
pub(crate) fn advise(remote: &mut Remote, start: u64, bytes: u64, advice: i32) -> Result<bool, Failure> {
    match remote.call("madvise", libc::SYS_madvise, [start, bytes, advice as u64, 0, 0, 0]) {
        Ok(_) => Ok(true),
        Err(Failure::Call(..) | Failure::Refused(_)) => Ok(false),
        Err(failure) => Err(failure),
    }
}
