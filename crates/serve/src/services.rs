//! The services of a recording: an HTTP server, senders, both, or none.

use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::Duration;

use heapbpf_host::privileges::restrict_server;
use heapbpf_profile::report::FrameView;
use heapbpf_record::requests::{FinishedProfile, RecordingHandle};
use tokio::sync::oneshot;

use super::connections;
use super::history::KeptHistory;
use super::listen::Listen;
use super::push::{PushPlan, PushStatuses, Pusher};
use super::routes::Routes;

/// Number of threads of the server that encode profiles.
const ENCODERS: usize = 2;

/// How long answers in progress may continue after the recording ends.
const GRACE_PERIOD: Duration = Duration::from_secs(1);

/// Where profiles are served and pushed during a recording.
#[derive(Debug, Default)]
pub struct ServePlan {
    /// The address that answers scrapers, already bound.
    pub listen: Option<Listen>,
    /// What the server remembers of earlier runs, and keeps for later ones.
    pub history: Option<KeptHistory>,
    /// Where profiles are pushed.
    pub push: Option<PushPlan>,
    /// How the page and leak suspects show frames.
    pub frames: FrameView,
}

impl ServePlan {
    /// Whether there is neither a server nor a sender.
    pub const fn is_empty(&self) -> bool {
        self.listen.is_none() && self.push.is_none()
    }
}

/// The running services.
pub struct Services {
    pusher: Option<Pusher>,
    server: Option<Server>,
}

impl Services {
    /// Starts the planned services.
    ///
    /// # Errors
    /// The system provides no thread or no event queue.
    pub fn start(plan: ServePlan, recording: RecordingHandle) -> std::io::Result<Self> {
        let pusher = plan.push.map(|push| Pusher::start(push, recording.clone())).transpose()?;
        let statuses = pusher.as_ref().map(Pusher::statuses).unwrap_or_default();
        let start = |listen| Server::start(listen, recording, statuses, plan.history, plan.frames);
        let server = plan.listen.map(start).transpose()?;
        Ok(Self { pusher, server })
    }

    /// Returns the server's URL, if there is one.
    pub fn url(&self) -> Option<String> {
        let scheme = |server: &Server| if server.is_tls { "https" } else { "http" };
        self.server.as_ref().map(|server| format!("{}://{}", scheme(server), server.address))
    }

    /// Stops answering requests, because the recording is over. `last`: its last profile, whose totals later runs know.
    pub fn stop_answering(&mut self, last: &FinishedProfile) {
        if let Some(server) = self.server.take() {
            server.routes.remember_last(last);
        }
    }

    /// Pushes the last profile, if profiles are pushed, and waits a few seconds for the queues to empty.
    pub fn finish(self, last: FinishedProfile) {
        if let Some(pusher) = self.pusher {
            pusher.finish(last);
        }
    }
}

/// The HTTP server, with its own thread and runtime. Dropping it stops it.
struct Server {
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
    fn start(
        listen: Listen,
        recording: RecordingHandle,
        push: PushStatuses,
        kept: Option<KeptHistory>,
        frames: FrameView,
    ) -> std::io::Result<Self> {
        let history = kept.map(KeptHistory::start).transpose()?.unwrap_or_default();
        let (address, is_tls) = (listen.address, listen.tls.is_some());
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(ENCODERS).build()?;
        let routes = Routes::new(recording, listen.tokens, push, history, frames);
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
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
