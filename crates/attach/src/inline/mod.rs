//! Inline hooks: code mapped into a process counts its calls, and only sampled calls reach a probe.
//!
//! `hooking` makes the attempts, `preparation` carries out what `plan` decides, `counted` knows which processes count,
//! `figures` merges the targets' own counts into the kernel's. The code is mapped and linked before jumps lead to it, so
//! each call is counted and sampled from the first one on. Another thread does that, because it takes tens of
//! milliseconds, and seconds on a busy machine; the jumps are written by the thread that takes in records, because it
//! must know from when on calls are counted.

pub mod attempts;
pub mod cleaner;
mod control;
mod counted;
pub mod crashes;
mod figures;
pub mod forbidden;
mod hooking;
mod known;
pub mod left;
mod limits;
mod may_be_hooked;
pub mod memory;
pub mod objects;
mod plan;
mod preparation;
pub mod preview;
pub mod removal;
pub mod service;
pub mod standing;
mod waits;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use heapbpf_host::side_by_side::Aside;
use heapbpf_inline::abi::CONTROL;
use heapbpf_kernel::generations::Generations;
use heapbpf_kernel::inline::{InlineMap, InlinePrograms};
use heapbpf_probes::{FileImage, Table};
use heapbpf_remote::Target;
use sampler_ebpf::abi::{Counters, CrashRecord, ProcessKey, Site};
use sampler_ebpf::geometric::DrawConstants;

use self::attempts::Attempts;
use self::cleaner::Cleaner;
use self::control::ControlPage;
pub use self::control::{Sampling, SetBound};
pub use self::counted::Counted;
use self::crashes::Blamed;
use self::known::{KnownFiles, KnownNames};
pub use self::may_be_hooked::Refused;
pub use self::memory::loader_is_done;
use self::objects::ObjectFunction;
use self::preparation::{Answer, DoneOrder, Preparation, Prepared};
use self::waits::Waits;
pub use self::waits::{Level, Levels};
use crate::content::Content;
use crate::files::{ExaminedFiles, FileKey};

/// How long the end of a recording waits for a process that is being prepared: its files may be on a file system whose
/// server does not answer.
const LONGEST_PREPARATION: Duration = Duration::from_secs(10);

/// How the calls of an allocator in a process are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// By inline hooks.
    Inline,
    /// By probes: inline hooks were refused.
    Probes,
    /// Not yet. Another attempt to hook it inline comes later.
    Waits {
        /// The attempts that failed.
        attempts: Attempts,
        /// When the next attempt is due.
        until: Instant,
    },
}

/// The inline hooks of a recording.
pub struct InlineHooks {
    preparation: Arc<Preparation>,
    /// Prepares processes.
    aside: Aside<(ProcessKey, FileKey), Answer>,
    /// Undoes that. A thread of its own, which no preparation keeps waiting.
    undoing: Aside<(ProcessKey, FileKey), Answer>,
    /// A thread that prepares processes while others are hooked, before the recording begins.
    ahead: Option<JoinHandle<Vec<DoneOrder>>>,
    /// Answers of these threads that were not used yet. Prepared processes are in `prepared`.
    answers: HashMap<(ProcessKey, FileKey), Result<Vec<Site>, Refused>>,
    /// Their CPU time since somebody last took it.
    pub spent: Duration,
    /// Numbers of the allocators in processes, in the order in which they were to be hooked; and the next number.
    numbers: HashMap<(ProcessKey, FileKey), u64>,
    next_number: u64,
    generations: Arc<Generations>,
    sampling: Sampling,
    control: ControlPage,
    /// Set if processes wait when their samples come too fast.
    waits: Option<Waits>,
    /// The processes that are counted.
    pub counted: Counted,
    /// Processes that are prepared, but whose jumps could not be written yet.
    prepared: HashMap<(u32, FileKey), Prepared>,
    /// How an allocator is counted in a process, and the process generation for which that was decided.
    decided: HashMap<(u32, FileKey), (ProcessKey, Service)>,
    /// Index of the first site of a file.
    sites: HashMap<FileKey, u32>,
    /// Processes in which an interpreter was to be led to the mapped code: success, or why not.
    led: HashMap<u32, Result<(), String>>,
    /// Why nothing is hooked any more: a process died of its hooks.
    tripped: Option<String>,
    /// Processes that still had hooks after [`Self::trip`], and have lost them since somebody last took this list, or
    /// are about to. Children that were forked since are among them.
    pub stopped: Vec<ProcessKey>,
    /// Dropped after all hooks have been removed.
    _cleaner: Cleaner,
}

