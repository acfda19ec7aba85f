//! Connects the overhead controller to a recording: passes it figures and carries out its actions.

use std::time::Duration;

use heapbpf_host::Host;
use heapbpf_host::clock::{monotonic_ns, thread_cpu_time};
use heapbpf_kernel::inline;
use heapbpf_kernel::totals::Counts;
use sampler_ebpf::abi::Counters;
use sampler_ebpf::constants::draw_constants;

use super::errors::Step;
use super::state::Session;
use crate::attaching::probes::Attaching;
use crate::budget::controller::{Action, OverheadController, usage};
use crate::budget::decision::{MeanCosts, Use};
use crate::budget::slowed::{CheckedTarget, Slowed, SlowedTargets};
use crate::budget::spent::Spent;
use crate::cost::cpu_time::{self, CpuTime};
use crate::cost::measure::Measured;
use crate::cost::probe_costs::ProbeCosts;
use crate::plan::Hook;

/// State of the overhead control of a recording.
pub(super) struct Overhead {
    /// The controller that decides.
    pub(super) controller: OverheadController,
    /// Time that probes have taken so far.
    pub(super) spent: Spent,
    /// CPU time of the targets.
    pub(super) cpu_time: CpuTime,
    /// Targets that probes slow down. Under a budget, their own links are detached.
    pub(super) slowed: SlowedTargets,
}

impl Overhead {
    /// Creates the state of a recording; nothing is known yet.
    pub(super) fn new(controller: OverheadController) -> Self {
        Self { controller, spent: Spent::default(), cpu_time: CpuTime::begin(), slowed: SlowedTargets::default() }
    }
}

impl Session {
    /// Starts the recording. Its probes are in place.
    pub(super) fn begin(&mut self) {
        let cpu_seconds = self.cpu_seconds(std::iter::empty());
        self.schedule.restart(self.plan.duration);
        if let Some(last_ns) = self.schedule.last_hooking_ns() {
            self.attaching.until_ns = last_ns;
        }
        self.overhead.controller.begin(cpu_seconds, self.schedule.started_ns);
        // A command's own exec is awaited elsewhere.
        if self.attaching.held.is_none() {
            self.watch_execs();
        }
    }

    /// Lets the controller check, if it is time, and carries out its actions.
    pub(super) fn govern(&mut self) {
        self.set_interval();
        let now = monotonic_ns();
        if self.overhead.controller.next_ns().is_none_or(|at| at > now) || !self.may_try(Step::Counters) {
            return;
        }
        let lacks_calls = self.may_check_without_calls(now);
        if lacks_calls && self.is_well_within_budget(now) {
            return;
        }
        let counted = self.counts();
        let Some((counts, total)) = self.errors.note(Step::Counters, counted, monotonic_ns()) else { return };
        self.cuts.last_total = total;
        self.learn_costs(&counts, &total);
        let cpu_seconds = self.cpu_seconds(counts.processes.keys().map(|process| process.tgid));
        if lacks_calls {
            return self.overhead.controller.look_from(&total, cpu_seconds, now);
        }
        let takes_in = self.attaching.takes_in();
        let actions = self.overhead.controller.look(&total, cpu_seconds, takes_in, now);
        actions.into_iter().for_each(|action| self.act(action));
    }

    /// Whether all that is counted is counted from inside, so that only samples trap.
    pub(super) fn is_all_inside(&self) -> bool {
        self.attaching.inline.is_some() && self.attaching.own.is_empty()
    }

    /// Whether the controller can do without the calls that targets count themselves: their samples are all that costs.
    /// If the kernel does not read these calls at the end of a target, they must be read all the time.
    fn may_check_without_calls(&self, now: u64) -> bool {
        let are_read = || inline::are_read(&self.attaching.programs.lifecycle.inline_ends);
        self.is_all_inside() && !self.overhead.controller.needs_calls(now) && are_read()
    }

