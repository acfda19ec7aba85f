//! Profiles for pipelines, while the recording runs: an HTTP server that scrapers ask, and senders to stores.
//!
//! The server has a thread and a runtime of its own. It asks the recording for snapshots through
//! [`Recording`] and shares each with everyone who came before it was taken, so
//! that many scrapers cost the event path no more than one.

mod connections;
mod delta;
pub mod filter;
pub mod listen;
pub mod metrics;
mod parameters;
pub mod push;
mod routes;
mod source;
mod tokens;

use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::oneshot;

use self::listen::Listen;
use self::push::PushStatuses;
use crate::record::requests::Recording;

/// Threads that encode profiles.
const ENCODERS: usize = 2;

/// Answers under way get this long when the recording ends.
const PARTING: Duration = Duration::from_secs(1);

/// A running server. Ends when dropped.
pub struct Server {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts to answer.
    ///
    /// # Errors
    /// The system gives no thread or no event queue.
    pub fn start(listen: Listen, recording: Recording, push: PushStatuses) -> std::io::Result<Self> {
        let address = listen.address;
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(ENCODERS).build()?;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("server".into()).spawn(move || {
            let router = routes::router(recording, listen.tokens, push);
            runtime.block_on(connections::serve(listen.socket, router, stopped));
            runtime.shutdown_timeout(PARTING);
        })?;
        Ok(Self { address, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it listens.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
