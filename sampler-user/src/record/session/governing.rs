//! What the governor is told of a recording, and what is done of what it says.

use std::time::Duration;

use sampler_ebpf::abi::{Counters, LiveKey};

use super::Session;
use crate::cost::cpu_time;
use crate::heap::windows::Weights;
use crate::host::events::monotonic_ns;
use crate::host::process::Target;
use crate::kernel::totals::Counts;
use crate::record::free_groups::{self, Frees};
use crate::record::governor::Action;
use crate::sampling::constants::draw_constants;

/// What a recording that ends does with its last window.
pub(super) enum LastWindow {
    /// There is none.
    None,
    /// It ends with the recording.
    Ends(Weights),
    /// It stands for the time since, too.
    Extends(Weights),
}

impl Session {
    /// Time until the governor looks again.
    pub fn until_look(&self) -> Duration {
        let until = self.governor.next_ns().map(|at| at.saturating_sub(monotonic_ns()));
        until.map_or(Duration::MAX, Duration::from_nanos)
    }

    /// The recording begins now.
    pub fn begin_governing(&mut self) {
        let cpu_seconds = self.cpu_seconds(std::iter::empty());
        self.governor.begin(cpu_seconds, monotonic_ns());
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
        let (counts, total) = self.counts()?;
        // A window ends with the look at it, whatever comes next: its length must not depend on what was in it.
        let ended_ns = monotonic_ns();
        let window = self.weigh_window(&counts, ended_ns);
        let cpu_seconds = self.cpu_seconds(counts.processes.keys().map(|process| process.tgid));
        let (before, attaching) = (&self.frees, &self.attaching);
        let groups = || free_groups::groups(&counts, before, attaching, &self.host, &self.recorder.heap);
        let actions = self.governor.look(&total, cpu_seconds, now, groups);
        self.frees = if self.governor.may_leave_frees() { Frees::of(&counts) } else { Frees::default() };
        if let Some(window) = &window
            && !actions.contains(&Action::Detach)
        {
            self.cycle()?;
            self.recorder.heap.close_window(window);
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
                    if let Some(window) = &window {
                        self.recorder.heap.close_window(window);
                    }
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

    /// The recording ends, its probes are about to be taken away.
    pub(super) fn end_windows(&mut self) -> anyhow::Result<LastWindow> {
        let (counts, _) = self.counts()?;
        let now = monotonic_ns();
        if let Some(weights) = self.weigh_window(&counts, now) {
            self.recorder.heap.window_ends(now);
            return Ok(LastWindow::Ends(weights));
        }
        Ok(self.windows.ended(now).map_or(LastWindow::None, |(pause_ns, more)| {
            self.attaching.uncovered(pause_ns, now);
            LastWindow::Extends(self.progress.end(pause_ns as f64 * 1e-9, more))
        }))
    }

    /// Everything of the last window has come in.
    pub(super) fn weigh_last(&mut self, last: &LastWindow) {
        match last {
            LastWindow::None => {}
            LastWindow::Ends(weights) => self.recorder.heap.close_window(weights),
            LastWindow::Extends(more) => self.recorder.heap.extend_window(more),
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
