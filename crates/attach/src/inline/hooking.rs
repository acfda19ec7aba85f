//! Attempts to hook an allocator in a process: its preparation on another thread, and then the jumps.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, mpsc};
use std::thread::Builder;
use std::time::{Duration, Instant};

use heapbpf_host::clock::thread_cpu_time;
use heapbpf_host::priority::RaisedPriority;
use heapbpf_host::side_by_side::Done;
use heapbpf_inline::abi::Lead;
use heapbpf_kernel::KernelError;
use heapbpf_probes::Table;
use heapbpf_remote::{Busy, Error as Remote, Refusal};
use sampler_ebpf::abi::{ProcessKey, Site};

use super::attempts::Attempts;
use super::counted::{Linked, list};
use super::may_be_hooked::Refused;
use super::preparation::{Answer, Order, Outcome, Prepared};
use super::waits::Waits;
use super::{HookRequest, InlineHooks, Service, forbidden, limits, memory, objects, removal, write_changes};
use crate::files::FileKey;
use crate::stop_limit;

impl InlineHooks {
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
        let spared_calls = attempts.spares_calls();
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
                    let not_yet = format!("process {pid} is not counted from inside yet: {refused}");
                    // About a second has passed, and the recording waits for it.
                    if wanted.is_at_once && spared_calls && !attempts.spares_calls() {
                        log::warn!("{not_yet}; it is tried again for up to {:?}", attempts.left());
                    }
                    log::info!("{not_yet}; next attempt in {pause:?}");
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

    /// Begins to prepare allocators that [`Self::attempt`] is to hook later: one in each process, with the path and the
    /// file. Waits first for those that were begun before. Other threads do the work while the caller hooks others.
    /// They have ended once [`Self::undo_prepared`] returns. An allocator whose sites were not added yet is left out.
    pub fn begin_ahead(&mut self, allocators: Vec<(ProcessKey, FileKey, String, Arc<File>)>, table: &Table) {
        self.end_ahead();
        let wanted = HookRequest { table, sampled: &[], objects: &[], is_at_once: true, is_held: false };
        let mut orders = Vec::new();
        for (process, key, path, file) in allocators {
            if self.sites.contains_key(&key) && forbidden::check(process.tgid).is_ok() {
                orders.push(self.order((process, key), (path.as_str(), &file), wanted));
            }
        }
        if !orders.is_empty() {
            let preparation = Arc::clone(&self.preparation);
            let run = move || preparation.prepare_all(orders);
            // Without a thread, each is prepared when it is to be hooked.
            self.ahead = Builder::new().name("heapbpf-ahead".into()).spawn(run).ok();
        }
    }

    /// Waits until what [`Self::begin_ahead`] began is done.
    fn end_ahead(&mut self) {
        // If it panics, that is reported when these processes are to be hooked.
        let done = self.ahead.take().and_then(|ahead| ahead.join().ok());
        done.into_iter().flatten().for_each(|done| self.take_over(done));
    }

    /// Restores processes that were prepared and not hooked.
    pub fn undo_prepared(&mut self) {
        self.end_ahead();
        self.prepared.drain().for_each(|(_, prepared)| prepared.undo());
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
                    (false, false) => self.counted.closing.close(prepared.linked.links),
                }
                continue;
            }
            let answer = self.answers.remove(&(process, key)).transpose()?;
            if !self.sites.contains_key(&key)
                && let Some(sites) = answer.or_else(|| self.preparation.files.known(file.1).map(|known| known.sites()))
            {
                self.sites.insert(key, add_sites(&sites)?);
            }
            let done = match (is_preparing, wanted.is_at_once) {
                (true, true) => self.undoing.wait().or_else(|| self.aside.wait()),
                (true, false) => return Ok(None),
                (false, true) => {
                    // A thread that begins now might keep rights that the recording drops.
                    let order = self.order((process, key), file, wanted);
                    let outcome = self.preparation.prepare(&order);
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
            let outcome = preparation.prepare(&order);
            (outcome, thread_cpu_time().saturating_sub(begun))
        };
        self.aside.begin_optional(key, prepare, (Ok(Outcome::Undone), Duration::ZERO))
    }

    /// Whether another thread is preparing an allocator of a process, or undoing that.
    pub(super) fn is_preparing(&mut self, pid: u32) -> bool {
        self.take_over_done();
        self.prepares(pid)
    }

    /// Whether another thread is, or was at the last check, preparing an allocator of a process: what appears there is
    /// most likely our own code, which is known once that thread is done.
    pub fn prepares(&self, pid: u32) -> bool {
        self.under_way().any(|process| process.tgid == pid)
    }

    /// The processes whose allocators other threads are preparing, or undoing that.
    fn under_way(&self) -> impl Iterator<Item = &ProcessKey> {
        self.aside.under_way().iter().chain(self.undoing.under_way()).map(|(process, _)| process)
    }

    /// Takes over what the other threads have done since the last call.
    pub(super) fn take_over_done(&mut self) {
        let mut is_any = false;
        while let Some(done) = self.aside.next_done().or_else(|| self.undoing.next_done()) {
            is_any = true;
            self.take_over(done);
        }
        // What `trip` had to leave alone.
        if self.tripped.is_some() && (is_any && !self.counted.linked.is_empty() || self.counted.has_any_gone_on()) {
            let busy = self.busy();
            let had = self.counted.stop(&busy);
            self.stopped.extend(had);
        }
    }

    /// Processes that another thread may stop: only one thread at a time can.
    pub(super) fn busy(&self) -> HashSet<u32> {
        self.under_way().map(|process| process.tgid).collect()
    }

    /// Takes over an answer of the other thread.
    pub(super) fn take_over(&mut self, ((process, key), done): Done<(ProcessKey, FileKey), Answer>) {
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

    /// Restores a process that was prepared, on another thread.
    pub(super) fn undo(&mut self, pid: u32, key: FileKey) {
        if let Some(prepared) = self.prepared.remove(&(pid, key)) {
            self.undo_aside(prepared);
        }
    }

    fn undo_aside(&mut self, prepared: Prepared) {
        let process = prepared.process;
        // Only one thread at a time can stop a process.
        let is_stopped = self.aside.under_way().iter().any(|(other, _)| other.tgid == process.tgid);
        if !self.aside.is_started() || !self.undoing.starts() {
            return prepared.undo();
        }
        let thread = if is_stopped { &mut self.aside } else { &mut self.undoing };
        thread.begin((process, prepared.linked.key), move || {
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
        let (generations, map) = (Arc::clone(&self.generations), self.counted.map.clone());
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
}

/// Tells the mapped code, to which no jump leads yet, about blocks that have already been sampled.
fn note(prepared: &Prepared, sampled: &[u64]) -> Result<(), Refused> {
    if sampled.is_empty() {
        return Ok(());
    }
    let Linked { pid, base, .. } = prepared.linked;
    let writes = heapbpf_inline::noted::writes(prepared.set_log2, sampled).ok_or(Refused::Blocks)?;
    let written = memory::open(pid)
        .and_then(|memory| writes.iter().try_for_each(|(at, bytes)| memory.write_all_at(bytes, base + at)));
    written.map_err(|source| Refused::Read { what: "the target's memory", source })
}
