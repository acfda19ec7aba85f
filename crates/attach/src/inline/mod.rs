//! Inline hooks: code mapped into a process counts its calls, and only sampled calls reach a probe.
//!
//! `plan` decides what is mapped, `counted` knows which processes count, `figures` merges the targets' own counts into
//! the kernel's. The code is mapped and linked before jumps lead to it, so each call is counted and sampled from the
//! first one on. Another thread does that, because it takes tens of milliseconds, and seconds on a busy machine; the
//! jumps are written by the thread that takes in records, because it must know from when on calls are counted.

pub mod attempts;
pub mod breaker;
pub mod cleaner;
mod control;
mod counted;
pub mod crashes;
mod credit;
mod figures;
pub mod forbidden;
mod known;
pub mod left;
mod limits;
mod loaded;
pub mod memory;
mod noted;
pub mod objects;
mod plan;
pub mod preview;
mod refused;
pub mod removal;
mod sampling;
pub mod service;
pub mod standing;
mod waits;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::CString;
use std::fs::File;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use heapbpf_host::clock::thread_cpu_time;
use heapbpf_host::priority::RaisedPriority;
use heapbpf_host::resident::anonymous_bytes;
use heapbpf_host::side_by_side::{Aside, Done};
use heapbpf_inline::abi::{CONTROL, Control, Lead};
use heapbpf_inline::fault::Layout;
use heapbpf_kernel::KernelError;
use heapbpf_kernel::generations::Generations;
use heapbpf_kernel::inline::{InlineMap, InlinePrograms};
use heapbpf_kernel::totals;
use heapbpf_probes::Table;
use heapbpf_remote::{Busy, Error as Remote, FoundBlob, Mapped, Pages, Plan, Refusal, Target};
use sampler_ebpf::abi::{Counters, CrashRecord, ProcessKey, Site};
use sampler_ebpf::geometric::DrawConstants;

use self::attempts::Attempts;
use self::breaker::{Blamed, Ours};
use self::cleaner::Cleaner;
use self::control::ControlPage;
use self::counted::{Counted, Linked, list};
use self::crashes::Builds;
pub use self::credit::{Level, Levels};
use self::known::{KnownFiles, KnownNames};
pub use self::loaded::loader_is_done;
use self::noted::Noted;
use self::objects::ObjectHook;
use self::preview::Planned;
pub use self::refused::Refused;
use self::removal::take_out;
use self::sampling::LEAST_SET_LOG2;
pub use self::sampling::{Sampling, SetBound};
use self::waits::Waits;
use crate::files::FileKey;
use crate::stop_limit;

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
    preparation: Arc<Mutex<Preparation>>,
    /// Prepares processes, and undoes that.
    aside: Aside<(ProcessKey, FileKey), Answer>,
    /// Answers of the other thread that were not used yet. Prepared processes are in `prepared`.
    answers: HashMap<(ProcessKey, FileKey), Result<Vec<Site>, Refused>>,
    /// CPU time of that thread since the last [`Self::take_spent`].
    spent: Duration,
    /// Numbers of the allocators in processes, in the order in which they were to be hooked; and the next number.
    numbers: HashMap<(ProcessKey, FileKey), u64>,
    next_number: u64,
    generations: Arc<Generations>,
    sampling: Sampling,
    control: ControlPage,
    /// Set if processes wait when their samples come too fast.
    waits: Option<Waits>,
    counted: Counted,
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
    /// Processes that had hooks after that. Children that were forked since are among them.
    stopped: Vec<ProcessKey>,
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
    pub objects: &'a [ObjectHook],
    /// Whether the caller waits until the process is prepared. Otherwise another thread prepares it in the meantime.
    pub is_at_once: bool,
    /// Whether the process waits at its entry point, for a second at most.
    pub is_held: bool,
}

/// What is needed to prepare any process.
struct Preparation {
    programs: InlinePrograms,
    files: KnownFiles,
    names: KnownNames,
}

