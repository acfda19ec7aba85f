//! The host: processes, their mappings, the files behind these.
//!
//! [`Host`] reads /proc once and then follows the kernel's events; it answers what was at an address of a process at
//! a time, and says when there is something new to attach to. Drain it (or [`Host::poll`]) *after* reading a batch of
//! samples and before resolving them: the kernel reports a mapping before the code in it can run.

pub mod build_id;
pub mod cgroup;
pub mod events;
pub mod in_root;
pub mod limits;
pub mod lives;
pub mod mappings;
pub mod modules;
pub mod open;
pub mod own_memory;
pub mod perf_ring;
pub mod proc_maps;
pub mod process;
pub mod record;
pub mod vdso;

use std::collections::HashSet;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use events::{HostEvents, monotonic_ns, suspended_ns};
use lives::{HostChange, Life, LifeId, Lives};
use mappings::ModuleId;
use modules::ModuleTable;
use perf_ring::RingOptions;
use process::ProcessInfo;
use record::HostEvent;

/// While events keep getting lost, /proc is read at most this often.
const RESCAN_INTERVAL_NS: u64 = 200_000_000;

/// Rounds of events in one [`Host::poll`]; a storm that outruns us does not keep the caller forever.
const MAX_ROUNDS: usize = 4;

/// What can go wrong when the host is looked at.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// Process events cannot be had.
    #[error(
        "cannot listen to process events (perf_event_open): {source}; run as root, or with CAP_PERFMON and CAP_BPF"
    )]
    Events {
        /// The kernel's reason.
        source: std::io::Error,
    },
    /// No /proc.
    #[error("cannot list processes in /proc: {source}")]
    Proc {
        /// The kernel's reason.
        source: std::io::Error,
    },
}

/// How the host is followed.
#[derive(Clone, Copy, Debug)]
pub struct HostOptions {
    /// Room for events, and when we are woken.
    pub ring: RingOptions,
    /// Module files kept open at most (see [`limits::raise`]).
    pub max_open_files: usize,
}

impl Default for HostOptions {
    /// 4,096 files.
    fn default() -> Self {
        Self { ring: RingOptions::default(), max_open_files: 4096 }
    }
}

/// Where an address of a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// In what.
    pub module: ModuleId,
    /// Where in its file; for anonymous memory the address itself.
    pub file_offset: u64,
}

/// What [`Host::poll`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Polled {
    /// Events applied.
    pub events: usize,
    /// Records that the kernel could not deliver.
    pub lost: u64,
    /// Whether /proc was read again because of that.
    pub rescanned: bool,
    /// Whether events are waiting already: there will be no wake-up for them.
    pub more: bool,
}

/// Events that there is room for while nothing much happens.
const ROOM_FOR_EVENTS: usize = 256;

/// Processes, mappings and modules of this machine, kept up to date.
#[derive(Debug)]
pub struct Host {
    events: Option<HostEvents>,
    lives: Lives,
    modules: ModuleTable,
    /// Events taken but not applied yet; empty between calls.
    buffer: Vec<HostEvent>,
    rescan_due: bool,
    rescanned_ns: u64,
}

impl Host {
    /// Listens to events, then reads /proc.
    ///
    /// # Errors
    /// [`HostError`] if one of the two cannot be had.
    pub fn start(options: HostOptions) -> Result<Self, HostError> {
        let events = HostEvents::open(options.ring)?;
        Self::with(Some(events), options)
    }

    /// Reads /proc only: what is there now, without events. Needs no rights but those to read /proc.
    ///
    /// # Errors
    /// [`HostError::Proc`].
    pub fn snapshot(options: HostOptions) -> Result<Self, HostError> {
        Self::with(None, options)
    }

    fn with(events: Option<HostEvents>, options: HostOptions) -> Result<Self, HostError> {
        let mut host = Self {
            events,
            lives: Lives::default(),
            modules: ModuleTable::new(options.max_open_files),
            buffer: Vec::new(),
            rescan_due: false,
            rescanned_ns: 0,
        };
        host.scan(true)?;
        host.apply_events(&mut Polled::default());
        Ok(host)
    }

    /// Applies everything that has happened so far. Cheap when nothing has.
    ///
    /// # Errors
    /// [`HostError::Proc`] if events were lost and /proc cannot be read.
    pub fn poll(&mut self) -> Result<Polled, HostError> {
        let mut polled = Polled::default();
        for _ in 0..MAX_ROUNDS {
            polled.more = self.take_events();
            self.apply_events(&mut polled);
            if !polled.more {
                break;
            }
        }
        if self.rescan_due && monotonic_ns().saturating_sub(self.rescanned_ns) > RESCAN_INTERVAL_NS {
            self.scan(false)?;
            self.apply_events(&mut polled);
            polled.rescanned = true;
        }
        Ok(polled)
    }

    /// Moves events from the rings to the buffer; `true` if more are waiting.
    fn take_events(&mut self) -> bool {
        self.events.as_mut().is_some_and(|events| events.drain(&mut self.buffer))
    }

