//! Inline hooks: code mapped into a process counts its calls, and only sampled ones reach a probe.
//!
//! `plan` says what is mapped, `figures` how the target's own counts enter the kernel's. The code is mapped and linked
//! before jumps lead to it, so that from the first call on each is counted and sampled.

pub mod attempts;
mod control;
mod figures;
pub mod left;
mod loaded;
mod plan;
pub mod preview;
mod removal;
pub mod standing;

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::time::Instant;

use heapbpf_inline::ForeignBlob;
use heapbpf_inline::abi::{CONTROL, STATE, Slot};
use heapbpf_inline::read::{COUNTS_BYTES, Counts};
use heapbpf_probes::{AttachError, Table};
use heapbpf_remote::{Busy, Error as Remote, Found, Mapped, Plan, Refusal, STOP_LIMIT, Target};
use sampler_ebpf::abi::{Counters, ProcessKey, Site};
use sampler_ebpf::geometric::DrawConstants;

use self::attempts::Attempts;
use self::control::ControlPage;
use self::left::Left;
use self::removal::take_out;
use crate::attach::files::FileKey;
use crate::kernel::KernelError;
use crate::kernel::inline::{InlineLinks, InlinePrograms};
use crate::kernel::totals;

/// The set of sampled blocks has 2^16 entries.
const SET_LOG2: u32 = 16;

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
    /// Another tool's patch.
    #[error("its code at {0:#x} is not that of the allocator's file: another tool has changed it in memory")]
    Patched(u64),
    /// Another recording's hooks.
    #[error("another recording hooks it inline; probes see nothing of it meanwhile")]
    Hooked,
    /// Hooks that a killed heapbpf left, and that cannot be taken out.
    #[error(
        "it has inline hooks of a heapbpf that was killed, and these are not touched: {0}; probes see nothing of it"
    )]
    Left(ForeignBlob),
    /// The same, but it was not possible yet.
    #[error(
        "it has inline hooks of a heapbpf that was killed, and they could not be taken out; probes see nothing of it"
    )]
    Stays,
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

impl Refused {
    /// Whether another attempt may succeed: no thread found a CPU in time, or the process was changing.
    pub fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Hook(Remote::Busy { .. } | Remote::Refused(Refusal::SharedMemory(_)))
                | Self::Target(Refusal::SharedMemory(_))
                | Self::Place(_)
                | Self::Stays
        )
    }
}

/// How an allocator is counted in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// By inline hooks.
    Inline,
    /// By probes: inline hooks were refused.
    Probes,
    /// Not yet: another attempt to hook it inline is due then.
    Waits {
        /// Those that failed.
        attempts: Attempts,
        /// When.
        until: Instant,
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
    criterion: u32,
    control: ControlPage,
    /// Whether nothing was sampled for a while: threads then count down from afar.
    has_paused: bool,
    targets: Vec<Hooked>,
    /// Processes to which no jump could be written yet.
    prepared: HashMap<(u32, FileKey), Prepared>,
    /// Whether an allocator is hooked inline in a process, or was refused.
    decided: HashMap<(u32, FileKey), Service>,
    /// Index of the first of a file's sites.
    sites: HashMap<FileKey, u32>,
}

/// An allocator in a process with our code, and links to it.
struct Hooked {
    pid: u32,
    key: FileKey,
    base: u64,
    memory: File,
    /// What was counted, as of the last two reads.
    counts: [Counts; 2],
    /// Its incarnation, once the kernel knows it.
    process: Option<ProcessKey>,
    /// What was added to its counters last.
    added: Counters,
    /// The mapped code. It is locked as long as we live, by which others know that.
    text: File,
    _links: InlineLinks,
}

/// A process in which everything but the jumps is in place.
struct Prepared {
    target: Target,
    plan: Plan,
    mapped: Mapped,
    hooked: Hooked,
}

impl Prepared {
    /// Has it as it was before.
    fn undo(self) {
        let Self { target, plan, mapped, hooked } = self;
        drop(hooked);
        if target.unmap(&plan, &mapped, STOP_LIMIT).is_err() {
            take_out(target.pid().unsigned_abs());
        }
    }
}

impl Hooked {
    fn is_of(&self, pid: u32, base: u64) -> bool {
        self.pid == pid && self.base == base
    }
}

