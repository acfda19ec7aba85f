//! Whole hosts, names and cgroups: processes are hooked as they become active.

use std::time::Duration;

use heapbpf_attach::inline::InlineHooks;
use heapbpf_host::clock::{monotonic_ns, thread_cpu_time};
use heapbpf_host::helper::is_helper;
use heapbpf_kernel::generations::threads;
use sampler_ebpf::abi::ProcessKey;

use super::errors::Step;
use super::state::Session;
use crate::attaching::probes::Spent;
use crate::attaching::taking_in::{Place, TakenIn};
use crate::budget::activity::Activity;

/// Shortest and longest time between two attempts to hook a process for which another thread is working, ns. In
/// between, it is half of what that has taken so far: each attempt costs a turn of the loop, and on a busy host the
/// other thread waits for a processor.
const SHORTEST_PAUSE_NS: u64 = 5_000_000;
const LONGEST_PAUSE_NS: u64 = 40_000_000;

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
        let due = self.look_at_activity();
        if self.attaching.is_over() {
            return;
        }
        // The busiest is taken from the end.
        for process in due.into_iter().rev() {
            // The helper process that stops processes would have to stop itself.
            if self.attaching.is_active_target(&mut self.host, process) && !is_helper(process.tgid) {
                self.due.push(process);
            } else if let Some(activity) = &mut self.attaching.activity {
                activity.pass_over(process, now_ns);
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
    pub(super) fn note_activity(&mut self) {
        let next_ns = self.attaching.activity.as_ref().map(Activity::next_ns);
        self.look_at_activity();
        if let (Some(activity), Some(next_ns)) = (&mut self.attaching.activity, next_ns) {
            activity.is_due_at(next_ns);
        }
    }

    /// Updates the CPU time of all processes. Returns those that should be hooked now, the busiest first.
    fn look_at_activity(&mut self) -> Vec<ProcessKey> {
        if self.attaching.activity.is_none() {
            return Vec::new();
        }
        let now_ns = monotonic_ns();
        let read = threads(self.attaching.programs.process_iterator_link());
        let Some(threads) = self.errors.note(Step::Census, read, now_ns) else { return Vec::new() };
        self.attaching.note_heirs();
        self.end_unlisted(&threads, now_ns);
        self.attaching.look_at_activity(&mut self.host, &threads, now_ns)
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
        let place = self.attaching.make_place(process, now_ns);
        if place == Some(Place::OfIdle) {
            self.drop_untracked_heaps();
        }
        let taken_in = place.map(|_| self.attaching.take_in(&mut self.host, process.tgid));
        self.recorder.set_functions(self.attaching.hooks.functions());
        let aside = self.attaching.inline.as_mut().map(InlineHooks::take_spent).unwrap_or_default();
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
            Some(TakenIn::Not(_)) => activity.refused(process),
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
}
