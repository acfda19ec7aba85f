//! Connects the overhead controller to a recording: passes it figures and carries out its actions.

use std::time::Duration;

use sampler_ebpf::abi::Counters;

use super::errors::Step;
use super::moment::Cut;
use super::state::Session;
use crate::clock::monotonic_ns;
use crate::cost::budget::{MeanCosts, ProbeCosts};
use crate::cost::cpu_time;
use crate::cost::measure::Measured;
use crate::heap::windows::Weights;
use crate::host::Host;
use crate::host::process::Target;
use crate::kernel::totals::Counts;
use crate::record::attaching::probes::Attaching;
use crate::record::budget::controller::{Action, usage};
use crate::record::budget::free_groups::{Calls, groups};
use crate::record::budget::overhead::Overhead;
use crate::record::budget::slowed::Seen;
use crate::record::plan::Hook;
use crate::record::profiles::describe::Looked;
use sampler_ebpf::constants::draw_constants;

/// Counters at a look of the controller.
struct Counted {
    counts: Counts,
    total: Counters,
    /// Weights of the time window that ended with the look, and when it ended (CLOCK_MONOTONIC).
    window: Option<(Weights, u64)>,
}

impl Session {
    /// Starts the recording. Its probes are in place.
    pub(super) fn begin(&mut self) {
        let cpu_seconds = self.cpu_seconds(std::iter::empty());
        self.schedule.restart(self.plan.duration);
        if let Some(last_ns) = self.schedule.last_hooking_ns() {
            self.attaching.set_end(last_ns);
        }
        self.overhead.controller.begin(cpu_seconds, self.schedule.started_ns);
        // A command's own exec is awaited otherwise.
        if self.attaching.held.is_none() {
            self.watch_execs();
        }
    }

    /// Lets the controller look, if it is time, and carries out its actions.
    pub(super) fn govern(&mut self) {
        self.set_interval();
        self.reattach();
        let now = monotonic_ns();
        if self.overhead.controller.next_ns().is_none_or(|at| at > now) || self.unfinished.attach {
            return;
        }
        let Some(Counted { counts, total, window }) = self.count() else { return };
        self.learn_costs(&counts, &total);
        let cpu_seconds = self.cpu_seconds(counts.processes.keys().map(|process| process.tgid));
        let Overhead { controller, calls, .. } = &mut self.overhead;
        let groups = |which| groups(which, &counts, calls, &self.attaching, &self.host, &self.recorder.heap);
        let actions = controller.look(&total, cpu_seconds, now, groups);
        // Before anything is given up, which would make it look cheaper.
        self.advise_inline();
        let Overhead { controller, calls, .. } = &mut self.overhead;
        *calls = if controller.chooses_whose_frees() { Calls::of(&counts) } else { Calls::default() };
        if window.is_some() && !actions.contains(&Action::Detach) {
            self.recorder.heap.end_windows();
        }
        let ended_ns = window.map(|(_, ended_ns)| ended_ns);
        actions.into_iter().for_each(|action| self.act(action, &counts, ended_ns));
    }

    /// Says once what inline hooks would take of the one named target, if probes take much of it.
    fn advise_inline(&mut self) {
        let Overhead { controller, inline_advice, .. } = &mut self.overhead;
        let targets = &self.plan.targets;
        let ([Target::Pid(_)], [target]) = (&targets.rules[..], &targets.running[..]) else { return };
        let (Some(share), Some(measured)) = (controller.share(), controller.measured()) else { return };
        if self.plan.kernel.hook == Hook::Inline || !inline_advice.is_due(share) {
            return;
        }
        if !self.attaching.could_be_hooked_inline(&self.host, target.pid) {
            return inline_advice.refused();
        }
        if let Some(line) = inline_advice.tell(&target.comm, share, measured) {
            log::warn!("{line}");
        }
    }

    /// Reads the counters, if that is possible at this time. An open window ends at every look, whatever is decided: its length must not depend on what
    /// it contains.
    fn count(&mut self) -> Option<Counted> {
        if !self.overhead.windows.is_open() {
            if !self.may_try(Step::Counters) {
                return None;
            }
            let counted = self.counts();
            let (counts, total) = self.errors.note(Step::Counters, counted, monotonic_ns())?;
            self.cuts.last_total = total;
            return Some(Counted { counts, total, window: None });
        }
        self.with_cut(|session, cut| {
            let window = session.weigh_window(&cut.counts, cut.time_ns);
            if let Some(window) = &window {
                session.recorder.heap.close_window(window);
            }
            let window = window.map(|window| (window, cut.time_ns));
            Counted { counts: cut.counts.clone(), total: cut.total, window }
        })
    }