/// An allocator in a process that is to be prepared.
struct Order {
    process: ProcessKey,
    key: FileKey,
    path: String,
    file: Arc<File>,
    table: Table,
    objects: Vec<ObjectHook>,
    /// Index of the file's first site, if its sites were added.
    first_site: Option<u32>,
    control: Control,
    sampling: Sampling,
    /// Where this heapbpf's code for other allocators is in the process.
    bases: Vec<u64>,
}

/// Result of an order, and the CPU time that it took.
type Answer = (Result<Outcome, Refused>, Duration);

enum Outcome {
    /// These sites of the file must be added first.
    Sites(Vec<Site>),
    Prepared(Box<Prepared>),
    Undone,
}

/// A process in which everything except the jumps is in place.
struct Prepared {
    process: ProcessKey,
    /// The control page as it was written.
    control: Control,
    target: Target,
    plan: Plan,
    mapped: Mapped,
    linked: Linked,
    /// Words that lead an interpreter to the mapped code.
    leads: Vec<Lead>,
    /// The set of sampled blocks has 2^`set_log2` entries.
    set_log2: u32,
}

impl Prepared {
    /// Restores the process, except for what is mapped. The next attempt reuses that.
    fn undo(self) {
        let Self { target, linked, .. } = self;
        drop(linked);
        take_out(target.pid().unsigned_abs());
    }
}

impl Preparation {
    /// Maps everything into a process, and links the programs. No jump leads there yet.
    fn prepare(&mut self, order: &Order) -> Result<Outcome, Refused> {
        let Order { process, key, sampling, control, .. } = *order;
        let (pid, file) = (process.tgid, &*order.file);
        let builds = Builds::of(pid, file);
        crashes::check(builds.as_ref())?;
        let known = self.files.functions((&order.path, file), &order.table)?;
        let Some(first_site) = order.first_site else {
            return Ok(Outcome::Sites(known.found.functions.iter().map(|function| function.site).collect()));
        };
        // A process may have several allocators, each with its own hook code.
        let is_ours = |found: &FoundBlob| order.bases.contains(&found.range.start);
        let target = removal::without_what_was_left(pid, &is_ours)?;
        // It may run another program than when this was ordered.
        forbidden::check(pid)?;
        let (set_log2, bound) = sampling.set(anonymous_bytes(pid).unwrap_or(0), limits::most_set_bytes(pid));
        let settings = preview::Sampled { criterion: sampling.criterion, set_log2, control };
        let place = plan::place(&target, file)?;
        let objects: Vec<ObjectHook> = order.objects.iter().map(|hook| hook.relative_to(first_site)).collect();
        let what = (known.as_ref(), objects.as_slice());
        let Planned { plan, leads, originals, text, set_log2, lacks } =
            preview::plan((&target, &place), what, &self.names, file, (&settings, true))?;
        let mapped = target.map(&plan, stop_limit()).map_err(|error| removal::reason(pid, error));
        let mapped = mapped.inspect_err(|_| take_out(pid))?.outcome;
        let pages = plan.draft().pages.iter().map(Pages::range).collect();
        let layout = Layout { mapped: plan.range(), originals, pages };
        let from_file = place.mapping.range.start.wrapping_sub(place.mapping.offset);
        let ours = Ours { layout, from_file, builds };
        let set_bound = lacks.map_or(bound, SetBound::Limit);
        let linked = self.link((pid, key), (plan.draft().base, text), first_site, (ours, set_bound))?;
        Ok(Outcome::Prepared(Box::new(Prepared { process, control, target, plan, mapped, linked, leads, set_log2 })))
    }

