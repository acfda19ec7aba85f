//! Decides which examined files are hooked, for which processes, and with which links. Links are made when processes
//! need them.

mod links;

use std::collections::HashSet;
use std::collections::btree_map::BTreeMap;
use std::collections::hash_map::{Entry, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use heapbpf_audit::{FileAudit, LinkKind, ProbeKind};
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::side_by_side::Aside;
use heapbpf_kernel::KernelError;
use heapbpf_kernel::mappings::MappingProbes;
use heapbpf_kernel::programs::Links;
use heapbpf_probes::{AttachError, KernelRules, PlannedSite, ReturnProbe, Table};
use sampler_ebpf::abi::{FileRanges, Site};

use self::links::{Job, LinkedPart};
use super::audit::file_audit;
use super::content::Watch;
use super::files::{ExaminedFile, ExaminedFiles, FileKey};
use super::linker::{LinkResult, Linker, ProbeLinks, SiteTable};

/// Maximum number of named processes with links of their own to one file. On every hit of an instruction the kernel
/// checks each link there, whichever process it is for (about 50 ns each), and a session link for another process makes
/// the call trap on its return. With more processes than this, a named process pays as much for the others' links as
/// for its own, and more than an unnamed one would pay for a single link that serves all processes. Beyond this number
/// one link serves all processes, and the BPF programs check who is a target.
pub const MOST_OWN_LINKS: usize = 8;

/// Time before a file that another tracer has already patched is tried again. Each attempt blocks for some 40 ms.
const CONFLICT_RETRY: Duration = Duration::from_secs(1);

/// Time for which links stay that serve every process, while no process has mapped the file. They keep its file system
/// in use; but programs come back, and would not be counted at first.
const KEPT_UNMAPPED: Duration = Duration::from_secs(60);

/// Why a file is not hooked.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// It has nothing to hook, or cannot be hooked.
    #[error("{path}: {source}")]
    Unfit {
        /// Its path.
        path: String,
        /// Why.
        source: Arc<AttachError>,
    },
    /// The kernel refused.
    #[error("{path}: {source}")]
    Kernel {
        /// Its path.
        path: String,
        /// Why.
        source: KernelError,
    },
    /// The file has changed since it was examined.
    #[error("{0}: it was overwritten while it was examined")]
    Overwritten(String),
    /// See [`Hooks::must_be_shared`].
    #[error(
        "{0}: a function may call code that switches to another stack before it returns, and its return \
         instructions cannot be found: this needs probes that serve every process (--comm or --all with --hook \
         probe)"
    )]
    MustBeShared(String),
    /// See [`Hooks::hook_aside`].
    #[error("{0}: its probes are being made")]
    UnderWay(String),
}

impl HookError {
    /// Whether the process exited before its links were made.
    pub fn is_too_late(&self) -> bool {
        matches!(self, Self::Kernel { source: KernelError::Link { source, .. }, .. }
            if source.raw_os_error() == Some(libc::ESRCH))
    }
}

/// Result of hooking a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hooked {
    /// Links were made.
    Now,
    /// There was nothing to do.
    Already,
}

/// A file whose sites are in the kernel's table.
struct HookedFile {
    /// Index of its first site in that table.
    first_site: u32,
    /// CLOCK_MONOTONIC when it was first linked for all processes.
    shared_since_ns: Option<u64>,
    /// The audit from when it was first linked, or from when tracking of its frees stopped.
    audit: Option<Arc<FileAudit>>,
    /// Instructions (file offsets) where the kernel refuses a probe, with its error.
    refused: BTreeMap<u64, String>,
}

/// A file, and the process that links to it are for; `None` means all processes.
type Served = (FileKey, Option<u32>);

