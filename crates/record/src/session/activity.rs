//! Hooks processes inline. On whole hosts, by names and by cgroups, that happens as they become active; a `-- COMMAND`
//! is hooked at its entry point, where its libraries are mapped. Until then, probes count its calls.

use std::sync::Arc;
use std::thread::{Builder, ScopedJoinHandle};
use std::time::{Duration, Instant};

use heapbpf_attach::inline::forbidden;
use heapbpf_host::clock::{monotonic_ns, thread_cpu_time};
use heapbpf_host::helper::is_helper;
use heapbpf_host::process::ProcessInfo;
use heapbpf_kernel::KernelError;
use heapbpf_kernel::exec_watch::{ExecRing, ExecWatch};
use heapbpf_kernel::generations::threads;
use heapbpf_remote::{NotHeld, Waiting};
use sampler_ebpf::abi::{LiveValue, LivingThread, ProcessKey};

use super::errors::Step;
use super::state::Session;
use crate::attaching::probes::Spent;
use crate::attaching::taking_in::TakenIn;
use crate::budget::activity::Activity;

/// Shortest and longest time between two attempts to hook a process for which another thread is working, ns. In
/// between, it is half of what that has taken so far: each attempt costs a turn of the loop, and on a busy host the
/// other thread waits for a processor.
const SHORTEST_PAUSE_NS: u64 = 5_000_000;
const LONGEST_PAUSE_NS: u64 = 40_000_000;
/// Time that a command may take to reach its entry point. After that, it is no longer awaited.
const LONGEST_START: Duration = Duration::from_secs(5);
/// A program that a target executes continues by itself after this time, if it has not been released before.
const HELD_AT_MOST: Duration = Duration::from_secs(2);
/// Pause between two checks whether a command has reached its entry point.
const START_PAUSE: Duration = Duration::from_micros(500);

impl Session {
    /// Checks the CPU time of all processes, if it is time, or hooks the busiest that is not counted yet. Hooks one at
    /// a time, so that records are taken in between.
    pub(super) fn take_in_active(&mut self) {
        let now_ns = monotonic_ns();
        if self.go_on_with_prepared(now_ns) {
            return;
        }
        if let Some(process) = self.due.pop() {
            self.take_in_one(process, now_ns);
            return;
        }
        let next_ns = self.attaching.activity.as_ref().map(Activity::next_ns);
        if next_ns.is_none_or(|next_ns| now_ns < next_ns) || !self.errors.may_try(Step::Census, now_ns) {
            return;
        }
        let due = self.look_at_activity().map(|(_, due)| due).unwrap_or_default();
        if self.attaching.is_over() {
            return;
        }
        // The busiest is taken from the end.
        for process in due.into_iter().rev() {
            // The helper process that stops processes would have to stop itself.
            let is_ours = process.tgid == std::process::id() || is_helper(process.tgid);
            if !is_ours && self.attaching.is_active_target(&mut self.host, process) {
                self.due.push(process);
            } else if let Some(activity) = &mut self.attaching.activity {
                // We are always busy. If we were passed over, we would keep ourselves awake.
                if is_ours { activity.refused(process) } else { activity.pass_over(process, now_ns) }
            }
        }
    }

    /// Tries again to hook the processes for which another thread was working, if it is time, up to the first for which
    /// none works any more. Returns whether there was any.
    fn go_on_with_prepared(&mut self, now_ns: u64) -> bool {
        let mut is_any = false;
        for _ in 0..self.under_way.len() {
            let Some((at_ns, process)) = self.under_way.pop_front() else { break };
            if at_ns > now_ns {
                self.under_way.push_back((at_ns, process));
                continue;
            }
            is_any = true;
            if !self.take_in_one(process, now_ns) {
                break;
            }
        }
        is_any
    }

    /// Updates the CPU time of all processes, only for figures: which processes to hook is decided at its own time.
    /// Returns all threads of the host, if they were read.
    pub(super) fn note_activity(&mut self) -> Option<Vec<LivingThread>> {
        let next_ns = self.attaching.activity.as_ref().map(Activity::next_ns);
        let (threads, _) = self.look_at_activity()?;
        if let (Some(activity), Some(next_ns)) = (&mut self.attaching.activity, next_ns) {
            activity.is_due_at(next_ns);
        }
        Some(threads)
    }

    /// Updates the CPU time of all processes. Returns all threads of the host, and the processes that should be hooked
    /// now, the busiest first.
    fn look_at_activity(&mut self) -> Option<(Vec<LivingThread>, Vec<ProcessKey>)> {
        self.attaching.activity.as_ref()?;
        let (now_ns, begun) = (monotonic_ns(), thread_cpu_time());
        let read = threads(self.attaching.programs.process_iterator_link());
        let threads = self.errors.note(Step::Census, read, now_ns)?;
        let counted = self.attaching.note_heirs();
        self.end_unlisted(&threads, now_ns);
        let due = self.attaching.look_at_activity(&mut self.host, &threads, &counted, now_ns);
        let took = thread_cpu_time().saturating_sub(begun);
        self.attaching.activity.iter_mut().for_each(|activity| activity.check_took(took.as_nanos() as u64));
        Some((threads, due))
    }