    /// Links the programs to the code that is mapped at `base`. `locked` is its memfd if we already hold its lock.
    fn link(
        &self,
        (pid, key): (u32, FileKey),
        (base, locked): (u64, Option<File>),
        first_site: u32,
        (ours, set_bound): (Ours, SetBound),
    ) -> Result<Linked, Refused> {
        let text = match locked {
            Some(text) => text,
            None => {
                let range = base..base + heapbpf_inline::abi::TEXT_BYTES;
                let text = left::open_mapped(pid, &range).map_err(|source| match source.kind() {
                    std::io::ErrorKind::NotFound => Refused::Claimed,
                    _ => Refused::Read { what: "the mapped code", source },
                })?;
                text.try_lock().map_err(|_| Refused::Claimed)?;
                text
            }
        };
        let path = CString::new(format!("/proc/self/fd/{}", text.as_raw_fd())).unwrap_or_default();
        let code = heapbpf_inline_blob::code().ok_or(Refused::Machine)?;
        let links = self.programs.link(&path, &heapbpf_inline::site_offsets(&code), first_site)?;
        Ok(Linked { pid, key, base, text, links, ours: Arc::new(ours), set_bound })
    }
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
            preparation: Arc::new(Mutex::new(Preparation { programs, files, names })),
            aside: Aside::new("prepare"),
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

    /// Tries to hook an allocator in a process. If hooking was refused for good, also returns the reason.
    pub fn attempt(
        &mut self,
        (process, key): (ProcessKey, FileKey),
        file: (&str, &Arc<File>),
        wanted: HookRequest<'_>,
        add_sites: &mut dyn FnMut(&[Site]) -> Result<u32, KernelError>,
    ) -> (Service, Option<Refused>) {
        let pid = process.tgid;
        if self.counted.is_child(process) {
            let is_hooked = self.counted.has_hooks_of(process, key);
            return (if is_hooked { Service::Inline } else { Service::Probes }, None);
        }
        // It was hooked as the previous program, before we heard of its exec.
        if self.counted.has_hooks_of(process, key) && self.is_in_place(pid, key) {
            self.decided.insert((pid, key), (process, Service::Inline));
            return (Service::Inline, None);
        }
        let mut attempts = match self.decided.get(&(pid, key)) {
            Some((_, Service::Waits { attempts, .. })) => *attempts,
            _ => Attempts::default(),
        };
        let Some(prepared) = self.ready((process, key), file, wanted, add_sites).transpose() else {
            let service = Service::Waits { attempts, until: Instant::now() };
            self.decided.insert((pid, key), (process, service));
            return (service, None);
        };
        let hooked = prepared.and_then(|prepared| {
            // It was prepared before the earlier attempts.
            if attempts != Attempts::default() && limits::is_frozen(pid) {
                self.undo_aside(prepared);
                return Err(Refusal::Frozen.into());
            }
            self.hook(prepared, wanted.sampled)
        });
        let (service, refused) = match hooked {
            Ok(()) => (Service::Inline, None),
            Err(refused) => match attempts.failed().filter(|pause| refused.may_pass_in(*pause)) {
                Some(pause) => {
                    log::info!("process {pid} is not counted from inside yet: {refused}; next attempt in {pause:?}");
                    (Service::Waits { attempts, until: Instant::now() + pause }, None)
                }
                None => {
                    self.undo(pid, key);
                    (Service::Probes, Some(refused))
                }
            },
        };
        self.decided.insert((pid, key), (process, service));
        (service, refused)
    }

    /// Returns the work of reading files that will most likely be hooked, for any thread. Without it, they are read when
    /// the first process is prepared.
    pub fn read_ahead(&self, files: Vec<(String, Arc<File>)>, table: Table) -> Box<dyn FnOnce() + Send> {
        let preparation = Arc::clone(&self.preparation);
        Box::new(move || {
            let mut preparation = preparation.lock().unwrap_or_else(PoisonError::into_inner);
            for (path, file) in files {
                // What is wrong with a file is reported when it is to be hooked.
                let _ = preparation.files.functions((&path, &*file), &table);
            }
        })
    }