/// All hooked files and their links. Dropping it removes every probe.
pub struct Hooks<L = Links> {
    /// The examined files.
    pub files: ExaminedFiles,
    hooked: HashMap<FileKey, HookedFile>,
    /// The audits of files that were hooked inline in a process.
    pub inline: HashMap<FileKey, Arc<FileAudit>>,
    links: HashMap<Served, L>,
    /// Makes links while the recording goes on.
    making: Aside<Served, LinkResult<L>>,
    /// Links that were asked for: `None` as long as `making` makes them, then the outcome until somebody fetches it.
    asked: HashMap<Served, Option<Result<(), HookError>>>,
    /// See [`take_loose`](Self::take_loose).
    loose: Vec<L>,
    /// Files with links for all processes that no process has mapped, and since when.
    unmapped: HashMap<FileKey, Instant>,
    /// Watches the files with links for writes.
    watch: Watch,
    /// Files that another tracer has already patched, with the time when that was last observed.
    conflicts: HashMap<FileKey, Instant>,
    /// Row of the allocator table for each site, by the site's index.
    pub functions: Vec<u16>,
    /// Probes on the system calls that map memory, if requested. They are linked after the allocators are hooked. With
    /// them, allocator calls are tracked while they are in flight, so that mappings an allocator makes for itself are
    /// attributed to it.
    pub mappings: Option<MappingProbes>,
    /// Whether frees are tracked.
    frees: bool,
    /// Whether frees were tracked and the tracking was stopped.
    pub gave_up_frees: bool,
    /// The functions to hook. `None` means all.
    pub only: Option<&'static [&'static str]>,
}

