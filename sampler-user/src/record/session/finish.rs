//! The end of a recording: its last profile, and the probes out.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::bail;

use super::Session;
use crate::record::maker::Made;
use crate::record::snapshot::Detail;

/// Time between two words on how far naming has come.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// What is being done after the recording, for who waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finishing {
    /// Probes are taken away.
    RemovingProbes,
    /// So many places have been given names, of so many.
    Naming(usize, usize),
}

impl Session {
    /// Makes the last profile, of this moment, and takes the probes away: what happens meanwhile is no part of the
    /// recording. `tell` hears what takes time.
    ///
    /// # Errors
    /// The profile cannot be made. No probe is left behind then, either.
    pub fn finish(&mut self, mut tell: impl FnMut(Finishing)) -> anyhow::Result<Made> {
        let begun = Instant::now();
        let snapshot = self.with_cut(|session, cut| {
            if let Some(ends_ns) = session.ends_ns {
                log::debug!(
                    "cut {} µs after the recording's time was over",
                    cut.time_ns.saturating_sub(ends_ns) / 1_000
                );
            }
            session.end_windows(cut);
            Ok(session.snapshot_of(cut, Detail::Lifetimes, true, begun))
        });
        self.last_hurry = None;
        let (sender, made) = channel();
        let asked = snapshot.map(|snapshot| self.maker.make(snapshot, move |made| drop(sender.send(made))));
        tell(Finishing::RemovingProbes);
        self.attaching.hooks.release_all();
        asked?;
        loop {
            match made.recv_timeout(TELL_EVERY) {
                Ok(made) => return Ok(made),
                Err(RecvTimeoutError::Timeout) => {
                    let (done, of) = self.maker.progress();
                    tell(Finishing::Naming(done, of));
                }
                Err(RecvTimeoutError::Disconnected) => bail!("the profile could not be made: its thread has died"),
            }
        }
    }
}
