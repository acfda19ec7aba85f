//! Which files are hooked, for whom: links are made as processes need them.

mod files;
mod frees;

use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sampler_ebpf::abi::{SITE_CALLS_OUT, Site};

pub use self::files::FileKey;
use self::files::Known;
pub use self::frees::Served;
use super::audit::{FileAudit, LinkKind};
use super::{AttachError, KernelRules, PlannedSite, Table};
use crate::host::events::monotonic_ns;
use crate::host::open::Beneath;
use crate::kernel::mappings::MappingProbes;
use crate::kernel::programs::{Links, ProbePoint, Programs, Role};
use crate::kernel::steering::Steering;
use crate::kernel::{KernelError, is_of_an_instruction};

/// Time before a file that another tool keeps us from is tried again.
const CONFLICT_REST: Duration = Duration::from_secs(1);

/// Most named processes that have links of their own to one file. On every hit of an instruction the kernel looks at each
/// link there, whichever process it is for (some 50 ns each), and a session that is for another process makes the call trap
/// on its return. With so many, a named process pays as much for the links of the others as for its own, and so more than
/// one that is not named would for a link that serves all: from there on one does, and the programs tell who is a target.
const MOST_OWN_LINKS: usize = 8;

/// Why a file is not hooked.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// It cannot be read.
    #[error("cannot read {path}: {source}")]
    Unreadable {
        /// Its path, as the process sees it.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// Nothing in it to hook, or not hookable.
    #[error("{path}: {source}")]
    Unfit {
        /// Its path.
        path: String,
        /// Why.
        source: Arc<AttachError>,
    },
    /// The kernel refuses.
    #[error("{path}: {source}")]
    Kernel {
        /// Its path.
        path: String,
        /// Why.
        source: KernelError,
    },
}

impl HookError {
    /// The process ended between the look and the link.
    pub fn is_too_late(&self) -> bool {
        matches!(self, Self::Kernel { source: KernelError::Link { source, .. }, .. }
            if source.raw_os_error() == Some(libc::ESRCH))
    }
}

/// What hooking a file came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hooked {
    /// Links were made now.
    Now,
    /// They were there.
    Already,
}

/// All hooked files and links. Dropping it takes every probe away.
pub struct Hooks {
    rules: KernelRules,
    table: Table,
    live: bool,
    /// Whose frees are not followed any more, while those of others are.
    without_frees: HashSet<Served>,
    known: HashMap<FileKey, Known>,
    links: HashMap<(FileKey, Option<u32>), Links>,
    /// Files whose links serve all named processes.
    shared: HashSet<FileKey>,
    /// Files that another tool keeps us from, and when that was seen last.
    conflicts: HashMap<FileKey, Instant>,
    /// What is to be linked when the pause ends; `None`: there is no pause.
    paused: Option<Vec<(FileKey, Option<u32>)>>,
    /// Row of the table for each site, by the site's index.
    functions: Vec<u16>,
    /// Mappings that programs make themselves, if those are wanted.
    mappings: Option<MappingProbes>,
    /// Files by what they are beneath overlay mounts, and whether they were seen through one: probes go to that inode.
    beneath: HashMap<Beneath, (FileKey, bool)>,
    /// Other keys of such files.
    others: HashMap<FileKey, FileKey>,
    /// The functions to hook, where not all are wanted.
    only: Option<&'static [&'static str]>,
}

impl Hooks {
    /// Nothing is hooked yet. `live`: frees are followed.
    pub fn new(rules: KernelRules, table: Table, live: bool) -> Self {
        Self {
            rules,
            table,
            live,
            without_frees: HashSet::new(),
            known: HashMap::new(),
            links: HashMap::new(),
            shared: HashSet::new(),
            conflicts: HashMap::new(),
            paused: None,
            functions: Vec::new(),
            mappings: None,
            beneath: HashMap::new(),
            others: HashMap::new(),
            only: None,
        }
    }