impl InlineHooks {
    /// No process is hooked yet.
    pub fn new(programs: InlinePrograms, sampling: Sampling) -> Self {
        Self {
            programs,
            criterion: sampling.criterion,
            control: ControlPage::new(sampling.draw, sampling.seed),
            has_paused: sampling.draw.interval == 0,
            targets: Vec::new(),
            prepared: HashMap::new(),
            decided: HashMap::new(),
            sites: HashMap::new(),
        }
    }

    /// Hooks an allocator in a process, unless that has been decided already, or another attempt is not due yet. The reason
    /// for which it was refused for good comes with it.
    pub fn serve(
        &mut self,
        (pid, key): (u32, FileKey),
        file: (&str, &File),
        table: &Table,
        add_sites: &mut dyn FnMut(&[Site]) -> Result<u32, KernelError>,
    ) -> (Service, Option<Refused>) {
        let before = self.decided.get(&(pid, key)).copied();
        let mut attempts = match before {
            Some(Service::Waits { until, attempts }) if until <= Instant::now() => attempts,
            // Its file may have been unloaded, and loaded again.
            Some(Service::Inline) if !self.is_in_place(pid, key) => Attempts::default(),
            Some(known) => return (known, None),
            None => Attempts::default(),
        };
        let (service, refused) = match self.hook((pid, key), file, table, add_sites) {
            Ok(()) => (Service::Inline, None),
            Err(refused) => match attempts.failed().filter(|_| refused.may_pass()) {
                Some(pause) => {
                    log::info!("process {pid} is not hooked inline yet: {refused}; next attempt in {pause:?}");
                    (Service::Waits { attempts, until: Instant::now() + pause }, None)
                }
                None => {
                    self.prepared.remove(&(pid, key)).into_iter().for_each(Prepared::undo);
                    (Service::Probes, Some(refused))
                }
            },
        };
        self.decided.insert((pid, key), service);
        (service, refused)
    }