/// What to hook in a process.
#[derive(Clone, Copy)]
pub struct HookRequest<'a> {
    /// The allocators to look for.
    pub table: &'a Table,
    /// Blocks that probes have sampled.
    pub sampled: &'a [u64],
    /// Functions of an object allocator that calls the allocator.
    pub objects: &'a [ObjectFunction],
    /// Whether the caller waits until the process is prepared. Otherwise another thread prepares it in the meantime.
    pub is_at_once: bool,
    /// Whether the process waits at its entry point, for a second at most.
    pub is_held: bool,
}

impl InlineHooks {
    /// Creates the state without any hooked process. `follows` says whether children are targets.
    pub fn new(
        programs: InlinePrograms,
        (map, generations): (InlineMap, Generations),
        sampling: Sampling,
        follows: bool,
    ) -> Self {
        let mut counted = Counted::new(map, follows);
        counted.will_sample(sampling.draw.interval);
        let waits = sampling.lossless.then(Waits::new);
        let most_pauses = waits.as_ref().map(Waits::most_pauses);
        // The mapped code has little else that is unpredictable.
        let random = || RandomState::new().build_hasher().finish().max(1);
        let seed = if sampling.seed == 0 && !has_rdrand() { random() } else { sampling.seed };
        let (files, names) = (KnownFiles::default(), KnownNames::default());
        Self {
            preparation: Arc::new(Preparation { programs, files, names }),
            aside: Aside::new("prepare"),
            undoing: Aside::new("undo"),
            ahead: None,
            answers: HashMap::new(),
            spent: Duration::ZERO,
            numbers: HashMap::new(),
            next_number: 0,
            generations: Arc::new(generations),
            sampling,
            control: ControlPage::new(sampling.draw, seed, most_pauses),
            waits,
            counted,
            prepared: HashMap::new(),
            decided: HashMap::new(),
            sites: HashMap::new(),
            led: HashMap::new(),
            tripped: None,
            stopped: Vec::new(),
            _cleaner: Cleaner::started(),
        }
    }

    /// How calls are counted when inline hooking is not to be attempted now. `None` if it is. `has_links` says whether
    /// probes count the calls.
    pub fn decided(&mut self, (pid, key): (u32, FileKey), has_links: bool) -> Option<Service> {
        let known = self.decided.get(&(pid, key)).copied();
        match known {
            Some((process, Service::Inline)) if self.counted.runs(process) && self.is_in_place(pid, key) => {
                Some(Service::Inline)
            }
            Some((_, Service::Probes)) => Some(Service::Probes),
            // The hooks would not know the blocks that probes sampled.
            _ if has_links => {
                self.undo(pid, key);
                Some(Service::Probes)
            }
            Some((_, waits @ Service::Waits { until, .. })) => {
                (Instant::now() < until || self.is_preparing(pid)).then_some(waits)
            }
            // The file may have been unloaded and loaded again, or the process runs another program. Two at a time in a
            // process would get in each other's way.
            Some((_, Service::Inline)) | None => {
                self.is_preparing(pid).then(|| Service::Waits { attempts: Attempts::default(), until: Instant::now() })
            }
        }
    }

    /// Forgets how the allocators of a process are counted, because it runs another program.
    pub fn forget_decisions(&mut self, pid: u32) {
        self.decided.retain(|(of, _), _| *of != pid);
        self.answers.retain(|(of, _), _| of.tgid != pid);
        // If it is hooked again, it draws other numbers.
        self.numbers.retain(|(of, _), _| of.tgid != pid);
    }

    /// The program of a process that was hooked last.
    pub fn hooked_program(&self, pid: u32) -> Option<ProcessKey> {
        let inline = self.decided.iter().find(|((of, _), (_, service))| *of == pid && *service == Service::Inline);
        inline.map(|(_, (process, _))| *process)
    }

    /// Returns the work of reading files that will most likely be hooked, for any thread. Without it, they are read when
    /// the first process is prepared.
    pub fn read_ahead(&self, files: Vec<(String, Arc<File>)>, table: Table) -> Box<dyn FnOnce() + Send> {
        let known = self.preparation.files.clone();
        Box::new(move || {
            for (path, file) in files {
                // What is wrong with a file is reported when it is to be hooked.
                let _ = known.functions((&path, &*file), &table);
            }
        })
    }

