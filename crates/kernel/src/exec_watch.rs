//! Makes targets that execute a program wait at their entry point, before they have allocated anything.
//!
//! A BPF program reports the exec once everything is mapped, before the process runs. The process needs some 250 µs to
//! get from there to its entry point. A separate thread, with priority over all others where that is permitted, stops
//! it in time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use heapbpf_remote::{NotHeld, Raised, Waiting};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::KernelError;
use super::loader::Loader;
use super::ring_maps::{self, RINGS, RingId, RingMemory};
use super::rings;

/// Maximum number of processes that are held and not taken yet. Others are not held.
const MOST: usize = 256;
/// Size of the ring in bytes: enough for a thousand execs.
const RING_BYTES: u64 = 16 << 10;

/// A process that executed a program.
#[derive(Debug)]
pub struct Executed {
    /// The process.
    pub pid: u32,
    /// Whether it waits at its entry point (or will, when it gets there), or the reason why not.
    pub held: Result<Waiting, NotHeld>,
}

/// The ring in which execs of targets are reported. The kernel takes a grace period to make it.
pub struct ExecRing(RingMemory);

impl ExecRing {
    /// Makes the ring.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn new(loader: &Loader) -> Result<Self, KernelError> {
        let ring = ring_maps::put_new(loader.map(RINGS)?, RingId::Execs, RING_BYTES)?;
        rings::map(RingId::Execs, ring).map(Self)
    }
}

/// A thread that is notified of execs. It ends soon after this is dropped. Processes that were not taken by then
/// continue.
#[derive(Debug)]
pub struct ExecWatch {
    executed: Receiver<Executed>,
    /// Readable when there is a process to take.
    wakes: Arc<OwnedFd>,
    ends: Arc<OwnedFd>,
}

impl ExecWatch {
    /// Makes targets wait when their exec is reported in the ring and `may_wait` returns true, each for about `limit`
    /// unless it is released earlier. `may_wait` should take only microseconds, because the processes keep running
    /// during the call.
    ///
    /// # Errors
    /// Notifications of execs are not available.
    pub fn start(
        ring: ExecRing,
        may_wait: impl Fn(u32) -> bool + Send + 'static,
        limit: Duration,
    ) -> Result<Self, KernelError> {
        let failed = |source| KernelError::Read { what: "execs", source };
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let new = || eventfd(0, flags).map(Arc::new).map_err(|error| failed(error.into()));
        let (wakes, ends) = (new()?, new()?);
        let (sender, executed) = sync_channel(MOST);
        let watcher = Watcher { execs: ring.0, limit, sender, wakes: Arc::clone(&wakes), ends: Arc::clone(&ends) };
        let run = move || watcher.run(&may_wait);
        std::thread::Builder::new().name("heapbpf-execs".into()).spawn(run).map_err(failed)?;
        Ok(Self { executed, wakes, ends })
    }

    /// Takes the next process, if there is one.
    pub fn take(&self) -> Option<Executed> {
        self.executed.try_recv().ok().or_else(|| {
            // A process that arrives from now on makes it readable again.
            let _ = rustix::io::read(&*self.wakes, &mut [0; 8]);
            self.executed.try_recv().ok()
        })
    }
}

/// Readable when there is something to take.
impl AsFd for ExecWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wakes.as_fd()
    }
}

impl Drop for ExecWatch {
    fn drop(&mut self) {
        // Not joined, because the thread may be busy for long reading a process's memory.
        signal(&self.ends);
    }
}

/// Makes an eventfd readable. If the write fails because it is full, it is readable already.
fn signal(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}

/// The state of the thread.
struct Watcher {
    execs: RingMemory,
    limit: Duration,
    sender: SyncSender<Executed>,
    wakes: Arc<OwnedFd>,
    ends: Arc<OwnedFd>,
}

impl Watcher {
    fn run(mut self, may_wait: &dyn Fn(u32) -> bool) {
        let _raised = Raised::begin();
        while self.wait() {
            while let Some(pid) = self.execs.read(|record| record.first_chunk().map(|pid| u32::from_ne_bytes(*pid))) {
                if let Some(pid) = pid.filter(|pid| may_wait(*pid)) {
                    self.hold(pid);
                }
            }
        }
    }

    /// Waits for an exec. Returns `false` when it is time to end.
    fn wait(&self) -> bool {
        let mut waited = [PollFd::new(&self.execs, PollFlags::IN), PollFd::new(&*self.ends, PollFlags::IN)];
        let failed = poll(&mut waited, None).is_err_and(|error| error != rustix::io::Errno::INTR);
        !failed && waited[1].revents().is_empty()
    }

    /// Makes a process wait, and hands it over. If it cannot be handed over, the process continues.
    fn hold(&self, pid: u32) {
        let held = Waiting::at_entry_of(pid, self.limit);
        match self.sender.try_send(Executed { pid, held }) {
            Ok(()) => signal(&self.wakes),
            Err(_) => log::debug!("process {pid} does not wait at its entry point: {MOST} others do"),
        }
    }
}