    /// Everything except the jumps for an allocator in a process; `None` if another thread is still preparing it.
    /// `add_sites` adds sites and returns the index of the first.
    fn ready(
        &mut self,
        (process, key): (ProcessKey, FileKey),
        file: (&str, &Arc<File>),
        wanted: HookRequest<'_>,
        add_sites: &mut dyn FnMut(&[Site]) -> Result<u32, KernelError>,
    ) -> Result<Option<Prepared>, Refused> {
        let pid = process.tgid;
        forbidden::check(pid)?;
        self.tripped.clone().map_or(Ok(()), |why| Err(Refused::Tripped(why)))?;
        loop {
            // Only one thread at a time can stop a process.
            let is_preparing = self.is_preparing(pid);
            // What was prepared in another process generation with this PID is gone with that generation's memory.
            if !is_preparing && let Some(prepared) = self.prepared.remove(&(pid, key)) {
                match (prepared.target.is_there(), wanted.is_at_once) {
                    (true, _) if prepared.process == process => return Ok(Some(prepared)),
                    // It was ordered for the previous program, but made in this one.
                    (true, _) => self.undo_aside(prepared),
                    // A thread that begins now to close the links might keep rights that the recording drops.
                    (false, true) => drop(prepared),
                    (false, false) => self.counted.close(prepared.linked),
                }
                continue;
            }
            if let Some(sites) = self.answers.remove(&(process, key)).transpose()?
                && !self.sites.contains_key(&key)
            {
                self.sites.insert(key, add_sites(&sites)?);
            }
            let done = match (is_preparing, wanted.is_at_once) {
                (true, true) => self.aside.wait(),
                (true, false) => return Ok(None),
                (false, true) => {
                    // A thread that begins now might keep rights that the recording drops.
                    let order = self.order((process, key), file, wanted);
                    let outcome = self.preparation.lock().unwrap_or_else(PoisonError::into_inner).prepare(&order);
                    Some(((process, key), Some((outcome, Duration::ZERO))))
                }
                (false, false) => {
                    let order = self.order((process, key), file, wanted);
                    let has_begun = self.begin(order, wanted.is_held);
                    let failed = || Refused::Plan("no thread can be started to prepare it".to_owned());
                    return if has_begun { Ok(None) } else { Err(failed()) };
                }
            };
            done.into_iter().for_each(|done| self.take_over(done));
        }
    }

    /// What to prepare.
    fn order(
        &mut self,
        (process, key): (ProcessKey, FileKey),
        (path, file): (&str, &Arc<File>),
        wanted: HookRequest<'_>,
    ) -> Order {
        let number = *self.numbers.entry((process, key)).or_insert(self.next_number);
        self.next_number = self.next_number.max(number + 1);
        let mut control = self.control.of_number(number);
        if !limits::may_wait(process.tgid) {
            (control.granted, control.most_pauses) = (0, 0);
        }
        Order {
            process,
            key,
            path: path.to_owned(),
            file: Arc::clone(file),
            table: wanted.table.clone(),
            objects: wanted.objects.to_vec(),
            first_site: self.sites.get(&key).copied(),
            control,
            sampling: self.sampling,
            bases: self.mapped_in(process.tgid).collect(),
        }
    }

    /// Begins to prepare an allocator in a process on the other thread. Returns whether that was possible.
    fn begin(&mut self, order: Order, is_held: bool) -> bool {
        let preparation = Arc::clone(&self.preparation);
        let key = (order.process, order.key);
        let prepare = move || {
            let _raised = is_held.then(RaisedPriority::begin);
            let begun = thread_cpu_time();
            let outcome = preparation.lock().unwrap_or_else(PoisonError::into_inner).prepare(&order);
            (outcome, thread_cpu_time().saturating_sub(begun))
        };
        self.aside.begin_optional(key, prepare, (Ok(Outcome::Undone), Duration::ZERO))
    }

    /// Whether another thread is preparing an allocator of a process, or undoing that.
    fn is_preparing(&mut self, pid: u32) -> bool {
        self.take_over_done();
        self.prepares(pid)
    }