    /// Lets the threads that examine files take what hooking needs from them, so that they are read once.
    pub fn read_with(&self, files: &mut ExaminedFiles) {
        let known = self.preparation.files.clone();
        files.read_on = Some(Arc::new(move |content: Content, file: &File, image: FileImage<'_>, table: &Table| {
            known.note(content, file, image, table);
        }));
    }

    /// Whether an interpreter's object allocator was hooked with the last allocator of a process, or the reason why
    /// not. `None` if that was not tried since the last call.
    pub fn take_led(&mut self, pid: u32) -> Option<Result<(), String>> {
        self.led.remove(&pid)
    }

    /// Whether an allocator of a process is hooked inline.
    pub fn has_hooked(&self, pid: u32, key: FileKey) -> bool {
        self.decided.get(&(pid, key)).is_some_and(|(_, service)| *service == Service::Inline)
    }

    /// Whether calls of a process are counted inline.
    pub fn counts(&self, pid: u32) -> bool {
        let is_inline = |(of, service): &(ProcessKey, Service)| {
            of.tgid == pid && *service == Service::Inline && self.counted.runs(*of)
        };
        self.decided.values().any(is_inline) || self.counted.all_heirs().contains(&pid)
    }

    /// Removes the hooks from an idle process, and keeps its counts, which go on if it is hooked again. Returns whether
    /// that was possible now.
    pub fn let_go(&mut self, process: ProcessKey) -> bool {
        // Only one thread at a time can stop a process.
        let is_paused = !self.is_preparing(process.tgid) && self.counted.pause(process);
        if is_paused {
            self.forget_decisions(process.tgid);
        }
        is_paused
    }

    /// Looks for children with inherited hooks. Returns the PIDs of those found since the last call, and all process
    /// generations whose calls are counted inline.
    pub fn look_for_heirs(&mut self) -> (Vec<u32>, HashSet<ProcessKey>) {
        let counted = self.look();
        (std::mem::take(&mut self.counted.heirs), counted.into_iter().collect())
    }

    /// Whether an allocator that was hooked inline still is. Its file may have been unloaded and loaded again.
    fn is_in_place(&self, pid: u32, key: FileKey) -> bool {
        let bases = self.counted.linked(pid).filter(|linked| linked.key == key).map(|linked| linked.base);
        let bases: Vec<u64> = bases.collect();
        // A process that cannot be examined now has not loaded anything.
        let Ok(target) = Target::look(pid) else { return !bases.is_empty() };
        target.found().iter().any(|found| bases.contains(&found.range.start) && found.is_hooked())
    }

    /// Whether the code that is mapped at `base` in a process is ours.
    pub fn has_mapped(&self, pid: u32, base: u64) -> bool {
        self.mapped_in(pid).any(|ours| ours == base)
    }

    /// Where our code is mapped in a process, whether or not jumps lead to it.
    fn mapped_in(&self, pid: u32) -> impl Iterator<Item = u64> {
        let prepared = self.prepared.values().map(|prepared| &prepared.linked);
        let prepared = prepared.filter(move |linked| linked.pid == pid);
        self.counted.linked(pid).chain(prepared).map(|linked| linked.base)
    }

    /// Changes the sampling interval. Each thread uses it from its next draw on. With an interval of 0, nothing is
    /// sampled from now on.
    pub fn set_draw(&mut self, draw: DrawConstants) {
        self.counted.will_sample(draw.interval);
        let changes = self.control.set(draw);
        // Children that were forked before have the interval that their parents had then.
        self.counted.look();
        let opened = self.prepared.values().filter_map(|Prepared { linked, target, .. }| {
            let memory = memory::open(linked.pid).ok()?;
            // If it is still there, it was there when its memory was opened.
            target.is_there().then_some((linked.pid, memory, linked.base))
        });
        let opened: Vec<(u32, File, u64)> = opened.collect();
        let prepared = opened.iter().map(|(pid, memory, base)| (*pid, memory, *base));
        let counted = self.counted.memories().map(|(process, memory, base)| (process.tgid, memory, base));
        for (pid, memory, base) in counted.chain(prepared) {
            write_changes(pid, memory, base, &changes);
        }
    }

    /// If processes wait when the rings are full, lets them pass as many more sites as the rings can hold. `levels` is
    /// called after their numbers of passed sites are read. `has_forked` says that there may be unknown children with
    /// inherited hooks.
    pub fn grant(&mut self, has_forked: bool, levels: impl FnOnce() -> Levels) {
        let Some(waits) = &mut self.waits else { return };
        if has_forked {
            self.counted.look();
        }
        waits.grant(self.counted.memories(), levels);
    }

    /// Whether a process is waiting for its samples to be taken in, or may have to soon.
    pub fn may_wait(&self) -> bool {
        self.waits.as_ref().is_some_and(Waits::are_likely)
    }

    /// Total time in nanoseconds that threads have waited for the recording. `None` if they never wait.
    pub fn waited_ns(&self) -> Option<u64> {
        self.waits.as_ref().map(Waits::waited_ns)
    }

    /// Ends all waits, and lets no process wait any more.
    fn end_waits(&mut self) {
        if let Some(waits) = &mut self.waits {
            waits.end(self.counted.memories());
        }
    }

    /// Finds new children, and processes that have exited or run another program. Returns those whose calls are
    /// counted.
    pub fn look(&mut self) -> Vec<ProcessKey> {
        self.take_over_done();
        let gone = self.prepared.extract_if(|_, prepared| !prepared.target.is_there());
        gone.for_each(|(_, prepared)| self.counted.closing.close(prepared.linked.links));
        self.counted.look()
    }

    /// Forgets a process that had ended at the last [`Self::look`]. `kernel` are its counts in the kernel. Returns what
    /// it has counted in addition.
    pub fn take(&mut self, process: ProcessKey, kernel: &Counters) -> Counters {
        self.decided.retain(|_, (of, _)| *of != process);
        // What was done for it is not asked for any more.
        self.take_over_done();
        self.answers.retain(|(of, _), _| *of != process);
        self.numbers.retain(|(of, _), _| *of != process);
        self.counted.take(process, kernel)
    }

    /// Forgets what was decided about programs that are not among the `living`. Returns those of them that had lost
    /// their hooks before they ended, so that the kernel may not report their ends; they are still to be taken
    /// ([`Self::take`]).
    pub fn forget_ended(&mut self, living: &HashSet<ProcessKey>) -> Vec<ProcessKey> {
        self.decided.retain(|_, decided| living.contains(&decided.0));
        self.numbers.retain(|(of, _), _| living.contains(of));
        self.answers.retain(|(of, _), _| living.contains(of));
        self.counted.ended_unlisted(living)
    }

    /// Forgets files that no process maps any more. Returns the indexes of their first sites.
    pub fn forget_files(&mut self, gone: &[FileKey]) -> Vec<u32> {
        gone.iter().filter_map(|key| self.sites.remove(key)).collect()
    }

    /// Whether a process died of the inline hooks that it has, or had until shortly before. `file` returns an
    /// allocator's file.
    pub fn blamed(&self, crash: &CrashRecord, file: &dyn Fn(FileKey) -> Option<Arc<File>>) -> Option<Blamed> {
        let ours = self.counted.ours_in(crash.process, crash.time_ns);
        ours.iter().find_map(|(key, ours)| ours.blamed(*key, crash, file(*key).as_deref()))
    }

    /// Removes the hooks from all processes, and hooks none from now on, for this reason. Their counts are kept. A
    /// process that another thread is stopping loses its hooks when that thread is done, and one that is frozen or
    /// stopped by a signal when it goes on ([`Counted::at_rest`]); nothing waits for that. Returns the processes that
    /// had hooks.
    pub fn trip(&mut self, why: &str) -> Vec<ProcessKey> {
        // At once: calls sampled from here on would not be counted. What is prepared later has these constants, too.
        self.set_draw(DrawConstants::default());
        self.end_waits();
        self.aside.skip_optional();
        self.tripped = Some(why.to_owned());
        self.counted.read();
        let busy = self.busy();
        let had = self.counted.stop(&busy);
        let prepared: Vec<(u32, FileKey)> = self.prepared.keys().copied().collect();
        prepared.into_iter().for_each(|(pid, key)| self.undo(pid, key));
        had
    }

    /// Removes the hooks from all processes.
    pub fn release_all(&mut self) {
        self.end_waits();
        self.aside.skip_optional();
        let end = Instant::now() + LONGEST_PREPARATION;
        while let Some(done) = self.aside.wait_until(end) {
            self.take_over(done);
        }
        if let Some((process, _)) = self.aside.running() {
            log::warn!("process {}: reading its files takes too long; what was mapped into it stays", process.tgid);
        }
        // No jump leads to what that thread may still map.
        self.aside = Aside::new("prepare");
        while let Some(done) = self.undoing.wait() {
            self.take_over(done);
        }
        self.undo_prepared();
        self.counted.release_all();
    }
}

impl Drop for InlineHooks {
    fn drop(&mut self) {
        self.release_all();
    }
}

/// Address in a process minus address in the file, for a file that the process executes.
///
/// # Errors
/// The process cannot be examined, or does not map the file's code, or maps it more than once.
pub fn bias(pid: u32, file: &File) -> Result<u64, Refused> {
    plan::bias(&Target::look(pid)?, file)
}

/// Changes the control page of the code that is mapped at `base`.
fn write_changes(pid: u32, memory: &File, base: u64, changes: &[(u64, Vec<u8>)]) {
    let mut writes = changes.iter().map(|(at, bytes)| memory.write_all_at(bytes, base + CONTROL + at));
    if let Err(error) = writes.try_for_each(|written| written) {
        log::debug!("process {pid} keeps its sampling interval: {error}");
    }
}

fn has_rdrand() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("rdrand");
    #[cfg(not(target_arch = "x86_64"))]
    false
}