    fn apply_events(&mut self, polled: &mut Polled) {
        let suspended_ns = suspended_ns();
        polled.events += self.buffer.len();
        for event in self.buffer.drain(..) {
            if let HostEvent::Lost { count, .. } = event {
                polled.lost += count;
                self.rescan_due = true;
            }
            self.lives.apply(&event, suspended_ns, &mut self.modules);
        }
    }

    /// Housekeeping, to be called about once a second: CPUs that came online, processes whose end was not noticed.
    ///
    /// # Errors
    /// [`HostError::Events`] if a CPU cannot be watched.
    pub fn tick(&mut self) -> Result<(), HostError> {
        if let Some(events) = &mut self.events {
            self.rescan_due |= events.watch_online_cpus().map_err(|source| HostError::Events { source })?;
        }
        for pid in self.lives.headless() {
            if process::Stat::read(pid).map_or(true, |stat| stat.without_memory && stat.threads <= 1) {
                self.lives.end(pid, monotonic_ns());
            }
        }
        Ok(())
    }

    /// What was at `address` of process `pid` at `time_ns` (CLOCK_MONOTONIC).
    #[must_use]
    pub fn resolve(&self, pid: u32, address: u64, time_ns: u64) -> Option<Location> {
        let mapping = self.lives.at(pid, time_ns)?.space.resolve(address, time_ns)?;
        Some(Location { module: mapping.module, file_offset: mapping.offset_of(address) })
    }

    /// All lives of processes that are kept.
    #[must_use]
    pub fn lives(&self) -> &Lives {
        &self.lives
    }

    /// For retaining, releasing, expiring, and for taking changes.
    pub fn lives_mut(&mut self) -> &mut Lives {
        &mut self.lives
    }

    /// All modules.
    #[must_use]
    pub fn modules(&self) -> &ModuleTable {
        &self.modules
    }

    /// For opening module files.
    pub fn modules_mut(&mut self) -> &mut ModuleTable {
        &mut self.modules
    }

    /// Lives to read and modules to open, both at once: what unwinding needs.
    pub fn split(&mut self) -> (&Lives, &mut ModuleTable) {
        (&self.lives, &mut self.modules)
    }

    /// Forgets lives, as [`Lives::expire`] does, and gives back the room that the events of many took.
    pub fn expire(&mut self, before_ns: u64, sampled_before_ns: u64) -> usize {
        self.buffer.shrink_to(ROOM_FOR_EVENTS);
        self.lives.expire(before_ns, sampled_before_ns)
    }

    /// Moves what has changed since the last call to `out`.
    pub fn drain_changes(&mut self, out: &mut Vec<HostChange>) {
        self.lives.drain_changes(out);
    }

    /// What is known of the process that has or had this life; read from /proc the first time, if it is still there.
    pub fn describe(&mut self, id: LifeId) -> Option<Arc<ProcessInfo>> {
        let unread = |life: &Life| !life.described && life.until_ns.is_none();
        if self.lives.get(id).is_some_and(unread)
            && let Ok(mut info) = ProcessInfo::read(id.pid)
            && let Some(known) = self.lives.get(id).map(|life| &life.info)
            // It may have exec'ed by now, which we would learn later: then it must not describe this life.
            && (known.comm == info.comm || known.exe == info.exe)
        {
            // One that is ending has no executable any more.
            if info.exe.is_empty() {
                (info.exe, info.exe_deleted) = (known.exe.clone(), known.exe_deleted);
            }
            self.lives.describe(id, info);
        }
        self.lives.get(id).map(|life| life.info.clone())
    }

    /// Reads /proc: at the start, and after events were lost. What happens meanwhile is in the buffer afterwards: a
    /// fork can only be understood when its parent is known.
    fn scan(&mut self, first: bool) -> Result<(), HostError> {
        let begun_ns = monotonic_ns();
        let suspended_ns = suspended_ns();
        let pids = process::all_pids().map_err(|source| HostError::Proc { source })?;
        let mut there = HashSet::with_capacity(pids.len());
        for pid in pids {
            let time_ns = monotonic_ns();
            // What vanishes between the list and the look is no error; kernel threads are of no interest.
            let Some(info) = ProcessInfo::read(pid).ok().filter(|info| !info.without_memory) else { continue };
            there.insert(pid);
            let maps = proc_maps::read(pid).unwrap_or_default();
            let since_ns = if first { 0 } else { info.start_ns.saturating_sub(suspended_ns) };
            self.lives.found(info, &maps, since_ns, time_ns, &mut self.modules);
            self.take_events();
        }
        let gone = |life: &&Life| life.until_ns.is_none() && life.since_ns < begun_ns && !there.contains(&life.id.pid);
        let gone: Vec<u32> = self.lives.iter().filter(gone).map(|life| life.id.pid).collect();
        for pid in gone {
            self.lives.end(pid, begun_ns);
        }
        // Losses noticed from here on call for another look.
        self.rescan_due = false;
        self.rescanned_ns = monotonic_ns();
        Ok(())
    }
}

/// Readable when there is something to [`Host::poll`]; -1 without events. Edge-triggered: clear readiness first.
impl AsRawFd for Host {
    fn as_raw_fd(&self) -> RawFd {
        self.events.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }
}