    /// Hooks a process that is due, or goes on with one for which another thread was working. Returns whether another
    /// thread is working for it now.
    fn take_in_one(&mut self, process: ProcessKey, now_ns: u64) -> bool {
        let activity = self.attaching.activity.as_ref();
        let Some(activity) = activity.filter(|it| !it.is_spent() || it.is_being_prepared(process)) else {
            self.due.clear();
            return false;
        };
        // It may have been given up, or have executed another program.
        if !activity.awaits_hooks(process) {
            return false;
        }
        // It may end as soon as it is hooked.
        let used_before = Spent::of_living(process.tgid);
        let begun = thread_cpu_time();
        let has_place = self.attaching.make_place(process, now_ns);
        // An idle process may have been let go.
        self.drop_untracked_heaps();
        let taken_in = has_place.then(|| self.attaching.take_in(&mut self.host, process.tgid));
        self.recorder.set_functions(&self.attaching.hooks.functions);
        let aside = self.attaching.inline.as_mut().map(|inline| std::mem::take(&mut inline.spent)).unwrap_or_default();
        let Some(activity) = &mut self.attaching.activity else { return false };
        activity.spend((thread_cpu_time().saturating_sub(begun) + aside).as_nanos() as u64);
        match taken_in {
            Some(TakenIn::Counted) => activity.counted(process, Spent::of_living(process.tgid).or(used_before)),
            Some(TakenIn::UnderWay) if activity.prepares(process, now_ns) => {
                let pause_ns = activity.prepared_for_ns(process, now_ns) / 2;
                let pause_ns = pause_ns.clamp(SHORTEST_PAUSE_NS, LONGEST_PAUSE_NS);
                self.under_way.push_back((now_ns + pause_ns, process));
                return true;
            }
            Some(TakenIn::NotYet) => drop(activity.postponed(process, now_ns)),
            Some(TakenIn::Not) => activity.refused(process),
            Some(TakenIn::UnderWay) | None => activity.pass_over(process, now_ns),
        }
        false
    }

    /// Time until processes are checked, or one of them is hooked.
    pub(super) fn until_activity(&self) -> Option<Duration> {
        let activity = self.attaching.activity.as_ref()?;
        if !self.due.is_empty() {
            return Some(Duration::ZERO);
        }
        let now_ns = monotonic_ns();
        let until = Duration::from_nanos(activity.next_ns().saturating_sub(now_ns));
        let until = until.max(self.errors.until_retry(Step::Census, now_ns));
        let again_ns = self.under_way.iter().map(|(at_ns, _)| *at_ns).min();
        let again = again_ns.map(|at_ns| Duration::from_nanos(at_ns.saturating_sub(now_ns)));
        Some(again.map_or(until, |again| until.min(again)))
    }

    /// Hooks a command inline that was just executed, and lets it continue. If hooking is not possible, its probes
    /// stay.
    pub(super) fn hook_command(&mut self, pid: u32, held: Result<Waiting, NotHeld>) {
        let (programs, may_watch) = (Arc::clone(&self.attaching.programs), self.may_watch_execs());
        let make_ring = || programs.exec_ring();
        let (ring, hooked) = std::thread::scope(|scope| {
            // Meanwhile, because the kernel takes a grace period for it.
            let ring = may_watch.then(|| Builder::new().spawn_scoped(scope, make_ring).ok()).flatten();
            let hooked = match &held {
                Ok(waiting) => self.hook_waiting(pid, waiting),
                Err(why) => Err(why.to_string()),
            };
            (ring.map(ScopedJoinHandle::join), hooked)
        });
        // It may execute other programs as soon as it continues.
        match ring {
            Some(Ok(ring)) => self.watch_execs_in(ring),
            _ => self.watch_execs(),
        }
        drop(held);
        self.attaching.held = None;
        if let Err(why) = hooked {
            self.attaching.stays_probed(pid, &why);
        }
    }

    /// From now on, makes targets that execute a program wait at its entry point.
    pub(super) fn watch_execs(&mut self) {
        if self.may_watch_execs() {
            let ring = self.attaching.programs.exec_ring();
            self.watch_execs_in(ring);
        }
    }

    /// Whether execs are to be watched, and are not yet. Programs of a whole host are hooked when they become active.
    fn may_watch_execs(&self) -> bool {
        self.attaching.takes_in() && self.attaching.execs.is_none() && !self.plan.targets.are_all()
    }

    fn watch_execs_in(&mut self, ring: Result<ExecRing, KernelError>) {
        let may_wait = |pid| forbidden::check(pid).is_ok();
        match ring.and_then(|ring| ExecWatch::start(ring, may_wait, HELD_AT_MOST)) {
            Ok(watch) => self.attaching.execs = Some(watch),
            Err(error) => log::warn!("the first calls of programs that targets execute may be missing: {error}"),
        }
    }

    fn hook_waiting(&mut self, pid: u32, waiting: &Waiting) -> Result<(), String> {
        let since = Instant::now();
        while !waiting.is_there() {
            if since.elapsed() > LONGEST_START || ProcessInfo::read(pid).is_err() {
                return Err("it did not reach its entry point in time".to_owned());
            }
            self.cycle();
            std::thread::sleep(START_PAUSE);
        }
        self.cycle();
        // Other threads would go on to allocate, counted by probes, while it is being hooked.
        if ProcessInfo::read(pid).map_or(true, |process| process.threads != 1) {
            return Err("its libraries started threads before its entry point".to_owned());
        }
        let mut sampled = Vec::new();
        let scanned = self.kernel.live_map.scan(|entries| {
            let own = entries.filter(|(key, value)| key.space.tgid == pid && value.sample != LiveValue::FREED);
            sampled.extend(own.map(|(key, _)| key.address));
        });
        scanned.map_err(|error| error.to_string())?;
        self.attaching.hook_at_entry(&mut self.host, pid, &sampled);
        self.recorder.set_functions(&self.attaching.hooks.functions);
        Ok(())
    }
}
