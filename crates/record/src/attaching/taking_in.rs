//! Processes that are hooked inline or have links of their own: when they are taken in, and what happens to them
//! afterwards. No link serves every process here.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use heapbpf_attach::files::FileKey;
use heapbpf_attach::hooks::MOST_OWN_LINKS;
use heapbpf_attach::inline::loader_is_done;
use heapbpf_host::Host;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::processes::GenerationId;
use heapbpf_host::{shadow_stacks, translation};
use heapbpf_kernel::control::CountedBy;
use heapbpf_kernel::exec_watch::{ExecWatch, Executed};
use heapbpf_kernel::{generations, totals};
use heapbpf_profile::units;
use heapbpf_remote::Waiting;
use sampler_ebpf::abi::{ProcessKey, syscall_work};

use super::modules::Unhooked;
use super::probes::{Attaching, Look, Spent, is_alive};
use super::runtimes::modules_of;
use crate::budget::activity::Activity;

/// Time for taking in processes in one turn: each is stopped for a moment, and records arrive meanwhile.
const OF_A_TURN: Duration = Duration::from_millis(20);

/// How long to wait for a program's loader. If the program stops meanwhile, it is hooked as it is.
const LOADER_LIMIT: Duration = Duration::from_millis(500);

/// Longest time that a process is held: to its entry point, and until it is hooked.
const HELD_LIMIT: Duration = Duration::from_secs(1);

/// CPU time within which a process reaches its entry point once its loader is done, ns: constructors of libraries take
/// some milliseconds.
const TO_ENTRY_NS: u64 = 10_000_000;

/// Result of an attempt to take a process in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TakenIn {
    /// Its calls are counted.
    Counted,
    /// Not possible now.
    NotYet,
    /// Not possible now, but soon: another thread is examining its files or preparing it, or another attempt comes
    /// later.
    UnderWay,
    /// Never. If it has an allocator, the remarks say why.
    Not,
}

impl TakenIn {
    /// Whether another attempt may succeed.
    pub(super) const fn may_come(self) -> bool {
        matches!(self, Self::NotYet | Self::UnderWay)
    }
}

/// The processes that are taken in.
#[derive(Debug, Default)]
pub(crate) struct Members {
    /// Processes that were taken in, and the program that they ran then.
    taken: HashMap<u32, GenerationId>,
    /// Named processes that are to be taken in.
    awaited: HashMap<u32, Awaited>,
    /// Those of them that wait at their entry point, or will.
    held: HashMap<u32, Held>,
    /// Number of times that an idle process was let go.
    pub(super) let_go: u64,
}

/// A named process that is to be taken in.
#[derive(Clone, Copy, Debug)]
struct Awaited {
    since: Instant,
    /// Its CPU time at that moment, ns.
    cpu_ns: u64,
    /// Whether it has one of the places for processes that are counted.
    has_place: bool,
}

impl Awaited {
    fn now(pid: u32) -> Self {
        Self { since: Instant::now(), cpu_ns: Spent::of_living(pid).unwrap_or(0), has_place: false }
    }
}

/// A process that waits at its entry point, or will.
#[derive(Debug)]
struct Held {
    waiting: Waiting,
    /// Whether it was there before the host's latest events were read, so that all its mappings are known.
    is_there: bool,
    /// Its CPU time when its loader was found to be done, ns.
    loaded_ns: Option<u64>,
    /// Whether it was made to wait too late: it runs beyond its entry point, or what comes before that takes long.
    has_passed: bool,
}

impl Held {
    fn look(&mut self, pid: u32) {
        if self.is_there || self.has_passed {
            return;
        }
        // Read first: it may reach the entry point in the meantime.
        let cpu_ns = loader_is_done(pid).then(|| main_thread_cpu_ns(pid)).flatten();
        self.is_there = self.waiting.is_there();
        if let Some(cpu_ns) = cpu_ns.filter(|_| !self.is_there) {
            let has_run = cpu_ns >= *self.loaded_ns.get_or_insert(cpu_ns) + TO_ENTRY_NS;
            self.has_passed = has_run || self.waiting.sleeps_elsewhere();
        }
    }
}

