//! Requests for profiles of a running recording. The event path never waits for a profile: it takes a snapshot and
//! hands it to the profile worker, which replies.

use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

pub use super::snapshot::{Detail, Often};
pub use super::worker::FinishedProfile;

/// Capacity of the request queue. When it is full, senders wait.
const QUEUE: usize = 16;

/// A request for a profile of the present moment.
pub struct Request {
    /// Level of detail.
    pub detail: Detail,
    /// Moments that divide the blocks in use by age, as times since the start of the recording; ascending.
    pub marks: Vec<Duration>,
    /// Set for a client that does not need memory measured; see [`Often`].
    pub often: Option<Often>,
    /// Channel for the reply.
    pub reply: oneshot::Sender<Result<FinishedProfile, Unanswered>>,
}

/// Handle to a running recording, for other threads.
#[derive(Clone)]
pub struct RecordingHandle {
    requests: mpsc::Sender<Request>,
}

/// Why a request has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unanswered {
    /// The recording is over.
    #[error("the recording is ending")]
    Ended,
    /// Too many profiles wait for their names.
    #[error("too many profiles are waiting for names; try again later")]
    Busy,
    /// The profile could not be made.
    #[error("the profile could not be made because of an error inside heapbpf; see its log")]
    Failed,
}

impl RecordingHandle {
    /// Creates a handle, and the receiver from which the recording takes requests.
    pub fn new() -> (Self, mpsc::Receiver<Request>) {
        let (requests, queue) = mpsc::channel(QUEUE);
        (Self { requests }, queue)
    }

    /// Requests a profile, of a moment between the call and its return. `marks`: moments that divide memory in use
    /// ([`FinishedProfile::recent`]), ascending; totals have no such sums. `often`: see [`Often`].
    ///
    /// # Errors
    /// See [`Unanswered`].
    pub async fn profile(
        &self,
        detail: Detail,
        marks: Vec<Duration>,
        often: Option<Often>,
    ) -> Result<FinishedProfile, Unanswered> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(Request { detail, marks, often, reply }).await.map_err(|_| Unanswered::Ended)?;
        answer.await.unwrap_or_else(|_| Err(self.unanswered()))
    }

    /// Same as [`profile`](Self::profile), for a thread without a tokio runtime.
    ///
    /// # Errors
    /// See [`Unanswered`].
    pub fn profile_blocking(&self, detail: Detail, often: Option<Often>) -> Result<FinishedProfile, Unanswered> {
        let (reply, answer) = oneshot::channel();
        let request = Request { detail, marks: Vec::new(), often, reply };
        self.requests.blocking_send(request).map_err(|_| Unanswered::Ended)?;
        answer.blocking_recv().unwrap_or_else(|_| Err(self.unanswered()))
    }

    /// Why a request that was sent got no answer.
    fn unanswered(&self) -> Unanswered {
        if self.requests.is_closed() { Unanswered::Ended } else { Unanswered::Failed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn who_waits_when_the_recording_ends_is_told() {
        let (recording, mut requests) = RecordingHandle::new();
        let waiting = recording.clone();
        let waiter = tokio::spawn(async move { waiting.profile(Detail::Totals, Vec::new(), None).await.err() });
        let request = requests.recv().await.unwrap();
        assert_eq!(request.detail, Detail::Totals);
        drop(requests);
        drop(request);
        assert_eq!(waiter.await.unwrap(), Some(Unanswered::Ended));
        let later = recording.profile(Detail::Stacks, Vec::new(), None).await.err();
        assert_eq!(later, Some(Unanswered::Ended), "and so is who comes later");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn who_gets_no_profile_while_the_recording_goes_on_is_told_so() {
        let (recording, mut requests) = RecordingHandle::new();
        let waiter = tokio::spawn(async move { recording.profile(Detail::Totals, Vec::new(), None).await.err() });
        drop(requests.recv().await.unwrap());
        assert_eq!(waiter.await.unwrap(), Some(Unanswered::Failed));
    }
}