    /// Carries out an action. `counts`: counters at the look; `window_ended_ns`: when the time window ended, if one
    /// did.
    fn act(&mut self, action: Action, counts: &Counts, window_ended_ns: Option<u64>) {
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
            Action::StopTrackingFreesOf(served) => {
                served.into_iter().for_each(|it| attaching.hooks.stop_tracking_frees_of(it, attaching.programs.kind));
                self.cycle();
                self.drop_untracked_heaps();
            }
            Action::TrackFreesAgain { except } => {
                attaching.hooks.track_frees_again(&except, &attaching.programs);
                // No record is taken in between: from that moment on every block counts.
                self.begin_heaps_anew(Looked::All);
                let still = self.attaching.hooks.gave_up_frees();
                self.overhead.controller.frees_were_taken_up(still, monotonic_ns());
            }
            Action::Detach => self.detach(counts, window_ended_ns),
            Action::Attach => {
                self.unfinished.attach = true;
                self.reattach();
            }
        }
    }

    /// Sets the sampling interval, if another one was chosen.
    fn set_interval(&mut self) {
        let Some(interval) = self.unfinished.interval.filter(|_| self.may_try(Step::Interval)) else { return };
        self.make_room_for(interval);
        let draw = draw_constants(interval);
        let set = draw.map_or(Ok(()), |draw| self.attaching.control.set_draw(draw));
        if let (Some(draw), Some(inline)) = (draw, &mut self.attaching.inline) {
            inline.set_draw(draw);
        }
        if self.errors.note(Step::Interval, set, monotonic_ns()).is_some() {
            self.unfinished.interval = None;
        }
    }

    /// Detaches all probes: a pause begins.
    fn detach(&mut self, counts: &Counts, window_ended_ns: Option<u64>) {
        // The probes stop at once. Detaching takes longer, because the kernel waits for calls in progress.
        let now = window_ended_ns.unwrap_or_else(monotonic_ns);
        self.attaching.hooks.pause();
        let gone_ns = monotonic_ns();
        log::debug!("probes were taken away in {:.1} ms", (gone_ns - now) as f64 * 1e-6);
        self.overhead.progress.detached(&counts.processes, gone_ns);
        self.recorder.heap.window_ends(now);
        self.cycle();
        self.overhead.windows.detached(now);
        self.recorder.heap.open_window();
    }

    /// Attaches the probes again, if the pause is over: a time window begins.
    fn reattach(&mut self) {
        if !self.unfinished.attach || !self.may_try(Step::Attach) {
            return;
        }
        let begun = monotonic_ns();
        self.overhead.progress.before_window(begun);
        let attaching = &mut self.attaching;
        attaching.hooks.resume(&attaching.programs, &mut attaching.control);
        let now = monotonic_ns();
        log::debug!("probes were put on in {:.1} ms", (now - begun) as f64 * 1e-6);
        let counted = self.counts();
        let Some((counts, _)) = self.errors.note(Step::Attach, counted, monotonic_ns()) else {
            // A window cannot begin without the counters at its beginning.
            self.attaching.hooks.pause();
            return;
        };
        self.unfinished.attach = false;
        self.overhead.controller.window_begins(now);
        self.recorder.heap.window_begins(now);
        let pause_ns = self.overhead.windows.attached(now);
        self.attaching.uncovered(pause_ns, now);
        let Overhead { controller, progress, .. } = &mut self.overhead;
        let cost = |counters: &Counters| controller.probe_seconds(counters).unwrap_or(0.0);
        progress.begin_window(&counts.processes, cost, pause_ns as f64 * 1e-9);
    }

    /// Looks for targets that probes slow down, if it is time and no budget bounds that, and tells of them.
    pub(super) fn look_for_slowed(&mut self) {
        let begun = monotonic_ns();
        if self.next_look_for_slowed().is_none_or(|at| at > begun) || !self.may_try(Step::Counters) {
            return;
        }
        if self.overhead.controller.costs().is_none() {
            return;
        }
        let counted = self.counts();
        let Some((counts, total)) = self.errors.note(Step::Counters, counted, monotonic_ns()) else { return };
        self.learn_costs(&counts, &total);
        let processes = self.host.processes();
        let (controller, attaching) = (&self.overhead.controller, &self.attaching);
        let (Some(measured), Some((mean, tracking))) = (controller.measured(), controller.costs()) else { return };
        let targets = counts.processes.iter().filter_map(|(process, counters)| {
            let cpu_seconds = cpu_time::of_process(process.tgid)?;
            let comm = processes.current(process.tgid).map_or("", |incarnation| &*incarnation.info.comm);
            let used = usage(counters, cpu_seconds, begun as f64 * 1e-9);
            let costs = costs_of(measured, attaching, &self.host, process.tgid).unwrap_or(mean);
            let is_inline = attaching.standing.hook(process.tgid) == heapbpf_audit::Hook::Inline;
            Some(Seen { process: *process, comm, used, costs, is_inline })
        });
        let seconds = begun.saturating_sub(self.schedule.started_ns) as f64 * 1e-9;
        let lines = self.overhead.slowed.look(targets, tracking, seconds);
        if !self.plan.display.quiet {
            lines.iter().for_each(|line| log::warn!("{line}"));
        }
        self.overhead.slowed.looked(begun, monotonic_ns());
    }

    /// CLOCK_MONOTONIC of the next look for slowed targets; `None` if none is needed: there is a budget, or whole hosts are
    /// recorded without one because the user said so.
    fn next_look_for_slowed(&self) -> Option<u64> {
        let is_host = self.plan.targets.rules.iter().any(|rule| matches!(rule, Target::All));
        let needed = self.plan.budget.share.is_none() && !is_host && self.overhead.controller.costs().is_some();
        self.overhead.slowed.next_ns().filter(|_| needed)
    }

    /// Time until the next look for slowed targets.
    pub(super) fn until_look_for_slowed(&self) -> Duration {
        let now = monotonic_ns();
        let until = self.next_look_for_slowed().map(|at| at.saturating_sub(now));
        until.map_or(Duration::MAX, |ns| Duration::from_nanos(ns).max(self.errors.until_retry(Step::Counters, now)))
    }

    /// Time until the controller looks again.
    pub(super) fn until_look(&self) -> Duration {
        let now = monotonic_ns();
        let until = self.overhead.controller.next_ns().map(|at| at.saturating_sub(now));
        let until = until.map_or(Duration::MAX, Duration::from_nanos);
        let needs = if self.unfinished.attach { Step::Attach } else { Step::Counters };
        until.max(self.errors.until_retry(needs, now))
    }

    /// CPU time of the targets in seconds, including the processes in `counted`.
    fn cpu_seconds(&mut self, counted: impl Iterator<Item = u32>) -> f64 {
        if self.plan.targets.rules.iter().any(|rule| matches!(rule, Target::All)) {
            return cpu_time::of_host();
        }
        let targets = self.attaching.targets.named_alive.iter().copied();
        self.overhead.cpu_time.of_processes(targets.chain(counted))
    }

    /// Closes the open window, if there is one, and returns its weights.
    fn weigh_window(&mut self, counts: &Counts, now_ns: u64) -> Option<Weights> {
        let Overhead { controller, windows, progress, .. } = &mut self.overhead;
        let (pause_ns, length_ns) = windows.closed(now_ns)?;
        let cost = |counters: &Counters| controller.probe_seconds(counters).unwrap_or(0.0);
        let lengths = (pause_ns as f64 * 1e-9, length_ns as f64 * 1e-9);
        Some(progress.end_window(&counts.processes, cost, lengths))
    }

    /// Ends the recording's last window, or the pause that it ends in, at its last cut.
    pub(super) fn end_windows(&mut self, cut: &Cut) {
        if let Some(weights) = self.weigh_window(&cut.counts, cut.time_ns) {
            self.recorder.heap.close_window(&weights);
        } else if let Some((pause_ns, more)) = self.overhead.windows.ended(cut.time_ns) {
            self.attaching.uncovered(pause_ns, cut.time_ns);
            let more = self.overhead.progress.end(pause_ns as f64 * 1e-9, more);
            self.recorder.heap.extend_window(&more);
        }
    }

    /// Tells the controller what probes cost the targets on average, and notes what was spent on them.
    pub(super) fn learn_costs(&mut self, counts: &Counts, total: &Counters) {
        let Overhead { controller, spent, .. } = &mut self.overhead;
        let Some(measured) = controller.measured() else { return };
        let mut mean = MeanCosts::default();
        for (process, counters) in &counts.processes {
            if let Some(costs) = costs_of(measured, &self.attaching, &self.host, process.tgid) {
                mean.add(&usage(counters, 0.0, 0.0), &costs);
            }
        }
        // Of processes that have ended it is not known any more which files they mapped.
        let kinds = |frees| self.attaching.hooks.kinds(frees).collect::<Vec<_>>();
        let costs = mean.mean(&measured.costs_on(&kinds(false), &kinds(true)));
        controller.set_costs(costs);
        spent.note(total, &costs);
    }
}

/// What probes cost a process; `None` if that is not known.
fn costs_of(measured: &Measured, attaching: &Attaching, host: &Host, pid: u32) -> Option<ProbeCosts> {
    let [allocation, free] = [false, true].map(|frees| attaching.kinds_in(host, pid, frees));
    (!allocation.is_empty() || !free.is_empty()).then(|| measured.costs_on(&allocation, &free))
}