impl Members {
    /// Reports that idle processes were let go.
    pub(super) fn let_go_remark(&self) -> Option<String> {
        let times = match self.let_go {
            0 => return None,
            1 => "once".to_owned(),
            times => format!("{} times", units::count(times as f64)),
        };
        Some(format!(
            "an idle process was let go so that a busy one could be counted ({times}): until it is active again it is \
             not counted, and its older blocks no longer count as in use"
        ))
    }
}

impl Attaching {
    /// Whether processes are taken in one by one, and no link serves every process.
    pub(crate) const fn takes_in(&self) -> bool {
        self.inline.is_some()
    }

    /// Whether the program that a process runs was taken in.
    pub(super) fn was_taken_in(&self, generation: GenerationId) -> bool {
        self.members.taken.get(&generation.pid) == Some(&generation)
    }

    /// Whether named processes are to be taken in.
    pub(super) fn awaits_members(&self) -> bool {
        !self.members.awaited.is_empty()
    }

    /// Whether named processes wait at their entry point, or will.
    pub(super) fn holds_members(&self) -> bool {
        !self.members.held.is_empty()
    }

    /// Whether a process waits at its entry point, or will.
    pub(super) fn is_held(&self, pid: u32) -> bool {
        self.members.held.contains_key(&pid)
    }

    /// Takes over the processes that executed a program and wait, and checks which are at their entry point. The host's
    /// events must be read afterwards.
    pub(crate) fn look_at_held(&mut self) {
        while let Some(Executed { pid, held }) = self.execs.as_ref().and_then(ExecWatch::take) {
            match held {
                Ok(waiting) if !self.is_over() => {
                    let held = Held { waiting, is_there: false, loaded_ns: None, has_passed: false };
                    self.members.held.insert(pid, held);
                    // It may have been awaited since its previous program.
                    self.members.awaited.remove(&pid);
                    self.await_member(pid);
                }
                Ok(_) => {}
                Err(why) => log::debug!("process {pid} does not wait at its entry point: {why}"),
            }
        }
        for (pid, held) in &mut self.members.held {
            held.look(*pid);
        }
    }

    /// Whether a process that has been named since a given time can be taken in now.
    fn is_member_due(&self, pid: u32, since: Instant) -> bool {
        let Some(held) = self.members.held.get(&pid) else {
            return since.elapsed() >= LOADER_LIMIT || loader_is_done(pid);
        };
        since.elapsed() >= HELD_LIMIT || held.is_there || held.has_passed
    }

    /// Notes that the program that a process ran at a given time (CLOCK_MONOTONIC) is hooked.
    pub(super) fn has_hooks(&mut self, host: &Host, pid: u32, time_ns: u64) {
        let hooked = host.processes().at(pid, time_ns).map(|generation| generation.id);
        let current = host.processes().current(pid).map(|generation| generation.id);
        match hooked {
            Some(hooked) if current == Some(hooked) => {
                self.members.awaited.remove(&pid);
                self.members.taken.insert(pid, hooked);
            }
            // It has executed another program by now.
            Some(_) => self.await_member(pid),
            None => {}
        }
    }

    /// Queues a named process to be taken in once its loader is done.
    pub(super) fn await_member(&mut self, pid: u32) {
        if self.held != Some(pid) {
            self.members.awaited.entry(pid).or_insert_with(|| Awaited::now(pid));
        }
    }

    /// Handles an exec: links of the process's own were for the previous program.
    pub(super) fn member_replaced(&mut self, before: GenerationId) {
        if let Some(inline) = &mut self.inline {
            inline.forget_decisions(before.pid);
        }
        // Its loader gets the full time again.
        if let Some(awaited) = self.members.awaited.get_mut(&before.pid) {
            *awaited = Awaited::now(before.pid);
        }
        if self.was_taken_in(before) {
            self.members.taken.remove(&before.pid);
            self.no_longer_needs_links(before.pid);
        }
    }

    /// Forgets a process that has ended.
    pub(super) fn member_ended(&mut self, pid: u32) {
        self.members.taken.remove(&pid);
        self.members.awaited.remove(&pid);
        self.members.held.remove(&pid);
    }

