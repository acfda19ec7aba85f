//! What the governor is told of a recording, and what is done of what it says.

use std::time::Duration;

use super::Session;
use crate::cost::cpu_time;
use crate::host::events::monotonic_ns;
use crate::host::process::Target;
use crate::record::governor::Action;
use crate::sampling::constants::draw_constants;

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
        let counts = self.counts()?;
        let cpu_seconds = self.cpu_seconds(counts.processes.keys().map(|process| process.tgid));
        let actions = self.governor.look(&counts.total(), cpu_seconds, now);
        // A window ends with the look at it, whatever comes next: its length must not depend on what was in it.
        if self.windows.is_open() && !actions.contains(&Action::Detach) {
            self.close_window(monotonic_ns())?;
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
                Action::LeaveFrees => attaching.hooks.leave_frees(&attaching.programs, &mut attaching.steering),
                Action::Detach => {
                    // The probes are gone at once; that the kernel waits for calls in progress takes longer.
                    let now = monotonic_ns();
                    attaching.hooks.pause();
                    self.recorder.heap.window_ends(now);
                    self.close_window(now)?;
                    self.windows.detached(now);
                    self.recorder.heap.open_window();
                }
                Action::Attach => {
                    attaching.hooks.resume(&attaching.programs, &mut attaching.steering);
                    let now = monotonic_ns();
                    self.recorder.heap.window_begins(now);
                    let pause_ns = self.windows.attached(now);
                    attaching.uncovered(pause_ns, now);
                }
            }
        }
        Ok(())
    }

    /// Takes in what has been seen, and ends the window that was open until `now_ns`, if there was one.
    fn close_window(&mut self, now_ns: u64) -> anyhow::Result<()> {
        let factor = self.windows.closed(now_ns);
        self.cycle()?;
        if let Some(factor) = factor {
            self.recorder.heap.close_window(factor);
        }
        Ok(())
    }

    /// The recording ends: the last window stands for the time since, too.
    pub(super) fn end_windows(&mut self) {
        let now = monotonic_ns();
        if let Some(factor) = self.windows.closed(now) {
            self.recorder.heap.close_window(factor);
        } else if let Some((pause_ns, more)) = self.windows.ended(now) {
            self.recorder.heap.extend_window(more);
            self.attaching.uncovered(pause_ns, now);
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