impl<L: ProbeLinks + Send + 'static> Hooks<L> {
    /// Creates the state without any hooks. `live` says whether frees are tracked.
    pub fn new(rules: KernelRules, table: Table, live: bool) -> Self {
        Self {
            files: ExaminedFiles::new(rules, table),
            hooked: HashMap::new(),
            inline: HashMap::new(),
            links: HashMap::new(),
            making: Aside::new("links"),
            asked: HashMap::new(),
            loose: Vec::new(),
            unmapped: HashMap::new(),
            watch: Watch::new(),
            conflicts: HashMap::new(),
            functions: Vec::new(),
            mappings: None,
            frees: live,
            gave_up_frees: false,
            only: None,
        }
    }

    /// Hooks an examined file for one process, or for all processes.
    ///
    /// # Errors
    /// The file cannot be hooked, or the kernel refuses. Earlier links stay.
    pub fn hook<K: Linker<Links = L>>(
        &mut self,
        key: FileKey,
        pid: Option<u32>,
        linker: &K,
        sites: &mut impl SiteTable,
    ) -> Result<Hooked, HookError> {
        match self.plan_links((key, pid), linker.kind(), sites)? {
            None => Ok(Hooked::Already),
            Some(job) => self.take_in((key, pid), job.make(linker), linker.kind()).map(|()| Hooked::Now),
        }
    }

    /// Hooks an examined file like [`hook`](Self::hook). Another thread makes the links, because that takes tens of
    /// milliseconds, and longer on a busy machine.
    ///
    /// # Errors
    /// [`HookError::UnderWay`] until that is done. Then as for [`hook`](Self::hook).
    pub fn hook_aside<K: Linker<Links = L> + Send + Sync + 'static>(
        &mut self,
        key: FileKey,
        pid: Option<u32>,
        linker: &Arc<K>,
        sites: &mut impl SiteTable,
    ) -> Result<Hooked, HookError> {
        self.take_in_made(linker.kind());
        if let Some(outcome) = self.asked.get_mut(&(key, pid)).and_then(Option::take) {
            self.asked.remove(&(key, pid));
            return outcome.map(|()| Hooked::Now);
        }
        // Nobody may have been asking for the links that are being made.
        if !self.is_making(key, pid) {
            let Some(job) = self.plan_links((key, pid), linker.kind(), sites)? else { return Ok(Hooked::Already) };
            let aside = Arc::clone(linker);
            if !self.making.begin((key, pid), move || job.make(&*aside)) {
                return self.hook(key, pid, &**linker, sites);
            }
            self.asked.insert((key, pid), None);
        }
        Err(HookError::UnderWay(self.files.path(key).unwrap_or_default().to_owned()))
    }

    /// Takes in the links that the other thread has made.
    pub fn take_in_made(&mut self, kind: LinkKind) {
        while let Some((served, made)) = self.making.next_done() {
            let panicked = || Err(KernelError::Object("an error inside heapbpf".to_owned()));
            let made = made.unwrap_or_else(panicked);
            if self.asked.contains_key(&served) {
                let outcome = self.take_in(served, made, kind);
                self.asked.insert(served, Some(outcome));
            } else {
                self.loose.extend(made.ok().map(|(links, _)| links));
            }
        }
    }

    /// Plans the links to an examined file, unless there is nothing to do.
    fn plan_links(
        &mut self,
        (key, pid): Served,
        kind: LinkKind,
        sites: &mut impl SiteTable,
    ) -> Result<Option<Job>, HookError> {
        for outdated in self.files.take_outdated() {
            self.remove_links(outdated, sites);
        }
        if self.links.contains_key(&(key, pid)) {
            return Ok(None);
        }
        let Some(examined) = self.files.get(key) else { return Ok(None) };
        let path = &examined.path;
        let (plan, file) = match (&examined.plan, &examined.file) {
            (Ok(plan), Some(file)) => (plan, file),
            (Err(source), _) => return Err(HookError::Unfit { path: path.clone(), source: Arc::clone(source) }),
            (Ok(_), None) => return Ok(None),
        };
        if pid.is_some() && self.must_be_shared(key, kind) {
            return Err(HookError::MustBeShared(path.clone()));
        }
        let refused = |source| HookError::Kernel { path: path.clone(), source };
        let wanted = LinkedPart { only: self.only, frees: self.frees, calls_out: self.mappings.is_some(), link: kind };
        let hooked = match self.hooked.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let planned: Vec<Site> = plan.sites.iter().map(|site| wanted.site(site)).collect();
                let first_site = sites.add_file(&plan.ranges, &planned).map_err(refused)?;
                set_functions(&mut self.functions, first_site, &planned);
                new.insert(HookedFile { first_site, shared_since_ns: None, audit: None, refused: BTreeMap::new() })
            }
        };
        if self.conflicts.get(&key).is_some_and(|since| since.elapsed() < CONFLICT_RETRY) {
            return Err(refused(KernelError::Conflict));
        }
        let points = wanted.points(plan, hooked);
        // The file was examined a while ago. From here on, every write is reported.
        if !self.links.keys().any(|(of, _)| *of == key) {
            self.watch.add(key, file);
        }
        if examined.was_written() {
            return Err(HookError::Overwritten(path.clone()));
        }
        Ok(Some(Job { file: Arc::clone(file), content: examined.content, points, pid }))
    }

    /// Takes in the links to a file that were planned.
    fn take_in(&mut self, (key, pid): Served, made: LinkResult<L>, kind: LinkKind) -> Result<(), HookError> {
        let Some(ExaminedFile { path, plan: Ok(plan), .. }) = self.files.get(key) else { return Ok(()) };
        let Some(hooked) = self.hooked.get_mut(&key) else { return Ok(()) };
        if self.files.get(key).is_some_and(ExaminedFile::was_written) {
            return Err(HookError::Overwritten(path.clone()));
        }
        let (mut links, unprobed) = made.map_err(|source| {
            if matches!(source, KernelError::Conflict) {
                self.conflicts.insert(key, Instant::now());
            }
            HookError::Kernel { path: path.clone(), source }
        })?;
        if self.gave_up_frees {
            links.stop_tracking_frees();
        }
        hooked.refused.extend(unprobed);
        if pid.is_none() {
            hooked.shared_since_ns.get_or_insert_with(monotonic_ns);
        }
        hooked.audit.get_or_insert_with(|| Arc::new(file_audit(path, plan, kind, self.frees, &hooked.refused)));
        self.links.insert((key, pid), links);
        Ok(())
    }

    /// Adds sites that are not served by links of this table. Returns the index of the first.
    ///
    /// # Errors
    /// The kernel's table is full.
    pub fn add_sites(&mut self, planned: &[Site], sites: &mut impl SiteTable) -> Result<u32, KernelError> {
        let first = sites.add_file(&FileRanges::default(), planned)?;
        set_functions(&mut self.functions, first, planned);
        Ok(first)
    }

    /// Forgets files for which `stays` returns false, given key and path; no process has mapped them. Their links are
    /// loose. Forgets only some of them per call. Returns the forgotten files.
    pub fn forget(&mut self, stays: impl Fn(&FileKey, &str) -> bool, sites: &mut impl SiteTable) -> Vec<FileKey> {
        let gone = self.files.forget(stays);
        for key in &gone {
            self.conflicts.remove(key);
            self.inline.remove(key);
            let links = self.links.extract_if(|(of, _), _| of == key);
            self.loose.extend(links.map(|(_, links)| links));
            self.remove_links(*key, sites);
        }
        self.watch.remove(&gone);
        gone
    }

    /// Removes all links of files that were written to since the last call, because the probes may now be on other
    /// instructions. The files are forgotten. Returns them with their paths.
    pub fn forget_written(&mut self, sites: &mut impl SiteTable) -> Vec<(FileKey, String)> {
        let written = self.watch.written().into_iter();
        let had_links = |key: &FileKey| self.links.keys().chain(self.asked.keys()).any(|(of, _)| of == key);
        let written: Vec<FileKey> = written.filter(had_links).collect();
        let path = |key: FileKey| (key, self.files.path(key).unwrap_or_default().to_owned());
        let gone = written.into_iter().map(path).collect::<Vec<_>>();
        for (key, _) in &gone {
            self.remove_links(*key, sites);
            self.files.forget_written(*key);
        }
        gone
    }

    /// Readable when [`forget_written`](Self::forget_written) has something to do.
    pub fn written(&self) -> Option<BorrowedFd<'_>> {
        self.watch.as_fd()
    }

    fn remove_links(&mut self, key: FileKey, sites: &mut impl SiteTable) {
        self.asked.retain(|(of, _), _| *of != key);
        self.links.retain(|(of, _), _| *of != key);
        self.hooked.remove(&key).into_iter().for_each(|hooked| sites.remove_file(hooked.first_site));
    }

    /// Takes the links of one process, for example because it has exited; they are loose. Links that it shares with
    /// others stay.
    pub fn release(&mut self, pid: u32) {
        self.asked.retain(|(_, owner), _| *owner != Some(pid));
        let links = self.links.extract_if(|(_, owner), _| *owner == Some(pid));
        self.loose.extend(links.map(|(_, links)| links));
    }

    /// Makes links loose that serve every process, if no process has mapped their file for a minute. They are made again
    /// when a process maps it.
    pub fn let_go_of_unmapped(&mut self, now: Instant, is_mapped: impl Fn(FileKey) -> bool) {
        let Self { links, unmapped, hooked, loose, .. } = self;
        unmapped.retain(|key, _| !is_mapped(*key));
        for (key, _) in links.keys().filter(|(key, pid)| pid.is_none() && !is_mapped(*key)) {
            unmapped.entry(*key).or_insert(now);
        }
        for (key, _) in unmapped.extract_if(|_, since| now.saturating_duration_since(*since) >= KEPT_UNMAPPED) {
            loose.extend(links.remove(&(key, None)));
            if let Some(hooked) = hooked.get_mut(&key) {
                hooked.shared_since_ns = None;
            }
        }
    }

    /// Links that nothing needs any more. Dropping them removes their probes, which takes tens of milliseconds each.
    pub fn take_loose(&mut self) -> Vec<L> {
        std::mem::take(&mut self.loose)
    }

    /// Stops tracking frees in all files, if they are tracked. Allocations stay hooked without a gap.
    pub fn stop_tracking_frees(&mut self, link: LinkKind) {
        self.gave_up_frees |= std::mem::take(&mut self.frees);
        self.links.values_mut().for_each(L::stop_tracking_frees);
        for (key, hooked) in &mut self.hooked {
            if hooked.audit.is_some()
                && let (Some(path), Some(plan)) = (self.files.path(*key), self.files.plan(*key))
            {
                hooked.audit = Some(Arc::new(file_audit(path, plan, link, false, &hooked.refused)));
            }
        }
    }

    /// Makes all links loose ([`take_loose`](Self::take_loose)).
    pub fn loosen_all(&mut self) {
        self.mappings.iter_mut().for_each(MappingProbes::unlink);
        self.asked.clear();
        while let Some((_, made)) = self.making.wait() {
            self.loose.extend(made.and_then(Result::ok).map(|(links, _)| links));
        }
        self.loose.extend(self.links.drain().map(|(_, links)| links));
    }

    /// Removes all probes.
    pub fn release_all(&mut self) {
        self.loosen_all();
        self.loose.clear();
    }

    /// Whether a file has links for one process, or for all processes.
    pub fn is_served(&self, key: FileKey, pid: Option<u32>) -> bool {
        self.links.contains_key(&(key, pid))
    }

    /// Whether another thread is making links to a file for one process, or for all processes.
    pub fn is_making(&self, key: FileKey, pid: Option<u32>) -> bool {
        self.making.under_way().contains(&(key, pid))
    }

    /// How many processes have links of their own to a file, or are about to get them.
    pub fn own_links(&self, key: FileKey) -> usize {
        let own: HashSet<&Served> = self.links.keys().chain(self.asked.keys()).collect();
        own.into_iter().filter(|(file, pid)| *file == key && pid.is_some()).count()
    }

    /// Files that have links for one process, or for all processes.
    pub fn served(&self, pid: Option<u32>) -> impl Iterator<Item = FileKey> + '_ {
        self.links.keys().filter(move |(_, of)| *of == pid).map(|(key, _)| *key)
    }

    /// Whether links of this kind to a file must serve all processes. That is so if a function's return may be awaited
    /// in only one call of a thread at a time. The programs ensure that. But if a session is for one process, the
    /// kernel replaces the return address of each call in other probed processes without running the programs.
    pub fn must_be_shared(&self, key: FileKey, link: LinkKind) -> bool {
        let is_one_at_a_time = |site: &PlannedSite| site.return_needed && site.return_probe == ReturnProbe::OneAtATime;
        let plan = self.files.plan(key).filter(|_| link == LinkKind::Session);
        plan.is_some_and(|plan| plan.sites.iter().any(is_one_at_a_time))
    }

    /// Kinds of the probed instructions in hooked files: of freeing functions if `frees`, otherwise of allocating ones.
    pub fn kinds(&self, frees: bool) -> impl Iterator<Item = ProbeKind> + '_ {
        self.hooked.keys().flat_map(move |key| self.kinds_in(*key, frees))
    }

    /// The same for one file. Empty if it is not hooked.
    pub fn kinds_in(&self, key: FileKey, frees: bool) -> impl Iterator<Item = ProbeKind> + '_ {
        let plan = self.hooked.get(&key).and_then(|_| self.files.plan(key));
        let sites = plan.into_iter().flat_map(|plan| &plan.sites);
        sites.filter(move |site| site.return_needed != frees).map(|site| site.kind)
    }

    /// Number of files with links, without those that serve only the process `but`.
    pub fn probed_files(&self, but: Option<u32>) -> usize {
        let files = self.links.keys().filter(|(_, pid)| pid.is_none() || *pid != but).map(|(key, _)| key);
        files.collect::<HashSet<_>>().len()
    }

    /// Whether the sites of a file are in the kernel's table. Then its plan must not change.
    pub fn has_sites(&self, key: FileKey) -> bool {
        self.hooked.contains_key(&key)
    }

    /// CLOCK_MONOTONIC when a file was first hooked for all processes.
    pub fn shared_since(&self, key: FileKey) -> Option<u64> {
        self.hooked.get(&key)?.shared_since_ns
    }

    /// What was hooked in a file, and what was not.
    pub fn audited(&self, key: FileKey) -> Option<&Arc<FileAudit>> {
        self.hooked.get(&key)?.audit.as_ref()
    }

    /// Notes that a file was hooked inline in a process. Its audit lists no probes.
    pub fn hooked_inline(&mut self, key: FileKey, link: LinkKind) {
        if !self.inline.contains_key(&key)
            && let Some(audit) = self.audit_of(key, link)
        {
            self.inline.insert(key, Arc::new(FileAudit { attach: Vec::new(), ..audit }));
        }
    }

    /// The audits of all hooked files, by path.
    pub fn audit(&self) -> Vec<Arc<FileAudit>> {
        let probed = self.hooked.values().filter_map(|hooked| hooked.audit.clone());
        let inline =
            self.inline.iter().filter(|(key, _)| !self.hooked.contains_key(key)).map(|(_, audit)| audit.clone());
        let mut audits: Vec<Arc<FileAudit>> = probed.chain(inline).collect();
        audits.sort_by(|a, b| a.file.cmp(&b.file));
        audits
    }

    /// What is hooked in an examined file, or would be.
    pub fn audit_of(&self, key: FileKey, link: LinkKind) -> Option<FileAudit> {
        let none = BTreeMap::new();
        let refused = self.hooked.get(&key).map_or(&none, |hooked| &hooked.refused);
        Some(file_audit(self.files.path(key)?, self.files.plan(key)?, link, self.frees, refused))
    }
}

/// Records the functions of sites, starting at the index of the first.
fn set_functions(functions: &mut Vec<u16>, first_site: u32, sites: &[Site]) {
    let (first, past) = (first_site as usize, first_site as usize + sites.len());
    functions.resize(functions.len().max(past), u16::MAX);
    functions[first..past].iter_mut().zip(sites).for_each(|(function, site)| *function = site.function);
}

#[cfg(test)]
mod tests;
