//! Inline hooks: code mapped into a process counts its calls, and only sampled ones reach a probe.
//!
//! [`plan`] says what is mapped, [`figures`] how the target's own counts enter the kernel's. Nothing is sampled before
//! the links are there: the control page says so at first.

mod figures;
mod loaded;
mod plan;

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::time::Duration;

use heapbpf_inline::Settings;
use heapbpf_inline::abi::{CONTROL, Control, DRAWS, MAGIC, STATE, Slot, VERSION, mapped_bytes};
use heapbpf_inline::read::{COUNTS_BYTES, Counts};
use heapbpf_probes::{AttachError, InlineFile, Table, inline_functions};
use heapbpf_remote::{Found, STOP_LIMIT, TakeOut, Target};
use sampler_ebpf::abi::{Counters, ProcessKey, Site};
use sampler_ebpf::geometric::DrawConstants;
use zerocopy::IntoBytes as _;

use crate::attach::files::FileKey;
use crate::kernel::KernelError;
use crate::kernel::inline::{InlineLinks, InlinePrograms};
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
    /// Something cannot be read or written.
    #[error("cannot access {what}: {source}")]
    Read {
        /// What.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
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
    programs: InlinePrograms,
    sampling: Sampling,
    targets: Vec<Hooked>,
    /// Whether an allocator is hooked inline in a process, or was refused.
    decided: HashMap<(u32, FileKey), bool>,
}

/// An allocator in a hooked process.
struct Hooked {
    pid: u32,
    key: FileKey,
    base: u64,
    memory: File,
    /// What was counted before the recording.
    baseline: Counts,
    /// What was counted in the recording, as of the last two reads.
    counts: [Counts; 2],
    /// Its incarnation, once the kernel knows it.
    process: Option<ProcessKey>,
    /// What was added to its counters last.
    added: Counters,
    _links: InlineLinks,
}

impl Hooked {
    fn is_of(&self, pid: u32, base: u64) -> bool {
        self.pid == pid && self.base == base
    }
}

impl InlineHooks {
    /// No process is hooked yet.
    pub fn new(programs: InlinePrograms, sampling: Sampling) -> Self {
        Self { programs, sampling, targets: Vec::new(), decided: HashMap::new() }
    }

    /// Whether an allocator is hooked inline in a process; `None` if that was not tried.
    pub fn serve(&self, pid: u32, key: FileKey) -> Option<bool> {
        self.decided.get(&(pid, key)).copied()
    }

    /// Notes whether it was hooked.
    pub fn decide(&mut self, pid: u32, key: FileKey, hooked: bool) {
        self.decided.insert((pid, key), hooked);
    }

    /// Hooks the allocator in `file` in a process. `add_sites` gives sites their indexes, and returns the first.
    ///
    /// # Errors
    /// The process cannot be hooked inline. It runs on as before.
    pub fn hook(
        &mut self,
        (pid, key): (u32, FileKey),
        (path, file): (&str, &File),
        table: &Table,
        add_sites: &mut dyn FnMut(&[Site]) -> Result<u32, KernelError>,
    ) -> Result<(), Refused> {
        let found = inline_functions(file, path, table)?;
        let mut target = Target::look(pid)?;
        // A process may have several allocators: each has code of its own.
        let is_of_others = |found: &&Found| !self.targets.iter().any(|hooked| hooked.is_of(pid, found.range.start));
        if target.found().iter().filter(is_of_others).any(Found::is_hooked) {
            return Err(Refused::Hooked);
        }
        if target.found().iter().any(|found| is_of_others(&found)) {
            // An earlier recording had to leave it, because a thread could have come back to it.
            take_out(pid, &|found| is_of_others(&found));
            target = Target::look(pid)?;
        }
        let base = self.map(&target, &found, file, add_sites)?;
        match self.activate(pid, key, base) {
            Ok(hooked) => self.targets.push(hooked),
            Err(refused) => {
                take_out(pid, &|found| found.range.start == base);
                return Err(refused);
            }
        }
        Ok(())
    }

