//! The HTTP server, with its own thread and runtime.

use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::Duration;

use heapbpf_host::privileges::restrict_server;
use heapbpf_record::requests::{FinishedProfile, RecordingHandle};
use tokio::sync::oneshot;

use super::connections;
use super::history::KeptHistory;
use super::listen::Listen;
use super::push::PushStatuses;
use super::routes::Routes;

/// Number of threads that encode profiles.
const ENCODERS: usize = 2;

/// How long answers in progress may continue after the recording ends.
const GRACE_PERIOD: Duration = Duration::from_secs(1);

/// A running server. Dropping it stops it.
pub struct Server {
    address: SocketAddr,
    is_tls: bool,
    routes: Routes,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts the server. `kept`: the history of earlier runs, to continue.
    ///
    /// # Errors
    /// The system provides no thread or no event queue.
    pub fn start(
        listen: Listen,
        recording: RecordingHandle,
        push: PushStatuses,
        kept: Option<KeptHistory>,
    ) -> std::io::Result<Self> {
        let history = kept.map(KeptHistory::start).transpose()?.unwrap_or_default();
        let (address, is_tls) = (listen.address, listen.tls.is_some());
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(ENCODERS).build()?;
        let routes = Routes::new(recording, listen.tokens, push, history);
        let own_routes = routes.clone();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("server".into()).spawn(move || {
            restrict_server();
            runtime.spawn(own_routes.clone().remember());
            runtime.block_on(connections::serve(listen.socket, listen.tls, own_routes, stopped));
            runtime.shutdown_timeout(GRACE_PERIOD);
        })?;
        Ok(Self { address, is_tls, routes, stop: Some(stop), thread: Some(thread) })
    }

    /// Returns the server's URL.
    pub fn url(&self) -> String {
        format!("{}://{}", if self.is_tls { "https" } else { "http" }, self.address)
    }

    /// Stops the server. Its history ends with the recording's last profile.
    pub fn finish(self, last: &FinishedProfile) {
        self.routes.remember_last(last);
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
