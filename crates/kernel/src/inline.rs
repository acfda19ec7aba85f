//! The program for the sites of inline hooks, and its link to the code that is mapped into a target.

use std::ffi::CString;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aya::maps::{HashMap, MapData};
use heapbpf_audit::LinkKind;
use sampler_ebpf::abi::ProcessKey;
use sampler_ebpf::abi::inline::{FREEING_SITE, InlineProcess, REALLOCATING_SITE, UNSEEN_SITE};

use super::guardian::{Guardian, ProbeLink};
use super::lifecycle::TracepointProgram;
use super::loader::{Abi, Loader, NamedProgram, ProgramKind};
use super::programs::single_kind;
use super::sys::{HashMapFd, How, read_all};
use super::{KernelError, release, sys};

/// The program for the sites.
const PROGRAM: &str = "inline_site";

/// The sites: the index of each in `heapbpf_inline::site_offsets`, and the mark that is added to its cookie. The first
/// two are for frees. One link covers all of them, because the kernel takes milliseconds to make a link and tens of
/// milliseconds to remove one.
const SITES: [(usize, u64); 4] = [(1, FREEING_SITE), (2, REALLOCATING_SITE), (3, UNSEEN_SITE), (0, 0)];
const SITES_OF_FREES: usize = 2;

/// The programs that read the counts of processes that exit or run another program, and the one that reports processes
/// that die of a fault, with their tracepoints.
const ENDS: [(&str, &str); 3] =
    [("inline_exit", "sched_process_exit"), ("inline_exec", "sched_prepare_exec"), ("inline_crash", "signal_deliver")];

/// The loaded program.
pub struct InlinePrograms {
    guardian: Guardian,
    kind: LinkKind,
    program: OwnedFd,
    /// Whether frees are tracked.
    live: bool,
}

/// Links the programs that read the counts of processes that exit (kernel 6.16) or run another program (6.10), and the
/// one that reports processes that die of a fault, as far as this kernel supports them. Must be called before the
/// programs that report process ends are linked ([`Programs::load`]), because the kernel runs programs in the order in
/// which they were linked, and the counts must have been read when an end is reported.
///
/// [`Programs::load`]: super::programs::Programs::load
pub fn link_ends(loader: &Loader) -> Vec<TracepointProgram> {
    let log = |error: &_| log::info!("what becomes of processes with inline hooks at their ends is not told: {error}");
    let link = |(name, tracepoint)| TracepointProgram::link(loader, name, tracepoint).inspect_err(log).ok();
    ENDS.into_iter().filter_map(link).collect()
}

/// Whether the programs that [`link_ends`] linked read the counts of all processes at their ends.
pub fn are_read(ends: &[TracepointProgram]) -> bool {
    ends.len() == ENDS.len() && release::exits_with_memory(&release::current())
}

type Entries = HashMap<MapData, Abi<ProcessKey>, Abi<InlineProcess>>;

/// The kernel's list of processes that inline hooks count. Clones are the same list.
#[derive(Clone)]
pub struct InlineMap {
    entries: Arc<Mutex<Entries>>,
    /// The same map, to be read in batches: where processes fork all the time, it has thousands of entries.
    batches: Arc<HashMapFd<ProcessKey, InlineProcess>>,
}

impl InlineMap {
    /// Opens the map.
    ///
    /// # Errors
    /// The object has no such map.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        let unreadable = |error| KernelError::Object(format!("INLINE: {error}"));
        let batches = loader.map("INLINE")?.try_clone_to_owned().and_then(HashMapFd::new).map_err(unreadable)?;
        let entries: Entries = loader.typed_map("INLINE")?;
        Ok(Self { entries: Arc::new(Mutex::new(entries)), batches: Arc::new(batches) })
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a process.
    ///
    /// # Errors
    /// There is no space for it.
    pub fn insert(&self, process: ProcessKey, entry: &InlineProcess) -> Result<(), KernelError> {
        let refused = |error| KernelError::Object(format!("INLINE: {error}"));
        self.lock().insert(Abi(process), Abi(*entry), 0).map_err(refused)
    }

    /// Removes a process, if it is listed.
    pub fn remove(&self, process: ProcessKey) {
        let _ = self.lock().remove(&Abi(process));
    }

    /// The entry of a process.
    pub fn get(&self, process: ProcessKey) -> Option<InlineProcess> {
        self.lock().get(&Abi(process), 0).ok().map(|entry| entry.0)
    }

    /// All entries.
    pub fn entries(&self) -> Vec<(ProcessKey, InlineProcess)> {
        let mut all = Vec::new();
        if let Err(error) = read_all(&self.batches, &mut all) {
            log::warn!("the list of processes with inline hooks was read only in part: {error}");
        }
        all
    }
}

/// Links to one target's code; none by default. Dropping them removes the probes.
#[derive(Debug, Default)]
pub struct InlineLinks(Vec<ProbeLink>);

impl InlineLinks {
    /// Removes the probes of code that was taken out of its processes, side by side.
    pub fn close(links: impl Iterator<Item = Self>) {
        ProbeLink::close_side_by_side(links.flat_map(|links| links.0).collect());
    }
}

impl InlinePrograms {
    /// The programs that [`Self::load`] loads.
    pub fn wanted(kind: LinkKind) -> Vec<NamedProgram> {
        let ends = ENDS.map(|(name, _)| (name, ProgramKind::RawTracepoint));
        [(PROGRAM, single_kind(kind))].into_iter().chain(ends).collect()
    }

    /// Loads the program, for the sites of frees as well if frees are tracked (`live`).
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn load(loader: &Loader, (kind, live): (LinkKind, bool), guardian: &Guardian) -> Result<Self, KernelError> {
        let program = loader.program(PROGRAM, single_kind(kind))?;
        Ok(Self { guardian: guardian.clone(), kind, program, live })
    }

    /// Links the sites at these offsets of a file for every process that maps it: the target and its children.
    ///
    /// # Errors
    /// The kernel refuses. Then nothing is linked.
    pub fn link(&self, path: &CString, offsets: &[u64; 4], first_site: u32) -> Result<InlineLinks, KernelError> {
        let refused = |source| KernelError::Link { what: path.to_string_lossy().into_owned(), source };
        let (guardian, program) = (&self.guardian, self.program.as_fd());
        let sites = &SITES[if self.live { 0 } else { SITES_OF_FREES }..];
        let (offsets, cookies): (Vec<u64>, Vec<u64>) =
            sites.iter().map(|(at, mark)| (offsets[*at], u64::from(first_site) | mark)).unzip();
        let how = if self.kind == LinkKind::Perf { How::perf(false).map_err(refused)? } else { How::multi(false) };
        let target = sys::UprobeTarget { path, offsets: &offsets, cookies: &cookies, semaphores: &[], pid: None };
        let links = target.parts(how).map(|part| guardian.link_uprobe(program, how, &part));
        links.collect::<Result<_, _>>().map(InlineLinks).map_err(refused)
    }
}
