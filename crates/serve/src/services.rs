//! The services of a recording: an HTTP server, senders, both, or none.

use heapbpf_record::requests::{FinishedProfile, RecordingHandle};

use super::history::KeptHistory;
use super::listen::Listen;
use super::push::{PushPlan, Pusher};
use super::server::Server;

/// Where profiles are served and pushed during a recording.
#[derive(Debug, Default)]
pub struct ServePlan {
    /// The address that answers scrapers, already bound.
    pub listen: Option<Listen>,
    /// What the server remembers of earlier runs, and keeps for later ones.
    pub history: Option<KeptHistory>,
    /// Where profiles are pushed.
    pub push: Option<PushPlan>,
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
        let server = plan.listen.map(|listen| Server::start(listen, recording, statuses, plan.history)).transpose()?;
        Ok(Self { pusher, server })
    }

    /// Returns the server's URL, if there is one.
    pub fn url(&self) -> Option<String> {
        self.server.as_ref().map(Server::url)
    }

    /// Stops answering requests, because the recording is over. `last`: its last profile, whose totals later runs know.
    pub fn stop_answering(&mut self, last: &FinishedProfile) {
        if let Some(server) = self.server.take() {
            server.finish(last);
        }
    }

    /// Pushes the last profile, if profiles are pushed, and waits a few seconds for the queues to empty.
    pub fn finish(self, last: FinishedProfile) {
        if let Some(pusher) = self.pusher {
            pusher.finish(last);
        }
    }
}
