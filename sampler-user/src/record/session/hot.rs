//! `--hook inline` with whole hosts, names and cgroups: probes count every process, and hot ones go over to inline hooks.

use std::time::Duration;

use super::errors::Step;
use super::hot_processes::Hot;
use super::state::Session;
use crate::attach::inline::FromProbes;
use crate::clock::monotonic_ns;
use crate::kernel::totals::Counts;
use crate::record::attaching::over::GoneOver;
use crate::record::attaching::probes::is_alive;

impl Session {
    /// Looks for hot processes, if it is time, or hooks one of those that were found. One at a time: records are taken in
    /// between.
    pub(super) fn hook_hot(&mut self) {
        let now_ns = monotonic_ns();
        let Some(hot) = self.hot.as_ref().filter(|_| self.attaching.hooks_the_hot()) else { return };
        if hot.heat.is_due() {
            return self.hook_hottest(now_ns);
        }
        if now_ns < hot.looks.next_ns || self.attaching.is_over() || !self.may_try(Step::Counters) {
            return;
        }
        // What is counted inside is no heat, and takes long to read.
        let counted = self.kernel.totals.read(&self.attaching.programs).map_err(anyhow::Error::from);
        let counted = self.errors.note(Step::Counters, counted, monotonic_ns());
        self.attaching.note_heirs();
        if let Some(counts) = counted {
            self.look_for_hot(&counts);
        }
    }

    /// Looks for hot processes in counts that were just read.
    pub(super) fn look_for_hot(&mut self, counts: &Counts) {
        let may = self.attaching.hooks_the_hot();
        let Some(hot) = self.hot.as_mut().filter(|_| may) else { return };
        let now_ns = monotonic_ns();
        hot.heat.look(counts.processes.iter(), now_ns);
        hot.looked(now_ns);
    }

    /// Whether hot processes are about to leave the probes.
    pub(super) fn is_about_to_cool(&mut self, now_ns: u64) -> bool {
        let may = self.attaching.hooks_the_hot();
        self.hot.as_mut().is_some_and(|hot| may && hot.heat.is_about_to_cool(now_ns))
    }

    fn hook_hottest(&mut self, now_ns: u64) {
        let Some(Hot { heat, handover, .. }) = &mut self.hot else { return };
        let Some(process) = heat.next_due().filter(|_| !self.attaching.is_over()) else { return };
        let mut from = FromProbes { live: &mut self.kernel.live_map, handover };
        let gone = self.attaching.go_over(&mut self.host, process, &mut from);
        self.recorder.set_functions(self.attaching.hooks.functions());
        let why = match gone {
            GoneOver::Yes => return heat.hooked(process),
            GoneOver::NotYet(why) => {
                log::info!("process {} does not go over to inline hooks yet: {why}", process.tgid);
                if heat.postponed(process, now_ns) {
                    return;
                }
                why
            }
            GoneOver::Never(why) => why,
        };
        heat.refused(process);
        // Of one that has ended meanwhile there is nothing to tell.
        if is_alive(process.tgid) {
            self.attaching.stays_on_probes(process.tgid, &why);
        }
    }

    /// Time until hot processes are looked for, or one of them hooked; `None` if none are to be hooked.
    pub(super) fn until_hot(&self) -> Option<Duration> {
        let hot = self.hot.as_ref().filter(|_| self.attaching.hooks_the_hot())?;
        let now_ns = monotonic_ns();
        let until = Duration::from_nanos(hot.looks.next_ns.saturating_sub(now_ns));
        let until = until.max(self.errors.until_retry(Step::Counters, now_ns));
        Some(if hot.heat.is_due() { Duration::ZERO } else { until })
    }
}
