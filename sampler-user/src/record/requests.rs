//! How others ask a running recording for profiles. The event path never waits for them: it takes a snapshot and hands
//! it to the maker, which answers.

use tokio::sync::{mpsc, oneshot};

use super::maker::Made;
use super::snapshot::Detail;

/// Requests that wait at most; who comes then waits until there is room.
const QUEUE: usize = 16;

/// A request for a profile of this moment.
pub struct Request {
    /// How much of it.
    pub detail: Detail,
    /// Where it goes.
    pub reply: oneshot::Sender<Made>,
}

/// The recording as seen from other threads.
#[derive(Clone)]
pub struct Recording {
    requests: mpsc::Sender<Request>,
}

/// The recording is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the recording is ending")]
pub struct Ended;

impl Recording {
    /// A way to a session, which takes requests at the other end.
    pub fn new() -> (Self, mpsc::Receiver<Request>) {
        let (requests, queue) = mpsc::channel(QUEUE);
        (Self { requests }, queue)
    }

    /// A profile of a moment between the call and its return.
    ///
    /// # Errors
    /// The recording is over.
    pub async fn profile(&self, detail: Detail) -> Result<Made, Ended> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(Request { detail, reply }).await.map_err(|_| Ended)?;
        answer.await.map_err(|_| Ended)
    }

    /// The same for a thread without a runtime.
    ///
    /// # Errors
    /// The recording is over.
    pub fn profile_blocking(&self, detail: Detail) -> Result<Made, Ended> {
        let (reply, answer) = oneshot::channel();
        self.requests.blocking_send(Request { detail, reply }).map_err(|_| Ended)?;
        answer.blocking_recv().map_err(|_| Ended)
    }
}