    /// Whether an allocator that was hooked inline still is: its file may have been unloaded, and loaded again.
    pub fn is_in_place(&self, pid: u32, key: FileKey) -> bool {
        let Some(hooked) = self.targets.iter().rev().find(|hooked| hooked.pid == pid && hooked.key == key) else {
            return false;
        };
        // A process that cannot be looked at now has not loaded anything.
        let Ok(target) = Target::look(pid) else { return true };
        target.found().iter().any(|found| found.range.start == hooked.base && found.is_hooked())
    }

    /// Maps everything and writes the jumps. Calls count from then on, and none is sampled. Returns the base.
    fn map(
        &self,
        target: &Target,
        found: &InlineFile,
        file: &File,
        add_sites: &mut dyn FnMut(&[Site]) -> Result<u32, KernelError>,
    ) -> Result<u64, Refused> {
        let place = plan::place(target, file)?;
        let memory = open_memory(target.pid().unsigned_abs())?;
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
        let is_elsewhere = |name: &str| plan::is_defined_elsewhere(target, &place, &word, name);
        let bindings = plan::Bindings { word: &word, is_elsewhere: &is_elsewhere };
        let plan = plan::inline_plan(found, &sites, &place, (base, &settings), &bindings)?;
        let draft = plan::draft(&plan, &place, file, SET_LOG2, &control(None, self.sampling.seed))?;
        let plan = heapbpf_remote::Plan::new(draft, target.maps())?;
        let stopped = target.hook(&plan, STOP_LIMIT)?;
        log::info!("process {}: hooked inline, stopped for {:?}", target.pid(), stopped.time);
        Ok(base)
    }

    /// Links the programs, and begins to sample.
    fn activate(&self, pid: u32, key: FileKey, base: u64) -> Result<Hooked, Refused> {
        let failed = |what| move |source| Refused::Read { what, source };
        let text = base..base + heapbpf_inline::abi::TEXT_BYTES;
        let text = File::open(format!("/proc/{pid}/map_files/{:x}-{:x}", text.start, text.end));
        let text = text.map_err(failed("the mapped code"))?;
        let path = CString::new(format!("/proc/self/fd/{}", text.as_raw_fd())).unwrap_or_default();
        let code = heapbpf_inline_blob::code().ok_or(Refused::Machine)?;
        let links = self.programs.link(&path, &heapbpf_inline::site_offsets(&code))?;
        let memory = open_memory(pid)?;
        let baseline = read_counts(&memory, base).map_err(failed("the target's counts"))?;
        // Calls from here on count. Those before the next line is done count as calls that were not sampled.
        let control = control(Some(self.sampling.draw), self.sampling.seed);
        // The index is written last.
        let (head, draws) = control.as_bytes().split_at(std::mem::offset_of!(Control, draws));
        let write = |bytes: &[u8], offset: usize| memory.write_all_at(bytes, base + CONTROL + offset as u64);
        write(draws, head.len()).and_then(|()| write(head, 0)).map_err(failed("the control page"))?;
        self.begin_to_sample(&memory, base).map_err(failed("the slots"))?;
        let counts = [Counts::default(); 2];
        Ok(Hooked {
            pid,
            key,
            base,
            memory,
            baseline,
            counts,
            process: None,
            added: Counters::default(),
            _links: links,
        })
    }

    /// Has threads draw that have begun without sampling. One that writes its countdown at the same moment may miss it: the
    /// next read repeats it.
    fn begin_to_sample(&self, memory: &File, base: u64) -> io::Result<()> {
        if self.sampling.draw.interval == 0 {
            return Ok(());
        }
        for slot in figures::not_sampling(&read_state(memory, base)?) {
            memory.write_all_at(&1_u64.to_ne_bytes(), base + slot + std::mem::offset_of!(Slot, discard) as u64)?;
            memory.write_all_at(&0_u64.to_ne_bytes(), base + slot + std::mem::offset_of!(Slot, countdown) as u64)?;
        }
        Ok(())
    }