    /// From here on, these functions alone are hooked.
    #[must_use]
    pub fn only(mut self, functions: &'static [&'static str]) -> Self {
        self.only = Some(functions);
        self
    }

    /// From here on, calls of allocators are awaited, so that what they map for themselves is known as theirs.
    #[must_use]
    pub fn with_mappings(mut self, mappings: Option<MappingProbes>) -> Self {
        self.mappings = mappings;
        self
    }

    /// Follows mappings, if they are wanted: when the allocators are hooked.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn follow_mappings(&mut self) -> Result<(), KernelError> {
        self.mappings.as_mut().map_or(Ok(()), MappingProbes::link)
    }

    /// Whether mappings are wanted.
    pub const fn has_mappings(&self) -> bool {
        self.mappings.is_some()
    }

    /// So many named processes map a file that is not hooked yet: from some number on, they share its links.
    pub fn expect(&mut self, key: FileKey, processes: usize) {
        if processes > MOST_OWN_LINKS && !self.links.keys().any(|(linked, _)| *linked == key) {
            self.shared.insert(key);
        }
    }

    /// Hooks a file that was looked at, for one process or for all.
    ///
    /// # Errors
    /// Why not. What was hooked before stays so.
    pub fn hook(
        &mut self,
        key: FileKey,
        pid: Option<u32>,
        programs: &Programs,
        steering: &mut Steering,
    ) -> Result<Hooked, HookError> {
        let pid = pid.filter(|_| !self.shared.contains(&key));
        if self.links.contains_key(&(key, pid)) {
            return Ok(Hooked::Already);
        }
        if let Some(paused) = &mut self.paused {
            if !paused.contains(&(key, pid)) {
                paused.push((key, pid));
            }
            return Ok(Hooked::Already);
        }
        let Some(known) = self.known.get_mut(&key) else {
            return Ok(Hooked::Already);
        };
        let refused = |source| HookError::Kernel { path: known.path.clone(), source };
        let planned = match &mut known.plan {
            Ok(planned) => planned,
            Err(source) => return Err(HookError::Unfit { path: known.path.clone(), source: Arc::clone(source) }),
        };
        let awaited = if self.mappings.is_some() { SITE_CALLS_OUT } else { 0 };
        let site = |planned: &PlannedSite| {
            let flags = if planned.return_needed { awaited } else { 0 };
            Site { flags: planned.site.flags | flags, ..planned.site }
        };
        let first = match planned.first_site {
            Some(first) => first,
            None => {
                let sites: Vec<Site> = planned.allocator.sites.iter().map(site).collect();
                let first = steering.add_file(&planned.allocator.ranges, &sites).map_err(refused)?;
                self.functions.extend(sites.iter().map(|site| site.function));
                *planned.first_site.insert(first)
            }
        };
        let live = self.live && !self.without_frees.contains(&Served::of(key, pid));
        let wanted = |planned: &&PlannedSite| {
            self.only.is_none_or(|only| only.contains(&planned.function.as_str())) && (live || planned.return_needed)
        };
        let points: Vec<ProbePoint> = (first..)
            .zip(&planned.allocator.sites)
            .filter(|(_, planned)| wanted(planned))
            .flat_map(|(index, planned)| points_of(planned, site(planned).cookie(index).0))
            .filter(|point| !planned.refused.contains_key(&point.offset))
            .collect();
        // By descriptor: it names this very file, whatever became of its path.
        let path = CString::new(format!("/proc/self/fd/{}", known.file.as_raw_fd())).unwrap_or_default();
        // Each try of a file that another tool keeps from us takes a moment, in which nothing else is done.
        if self.conflicts.get(&key).is_some_and(|since| since.elapsed() < CONFLICT_REST) {
            return Err(refused(KernelError::Conflict));
        }
        let links = match programs.attach(&path, &points, pid) {
            Ok(links) => links,
            Err(KernelError::Link { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
                self.conflicts.insert(key, Instant::now());
                return Err(refused(KernelError::Conflict));
            }
            Err(KernelError::Link { source, what }) if is_of_an_instruction(&source) => {
                let (links, others) = programs.attach_each(&path, &points, pid).map_err(refused)?;
                if others.len() == points.len() {
                    return Err(refused(KernelError::Link { source, what }));
                }
                planned.refused.extend(others);
                links
            }
            Err(error) => return Err(refused(error)),
        };
        self.links.insert((key, pid), links);
        planned.since_ns.get_or_insert_with(monotonic_ns);
        if planned.audit.is_none() {
            let audit = planned.audit(&known.path, programs.kind, live);
            planned.audit = Some(Arc::new(audit));
        }
        Ok(Hooked::Now)
    }

    /// Takes away the probes of one process (it has ended); those that it shares with others stay.
    pub fn release(&mut self, pid: u32) {
        self.links.retain(|(_, owner), _| *owner != Some(pid));
        self.without_frees.remove(&Served::Process(pid));
        if let Some(paused) = &mut self.paused {
            paused.retain(|(_, owner)| *owner != Some(pid));
        }
    }

    /// Takes away all probes for a while; what is hooked meanwhile waits for [`resume`](Self::resume).
    pub fn pause(&mut self) {
        self.mappings.iter_mut().for_each(MappingProbes::unlink);
        let links = std::mem::take(&mut self.links);
        self.paused.get_or_insert_default().extend(links.keys().copied());
    }

    /// Puts the probes back. What cannot be linked any more (its process ended) is left.
    pub fn resume(&mut self, programs: &Programs, steering: &mut Steering) {
        for (key, pid) in self.paused.take().unwrap_or_default() {
            if let Err(error) = self.hook(key, pid, programs, steering) {
                log::info!("{error}");
            }
        }
        if let Err(error) = self.follow_mappings() {
            log::warn!("{error}");
        }
    }

    /// Kinds of the probed instructions, of the functions that allocate (`frees`: that free) in hooked files.
    pub fn kinds(&self, frees: bool) -> impl Iterator<Item = super::Kind> + '_ {
        let planned = self.known.values().filter_map(|known| known.plan.as_ref().ok());
        planned
            .filter(|planned| planned.first_site.is_some())
            .flat_map(|planned| &planned.allocator.sites)
            .filter(move |site| site.return_needed != frees)
            .map(|site| site.kind)
    }

    /// Takes away all probes.
    pub fn release_all(&mut self) {
        self.mappings.iter_mut().for_each(MappingProbes::unlink);
        self.links.clear();
    }

    /// Number of files with links.
    pub fn hooked_files(&self) -> usize {
        self.known
            .values()
            .filter(|known| known.plan.as_ref().is_ok_and(|planned| planned.first_site.is_some()))
            .count()
    }

    /// CLOCK_MONOTONIC when a file was first hooked, for whichever process.
    pub fn hooked_since(&self, key: FileKey) -> Option<u64> {
        self.known.get(&key)?.plan.as_ref().ok()?.since_ns
    }

    /// What was hooked in a file, and what was not.
    pub fn audited(&self, key: FileKey) -> Option<&Arc<FileAudit>> {
        self.known.get(&key)?.plan.as_ref().ok()?.audit.as_ref()
    }

    /// Whether a file for which `wanted` holds (by its path) was looked at.
    pub fn has_seen(&self, wanted: impl Fn(&str) -> bool) -> bool {
        self.known.values().any(|known| wanted(&known.path))
    }

    /// Names of the allocators that are looked for.
    pub fn looked_for(&self) -> String {
        self.table.names()
    }

    /// Row of the table for each site, by the site's index.
    pub fn functions(&self) -> &[u16] {
        &self.functions
    }

    /// Name of a function by its row.
    pub fn function_name(&self, function: u16) -> &str {
        self.table.function_name(function).unwrap_or("?")
    }

    /// What was hooked where, for `--stats`.
    pub fn audit(&self) -> Vec<Arc<FileAudit>> {
        let planned = self.known.values().filter_map(|known| known.plan.as_ref().ok());
        let mut audits: Vec<Arc<FileAudit>> = planned.filter_map(|planned| planned.audit.clone()).collect();
        audits.sort_by(|a, b| a.file.cmp(&b.file));
        audits
    }

    /// What is, or would be, hooked in a file that was looked at.
    pub fn audit_of(&self, key: FileKey, link: LinkKind) -> Option<FileAudit> {
        let known = self.known.get(&key)?;
        known.plan.as_ref().ok().map(|planned| planned.audit(&known.path, link, self.live))
    }
}

/// The instructions that a site's probes are on.
fn points_of(planned: &PlannedSite, cookie: u64) -> impl Iterator<Item = ProbePoint> + '_ {
    let role = match (planned.return_needed, planned.ends.is_empty()) {
        (false, _) => Role::Frees,
        (true, true) => Role::Allocates,
        (true, false) => Role::AllocatesOrThrows,
    };
    let point = move |offset, role| ProbePoint { offset, cookie, role };
    let ends = planned.ends.iter().map(move |offset| point(*offset, Role::Ends));
    std::iter::once(point(planned.site.offset, role)).chain(ends)
}
