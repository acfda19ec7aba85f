//! Pushes profiles to stores at intervals. Each profile has the allocations since the previous one and the memory in
//! use at its own time.
//!
//! Each destination has its own queue and thread, so an unavailable destination does not delay the others.

mod batch;
pub mod destination;
mod grpc;
mod own_dir;
mod queue;
mod sender;
mod spool;

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use heapbpf_host::privileges::restrict_sender;
use heapbpf_record::requests::{Detail, FinishedProfile, RecordingHandle};

use self::batch::batches;
use self::destination::Destination;
pub use self::destination::DestinationError;
pub use self::own_dir::{OwnDir, SpoolError};
pub use self::queue::Counts;
use self::queue::Queue;
pub use self::spool::SpoolOptions;
use super::delta::{Inuse, difference};

/// What is pushed where.
#[derive(Debug)]
pub struct PushPlan {
    /// Destinations, with their queues.
    pub destinations: Vec<(Destination, Queue)>,
    /// Time between profiles.
    pub every: Duration,
}

/// Read access to the delivery status of all destinations.
#[derive(Clone, Default)]
pub struct PushStatuses(Arc<Vec<(String, Arc<Queue>)>>);

impl PushStatuses {
    /// Each destination with its counts.
    pub fn read(&self) -> Vec<(String, Counts)> {
        self.0.iter().map(|(destination, queue)| (destination.clone(), queue.counts())).collect()
    }
}

impl PushPlan {
    /// Parses the destinations and opens their queues, on disk if there is a spool.
    ///
    /// # Errors
    /// A URL is not a valid destination, or the spool cannot be used.
    pub fn open(urls: &[String], every: Duration, spool: Option<&SpoolOptions>) -> Result<Self, PushError> {
        let mut destinations: Vec<(Destination, Queue)> = Vec::new();
        for url in urls {
            let destination = Destination::parse(url)?;
            if destinations.iter().any(|(known, _)| known.shown() == destination.shown()) {
                return Err(DestinationError::twice(&destination).into());
            }
            let queue = match spool {
                Some(spool) => Queue::on_disk(spool, &destination.shown())?,
                None => Queue::in_memory(),
            };
            destinations.push((destination, queue));
        }
        Ok(Self { destinations, every })
    }
}

/// Why profiles cannot be pushed.
#[derive(Debug, thiserror::Error)]
pub enum PushError {
    /// A URL is not a valid destination.
    #[error(transparent)]
    Destination(#[from] DestinationError),
    /// The spool cannot be used.
    #[error(transparent)]
    Spool(#[from] SpoolError),
}

/// Pushes profiles while it exists. [`Pusher::finish`] pushes the end of the recording.
pub struct Pusher {
    work: Sender<FinishedProfile>,
    thread: std::thread::JoinHandle<()>,
    statuses: PushStatuses,
}

/// How long senders may take at the end to deliver their queues.
const GRACE_PERIOD: Duration = Duration::from_secs(5);

impl Pusher {
    /// Starts pushing.
    ///
    /// # Errors
    /// The system provides no thread.
    pub fn start(plan: PushPlan, recording: RecordingHandle) -> std::io::Result<Self> {
        let mut senders = Vec::new();
        let mut statuses = Vec::new();
        for (destination, queue) in plan.destinations {
            let queue = Arc::new(queue);
            statuses.push((destination.shown(), Arc::clone(&queue)));
            senders.push((destination.clone(), Arc::clone(&queue)));
            std::thread::Builder::new().name("push".into()).spawn(move || {
                restrict_sender();
                sender::run(&destination, &queue);
            })?;
        }
        let (work, last) = channel::<FinishedProfile>();
        let thread = std::thread::Builder::new().name("push".into()).spawn(move || {
            restrict_sender();
            let mut earlier: Option<FinishedProfile> = None;
            let mut due = Instant::now() + plan.every;
            loop {
                let made = match last.recv_timeout(due.saturating_duration_since(Instant::now())) {
                    Err(RecvTimeoutError::Timeout) => recording.profile_blocking(Detail::Stacks, None),
                    Ok(made) => {
                        enqueue(&senders, earlier.as_ref(), &made);
                        break;
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                };
                // The recording is ending and its last profile will arrive, or this profile could not be made.
                let Ok(made) = made else {
                    due = Instant::now() + plan.every;
                    continue;
                };
                enqueue(&senders, earlier.as_ref(), &made);
                earlier = Some(made);
                due = due.max(Instant::now() - plan.every) + plan.every;
            }
            let deadline = Instant::now() + GRACE_PERIOD;
            // All of them first: one that is away must not take the time of the others.
            senders.iter().for_each(|(_, queue)| queue.close());
            for (destination, queue) in &senders {
                queue.wait_until_empty(deadline);
                if let Some(lacking) = lacking(&queue.counts(), queue.is_on_disk()) {
                    log::warn!("{}: {lacking}", destination.shown());
                }
            }
        })?;
        Ok(Self { work, thread, statuses: PushStatuses(Arc::new(statuses)) })
    }

    /// The delivery status.
    pub fn statuses(&self) -> PushStatuses {
        self.statuses.clone()
    }

    /// Pushes the last profile and waits a few seconds for the queues to empty.
    pub fn finish(self, last: FinishedProfile) {
        let _ = self.work.send(last);
        let _ = self.thread.join();
    }
}

/// Describes what a destination did not get, for the end of the recording. `None` if nothing is waiting and nothing was
/// dropped.
fn lacking(counts: &Counts, on_disk: bool) -> Option<String> {
    let profiles = |number: u64| format!("{number} profile{}", if number == 1 { "" } else { "s" });
    let they = if counts.waiting == 1 { "it waits" } else { "they wait" };
    let then = if on_disk { format!("; {they} in the spool for the next run") } else { String::new() };
    let waiting = (counts.waiting > 0).then(|| format!("{} not delivered{then}", profiles(counts.waiting)));
    let dropped = (counts.dropped > 0).then(|| format!("{} dropped for lack of space", profiles(counts.dropped)));
    let parts: Vec<String> = waiting.into_iter().chain(dropped).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn enqueue(senders: &[(Destination, Arc<Queue>)], earlier: Option<&FinishedProfile>, made: &FinishedProfile) {
    let profile = difference(earlier, made, Inuse::Level);
    for (destination, queue) in senders {
        match batches(destination, &profile) {
            Ok(batch) => {
                if let Some(message) = queue.push(&batch) {
                    log::warn!("{}: {message}", destination.shown());
                }
            }
            Err(error) => log::warn!("{}: {error}", destination.shown()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_the_end_it_is_said_what_is_lacking() {
        let lacks = |waiting, dropped, on_disk| lacking(&Counts { waiting, dropped, ..Counts::default() }, on_disk);
        assert_eq!(lacks(0, 0, true), None);
        assert_eq!(lacks(2, 0, false).unwrap(), "2 profiles not delivered");
        let both =
            "1 profile not delivered; it waits in the spool for the next run; 3 profiles dropped for lack of space";
        assert_eq!(lacks(1, 3, true).unwrap(), both);
        assert_eq!(lacks(0, 1, true).unwrap(), "1 profile dropped for lack of space");
    }
}