    /// Reads what hooked processes have counted. To be called before and after the kernel's counters are read.
    pub fn read(&mut self) {
        for at in 0..self.targets.len() {
            let target = &self.targets[at];
            if let Err(error) = self.begin_to_sample(&target.memory, target.base) {
                log::debug!("process {}: {error}", target.pid);
            }
            let target = &mut self.targets[at];
            let now = read_counts(&target.memory, target.base);
            // After its end, what was read last stays.
            let now = now.map_or(target.counts[1], |now| figures::since(&now, &target.baseline));
            target.counts = [target.counts[1], now];
        }
    }

    /// Adds what hooked processes have counted to the kernel's counters.
    pub fn add_to(&mut self, counts: &mut totals::Counts) {
        // The kernel's counters are of a process, whatever allocator was called.
        let mut sums: HashMap<u32, [Counts; 2]> = HashMap::new();
        for target in &self.targets {
            let sum = sums.entry(target.pid).or_default();
            *sum = [0, 1].map(|at| figures::plus(&sum[at], &target.counts[at]));
        }
        for target in &mut self.targets {
            // The first of a process stands for all.
            let Some([before, now]) = sums.remove(&target.pid) else { continue };
            if target.process.is_none() {
                target.process = counts.processes.keys().find(|process| process.tgid == target.pid).copied();
            }
            let known = target.process.and_then(|process| counts.processes.get_mut(&process));
            if let Some(counters) = known {
                target.added = figures::addition(&before, &now, counters.inline_sampled);
                counters.add(&target.added);
            } else if let Some(process) = target.process {
                counts.processes.entry(process).or_default().add(&target.added);
            } else {
                // It has not been sampled yet.
                let added = figures::addition(&before, &now, 0);
                counts.unattributed.add(&added);
            }
        }
    }

    /// Takes everything out of all processes.
    pub fn release_all(&mut self) {
        for target in self.targets.drain(..) {
            take_out(target.pid, &|_| true);
        }
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

fn open_memory(pid: u32) -> Result<File, Refused> {
    let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"));
    memory.map_err(|source| Refused::Read { what: "the target's memory", source })
}

fn read_state(memory: &File, base: u64) -> io::Result<Vec<u8>> {
    let mut state = vec![0; COUNTS_BYTES];
    memory.read_exact_at(&mut state, base + STATE)?;
    Ok(state)
}

fn read_counts(memory: &File, base: u64) -> io::Result<Counts> {
    Counts::of(&read_state(memory, base)?).map_err(io::Error::other)
}

/// Takes what is ours, and wanted, out of a process, if it still runs.
fn take_out(pid: u32, is_wanted: &dyn Fn(&Found) -> bool) {
    const ATTEMPTS: usize = 5;
    const PAUSE: Duration = Duration::from_millis(2);
    for _ in 0..ATTEMPTS {
        let Ok(target) = Target::look(pid) else { return };
        let found = target.found();
        let out =
            found.iter().filter(|found| is_wanted(found)).map(|found| target.take_out(found, TakeOut::All, STOP_LIMIT));
        match out.collect::<Result<Vec<_>, _>>() {
            Ok(out) if out.iter().all(|stopped| stopped.outcome) => return,
            // A thread may come back to it. It leads nowhere any more.
            Ok(_) => std::thread::sleep(PAUSE),
            Err(error) => log::info!("process {pid}: inline hooks are not taken out yet: {error}"),
        }
    }
    log::info!("process {pid} keeps memory of its inline hooks: a thread may still come back to it");
}

#[cfg(target_arch = "x86_64")]
fn has_rdrand() -> bool {
    std::arch::is_x86_feature_detected!("rdrand")
}

#[cfg(not(target_arch = "x86_64"))]
const fn has_rdrand() -> bool {
    false
}
