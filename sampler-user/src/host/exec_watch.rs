//! Hears of execs as they happen, and has processes wait at their entry point, before they have allocated anything.
//!
//! A dynamic loader gets to a program's entry point in some 300 µs. A thread of its own, before all others where that is permitted,
//! is there in time.

use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use heapbpf_remote::{Executing, NotHeld, Raised, Waiting};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::HostError;
use super::events::HostEvents;
use super::perf_ring::RingOptions;
use super::record::HostEvent;

/// Most processes that are held and not taken yet, and most that are in the middle of their exec. Others run on, and are counted.
const MOST: usize = 256;
/// Bytes per CPU for changes of names: about a thousand.
const RING_BYTES: usize = 64 << 10;
/// Time between two looks for CPUs that came online, while there is something to do.
const CPUS_PERIOD: Duration = Duration::from_secs(1);

/// A process that executed a program.
#[derive(Debug)]
pub struct Executed {
    /// The process.
    pub pid: u32,
    /// When (CLOCK_MONOTONIC).
    pub time_ns: u64,
    /// It waits at its entry point, or will when it gets there; or why it does not.
    pub held: Result<Waiting, NotHeld>,
}

/// A thread that hears of execs. It ends, soon, when this is dropped; processes that were not taken yet go on.
#[derive(Debug)]
pub struct ExecWatch {
    executed: Receiver<Executed>,
    /// Readable when there is one.
    wakes: Arc<OwnedFd>,
    ends: Arc<OwnedFd>,
    missed: Arc<AtomicU64>,
}

impl ExecWatch {
    /// Has processes wait that execute a program and for which `is_target` is true, each for about `limit` if it is not let go before.
    /// `is_target` should take microseconds: the processes do not wait for it.
    ///
    /// # Errors
    /// Execs cannot be heard of.
    pub fn start(is_target: impl Fn(u32) -> bool + Send + 'static, limit: Duration) -> Result<Self, HostError> {
        let events = HostEvents::open(RingOptions { ring_bytes: RING_BYTES, watermark_bytes: 1, only_names: true })?;
        let new = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map(Arc::new);
        let failed = |source| HostError::Events { source };
        let (wakes, ends) =
            (new().map_err(|error| failed(error.into()))?, new().map_err(|error| failed(error.into()))?);
        let missed = Arc::new(AtomicU64::new(0));
        let (sender, executed) = sync_channel(MOST);
        let watcher = Watcher {
            events,
            executing: Vec::new(),
            limit,
            sender,
            wakes: Arc::clone(&wakes),
            missed: Arc::clone(&missed),
        };
        let until = Arc::clone(&ends);
        let run = move || watcher.run(&until, &is_target);
        std::thread::Builder::new().name("heapbpf-execs".into()).spawn(run).map_err(failed)?;
        Ok(Self { executed, wakes, ends, missed })
    }

    /// The next process, if there is one.
    pub fn take(&self) -> Option<Executed> {
        self.executed.try_recv().ok().or_else(|| {
            // One that comes from now on wakes again.
            let _ = rustix::io::read(&*self.wakes, &mut [0; 8]);
            self.executed.try_recv().ok()
        })
    }

    /// Execs that came too fast: nobody was asked whether these are targets, or they were let go at once.
    pub fn missed(&self) -> u64 {
        self.missed.load(Relaxed)
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
        // It is not waited for: a read of a process's memory may take long.
        signal(&self.ends);
    }
}

/// Makes an eventfd readable. It is already if it is full.
fn signal(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}

/// What the thread has.
struct Watcher {
    events: HostEvents,
    /// Processes whose program is not mapped yet, and when they began with it.
    executing: Vec<(u32, u64, Executing)>,
    limit: Duration,
    sender: SyncSender<Executed>,
    wakes: Arc<OwnedFd>,
    missed: Arc<AtomicU64>,
}

impl Watcher {
    fn run(mut self, ends: &OwnedFd, is_target: &dyn Fn(u32) -> bool) {
        let _raised = Raised::begin();
        // Pauses of microseconds are no longer than that.
        // SAFETY: numbers only.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
        let (mut heard, mut looked) = (Vec::new(), Instant::now());
        while !self.wait(ends) {
            self.events.drain(&mut heard);
            for event in heard.drain(..) {
                match event {
                    HostEvent::Comm { pid, time_ns, exec: true, .. } if is_target(pid) => self.begin(pid, time_ns),
                    HostEvent::Lost { count, .. } => drop(self.missed.fetch_add(count, Relaxed)),
                    _ => {}
                }
            }
            self.hold();
            if self.executing.is_empty() && looked.elapsed() > CPUS_PERIOD {
                looked = Instant::now();
                let _ = self.events.watch_online_cpus();
            }
        }
    }

    /// Waits for an exec, or until it is time to look again; whether to end.
    fn wait(&self, ends: &OwnedFd) -> bool {
        let pause = self.executing.iter().map(|(_, _, executing)| executing.pause()).min();
        let pause = pause.and_then(|pause| Timespec::try_from(pause).ok());
        // SAFETY: `self.events` keeps the descriptor open until this function returns.
        let events = unsafe { BorrowedFd::borrow_raw(self.events.as_raw_fd()) };
        let mut waited = [PollFd::from_borrowed_fd(events, PollFlags::IN), PollFd::new(ends, PollFlags::IN)];
        let failed = poll(&mut waited, pause.as_ref()).is_err_and(|error| error != rustix::io::Errno::INTR);
        failed || !waited[1].revents().is_empty()
    }

    fn begin(&mut self, pid: u32, time_ns: u64) {
        if self.executing.len() >= MOST {
            self.missed.fetch_add(1, Relaxed);
            return;
        }
        match Executing::of(pid) {
            Ok(executing) => self.executing.push((pid, time_ns, executing)),
            Err(why) => self.tell(Executed { pid, time_ns, held: Err(why) }),
        }
    }

    /// Has those wait whose program is mapped by now.
    fn hold(&mut self) {
        for (pid, time_ns, executing) in std::mem::take(&mut self.executing) {
            match executing.hold(self.limit).transpose() {
                Some(held) => self.tell(Executed { pid, time_ns, held }),
                None => self.executing.push((pid, time_ns, executing)),
            }
        }
    }

    /// Hands it over; dropped, it goes on.
    fn tell(&self, executed: Executed) {
        match self.sender.try_send(executed) {
            Ok(()) => signal(&self.wakes),
            Err(_) => drop(self.missed.fetch_add(1, Relaxed)),
        }
    }
}
