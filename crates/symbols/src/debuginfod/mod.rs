//! Fetches debug files by build ID from debuginfod servers. Off unless the user names servers.
//!
//! [`settings`] holds what the user wants and the limits on servers. [`cache`] keeps files and negative answers in
//! elfutils' directory and layout. [`client`] asks the servers. Everything that a server sends is treated as hostile:
//! bounded, checked, never mapped.

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

/// A client, shared by everything that looks for files.
#[derive(Clone)]
pub struct Debuginfod(Arc<Mutex<Client>>);

impl Debuginfod {
    /// A client of the servers in `settings`.
    pub fn new(settings: Settings) -> Self {
        Self(Arc::new(Mutex::new(Client::new(settings))))
    }

    /// Reports downloads to `progress` from now on.
    pub fn report_to(&self, progress: Arc<Progress>) {
        self.client().report_to(progress);
    }

    /// Begins a batch. Its downloads together have a time limit.
    pub fn begin_batch(&self) {
        self.client().begin_batch();
    }

    /// Returns the debug file with this build ID, from the cache or from a server. May take minutes.
    ///
    /// # Errors
    /// Returns a text for the user that says why there is none.
    pub fn find(&self, build_id: &[u8]) -> Result<File, String> {
        self.client().find(build_id)
    }

    fn client(&self) -> MutexGuard<'_, Client> {
        // A panic leaves the client usable: what it did not download is requested again.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Debuginfod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Debuginfod")
    }
}