    /// Lets the controller check the kernel's counters alone. Returns whether these are enough, or cannot be read now.
    fn is_well_within_budget(&mut self, now: u64) -> bool {
        let counted = self.kernel_counts();
        let Some((counts, total)) = self.errors.note(Step::Counters, counted, monotonic_ns()) else { return true };
        let cpu_seconds = self.cpu_seconds(counts.processes.keys().map(|process| process.tgid));
        self.overhead.controller.is_well_within(&total, cpu_seconds, now)
    }

    /// Carries out an action.
    fn act(&mut self, action: Action) {
        let attaching = &mut self.attaching;
        match action {
            Action::SetInterval(interval) => {
                self.unfinished.interval = Some(interval);
                self.set_interval();
            }
            Action::StopTrackingFrees => {
                attaching.hooks.stop_tracking_frees(attaching.programs.kind);
                self.cycle();
                self.drop_untracked_heaps();
            }
            Action::Detach => attaching.detach(),
        }
    }

    /// Sets the sampling interval if a different one was chosen.
    fn set_interval(&mut self) {
        let Some(interval) = self.unfinished.interval.filter(|_| self.may_try(Step::Interval)) else { return };
        self.make_space_for(interval);
        let draw = draw_constants(interval);
        let set = draw.map(|draw| self.attaching.control.set_draw(draw)).transpose();
        if let (Some(draw), Some(inline)) = (draw, &mut self.attaching.inline) {
            inline.set_draw(draw);
        }
        if let Some(set) = self.errors.note(Step::Interval, set, monotonic_ns()) {
            self.unfinished.interval = None;
            // Processes that announce their samples choose their intervals themselves.
            if set.is_some() && self.plan.kernel.hook != Hook::Usdt {
                self.worker.set_interval(interval);
            }
        }
    }

    /// Searches for targets that probes slow down, if it is time, and reports them. If a budget must be kept, those
    /// that have links of their own lose them.
    pub(super) fn look_for_slowed(&mut self) {
        let begun = monotonic_ns();
        if self.next_look_for_slowed().is_none_or(|at| at > begun) || !self.may_try(Step::Counters) {
            return;
        }
        if self.overhead.controller.costs().is_none() {
            return;
        }
        let cpu_before = thread_cpu_time();
        let counted = self.counts();
        let Some((counts, total)) = self.errors.note(Step::Counters, counted, monotonic_ns()) else { return };
        self.learn_costs(&counts, &total);
        if self.overhead.controller.only_shows() {
            let cpu_seconds = self.cpu_seconds(counts.processes.keys().map(|process| process.tgid));
            self.overhead.controller.watch(&total, cpu_seconds, begun);
        }
        let processes = self.host.processes();
        let (controller, attaching) = (&self.overhead.controller, &self.attaching);
        let (Some(measured), Some((mean, tracking))) = (controller.measured(), controller.costs()) else { return };
        let budget = self.plan.budget;
        let is_any_told = budget.is_some() || !self.overhead.slowed.are_enough();
        let targets = counts.processes.iter().filter(|_| is_any_told).filter_map(|(process, counters)| {
            if budget.is_some() && !attaching.own.contains(&process.tgid) {
                return None;
            }
            let cpu_seconds = cpu_time::of_process(process.tgid)?;
            let comm = processes.current(process.tgid).map_or("", |generation| &*generation.info.comm);
            let used = usage(counters, cpu_seconds, begun as f64 * 1e-9);
            let costs = costs_of(measured, attaching, &self.host, process.tgid).unwrap_or(mean);
            let is_inline = attaching.standing.hook(process.tgid) == heapbpf_audit::Hook::Inline;
            Some(CheckedTarget { process: *process, comm, used, costs, is_inline })
        });
        let about_inline = |pid, used: &Use, costs: &ProbeCosts| match attaching.standing.why_not(pid) {
            Some(why) => Some(format!("it is not counted from inside: {why}")),
            None => {
                let advice = controller.advice.filter(|_| attaching.could_be_hooked_inline(&self.host, pid));
                advice.map(|advice| advice.text(used, costs))
            }
        };
        let seconds = begun.saturating_sub(self.schedule.started_ns) as f64 * 1e-9;
        let slowed = self.overhead.slowed.look(targets, (tracking, budget), seconds, about_inline);
        if budget.is_some() && !slowed.is_empty() {
            // Up to now they were counted.
            self.note_activity();
        }
        for Slowed { process, line } in slowed {
            if !self.plan.display.quiet {
                log::warn!("{line}");
            }
            if budget.is_some() {
                self.attaching.give_up(process);
                self.cycle();
                self.drop_untracked_heaps();
            }
        }
        self.overhead.slowed.looked(thread_cpu_time().saturating_sub(cpu_before), monotonic_ns());
    }