    /// Whether another thread is, or was at the last check, preparing an allocator of a process: what appears there is
    /// most likely our own code, which is known once that thread is done.
    pub fn prepares(&self, pid: u32) -> bool {
        self.aside.under_way().iter().any(|(process, _)| process.tgid == pid)
    }

    /// Takes over what the other thread has done since the last call.
    fn take_over_done(&mut self) {
        let mut is_any = false;
        while let Some(done) = self.aside.next_done() {
            is_any = true;
            self.take_over(done);
        }
        // What `trip` had to leave alone.
        if self.tripped.is_some() && (is_any && self.counted.has_links() || self.counted.has_any_gone_on()) {
            let busy = self.busy();
            let had = self.counted.stop(&busy);
            self.stopped.extend(had);
        }
    }

    /// Processes that another thread may stop: only one thread at a time can.
    fn busy(&self) -> HashSet<u32> {
        self.aside.under_way().iter().map(|(process, _)| process.tgid).collect()
    }

    /// Takes over an answer of the other thread.
    fn take_over(&mut self, ((process, key), done): Done<(ProcessKey, FileKey), Answer>) {
        let panicked = || (Err(Refused::Plan("an error inside heapbpf".to_owned())), Duration::ZERO);
        let (outcome, spent) = done.unwrap_or_else(panicked);
        self.spent += spent;
        let answer = match outcome {
            Ok(Outcome::Undone) => return,
            Ok(Outcome::Prepared(prepared)) => return self.keep(*prepared),
            Ok(Outcome::Sites(sites)) => Ok(sites),
            Err(refused) => Err(refused),
        };
        // Nobody asks for what was done for a process that has ended.
        if self.numbers.contains_key(&(process, key)) {
            self.answers.insert((process, key), answer);
        }
    }

    /// Keeps a prepared process until its jumps can be written. The sampling interval may have changed meanwhile.
    fn keep(&mut self, prepared: Prepared) {
        let Linked { pid, key, base, .. } = prepared.linked;
        let changes = self.control.changes_since(&prepared.control);
        // If it is still there, it was there when its memory was opened.
        if !changes.is_empty()
            && let Ok(memory) = memory::open(pid)
            && prepared.target.is_there()
        {
            write_changes(pid, &memory, base, &changes);
        }
        self.prepared.insert((pid, key), prepared);
        if self.tripped.is_some() {
            self.undo(pid, key);
        }
    }

    /// CPU time of the other thread since the last call.
    pub const fn take_spent(&mut self) -> Duration {
        std::mem::replace(&mut self.spent, Duration::ZERO)
    }

    /// Restores a process that was prepared, on the other thread.
    fn undo(&mut self, pid: u32, key: FileKey) {
        if let Some(prepared) = self.prepared.remove(&(pid, key)) {
            self.undo_aside(prepared);
        }
    }

    fn undo_aside(&mut self, prepared: Prepared) {
        if !self.aside.is_started() {
            return prepared.undo();
        }
        self.aside.begin((prepared.process, prepared.linked.key), move || {
            let begun = thread_cpu_time();
            prepared.undo();
            (Ok(Outcome::Undone), thread_cpu_time().saturating_sub(begun))
        });
    }

