//! Frees are given up and taken up again, while allocations stay hooked without a gap.

use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::os::fd::AsRawFd;

use heapbpf_audit::LinkKind;

use super::super::audit::file_audit;
use super::super::files::{ExaminedFiles, FileKey};
use super::super::linker::{Linker, ProbeLinks};
use super::{Arc, HookedFile, Hooks, Served, Wanted, link};
use crate::clock::monotonic_ns;
use crate::kernel::KernelError;
use crate::kernel::programs::Role;

impl<L: ProbeLinks> Hooks<L> {
    /// Stops tracking frees in all files. Allocations stay hooked without a gap.
    pub fn stop_tracking_frees(&mut self, link: LinkKind) {
        self.frees.give_up_all();
        self.links.values_mut().for_each(L::stop_tracking_frees);
        for (key, hooked) in &mut self.hooked {
            hooked.audit_again(*key, &self.files, link, false);
        }
    }

    /// Stops tracking the frees of some processes. Their allocations, and the frees of others, stay hooked without a gap.
    pub fn stop_tracking_frees_of(&mut self, served: Served, link: LinkKind) {
        self.frees.give_up(served);
        let links = self.links.iter_mut().filter(|((key, pid), _)| Served::of(*key, *pid) == served);
        links.for_each(|(_, links)| links.stop_tracking_frees());
        if let Served::File(key) = served
            && let Some(hooked) = self.hooked.get_mut(&key)
        {
            hooked.audit_again(key, &self.files, link, false);
        }
    }

    /// Tracks frees again that had been given up, but those of `except`. When this returns, every later free is seen.
    /// Frees that the kernel accepts no probes on stay given up.
    pub fn track_frees_again<K: Linker<Links = L>>(&mut self, except: &[Served], linker: &K) {
        let all = self.frees.lacks_all();
        let had_given_up = self.frees.take_up(except);
        let Self { links, hooked, files, only, mappings, .. } = self;
        let wanted = Wanted { only: *only, frees: true, calls_out: mappings.is_some(), link: linker.kind() };
        let (mut again, mut refused) = (HashSet::new(), HashSet::new());
        for ((key, pid), links) in links.iter_mut() {
            let served = Served::of(*key, *pid);
            if !had_given_up(served) {
                continue;
            }
            match link_frees(files, hooked, &wanted, (*key, *pid), linker) {
                Ok(made) => {
                    made.into_iter().for_each(|made| links.add_frees(made));
                    again.insert(served);
                }
                Err(error) => {
                    log::warn!("frees of {} cannot be followed again: {error}", files.path(*key).unwrap_or("a file"));
                    refused.insert(served);
                }
            }
        }
        for served in &refused {
            self.stop_tracking_frees_of(*served, linker.kind());
        }
        self.frees.tracked_again(again.difference(&refused).copied(), all, monotonic_ns());
        for (key, hooked) in &mut self.hooked {
            let tracked = self.frees.includes(Served::File(*key));
            hooked.audit_again(*key, &self.files, linker.kind(), tracked);
        }
    }

    /// Whether frees are tracked for some processes and not for others.
    pub fn tracks_some_frees(&self) -> bool {
        self.frees.are_tracked() && self.frees.lacks_any()
    }

    /// Whether tracking of frees was given up, for some processes or for all.
    pub fn gave_up_frees(&self) -> bool {
        self.frees.lacks_any()
    }

    /// Whether tracking of any frees was given up and taken up again.
    pub fn tracked_frees_again(&self) -> bool {
        self.frees.was_taken_up()
    }

    /// Whether tracking of all frees was given up.
    pub fn gave_up_all_frees(&self) -> bool {
        self.frees.lacks_all()
    }

    /// Whether tracking of these processes' frees was stopped.
    pub fn stopped_tracking_frees_of(&self, served: Served) -> bool {
        self.frees.gave_up(served)
    }

    /// When tracking of these processes' frees was last taken up again (CLOCK_MONOTONIC); `None` if it never was.
    pub fn frees_tracked_since(&self, served: Served) -> Option<u64> {
        self.frees.since(served)
    }
}

/// Links the freeing functions of a file; `None` if it has none.
fn link_frees<K: Linker>(
    files: &ExaminedFiles,
    hooked: &HashMap<FileKey, HookedFile>,
    wanted: &Wanted,
    (key, pid): (FileKey, Option<u32>),
    linker: &K,
) -> Result<Option<K::Links>, KernelError> {
    let (Some(examined), Some(hooked)) = (files.get(key), hooked.get(&key)) else { return Ok(None) };
    let (Ok(plan), Some(file)) = (&examined.plan, &examined.file) else { return Ok(None) };
    let mut points = wanted.points(plan, hooked);
    points.retain(|point| point.role == Role::Frees);
    if points.is_empty() {
        return Ok(None);
    }
    let by_descriptor = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default();
    link(linker, &by_descriptor, &points, pid).map(|(links, _)| Some(links))
}

impl HookedFile {
    /// Makes the audit anew, if there is one, with or without freeing functions.
    fn audit_again(&mut self, key: FileKey, files: &ExaminedFiles, link: LinkKind, frees: bool) {
        if self.audit.is_some()
            && let (Some(path), Some(plan)) = (files.path(key), files.plan(key))
        {
            self.audit = Some(Arc::new(file_audit(path, plan, link, frees, &self.refused)));
        }
    }
}
