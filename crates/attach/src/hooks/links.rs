//! The links to one file: which of its instructions get probes, and how the kernel is asked for them.

use std::collections::HashSet;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use heapbpf_audit::LinkKind;
use heapbpf_kernel::programs::{ProbePoint, Role};
use heapbpf_kernel::{KernelError, is_of_an_instruction};
use heapbpf_probes::{AllocatorFile, EndSeen, PlannedSite};
use sampler_ebpf::abi::{SITE_CALLS_OUT, SITE_RETURN_SITES_PROBED, Site};

use super::HookedFile;
use crate::content::Content;
use crate::linker::{LinkResult, Linker};

/// The links to make to a file.
pub(super) struct Job {
    pub(super) file: Arc<File>,
    /// Its state when it was examined.
    pub(super) content: Option<Content>,
    pub(super) points: Vec<ProbePoint>,
    pub(super) pid: Option<u32>,
}

impl Job {
    pub(super) fn make<K: Linker>(&self, linker: &K) -> LinkResult<K::Links> {
        // This may have waited for other links.
        if Content::was_written(self.content, &self.file) {
            return Err(KernelError::Object("the file was overwritten".to_owned()));
        }
        // Opening by descriptor reaches exactly this file, whatever has become of its path.
        let by_descriptor = CString::new(format!("/proc/self/fd/{}", self.file.as_raw_fd())).unwrap_or_default();
        link(linker, &by_descriptor, &self.points, self.pid)
    }
}

/// What part of a plan is linked.
pub(super) struct LinkedPart {
    /// The functions. `None` means all.
    pub(super) only: Option<&'static [&'static str]>,
    /// Whether freeing functions are linked.
    pub(super) frees: bool,
    /// Whether allocator calls are tracked while in flight, because mapping system calls are probed.
    pub(super) calls_out: bool,
    /// Kind of the links.
    pub(super) link: LinkKind,
}

impl LinkedPart {
    fn is_met_by(&self, planned: &PlannedSite) -> bool {
        self.only.is_none_or(|only| only.contains(&planned.function.as_str())) && (self.frees || planned.return_needed)
    }

    fn end_seen(&self, planned: &PlannedSite) -> EndSeen {
        planned.end_seen(self.link == LinkKind::Session)
    }

    pub(super) fn site(&self, planned: &PlannedSite) -> Site {
        let calls_out = if self.calls_out && planned.return_needed { SITE_CALLS_OUT } else { 0 };
        let return_sites = if self.end_seen(planned) == EndSeen::AtReturnSites { SITE_RETURN_SITES_PROBED } else { 0 };
        Site { flags: planned.site.flags | calls_out | return_sites, ..planned.site }
    }

    /// The instructions to link, except those that the kernel has refused before.
    pub(super) fn points(&self, plan: &AllocatorFile, hooked: &HookedFile) -> Vec<ProbePoint> {
        // Several functions may end in the same code.
        let mut return_sites = HashSet::new();
        (hooked.first_site..)
            .zip(&plan.sites)
            .filter(|(_, planned)| self.is_met_by(planned))
            .flat_map(|(index, planned)| self.points_of(planned, index))
            .filter(|point| !hooked.refused.contains_key(&point.offset))
            .filter(|point| point.role != Role::ReturnSite || return_sites.insert(point.offset))
            .collect()
    }

    /// The instructions that get the probes of a site.
    fn points_of(&self, planned: &PlannedSite, index: u32) -> Vec<ProbePoint> {
        let end = self.end_seen(planned);
        if let Some(semaphore) = planned.announces {
            let of = |role| ProbePoint { offset: planned.site.offset, cookie: planned.site.cookie(index).0, role };
            let allocates = planned.return_needed;
            return vec![of(if allocates { Role::Announces { semaphore } } else { Role::AnnouncesFree { semaphore } })];
        }
        let role = match end {
            _ if !planned.return_needed => Role::Frees,
            EndSeen::Returning => Role::Allocates,
            EndSeen::AtReturnSites | EndSeen::Never => Role::AllocatesWithoutReturn,
            EndSeen::Unhookable => return Vec::new(),
        };
        let entry = ProbePoint { offset: planned.site.offset, cookie: self.site(planned).cookie(index).0, role };
        let return_sites = planned.return_sites.iter().filter(|_| end == EndSeen::AtReturnSites);
        let return_sites = return_sites.map(|site| ProbePoint {
            offset: site.offset,
            cookie: site.result.cookie(index).0,
            role: Role::ReturnSite,
        });
        std::iter::once(entry).chain(return_sites).collect()
    }
}

/// Makes the links to a file: all points at once or, if the kernel refuses a probe on some instruction, each
/// separately. Returns the refused points with the kernel's error. [`KernelError::Conflict`] means that another tracer
/// has patched the file.
fn link<K: Linker>(linker: &K, path: &CString, points: &[ProbePoint], pid: Option<u32>) -> LinkResult<K::Links> {
    match linker.link(path, points, pid) {
        Ok(links) => Ok((links, Vec::new())),
        Err(KernelError::Link { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
            Err(KernelError::Conflict)
        }
        Err(KernelError::Link { source, what }) if is_of_an_instruction(&source) => {
            let (links, refused) = linker.link_each(path, points, pid)?;
            if refused.len() == points.len() { Err(KernelError::Link { source, what }) } else { Ok((links, refused)) }
        }
        Err(error) => Err(error),
    }
}