    /// Writes the jumps of a prepared process. If that is not possible, the process continues as before.
    fn hook(&mut self, prepared: Prepared, sampled: &[u64]) -> Result<(), Refused> {
        let (process, key, base) = (prepared.process, prepared.linked.key, prepared.linked.base);
        let pid = process.tgid;
        if self.waits.is_some() {
            Waits::begin(pid, base);
        }
        if let Err(refused) = note(&prepared, sampled) {
            self.undo_aside(prepared);
            return Err(refused);
        }
        let Prepared { target, plan, mapped, .. } = &prepared;
        let (generations, map) = (Arc::clone(&self.generations), self.counted.map());
        let (sender, not_listed) = mpsc::channel();
        // An exec that we have not heard of yet would make it look like a different process.
        let is_it = move || {
            let listed = || list(&map, process, base).map_err(|refused| sender.send(refused));
            generations.lives_alone(process) && listed().is_ok()
        };
        let error = match target.replace_if(plan, mapped, stop_limit(), is_it) {
            Ok(stopped) => {
                log::info!("process {pid}: counted from inside, stopped for {:?}", stopped.time);
                self.counted.add(process, prepared.linked);
                self.lead(pid, &prepared.leads);
                return Ok(());
            }
            Err(error) => removal::reason(pid, error),
        };
        self.counted.note_taken_from(process, key, Arc::clone(&prepared.linked.ours));
        self.counted.unlist(process, base);
        let refused = not_listed.try_recv().unwrap_or_else(|_| error.into());
        match &refused {
            // Nothing was changed.
            Refused::Hook(Remote::Busy { why: Busy::Slow | Busy::Position | Busy::NotNow | Busy::InCall, .. }) => {
                self.prepared.insert((pid, key), prepared);
            }
            _ => self.undo_aside(prepared),
        }
        Err(refused)
    }

    /// Makes an interpreter's object allocator count in the mapped code, if requested.
    fn lead(&mut self, pid: u32, leads: &[Lead]) {
        if !leads.is_empty() {
            self.led.insert(pid, objects::lead(pid, leads).map_err(|error| error.to_string()));
        }
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
        self.decided.values().any(is_inline) || self.has_inherited(pid)
    }

    /// Whether calls of a process generation are counted inline, by its own or inherited hooks.
    pub fn is_counted(&self, process: ProcessKey) -> bool {
        self.counted.runs(process)
    }

    /// All process generations whose calls are counted inline.
    pub fn all_counted(&self) -> HashSet<ProcessKey> {
        self.counted.all_that_run()
    }

