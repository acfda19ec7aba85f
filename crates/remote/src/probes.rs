//! Probes of the kernel (uprobes) in pages that are put back.
//!
//! Whoever makes or removes a probe has the kernel list the places where its file is mapped, and then go through that list. A page
//! that is moved in between is missed (seen on Linux 6.18): the breakpoint of a probe that is gone stays in it, and ends
//! the process at the next call, by a SIGTRAP of which the log seldom tells. So pages that have breakpoints are put back empty. What the
//! process then reads anew is the file's. The kernel puts the breakpoints of probes that are still there into it as it does into
//! any new mapping: when one is taken apart (`uprobe_mmap` in `vma_complete`).

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use crate::failure::Failure;
use crate::maps::PAGE_BYTES;
use crate::plan::Kept;
use crate::remote::Remote;
use crate::same_code::is_same_code;

/// Pages at their spare place, before they are put back.
pub(crate) struct Spare {
    kept: Kept,
    /// What the file has there, if the pages are to be renewed.
    code: Option<Vec<u8>>,
}

impl Spare {
    /// Looks at pages, and has the process drop them if they have breakpoints. Before they move: should the process be late with any
    /// call from here on, none of these comes back. Pages that hold other code than the file's stay as they are.
    pub(crate) fn empty(remote: &mut Remote, kept: Kept) -> Result<Self, Failure> {
        let Kept { spare, bytes, .. } = kept;
        let found = Self::found(remote, kept);
        let has_breakpoints = found.code.as_ref().is_some_and(|code| has_breakpoints(remote, spare, code));
        let is_emptied = has_breakpoints && advise(remote, spare, bytes, libc::MADV_DONTNEED)?;
        Ok(Self { code: found.code.filter(|_| is_emptied), ..found })
    }

    /// Pages that somebody put back who may have been late with any call since, or have died: they are to be renewed once more.
    pub(crate) fn found(remote: &Remote, kept: Kept) -> Self {
        let Kept { spare, bytes, offset, .. } = kept;
        let path = format!("/proc/{}/map_files/{spare:x}-{:x}", remote.pid(), spare + bytes);
        let mut code = vec![0; bytes as usize];
        // A mapping of one page cannot be taken apart.
        let is_read =
            bytes > PAGE_BYTES && File::open(path).and_then(|file| file.read_exact_at(&mut code, offset)).is_ok();
        Self { kept, code: is_read.then_some(code) }
    }

    /// Makes the pages, which are back, have the breakpoints of those probes that are there. No thread may run in them meanwhile.
    pub(crate) fn renew(self, remote: &mut Remote) -> Result<(), Failure> {
        let (Some(code), Kept { start, bytes, .. }) = (self.code, self.kept) else { return Ok(()) };
        // A probe that was made after the pages were dropped may already be gone.
        if has_breakpoints(remote, start, &code) {
            advise(remote, start, bytes, libc::MADV_DONTNEED)?;
        }
        // What is advised for a part of a mapping takes it apart, and what is taken back joins it.
        advise(remote, start, PAGE_BYTES, libc::MADV_DONTDUMP)?;
        advise(remote, start, PAGE_BYTES, libc::MADV_DODUMP)?;
        Ok(())
    }
}

/// Whether memory differs from this code by breakpoints alone.
fn has_breakpoints(remote: &Remote, start: u64, code: &[u8]) -> bool {
    // A page that is not in memory is the file's.
    let mut memory = code.to_vec();
    remote.memory().read(start, &mut memory);
    memory != code && is_same_code(code, &memory)
}

/// Has the process make a madvise(2). Whether the kernel, and the process's filters, let it.
pub(crate) fn advise(remote: &mut Remote, start: u64, bytes: u64, advice: i32) -> Result<bool, Failure> {
    match remote.call("madvise", libc::SYS_madvise, [start, bytes, advice as u64, 0, 0, 0]) {
        Ok(_) => Ok(true),
        Err(Failure::Call(..) | Failure::Refused(_)) => Ok(false),
        Err(failure) => Err(failure),
    }
}