    /// Queues the release of a process's own links, because inline hooks count it.
    pub(super) fn no_longer_needs_links(&mut self, pid: u32) {
        if self.takes_in() && self.own.remove(&pid) {
            self.left.push(pid);
            // It stays a target.
            if self.control.counted_by(pid).is_some() {
                let _ = self.control.add_target(pid, CountedBy::SharedLinks);
            }
        }
    }

    /// Frees a place for a busy process that is to be hooked: if there is none, lets the process go that has been idle
    /// longest. One that is being prepared has a place. Returns whether there is one.
    pub(crate) fn make_place(&mut self, busy: ProcessKey, now_ns: u64) -> bool {
        if self.activity.as_ref().is_some_and(|activity| activity.is_being_prepared(busy)) {
            return true;
        }
        let promised = places_of(&self.members.awaited);
        let is_full = |activity: &&Activity| !activity.has_place(busy.tgid, &promised);
        let Some(activity) = self.activity.as_ref().filter(is_full) else { return true };
        let idlest = activity.idlest_for(busy, now_ns, |process| self.may_go(process));
        let Some(idlest) = idlest else { return false };
        let has_gone = self.let_go(idlest);
        if !has_gone {
            self.activity.iter_mut().for_each(|activity| activity.stays(idlest, now_ns));
        }
        has_gone
    }

    /// Whether a process need not be counted while it is idle: it is not named, and no child shares its hooks.
    fn may_go(&self, process: ProcessKey) -> bool {
        let has_heirs = self.inline.as_ref().is_some_and(|inline| inline.counted.has_heirs(process));
        !has_heirs && !self.targets.named_alive.contains(&process.tgid)
    }

    /// Removes a process's hooks or own links until it is active again. Returns whether that was possible now.
    fn let_go(&mut self, process: ProcessKey) -> bool {
        // The kernel reports the end of a process that is listed, although nothing of it may have been sampled. It may
        // end as soon as its hooks are gone. Without children, a list would keep it a target whatever its name becomes.
        let may_list = self.follows || self.is_listed_by_all();
        let is_new = may_list
            && self.control.counted_by(process.tgid).is_none()
            && self.control.add_target(process.tgid, CountedBy::SharedLinks).is_ok();
        // It may run another program by now.
        let is_it = totals::program_of(&self.programs, process.tgid).ok().flatten() == Some(process);
        let inline = self.inline.as_mut().filter(|inline| inline.counted.runs(process));
        if !is_it || inline.is_some_and(|inline| !inline.let_go(process)) {
            if is_new {
                self.control.remove_target(process.tgid);
            }
            return false;
        }
        log::info!("process {} is idle and not counted any more, to make way for a busy one", process.tgid);
        self.no_longer_needs_links(process.tgid);
        self.members.taken.remove(&process.tgid);
        // Its program was counted, if it ends before it is hooked again.
        self.executed.refused.insert(process);
        self.members.let_go += 1;
        self.targets.let_go(process.tgid, monotonic_ns());
        if let Some(activity) = &mut self.activity {
            activity.let_go(process);
        }
        true
    }

    /// Detaches a process's own links, for as long as it runs this program.
    pub(crate) fn give_up(&mut self, process: ProcessKey) {
        self.no_longer_needs_links(process.tgid);
        self.note_given_up(process, monotonic_ns());
    }

    /// Notes that a process is not counted any more, for as long as it runs this program.
    pub(super) fn note_given_up(&mut self, process: ProcessKey, now_ns: u64) {
        self.targets.give_up(process.tgid, now_ns);
        // Another of its allocators may be being prepared.
        self.members.awaited.remove(&process.tgid);
        self.members.held.remove(&process.tgid);
        if let Some(activity) = &mut self.activity {
            activity.given_up(process);
        }
    }

    /// Whether a process that is to be taken in has a place or gets one. Processes that are given by their PID need
    /// none, nor do their descendants if there are no other targets. `promised`: those that have one because they
    /// are about to be taken in.
    pub(super) fn gets_place(&self, pid: u32, promised: &HashSet<u32>) -> bool {
        let is_free = |activity: &Activity| activity.has_place(pid, promised);
        self.targets.named_alive.contains(&pid) || self.activity.as_ref().is_none_or(is_free)
    }

