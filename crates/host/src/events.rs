//! Receives process events from the kernel: forks, execs, exits and executable mappings of every process.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::epoll;

use super::HostError;
use super::perf_ring::{Next, PerfRing};
use super::record::{self, HostEvent};
use crate::clock::monotonic_ns;

/// Maximum number of passes over the rings in one [`HostEvents::drain`], so that it returns even if events arrive
/// faster than they are read.
const MAX_PASSES: usize = 64;

/// The process events of all CPUs, one ring per CPU, read in order of time.
#[derive(Debug)]
pub struct HostEvents {
    rings: Vec<PerfRing>,
    epoll: OwnedFd,
    record: Vec<u8>,
}

impl HostEvents {
    /// Subscribes on every online CPU.
    ///
    /// # Errors
    /// [`HostError::Events`] if a CPU cannot be watched: a capability is missing, or the kernel has no perf events.
    pub fn open() -> Result<Self, HostError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| HostError::Events(error.into()))?;
        let mut events = Self { rings: Vec::new(), epoll, record: Vec::with_capacity(8192) };
        events.watch_online_cpus().map_err(HostError::Events)?;
        Ok(events)
    }

    /// Subscribes on CPUs that came online since the last call. Returns `true` if there were any. Their earlier events
    /// were missed, so /proc has to be read again.
    ///
    /// # Errors
    /// The kernel's error, if an online CPU cannot be watched.
    pub fn watch_online_cpus(&mut self) -> io::Result<bool> {
        let mut added = false;
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online")?;
        for cpu in parse_cpu_list(&online) {
            if self.rings.iter().any(|ring| ring.cpu == cpu) {
                continue;
            }
            let ring = match PerfRing::open(cpu) {
                Ok(ring) => ring,
                // The CPU went offline after it was listed.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) => continue,
                Err(error) => return Err(error),
            };
            epoll::add(&self.epoll, &ring, epoll::EventData::new_u64(cpu.into()), epoll::EventFlags::IN)?;
            self.rings.push(ring);
            added = true;
        }
        if self.rings.is_empty() { Err(io::Error::from_raw_os_error(libc::ENODEV)) } else { Ok(added) }
    }

    /// Appends all events so far to `out`, in order of time. Returns `true` if more are pending.
    ///
    /// A cause always comes before its effect, even across CPUs: the clock is read before the rings, and only events
    /// older than that are taken. Events of unrelated threads within a few microseconds may be swapped. Readiness is
    /// edge-triggered: clear it, then drain.
    pub fn drain(&mut self, out: &mut Vec<HostEvent>) -> bool {
        for _ in 0..MAX_PASSES {
            let first = out.len();
            let now_ns = monotonic_ns();
            let mut waiting = false;
            self.rings.iter_mut().for_each(|ring| waiting |= drain_ring(ring, now_ns, &mut self.record, out));
            out[first..].sort_by_key(HostEvent::time_ns);
            if !waiting {
                return false;
            }
        }
        true
    }
}

impl AsFd for HostEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// Readable when there is something to drain; works with tokio's `AsyncFd`.
impl AsRawFd for HostEvents {
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

/// Takes the events up to `now_ns` from one ring. Returns `true` if newer ones are left.
fn drain_ring(ring: &mut PerfRing, now_ns: u64, record: &mut Vec<u8>, out: &mut Vec<HostEvent>) -> bool {
    ring.refresh();
    let left = loop {
        match ring.peek(record) {
            Next::Empty => break false,
            Next::Corrupt => out.push(HostEvent::Lost { time_ns: now_ns, count: 1 }),
            Next::Record => {
                if record::time_ns(record).is_some_and(|time| time > now_ns) {
                    break true;
                }
                ring.advance(record.len());
                out.extend(record::decode(record));
            }
        }
    };
    ring.release();
    left
}

/// Parses the kernel's list format, such as `0-3,8`. Anything but CPU numbers below 65,536 is ignored.
fn parse_cpu_list(list: &str) -> Vec<u32> {
    const MAX_CPU: u32 = 65_535;
    let mut cpus = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<u32>(), last.trim().parse::<u32>()) {
            cpus.extend(first..=last.min(MAX_CPU));
        }
    }
    cpus
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists() {
        assert_eq!(parse_cpu_list("0-1\n"), [0, 1]);
        assert_eq!(parse_cpu_list("0,2-4,7"), [0, 2, 3, 4, 7]);
        assert_eq!(parse_cpu_list(""), [] as [u32; 0]);
        assert_eq!(parse_cpu_list("x,1-"), [] as [u32; 0]);
        assert_eq!(parse_cpu_list("0-4294967295").len(), 65_536);
    }
}
