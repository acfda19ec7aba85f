//! The programs for the sites of inline hooks, and their links to the code that is mapped into a target.

use std::ffi::CString;
use std::os::fd::{AsFd as _, OwnedFd};

use heapbpf_audit::LinkKind;

use super::loader::{Loader, ProgramKind};
use super::{KernelError, sys};

/// The programs, in the order of `heapbpf_inline::site_offsets`, and whether each is about frees.
const PROGRAMS: [(&str, bool); 4] =
    [("inline_result", false), ("inline_freeing", true), ("inline_reallocating", true), ("inline_unseen", false)];

/// The loaded programs.
pub struct InlinePrograms {
    kind: LinkKind,
    programs: Vec<Option<OwnedFd>>,
}

/// Links to one target's code. Dropping them removes the probes.
#[derive(Debug)]
pub struct InlineLinks {
    _links: Vec<OwnedFd>,
}

impl InlinePrograms {
    /// Loads the programs; those about frees only if they are tracked.
    ///
    /// # Errors
    /// The kernel refuses a program.
    pub fn load(loader: &Loader, kind: LinkKind, live: bool) -> Result<Self, KernelError> {
        let program_kind = if kind == LinkKind::Perf { ProgramKind::UprobePerf } else { ProgramKind::UprobeMulti };
        let load =
            |(name, frees): (&str, bool)| (live || !frees).then(|| loader.program(name, program_kind)).transpose();
        Ok(Self { kind, programs: PROGRAMS.map(load).into_iter().collect::<Result<_, _>>()? })
    }

    /// Links the sites at these offsets of a file, for every process that maps it: the target, and children of it.
    ///
    /// # Errors
    /// The kernel refuses; then nothing is linked.
    pub fn link(&self, path: &CString, offsets: &[u64; 4]) -> Result<InlineLinks, KernelError> {
        let refused = |source| KernelError::Link { what: path.to_string_lossy().into_owned(), source };
        let mut links = Vec::new();
        // Sites of frees before those of allocations.
        for at in [1, 2, 3, 0] {
            let Some(program) = &self.programs[at] else { continue };
            if self.kind == LinkKind::Perf {
                let (link, event) =
                    sys::link_uprobe_perf(program.as_fd(), path, offsets[at], 0, None, false).map_err(refused)?;
                links.extend([link, event]);
            } else {
                let target = sys::UprobeTarget { path, offsets: &offsets[at..=at], cookies: &[0], pid: None };
                let link = sys::link_uprobe_multi(program.as_fd(), sys::ATTACH_UPROBE_MULTI, &target, 0);
                links.push(link.map_err(refused)?);
            }
        }
        Ok(InlineLinks { _links: links })
    }
}