    /// Hooks the allocator in `file` in a process. `add_sites` gives sites their indexes, and returns the first. If the process
    /// cannot be hooked inline, it runs on as before.
    fn hook(
        &mut self,
        (pid, key): (u32, FileKey),
        file: (&str, &File),
        table: &Table,
        add_sites: &mut dyn FnMut(&[Site]) -> Result<u32, KernelError>,
    ) -> Result<(), Refused> {
        let prepared = match self.prepared.remove(&(pid, key)) {
            Some(prepared) => prepared,
            None => self.prepare((pid, key), file, table, add_sites)?,
        };
        let Prepared { target, plan, mapped, .. } = &prepared;
        match target.replace(plan, mapped, STOP_LIMIT) {
            Ok(stopped) => {
                log::info!("process {pid}: hooked inline, stopped for {:?}", stopped.time);
                self.targets.push(prepared.hooked);
                Ok(())
            }
            // Nothing was changed.
            Err(error @ Remote::Busy { why: Busy::Slow | Busy::Position, .. }) => {
                self.prepared.insert((pid, key), prepared);
                Err(error.into())
            }
            Err(error @ Remote::Busy { why: Busy::Late, .. }) => {
                drop(prepared);
                take_out(pid);
                Err(error.into())
            }
            Err(error) => {
                prepared.undo();
                Err(error.into())
            }
        }
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

    /// Maps everything into a process, and links the programs. No jump leads to it yet.
    fn prepare(
        &mut self,
        (pid, key): (u32, FileKey),
        (path, file): (&str, &File),
        table: &Table,
        add_sites: &mut dyn FnMut(&[Site]) -> Result<u32, KernelError>,
    ) -> Result<Prepared, Refused> {
        let found = preview::functions((path, file), table)?;
        let target = self.without_what_was_left(pid)?;
        let first_site = match self.sites.get(&key) {
            Some(first) => *first,
            None => {
                let sites: Vec<Site> = found.functions.iter().map(|function| function.site).collect();
                *self.sites.entry(key).or_insert(add_sites(&sites)?)
            }
        };
        let settings = preview::Sampled { criterion: self.criterion, control: *self.control.page() };
        let plan = preview::plan(&target, &found, file, &settings, first_site)?;
        let mapped = target.map(&plan, STOP_LIMIT).inspect_err(|_| take_out(pid))?.outcome;
        match self.link((pid, key), plan.draft().base) {
            Ok(hooked) => Ok(Prepared { target, plan, mapped, hooked }),
            Err(refused) => {
                if target.unmap(&plan, &mapped, STOP_LIMIT).is_err() {
                    take_out(pid);
                }
                Err(refused)
            }
        }
    }

    /// Looks at a process, and takes out what a heapbpf that was killed left in it.
    fn without_what_was_left(&self, pid: u32) -> Result<Target, Refused> {
        let target = Target::look(pid)?;
        let mut is_any = false;
        // A process may have several allocators: each has code of its own.
        let is_ours = |found: &Found| self.targets.iter().any(|hooked| hooked.is_of(pid, found.range.start));
        for found in target.found().into_iter().filter(|found| !is_ours(found)) {
            match left::judge(pid, &found) {
                Left::InUse => return Err(Refused::Hooked),
                Left::Foreign(why) if found.is_hooked() => return Err(Refused::Left(why)),
                Left::Foreign(_) => {}
                Left::Abandoned => is_any = true,
            }
        }
        if !is_any {
            return Ok(target);
        }
        take_out(pid);
        let target = Target::look(pid)?;
        if target.found().iter().any(|found| !is_ours(found) && found.is_hooked()) {
            return Err(Refused::Stays);
        }
        log::info!("process {pid}: what a heapbpf that was killed left was taken out");
        Ok(target)
    }

    /// Links the programs to the code that is mapped at `base`.
    fn link(&self, (pid, key): (u32, FileKey), base: u64) -> Result<Hooked, Refused> {
        let failed = |what| move |source| Refused::Read { what, source };
        let range = base..base + heapbpf_inline::abi::TEXT_BYTES;
        let text = left::open_mapped(pid, &range).map_err(failed("the mapped code"))?;
        text.try_lock().map_err(|_| Refused::Hooked)?;
        let path = CString::new(format!("/proc/self/fd/{}", text.as_raw_fd())).unwrap_or_default();
        let code = heapbpf_inline_blob::code().ok_or(Refused::Machine)?;
        let links = self.programs.link(&path, &heapbpf_inline::site_offsets(&code))?;
        let memory = open_memory(pid)?;
        let counts = [Counts::default(); 2];
        let (process, added) = (None, Counters::default());
        Ok(Hooked { pid, key, base, memory, counts, process, added, text, _links: links })
    }

    /// Changes the sampling interval. Each thread uses it from its next draw on, and at once if nothing was sampled before.
    pub fn set_draw(&mut self, draw: DrawConstants) {
        self.has_paused |= self.control.interval() == 0;
        let changes = self.control.set(draw);
        let prepared = self.prepared.values().map(|prepared| &prepared.hooked);
        for Hooked { pid, base, memory, .. } in self.targets.iter().chain(prepared) {
            let mut writes = changes.iter().map(|(at, bytes)| memory.write_all_at(bytes, base + CONTROL + at));
            if let Err(error) = writes.try_for_each(|written| written) {
                log::debug!("process {pid} keeps its sampling interval: {error}");
            }
        }
        self.begin_to_sample();
    }

    /// Has threads draw that have begun without sampling. One that writes its countdown at the same moment may miss it: the
    /// next read repeats it. What they counted down from so far was not drawn, so nothing is lost.
    fn begin_to_sample(&self) {
        if !self.has_paused || self.control.interval() == 0 {
            return;
        }
        for Hooked { pid, base, memory, .. } in &self.targets {
            let begin = |slot: u64| {
                memory.write_all_at(&1_u64.to_ne_bytes(), base + slot + offset_of!(Slot, discard) as u64)?;
                memory.write_all_at(&0_u64.to_ne_bytes(), base + slot + offset_of!(Slot, countdown) as u64)
            };
            let state = read_state(memory, *base);
            let begun = state.and_then(|state| figures::not_sampling(&state).into_iter().try_for_each(begin));
            if let Err(error) = begun {
                log::debug!("process {pid}: {error}");
            }
        }
    }

    /// Reads what hooked processes have counted. To be called before and after the kernel's counters are read.
    pub fn read(&mut self) {
        self.begin_to_sample();
        for target in &mut self.targets {
            // After its end, what was read last stays.
            let now = read_counts(&target.memory, target.base).unwrap_or(target.counts[1]);
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
        self.prepared.drain().for_each(|(_, prepared)| prepared.undo());
        for target in self.targets.drain(..) {
            let _ = target.text.unlock();
            take_out(target.pid);
        }
    }
}

impl Drop for InlineHooks {
    fn drop(&mut self) {
        self.release_all();
    }
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

#[cfg(target_arch = "x86_64")]
fn has_rdrand() -> bool {
    std::arch::is_x86_feature_detected!("rdrand")
}

#[cfg(not(target_arch = "x86_64"))]
const fn has_rdrand() -> bool {
    false
}
