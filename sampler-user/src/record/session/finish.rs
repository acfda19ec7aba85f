//! The end of a recording: makes its last profile and removes the probes.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::bail;

use super::state::Session;
use crate::record::outputs::status_line::Finishing;
use crate::record::profiles::snapshot::Detail;
use crate::record::profiles::worker::Made;

/// Time between two progress reports of symbolization.
const TELL_EVERY: Duration = Duration::from_millis(200);

impl Session {
    /// Makes the last profile as of now, and removes the probes. What happens meanwhile is not part of the recording.
    /// `tell` is called for each step that takes time.
    ///
    /// # Errors
    /// The profile cannot be made. No probe is left behind in that case either.
    pub(super) fn finish(&mut self, mut tell: impl FnMut(Finishing)) -> anyhow::Result<Made> {
        let begun = Instant::now();
        self.attaching.finish_examining(&mut self.host);
        let snapshot = self.with_cut(|session, cut| {
            if let Some(ends_ns) = session.schedule.ends_ns {
                log::debug!(
                    "cut {} µs after the recording's time was over",
                    cut.time_ns.saturating_sub(ends_ns) / 1_000
                );
            }
            session.end_windows(cut);
            Ok(session.snapshot_of(cut, Detail::Lifetimes, true, begun))
        });
        self.schedule.last_moments_are_over();
        let (sender, made) = channel();
        let asked = snapshot.map(|snapshot| self.worker.make(snapshot, move |made| drop(sender.send(made))));
        tell(Finishing::RemovingProbes);
        self.attaching.hooks.release_all();
        asked?;
        loop {
            match made.recv_timeout(TELL_EVERY) {
                Ok(made) => return Ok(made),
                Err(RecvTimeoutError::Timeout) => {
                    let (done, of) = self.worker.progress();
                    tell(Finishing::Symbolization(done, of));
                }
                Err(RecvTimeoutError::Disconnected) => bail!("the profile could not be made: its thread has died"),
            }
        }
    }
}
