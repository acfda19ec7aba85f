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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use client::Client;
use settings::Settings;

/// A client, shared by everything that looks for files.
#[derive(Clone)]
pub struct Debuginfod(Arc<Mutex<Client>>);

impl Debuginfod {
    /// A client of the servers in `settings`.
    pub fn new(settings: Settings) -> Self {
        Self(Arc::new(Mutex::new(Client::new(settings))))
    }

    /// The client, which others wait for meanwhile. A download may take minutes.
    pub fn lock(&self) -> MutexGuard<'_, Client> {
        // A panic leaves the client usable: what it did not download is requested again.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Debuginfod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Debuginfod")
    }
}
