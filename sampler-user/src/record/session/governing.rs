//! What the governor is told of a recording, and what is done of what it says.

use std::time::{Duration, SystemTime};

use sampler_ebpf::abi::{Counters, LiveKey};

use super::Session;
use super::cut::Cut;
use crate::cost::cpu_time;
use crate::heap::windows::Weights;
use crate::host::events::monotonic_ns;
use crate::host::process::Target;
use crate::kernel::totals::Counts;
use crate::record::free_groups::{self, Frees};
use crate::record::governor::Action;
use crate::sampling::constants::draw_constants;

/// To hook a process, or to release it, took up to 110 ms on two busy CPUs: that must not make a recording longer.
const LONGEST_HOOKING: Duration = Duration::from_millis(150);

impl Session {
    /// Time until the governor looks again.
    pub fn until_look(&self) -> Duration {
        let until = self.governor.next_ns().map(|at| at.saturating_sub(monotonic_ns()));
        until.map_or(Duration::MAX, Duration::from_nanos)
    }

    /// The recording begins now: its probes are in place.
    pub fn begin(&mut self) {
        let cpu_seconds = self.cpu_seconds(std::iter::empty());
        (self.started, self.started_ns) = (SystemTime::now(), monotonic_ns());
        self.ends_ns = self.plan.duration.map(|duration| self.started_ns.saturating_add(duration.as_nanos() as u64));
        if let (Some(ends_ns), Some(duration)) = (self.ends_ns, self.plan.duration) {
            let before = LONGEST_HOOKING.min(duration / 10);
            self.attaching.set_end(ends_ns.saturating_sub(before.as_nanos() as u64));
        }
        self.governor.begin(cpu_seconds, self.started_ns);
    }

    /// CPU time of the targets, those of the given process ids among them.
    fn cpu_seconds(&mut self, counted: impl Iterator<Item = u32>) -> f64 {
        if self.plan.targets.rules.iter().any(|rule| matches!(rule, Target::All)) {
            return cpu_time::of_host();
        }
        let targets = self.attaching.targets.awaited.iter().copied();
        self.cpu_time.of_processes(targets.chain(counted))
    }

    /// Lets the governor look, if it is time, and does what it says.
    pub fn govern(&mut self) -> anyhow::Result<()> {
        let now = monotonic_ns();
        if self.governor.next_ns().is_none_or(|at| at > now) {
            return Ok(());
        }
        self.learn_kinds();
        let windows = self.windows.is_open();
        let (counts, total, window, ended_ns) = if windows {
            // A window ends with the look at it, whatever comes next: its length must not depend on what was in it.
            self.with_cut(|session, cut| {
                let window = session.weigh_window(&cut.counts, cut.time_ns);
                if let Some(window) = &window {
                    session.recorder.heap.close_window(window);
                }
                Ok((cut.counts.clone(), cut.total, window, cut.time_ns))
            })?
        } else {
            let (counts, total) = self.counts()?;
            (counts, total, None, monotonic_ns())
        };
        let cpu_seconds = self.cpu_seconds(counts.processes.keys().map(|process| process.tgid));
        let (before, attaching) = (&self.frees, &self.attaching);
        let groups = || free_groups::groups(&counts, before, attaching, &self.host, &self.recorder.heap);
        let actions = self.governor.look(&total, cpu_seconds, now, groups);
        self.frees = if self.governor.may_leave_frees() { Frees::of(&counts) } else { Frees::default() };
        if window.is_some() && !actions.contains(&Action::Detach) {
            self.recorder.heap.end_windows();
        }
        for action in actions {
            let attaching = &mut self.attaching;
            match action {
                Action::SetInterval(interval) => {
                    if let Some(draw) = draw_constants(interval) {
                        attaching.steering.set_draw(draw)?;
                    }
                }
                Action::LeaveFrees => attaching.hooks.leave_frees(attaching.programs.kind),
                Action::LeaveFreesOf(served) => {
                    served.into_iter().for_each(|it| attaching.hooks.leave_frees_of(it, attaching.programs.kind));
                    self.cycle()?;
                    self.leave_heaps();
                }
                Action::Detach => {
                    // The probes are gone at once; that the kernel waits for calls in progress takes longer.
                    let now = if window.is_some() { ended_ns } else { monotonic_ns() };
                    attaching.hooks.pause();
                    let gone_ns = monotonic_ns();
                    log::debug!("probes were taken away in {:.1} ms", (gone_ns - now) as f64 * 1e-6);
                    self.progress.detached(&counts.processes, gone_ns);
                    self.recorder.heap.window_ends(now);
                    self.cycle()?;
                    self.windows.detached(now);
                    self.recorder.heap.open_window();
                }
                Action::Attach => {
                    let begun = monotonic_ns();
                    self.progress.before_window(begun);
                    attaching.hooks.resume(&attaching.programs, &mut attaching.steering);
                    let now = monotonic_ns();
                    log::debug!("probes were put on in {:.1} ms", (now - begun) as f64 * 1e-6);
                    self.recorder.heap.window_begins(now);
                    let pause_ns = self.windows.attached(now);
                    attaching.uncovered(pause_ns, now);
                    let (counts, _) = self.counts()?;
                    let governor = &self.governor;
                    let cost = |counters: &Counters| governor.probe_seconds(counters).unwrap_or(0.0);
                    self.progress.begin_window(&counts.processes, cost, pause_ns as f64 * 1e-9);
                }
            }
        }
        Ok(())
    }

    /// What is in use where frees are not followed any more is forgotten, also by the kernel, which keeps room for blocks
    /// whose frees it awaits.
    pub(super) fn leave_heaps(&mut self) {
        if !self.attaching.hooks.follows_some_frees() {
            return;
        }
        let heap = &mut self.recorder.heap;
        for space in self.descriptions.without_frees(heap, &self.host, &self.attaching) {
            for address in heap.leave(space) {
                self.live_entries.remove(LiveKey { space, address });
            }
        }
    }

    /// Ends the window that is open, if there is one: what it stands for.
    fn weigh_window(&mut self, counts: &Counts, now_ns: u64) -> Option<Weights> {
        let (pause_ns, length_ns) = self.windows.closed(now_ns)?;
        let governor = &self.governor;
        let cost = |counters: &Counters| governor.probe_seconds(counters).unwrap_or(0.0);
        let lengths = (pause_ns as f64 * 1e-9, length_ns as f64 * 1e-9);
        Some(self.progress.end_window(&counts.processes, cost, lengths))
    }

    /// The recording ends with this cut: so does its window, or the pause that it ends in.
    pub(super) fn end_windows(&mut self, cut: &Cut) {
        if let Some(weights) = self.weigh_window(&cut.counts, cut.time_ns) {
            self.recorder.heap.close_window(&weights);
        } else if let Some((pause_ns, more)) = self.windows.ended(cut.time_ns) {
            self.attaching.uncovered(pause_ns, cut.time_ns);
            let more = self.progress.end(pause_ns as f64 * 1e-9, more);
            self.recorder.heap.extend_window(&more);
        }
    }

    /// Tells the governor which kinds of instruction are probed: the most expensive ones.
    pub(super) fn learn_kinds(&mut self) {
        let governor = &self.governor;
        let worst = |frees: bool| {
            let kinds = self.attaching.hooks.kinds(frees).map(|kind| kind.to_string());
            kinds.max_by(|a, b| governor.cost_of_kind(a).total_cmp(&governor.cost_of_kind(b)))
        };
        let (allocation, free) = (worst(false), worst(true));
        self.governor.set_kinds(allocation.as_deref(), free.as_deref());
    }
}
