//! The end of a recording: makes its last profile and removes the probes.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::bail;
use heapbpf_attach::inline::InlineHooks;
use heapbpf_profile::units::count;

use super::cut::Cut;
use super::state::Session;
use crate::profiles::snapshot::{Detail, Snapshot};
use crate::profiles::worker::FinishedProfile;

/// Time between two progress reports of symbolization.
const REPORT_EVERY: Duration = Duration::from_millis(200);

/// How often making the last profile is tried.
const ATTEMPTS: usize = 2;

impl Session {
    /// Makes the last profile, as of now, and removes the probes. What happens during this is not part of the
    /// recording. `report` is called for each step that takes time.
    ///
    /// # Errors
    /// The profile cannot be made. No probe is left behind in that case either.
    pub(super) fn finish(&mut self, mut report: impl FnMut(String)) -> anyhow::Result<FinishedProfile> {
        let begun = Instant::now();
        if self.unmatched().is_some() {
            // One may have begun since the last turn, and ended.
            self.recorder.poll(&mut self.host);
        }
        // Hooks of others may have arrived since the last check.
        self.attaching.look_at_others_hooks(u64::MAX);
        self.attaching.log_refusals();
        self.attaching.finish_examining(&mut self.host);
        self.attaching.programs.lifecycle.await_skipped_ends();
        let (hooked, unhooked) = channel();
        let (cut, mut made) = self.with_last_cut(|session, cut| {
            if let Some(ends_ns) = session.schedule.ends_ns {
                log::debug!(
                    "cut {} µs after the recording's time was over",
                    cut.time_ns.saturating_sub(ends_ns) / 1_000
                );
            }
            (cut.clone(), session.make_last(cut, begun, Some(unhooked)))
        });
        self.schedule.last_moments = None;
        report("removing probes".into());
        self.attaching.inline.iter_mut().for_each(InlineHooks::release_all);
        self.attaching.release_links();
        self.attaching.detours.release_all();
        drop(hooked);
        for attempt in 1.. {
            match self.last_made(&made, &mut report) {
                Some(made) => return Ok(made),
                None if attempt < ATTEMPTS => made = self.make_last(&cut, begun, None),
                None => break,
            }
        }
        bail!("the last profile could not be made because of the error inside heapbpf reported above")
    }

    /// Requests the profile of the last cut. `unhooked`: closes when the hooks have been removed.
    fn make_last(&mut self, cut: &Cut, begun: Instant, unhooked: Option<Receiver<()>>) -> Receiver<FinishedProfile> {
        let snapshot = Snapshot { unhooked, ..self.snapshot_of(cut, Detail::Lifetimes, &[], false, true, begun) };
        let (sender, made) = channel();
        self.worker.make(snapshot, move |made| drop(sender.send(made)));
        made
    }

    /// Waits for the last profile; `None` if making it failed.
    fn last_made(&self, made: &Receiver<FinishedProfile>, report: &mut impl FnMut(String)) -> Option<FinishedProfile> {
        loop {
            match made.recv_timeout(REPORT_EVERY) {
                Ok(made) => return Some(made),
                Err(RecvTimeoutError::Timeout) => {
                    let (done, of) = self.worker.progress();
                    let names = || format!("finding names: {} of {} places", count(done as f64), count(of as f64));
                    report(self.worker.download().map_or_else(names, |download| download.to_string()));
                }
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }
}