    /// Whether another process has the hooks that were made in this one.
    pub fn has_heirs(&self, process: ProcessKey) -> bool {
        self.counted.has_heirs(process)
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

    /// Looks for children with inherited hooks. Returns the PIDs of those found since the last call.
    pub fn look_for_heirs(&mut self) -> Vec<u32> {
        self.look();
        self.counted.take_heirs()
    }

    /// Whether an allocator that was hooked inline still is. Its file may have been unloaded and loaded again.
    fn is_in_place(&self, pid: u32, key: FileKey) -> bool {
        let bases = self.counted.linked(pid).filter(|linked| linked.key == key).map(|linked| linked.base);
        let bases: Vec<u64> = bases.collect();
        // A process that cannot be examined now has not loaded anything.
        let Ok(target) = Target::look(pid) else { return !bases.is_empty() };
        target.found().iter().any(|found| bases.contains(&found.range.start) && found.is_hooked())
    }

    /// Whether a process began with hooks inherited from its parent. Takes a while if there are thousands of processes.
    pub fn has_inherited(&self, pid: u32) -> bool {
        self.counted.has_inherited(pid)
    }

    /// All processes that began with hooks inherited from their parents.
    pub fn heirs(&self) -> HashSet<u32> {
        self.counted.all_heirs()
    }

    /// Whether a process generation has inherited hooks. Takes no time.
    pub fn is_child(&self, process: ProcessKey) -> bool {
        self.counted.is_child(process)
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

    /// Reads the counts of hooked processes. Must be called before and after the kernel's counters are read.
    pub fn read(&mut self) {
        self.counted.read();
    }

    /// Adds the counts of hooked processes to the kernel's counters.
    pub fn add_to(&mut self, counts: &mut totals::Counts) {
        self.counted.add_to(counts);
    }

    /// Finds new children, and processes that have exited or run another program.
    pub fn look(&mut self) {
        self.take_over_done();
        let gone = self.prepared.extract_if(|_, prepared| !prepared.target.is_there());
        gone.for_each(|(_, prepared)| self.counted.close(prepared.linked));
        self.counted.look();
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

    /// Samples that did not fit into the set in their process, by what kept the set from being larger. `counts`: of the
    /// processes that have not been taken ([`Self::take`]).
    pub fn sets_full(&self, counts: &totals::Counts) -> BTreeMap<SetBound, u64> {
        self.counted.sets_full(counts)
    }

    /// Number of processes with uncounted calls: at their end, because something else removed the hooks, or because
    /// they reported impossible counts.
    pub fn incomplete(&self) -> u64 {
        let distrusted = self.counted.distrusted().len() as u64;
        self.counted.unread_ends() + self.counted.taken_out() + distrusted
    }

    /// Whether a process reported impossible counts. Only its sampled calls are in its totals.
    pub fn distrusts(&self, process: ProcessKey) -> bool {
        self.counted.distrusted().contains(&process)
    }

    /// Forgets files that no process maps any more. Returns the indexes of their first sites.
    pub fn forget_files(&mut self, gone: &[FileKey]) -> Vec<u32> {
        gone.iter().filter_map(|key| self.sites.remove(key)).collect()
    }

    /// Processes that reported impossible counts and have not ended, as far as is known.
    pub fn distrusted(&self) -> impl Iterator<Item = ProcessKey> {
        self.counted.distrusted_now()
    }

    /// Whether a process died of the inline hooks that it has, or had until shortly before. `file` returns an
    /// allocator's file.
    pub fn blamed(&self, crash: &CrashRecord, file: &dyn Fn(FileKey) -> Option<Arc<File>>) -> Option<Blamed> {
        let ours = self.counted.ours_in(crash.process, crash.time_ns);
        ours.iter().find_map(|(key, ours)| ours.blamed(*key, crash, file(*key).as_deref()))
    }

    /// Removes the hooks from all processes, and hooks none from now on, for this reason. Their counts are kept. A
    /// process that another thread is stopping loses its hooks when that thread is done, and one that is frozen or
    /// stopped by a signal when it goes on ([`Self::at_rest`]); nothing waits for that. Returns the processes that had
    /// hooks.
    pub fn trip(&mut self, why: &str) -> Vec<ProcessKey> {
        // At once: calls sampled from here on would not be counted. What is prepared later has these constants, too.
        self.set_draw(DrawConstants::default());
        self.end_waits();
        self.aside.skip_optional();
        self.tripped = Some(why.to_owned());
        self.read();
        let busy = self.busy();
        let had = self.counted.stop(&busy);
        let prepared: Vec<(u32, FileKey)> = self.prepared.keys().copied().collect();
        prepared.into_iter().for_each(|(pid, key)| self.undo(pid, key));
        had
    }

    /// Number of processes that keep their hooks after [`Self::trip`] until they go on.
    pub fn at_rest(&self) -> usize {
        self.counted.at_rest()
    }

    /// Returns the processes that still had hooks after [`Self::trip`], and have lost them since the last call or are
    /// about to.
    pub fn take_stopped(&mut self) -> Vec<ProcessKey> {
        std::mem::take(&mut self.stopped)
    }

    /// Removes the hooks from all processes.
    pub fn release_all(&mut self) {
        self.end_waits();
        self.aside.skip_optional();
        while let Some(done) = self.aside.wait() {
            self.take_over(done);
        }
        self.prepared.drain().for_each(|(_, prepared)| prepared.undo());
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

/// Tells the mapped code, to which no jump leads yet, about blocks that have already been sampled.
fn note(prepared: &Prepared, sampled: &[u64]) -> Result<(), Refused> {
    if sampled.is_empty() {
        return Ok(());
    }
    let failed = |source| Refused::Read { what: "the target's memory", source };
    let Linked { pid, base, .. } = prepared.linked;
    Noted::new((memory::open(pid).map_err(failed)?, base), prepared.set_log2).add(sampled)
}

#[cfg(target_arch = "x86_64")]
fn has_rdrand() -> bool {
    std::arch::is_x86_feature_detected!("rdrand")
}

#[cfg(not(target_arch = "x86_64"))]
const fn has_rdrand() -> bool {
    false
}