    /// Takes in named processes whose loader is done. One for which there is no place runs on, and is hooked once it is
    /// busy.
    pub(super) fn take_in_members(&mut self, host: &mut Host) {
        let begun = Instant::now();
        let members = std::mem::take(&mut self.members.awaited);
        let mut promised = places_of(&members);
        for (pid, mut awaited) in members {
            if begun.elapsed() > OF_A_TURN && !self.is_held(pid) {
                self.members.awaited.insert(pid, awaited);
                continue;
            }
            let (since, before) = (awaited.since, self.members.taken.get(&pid).copied());
            // Until it is hooked, none of its calls are counted.
            if let Some(current) = host.processes().current(pid) {
                self.targets.generation_began(pid, current.since_ns);
            }
            let used_ns = Spent::of_living(pid);
            let is_over = self.is_over() || !is_alive(pid);
            let is_due = is_over || self.is_member_due(pid, since);
            if is_due && !is_over && !awaited.has_place {
                if !self.gets_place(pid, &promised) {
                    self.members.held.remove(&pid);
                    continue;
                }
                awaited.has_place = true;
                promised.insert(pid);
            }
            if !is_due || !is_over && self.take_in(host, pid).may_come() {
                self.members.awaited.insert(pid, awaited);
            } else {
                promised.remove(&pid);
                let is_late = self.members.taken.get(&pid).copied() != before && !self.is_whole(pid);
                if is_late {
                    self.note_taken_in_late(pid, awaited, used_ns);
                }
                // It may run on.
                self.members.held.remove(&pid);
            }
            if since.elapsed() >= HELD_LIMIT {
                self.members.held.remove(&pid);
            }
        }
    }

    /// Notes the CPU time that a named process used before it was taken in. It may have ended or executed another
    /// program since. `before_ns`: its CPU time shortly before.
    fn note_taken_in_late(&mut self, pid: u32, awaited: Awaited, before_ns: Option<u64>) {
        let hooked = self.inline.as_ref().and_then(|inline| inline.hooked_program(pid));
        let program = hooked.or_else(|| totals::program_of(&self.programs, pid).ok().flatten());
        if let Some((activity, program)) = self.activity.as_mut().zip(program) {
            let used_ns = Spent::of_living(pid).or(before_ns);
            activity.counted_late(program, used_ns.unwrap_or(0).saturating_sub(awaited.cpu_ns), used_ns);
        }
    }

    /// Whether a process that is taken in now has not run yet: it waits at its entry point, or the recording has not
    /// begun.
    fn is_whole(&self, pid: u32) -> bool {
        self.is_starting || self.members.held.get(&pid).is_some_and(|held| held.is_there)
    }

    /// Starts counting the calls of a running process: inline if possible, otherwise by links of its own.
    pub(crate) fn take_in(&mut self, host: &mut Host, pid: u32) -> TakenIn {
        let Some(generation) = host.processes().current(pid) else { return TakenIn::NotYet };
        let (generation, since_ns) = (generation.id, generation.since_ns);
        if self.was_taken_in(generation) {
            return TakenIn::Counted;
        }
        let modules = modules_of(host, pid);
        let aside: Vec<bool> = modules.iter().map(|module| self.is_examined_aside(host, *module)).collect();
        if aside.contains(&true) {
            return TakenIn::UnderWay;
        }
        self.targets.generation_began(pid, since_ns);
        // An allocator may call another one, whichever file was mapped first.
        for &module in &modules {
            let _ = self.file_of(host, module);
        }
        // Runtimes must be known before the first sample.
        self.find_runtimes(host, std::iter::once(pid));
        let mut is_hooked = false;
        for &module in &modules {
            match self.hook_module_in(host, module, pid) {
                Ok(_) => {
                    host.note_allocator(pid, module);
                    is_hooked = true;
                }
                Err(Unhooked::Waits) => return TakenIn::UnderWay,
                Err(Unhooked::Known | Unhooked::Gone | Unhooked::TooLate) => {}
            }
        }
        if !is_hooked {
            if self.judges_programs() {
                self.executed.refused.extend(totals::program_of(&self.programs, pid).ok().flatten());
            }
            return TakenIn::Not;
        }
        self.members.taken.insert(pid, generation);
        self.activity.iter_mut().for_each(|activity| activity.took_in(pid));
        let is_whole = self.is_whole(pid);
        // Links of its own do not count here: they may still be those of the previous program, and about to be
        // released.
        if is_whole
            && self.judges_programs()
            && let Some(inline) = &self.inline
        {
            self.executed.whole.extend(inline.hooked_program(pid));
        }
        let hooked_ns = if is_whole { 0 } else { monotonic_ns() };
        self.targets.hooked(pid, since_ns, hooked_ns);
        TakenIn::Counted
    }