    /// CLOCK_MONOTONIC of the next check for slowed targets. `None` if none is needed: the budget is kept for all
    /// targets together, or the user chose to record a whole host without one, or enough were reported and no share is
    /// shown.
    fn next_look_for_slowed(&self) -> Option<u64> {
        let Overhead { controller, slowed, .. } = &self.overhead;
        let needed = if self.plan.budget.is_some() {
            self.attaching.takes_in() && !self.attaching.own.is_empty()
        } else {
            let is_shown = self.plan.display.progress && controller.only_shows();
            !self.plan.targets.are_all() && (is_shown || !slowed.are_enough())
        };
        (needed && controller.costs().is_some()).then(|| slowed.next_ns())
    }

    /// Time until the next check for slowed targets.
    pub(super) fn until_look_for_slowed(&self) -> Duration {
        let now = monotonic_ns();
        let until = self.next_look_for_slowed().map(|at| at.saturating_sub(now));
        until.map_or(Duration::MAX, |ns| Duration::from_nanos(ns).max(self.errors.until_retry(Step::Counters, now)))
    }

    /// Time until the controller checks again.
    pub(super) fn until_look(&self) -> Duration {
        let now = monotonic_ns();
        let until = self.overhead.controller.next_ns().map(|at| at.saturating_sub(now));
        let until = until.map_or(Duration::MAX, Duration::from_nanos);
        until.max(self.errors.until_retry(Step::Counters, now))
    }

    /// CPU time of the targets in seconds, including the processes in `counted`.
    fn cpu_seconds(&mut self, counted: impl Iterator<Item = u32>) -> f64 {
        if self.plan.targets.are_all() {
            return cpu_time::of_host();
        }
        let targets = self.attaching.targets.named_alive.iter().copied();
        self.overhead.cpu_time.of_processes(targets.chain(counted))
    }

    /// Passes the mean cost of probes to the controller, and notes what was spent on them.
    pub(super) fn learn_costs(&mut self, counts: &Counts, total: &Counters) {
        let Overhead { controller, spent, .. } = &mut self.overhead;
        let Some(measured) = controller.measured() else { return };
        let mut mean = MeanCosts::default();
        for (process, counters) in &counts.processes {
            let used = usage(counters, 0.0, 0.0);
            // Looking up the files of a process takes longer than the rest, and most processes reach no probe.
            if used.allocations + used.frees > 0.0
                && let Some(costs) = costs_of(measured, &self.attaching, &self.host, process.tgid)
            {
                mean.add(&used, &costs);
            }
        }
        // For processes that have ended, it is no longer known which files they mapped.
        let kinds = |frees| self.attaching.hooks.kinds(frees).collect::<Vec<_>>();
        let costs = mean.mean(&measured.costs_on(&kinds(false), &kinds(true)));
        controller.costs = Some(costs);
        spent.note(total, &costs);
    }
}

/// What probes cost a process; `None` if it is unknown.
fn costs_of(measured: &Measured, attaching: &Attaching, host: &Host, pid: u32) -> Option<ProbeCosts> {
    let [allocation, free] = [false, true].map(|frees| attaching.kinds_in(host, pid, frees));
    (!allocation.is_empty() || !free.is_empty()).then(|| measured.costs_on(&allocation, &free))
}
