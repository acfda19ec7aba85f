//! Inline hooks: code mapped into a process counts its calls, and only sampled ones reach a probe.
//!
//! [`plan`] says what is mapped, [`counted`] who counts, [`figures`] how the targets' own counts enter the kernel's. The links
//! are there before the jumps.

mod counted;
mod figures;
mod memory;
mod plan;

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::{Arc, Mutex, PoisonError};

use heapbpf_inline::Settings;
use heapbpf_inline::abi::{Control, DRAWS, MAGIC, Slot, VERSION, mapped_bytes};
use heapbpf_probes::{AttachError, InlineFile, Table, inline_functions};
use heapbpf_remote::{Moment, Prevented, STOP_LIMIT, Target};
use sampler_ebpf::abi::{Counters, ProcessKey, Site};
use sampler_ebpf::geometric::DrawConstants;

use counted::Counted;
use memory::take_out;

use crate::attach::files::FileKey;
use crate::kernel::KernelError;
use crate::kernel::inline::{InlineLinks, InlineMap, InlinePrograms};
use crate::kernel::totals;

/// The set of sampled blocks has 2^16 entries.
const SET_LOG2: u32 = 16;
/// Index of the draw in use.
const DRAW: u64 = 1;

/// Why a process is not hooked inline.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// Inline hooks are x86-64 code.
    #[error("inline hooks need an x86-64 machine")]
    Machine,
    /// The allocator cannot be hooked.
    #[error(transparent)]
    Allocator(#[from] AttachError),
    /// It must not be stopped.
    #[error(transparent)]
    Target(#[from] heapbpf_remote::Refusal),
    /// It was not hooked.
    #[error(transparent)]
    Hook(#[from] heapbpf_remote::Error),
    /// The plan does not fit to the process.
    #[error(transparent)]
    Place(#[from] heapbpf_remote::PlanError),
    /// The allocator's functions cannot be patched.
    #[error("{0}")]
    Plan(String),
    /// More than one executable mapping, or none.
    #[error("the allocator's code is not mapped in one piece")]
    Mappings,
    /// There is no room.
    #[error("there is no room for code within reach of the allocator")]
    NoRoom,
    /// The file and the process differ.
    #[error("the allocator's file has changed since it was mapped")]
    Changed,
    /// Another recording's hooks.
    #[error("it is hooked inline already, by another recording or one that was killed; probes see nothing of it")]
    Hooked,
    /// The kernel refuses a link or a site.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Every attempt came at a bad moment.
    #[error("it could not be stopped at a good moment: its threads, or this machine, are too busy")]
    Busy,
    /// Something cannot be read or written.
    #[error("cannot access {what}: {source}")]
    Read {
        /// What.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

impl Refused {
    /// Whether another attempt may succeed.
    pub const fn may_pass(&self) -> bool {
        matches!(self, Self::Hook(heapbpf_remote::Error::Busy { .. }))
    }
}

/// How hooked processes sample.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Constants of the draw.
    pub draw: DrawConstants,
    /// Seed of the draws; 0 for unpredictable ones.
    pub seed: u64,
    /// What a trial is: bytes or allocations.
    pub criterion: u32,
}

/// The inline hooks of a recording.
pub struct InlineHooks {
    programs: Arc<InlinePrograms>,
    sampling: Sampling,
    counted: Counted,
    /// The incarnation in which an allocator is hooked, by its process id; `None` if it was refused.
    decided: HashMap<(u32, FileKey), Option<ProcessKey>>,
}

impl InlineHooks {
    /// No process is hooked yet. `follows`: children are targets.
    pub fn new(programs: InlinePrograms, map: InlineMap, sampling: Sampling, follows: bool) -> Self {
        let counted = Counted::new(map, follows);
        Self { programs: Arc::new(programs), sampling, counted, decided: HashMap::new() }
    }

    /// Whether an allocator is hooked inline in a process; `None` if that was not tried.
    pub fn serve(&self, pid: u32, key: FileKey) -> Option<bool> {
        let hooked = self.decided.get(&(pid, key))?;
        Some(hooked.is_some_and(|process| self.counted.runs(process)))
    }

    /// Notes whether it was hooked, in which incarnation.
    pub fn decide(&mut self, pid: u32, key: FileKey, hooked: Option<ProcessKey>) {
        self.decided.insert((pid, key), hooked);
    }

    /// Whether a process inherited the hooks of its parent.
    pub fn has_inherited(&self, pid: u32) -> bool {
        self.counted.has_inherited(pid)
    }

    /// Hooks the allocator in `file` in a process. `add_sites` gives sites their indexes, and returns the first.
    ///
    /// # Errors
    /// The process cannot be hooked inline. It runs on as before.
    pub fn hook(
        &mut self,
        process: ProcessKey,
        (path, file): (&str, &File),
        table: &Table,
        add_sites: &mut dyn FnMut(&[Site]) -> Result<u32, KernelError>,
    ) -> Result<(), Refused> {
        let pid = process.tgid;
        let found = inline_functions(file, path, table)?;
        let mut target = Target::look(pid)?;
        if target.found().iter().any(heapbpf_remote::Found::is_hooked) {
            return Err(Refused::Hooked);
        }
        if !target.found().is_empty() {
            // An earlier recording had to leave it, because a thread could have come back to it.
            take_out(pid);
            target = Target::look(pid)?;
        }
        let plan = self.plan(&target, &found, file, add_sites)?;
        self.counted.list(process, plan.base())?;
        match self.inject(&target, &plan) {
            Ok(links) => self.counted.add(process, links),
            Err(refused) => {
                self.counted.unlist(process);
                take_out(pid);
                return Err(refused);
            }
        }
        Ok(())
    }

    /// What is to be done.
    fn plan(
        &self,
        target: &Target,
        found: &InlineFile,
        file: &File,
        add_sites: &mut dyn FnMut(&[Site]) -> Result<u32, KernelError>,
    ) -> Result<heapbpf_remote::Plan, Refused> {
        let place = plan::place(target, file)?;
        let memory = memory::open(target.pid().unsigned_abs())
            .map_err(|source| Refused::Read { what: "the target's memory", source })?;
        let word = |address: u64| {
            let mut bytes = [0; 8];
            memory.read_exact_at(&mut bytes, address).ok().map(|()| u64::from_ne_bytes(bytes))
        };
        // What is replaced is at most the whole text.
        let room = heapbpf_remote::reserved_bytes(mapped_bytes(SET_LOG2), place.mapping.bytes());
        let base = target.maps().gap(&place.mapping.range, room).ok_or(Refused::NoRoom)?;
        let metadata = file.metadata().map_err(|source| Refused::Read { what: "the allocator's file", source })?;
        let settings = Settings {
            criterion: self.sampling.criterion,
            set_log2: SET_LOG2,
            has_rdrand: has_rdrand(),
            file: [metadata.dev(), metadata.ino(), metadata.mtime().cast_unsigned()],
        };
        let sites: Vec<Site> = found.functions.iter().map(|function| function.site).collect();
        let first = add_sites(&sites)?;
        let sites: Vec<u32> = (first..).take(sites.len()).collect();
        let plan = plan::inline_plan(found, &sites, &place, (base, &settings), &word)?;
        let control = control(Some(self.sampling.draw), self.sampling.seed);
        let draft = plan::draft(&plan, &place, file, SET_LOG2, &control)?;
        Ok(heapbpf_remote::Plan::new(draft, target.maps())?)
    }

    /// Maps everything, links the programs, and then writes the jumps: so the first call that is counted may be sampled.
    fn inject(&self, target: &Target, plan: &heapbpf_remote::Plan) -> Result<InlineLinks, Refused> {
        let code = heapbpf_inline_blob::code().ok_or(Refused::Machine)?;
        let offsets = heapbpf_inline::site_offsets(&code);
        let (programs, pid, base) = (Arc::clone(&self.programs), target.pid().unsigned_abs(), plan.base());
        let linked = Arc::new(Mutex::new(None));
        let links = Arc::clone(&linked);
        let stopped = target.hook_with(plan, STOP_LIMIT, move |moment| {
            if moment == Moment::Mapped {
                let made =
                    link(&programs, pid, base, &offsets).map_err(|error| Prevented::Failed(io::Error::other(error)))?;
                links.lock().unwrap_or_else(PoisonError::into_inner).replace(made);
            }
            Ok(())
        })?;
        log::info!(
            "process {pid}: hooked inline, stopped for {:?}, one thread before for {:?}",
            stopped.time,
            stopped.alone
        );
        let links = linked.lock().unwrap_or_else(PoisonError::into_inner).take();
        links.ok_or_else(|| Refused::Plan("it was not linked".into()))
    }

    /// Has threads draw that have begun without sampling. One that writes its countdown at the same moment may miss it: the
    /// next read repeats it.
    fn begin_to_sample(&self, memory: &File, base: u64) -> io::Result<()> {
        if self.sampling.draw.interval == 0 {
            return Ok(());
        }
        for slot in figures::not_sampling(&memory::state(memory, base)?) {
            memory.write_all_at(&1_u64.to_ne_bytes(), base + slot + std::mem::offset_of!(Slot, discard) as u64)?;
            memory.write_all_at(&0_u64.to_ne_bytes(), base + slot + std::mem::offset_of!(Slot, countdown) as u64)?;
        }
        Ok(())
    }

    /// Reads what hooked processes have counted. To be called before and after the kernel's counters are read.
    pub fn read(&mut self) {
        for (pid, memory, base) in self.counted.memories() {
            if let Err(error) = self.begin_to_sample(memory, base) {
                log::debug!("process {pid}: {error}");
            }
        }
        self.counted.read();
    }

    /// Adds what hooked processes have counted to the kernel's counters.
    pub fn add_to(&self, counts: &mut totals::Counts) {
        self.counted.add_to(counts);
    }

    /// Forgets a process that has ended, whose counts in the kernel are `kernel`. What it has counted in addition.
    pub fn take(&mut self, process: ProcessKey, kernel: &Counters) -> Counters {
        self.decided.retain(|_, hooked| *hooked != Some(process));
        self.counted.take(process, kernel)
    }

    /// Processes whose last counts could not be read. Their totals are too small.
    pub const fn unread_ends(&self) -> u64 {
        self.counted.unread_ends()
    }

    /// Takes everything out of all processes.
    pub fn release_all(&mut self) {
        self.counted.release_all();
    }
}

impl Drop for InlineHooks {
    fn drop(&mut self) {
        self.release_all();
    }
}

/// A control page; without constants it says that nothing is sampled.
fn control(draw: Option<DrawConstants>, seed: u64) -> Control {
    let mut draws = [DrawConstants::default(); DRAWS];
    let index = if draw.is_some() { DRAW } else { 0 };
    draws[index as usize] = draw.unwrap_or_default();
    Control { magic: MAGIC, version: u64::from(VERSION), draw: index, seed, draws }
}

/// Links the programs to the code that is mapped.
fn link(programs: &InlinePrograms, pid: u32, base: u64, offsets: &[u64; 4]) -> Result<InlineLinks, Refused> {
    let text = base..base + heapbpf_inline::abi::TEXT_BYTES;
    let text = File::open(format!("/proc/{pid}/map_files/{:x}-{:x}", text.start, text.end));
    let text = text.map_err(|source| Refused::Read { what: "the mapped code", source })?;
    let path = CString::new(format!("/proc/self/fd/{}", text.as_raw_fd())).unwrap_or_default();
    Ok(programs.link(&path, offsets)?)
}

#[cfg(target_arch = "x86_64")]
fn has_rdrand() -> bool {
    std::arch::is_x86_feature_detected!("rdrand")
}

#[cfg(not(target_arch = "x86_64"))]
const fn has_rdrand() -> bool {
    false
}
