//! Debug files by build ID from debuginfod servers, off unless the user names servers.
//!
//! [`settings`] is what the user wants and what a server may cost, [`cache`] keeps files and negative answers in elfutils'
//! place and layout, [`client`] asks the servers. What a server sends is hostile: bounded, checked, never mapped.

pub mod cache;
pub mod client;
pub mod settings;

#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use client::Client;
use settings::Settings;

use super::progress::Progress;

/// A client that is shared by those who look for files.
#[derive(Clone)]
pub struct Debuginfod(Arc<Mutex<Client>>);

impl Debuginfod {
    /// A client of the servers in `settings`.
    pub fn new(settings: Settings) -> Self {
        Self(Arc::new(Mutex::new(Client::new(settings))))
    }

    /// Reports downloads to `progress` from now on.
    pub fn tell(&self, progress: Arc<Progress>) {
        self.client().tell(progress);
    }

    /// Begins a batch, whose downloads together have a limit of time.
    pub fn begin_batch(&self) {
        self.client().begin_batch();
    }

    /// The debug file with this build ID, from the cache or from a server. May take minutes.
    ///
    /// # Errors
    /// A text for the user that says why there is none.
    pub fn find(&self, build_id: &[u8]) -> Result<File, String> {
        self.client().find(build_id)
    }

    fn client(&self) -> MutexGuard<'_, Client> {
        // A panic leaves the client as it was: what it did not download is asked for again.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Debuginfod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Debuginfod")
    }
}