    /// Whether a module's allocator is hooked inline in a process.
    pub(super) fn is_hooked_inline(&self, module: ModuleId, pid: u32) -> bool {
        let key = self.modules.get(&module).and_then(Look::file);
        self.inline.as_ref().zip(key).is_some_and(|(inline, key)| inline.has_hooked(pid, key))
    }

    /// Whether a process may have links of its own to a file; if so, notes that it has.
    pub(super) fn may_have_own_links(&mut self, pid: u32, key: FileKey) -> Result<(), String> {
        if !self.takes_in() || self.own.contains(&pid) {
            return Ok(());
        }
        if !self.programs.links_one_process {
            return Err("on this kernel, probes of one process count its first thread only".to_owned());
        }
        if self.hooks.own_links(key) >= MOST_OWN_LINKS {
            return Err(format!("{MOST_OWN_LINKS} other processes already have probes of their own on this file"));
        }
        // Last, because it reads all threads of the host.
        let work = generations::work_at_calls(self.programs.process_iterator_link(), |asked| asked == pid)
            .map_err(|it| it.to_string())?;
        if let Some(why) = forbid_probes(pid, work.get(&pid).copied().unwrap_or(0)) {
            return Err(why);
        }
        self.control.add_target(pid, CountedBy::AwaitedLinks).map_err(|error| error.to_string())?;
        self.own.insert(pid);
        Ok(())
    }

    /// Notes that a process has links of its own to a file, if it was to get them.
    pub(super) fn own_links_are_made(&mut self, pid: u32) {
        if self.control.counted_by(pid) == Some(CountedBy::AwaitedLinks) {
            let _ = self.control.add_target(pid, CountedBy::OwnLinks);
        }
    }
}

/// Those of these processes that have a place.
fn places_of(awaited: &HashMap<u32, Awaited>) -> HashSet<u32> {
    awaited.iter().filter(|(_, awaited)| awaited.has_place).map(|(pid, _)| *pid).collect()
}

/// CPU time of a process's first thread, ns (`/proc/PID/schedstat`).
fn main_thread_cpu_ns(pid: u32) -> Option<u64> {
    let process = procfs::process::Process::new(i32::try_from(pid).ok()?).ok()?;
    Some(process.schedstat().ok()?.sum_exec_runtime)
}

/// The call is uretprobe(2), since Linux 6.11: its number ends `strace -c` with SIGSEGV, and sandboxes refuse it.
const IS_SEEN: &str = "its tracer sees its system calls, and would see one that it does not know at each probed return";
const IS_DISPATCHED: &str = "it handles its own system calls, and would get SIGSYS at each probed return";

/// Why probes would harm a process; `None` if they would not. `work`: what the kernel does at its system calls
/// ([`syscall_work`]).
pub(super) fn forbid_probes(pid: u32, work: u64) -> Option<String> {
    let translated =
        |translator| format!("{translator} executes its code by translation, and it would end at the first breakpoint");
    let is_dispatched = (work & syscall_work::USER_DISPATCH != 0).then_some(IS_DISPATCHED);
    let is_seen = (work & syscall_work::TRACED != 0).then_some(IS_SEEN);
    let why = shadow_stacks::forbid_return_probes(pid).or(is_dispatched).or(is_seen);
    why.map(str::to_owned).or_else(|| translation::translator_of(pid).map(translated))
}
