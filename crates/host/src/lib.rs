//! The host: processes, their mappings, and the files behind them.
//!
//! [`Host`] reads /proc once and then follows the kernel's events. It resolves an address of a process at a given time,
//! and reports changes that may need probes. Call [`Host::poll`] *after* reading a batch of samples and before
//! resolving them: the kernel reports a mapping before the code in it can run.

// These macros panic if nobody reads the output.
#![warn(clippy::print_stderr, clippy::print_stdout)]

pub mod arch;
pub mod arenas;
pub mod breakpoints;
pub mod census;
pub mod cgroup;
pub mod clock;
pub mod code_ranges;
pub mod environment;
pub mod events;
#[cfg(test)]
mod fuzzed;
pub mod helper;
pub mod in_memory;
pub mod in_root;
pub mod independent;
pub mod invoking_user;
pub mod limits;
pub mod mappings;
pub mod messages;
pub mod modules;
pub mod name_services;
pub mod open;
pub mod own_code;
pub mod own_memory;
pub mod pages;
pub mod perf_ring;
pub mod placement;
pub mod priority;
pub mod privileges;
pub mod proc_maps;
pub mod process;
pub mod processes;
pub mod reader_thread;
pub mod record;
pub mod replaced_text;
pub mod resident;
pub mod roots;
pub mod shadow_stacks;
pub mod side_by_side;
pub mod translation;
pub mod vdso;

use std::collections::HashSet;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use self::events::HostEvents;
use self::mappings::ModuleId;
use self::modules::ModuleTable;
use self::process::ProcessInfo;
use self::processes::{Generation, GenerationId, HostChange, Processes};
use self::record::HostEvent;
use crate::clock::{monotonic_ns, suspended_ns};

/// Minimum time between two scans of /proc while events keep getting lost, in nanoseconds.
const RESCAN_INTERVAL_NS: u64 = 200_000_000;

/// Maximum number of rounds of events in one [`Host::poll`], so that it returns even if events arrive faster than they
/// are applied.
const MAX_ROUNDS: usize = 4;

/// Why the host cannot be observed.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// Process events are not available.
    #[error("cannot listen to process events (perf_event_open): {0}; run as root, or with CAP_PERFMON and CAP_BPF")]
    Events(#[source] std::io::Error),
    /// /proc cannot be read.
    #[error("cannot list processes in /proc: {0}")]
    Proc(#[source] std::io::Error),
}

/// Maximum number of module files that a [`Host::snapshot`] keeps open.
const FILES_OF_SNAPSHOT: usize = 4096;

/// What [`Host::poll`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Polled {
    /// Records that the kernel dropped.
    pub lost: u64,
    /// Whether more events are pending. There will be no wake-up for them.
    pub more: bool,
}

/// Capacity that the event buffer keeps when it is empty.
const EVENTS_CAPACITY: usize = 256;

/// The processes, mappings and modules of this machine, kept up to date.
#[derive(Debug)]
pub struct Host {
    events: Option<HostEvents>,
    processes: Processes,
    modules: ModuleTable,
    /// Events that were read but not applied yet. Empty between calls.
    buffer: Vec<HostEvent>,
    rescan_due: bool,
    rescanned_ns: u64,
}

impl Host {
    /// Subscribes to process events, then reads /proc. `max_open_files`: maximum number of module files to keep open
    /// (see [`limits::raise`]).
    ///
    /// # Errors
    /// [`HostError`] if either is not available.
    pub fn start(max_open_files: usize) -> Result<Self, HostError> {
        Self::with(Some(HostEvents::open()?), max_open_files)
    }

    /// Reads /proc once, without events. Needs no privileges beyond reading /proc.
    ///
    /// # Errors
    /// [`HostError::Proc`].
    pub fn snapshot() -> Result<Self, HostError> {
        Self::with(None, FILES_OF_SNAPSHOT)
    }

    fn with(events: Option<HostEvents>, max_open_files: usize) -> Result<Self, HostError> {
        let mut host = Self {
            events,
            processes: Processes::default(),
            modules: ModuleTable::new(max_open_files),
            buffer: Vec::new(),
            rescan_due: false,
            rescanned_ns: 0,
        };
        host.scan(true)?;
        host.apply_events(&mut Polled::default());
        Ok(host)
    }

    /// Applies all events so far. Cheap if there are none.
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
        }
        Ok(polled)
    }

    /// Moves events from the rings to the buffer. Returns `true` if more are pending.
    fn take_events(&mut self) -> bool {
        self.events.as_mut().is_some_and(|events| events.drain(&mut self.buffer))
    }

    fn apply_events(&mut self, polled: &mut Polled) {
        let suspended_ns = suspended_ns();
        for event in self.buffer.drain(..) {
            if let HostEvent::Lost { count, .. } = event {
                polled.lost += count;
                self.rescan_due = true;
            }
            self.processes.apply(&event, suspended_ns, &mut self.modules);
        }
    }

    /// Does housekeeping; to be called about once a second. Watches CPUs that came online, and ends processes whose
    /// exit event was lost.
    ///
    /// # Errors
    /// [`HostError::Events`] if an online CPU cannot be watched.
    pub fn tick(&mut self) -> Result<(), HostError> {
        if let Some(events) = &mut self.events {
            self.rescan_due |= events.watch_online_cpus().map_err(HostError::Events)?;
        }
        for pid in self.processes.headless() {
            if process::Stat::read(pid).map_or(true, |stat| stat.without_memory && stat.threads <= 1) {
                self.processes.end(pid, monotonic_ns());
            }
        }
        Ok(())
    }

    /// The process generations that are kept.
    #[must_use]
    pub fn processes(&self) -> &Processes {
        &self.processes
    }

    /// The process generations, mutably.
    pub fn processes_mut(&mut self) -> &mut Processes {
        &mut self.processes
    }

    /// All modules.
    #[must_use]
    pub fn modules(&self) -> &ModuleTable {
        &self.modules
    }

    /// All modules, mutably: opening their files changes the table.
    pub fn modules_mut(&mut self) -> &mut ModuleTable {
        &mut self.modules
    }

    /// The processes to read and the module table to open files with, borrowed at the same time because unwinding needs
    /// both.
    pub fn split(&mut self) -> (&Processes, &mut ModuleTable) {
        (&self.processes, &mut self.modules)
    }

    /// Notes that a file contains an allocator, so that its mappings are kept first. If process `pid` has too many
    /// mappings, the mappings of this file are read again.
    pub fn note_allocator(&mut self, pid: u32, module: ModuleId) {
        self.modules.note_allocator(module);
        if self.processes.lacks(pid, module)
            && let Ok(maps) = proc_maps::read(pid)
        {
            self.processes.keep(pid, module, &maps, &mut self.modules);
        }
    }

    /// Forgets ended process generations as [`Processes::expire`] does, and shrinks the event buffer.
    pub fn expire(&mut self, before_ns: u64, sampled_before_ns: u64) -> usize {
        self.buffer.shrink_to(EVENTS_CAPACITY);
        self.processes.expire(before_ns, sampled_before_ns)
    }

    /// Moves the changes since the last call to `out`.
    pub fn drain_changes(&mut self, out: &mut Vec<HostChange>) {
        self.processes.drain_changes(out);
    }

    /// Returns what is known of a process generation. The first call reads /proc if the process is still running.
    pub fn describe(&mut self, id: GenerationId) -> Option<Arc<ProcessInfo>> {
        let unread = |generation: &Generation| !generation.described && generation.until_ns.is_none();
        if self.processes.get(id).is_some_and(unread)
            && let Ok(mut info) = ProcessInfo::read(id.pid)
            && let Some(known) = self.processes.get(id).map(|generation| &generation.info)
            // The process may have called exec since, in an event that was not read yet. Then /proc describes the next
            // generation.
            && (known.comm == info.comm || known.exe == info.exe)
        {
            // An exiting process no longer has an executable.
            if info.exe.is_empty() {
                (info.exe, info.exe_deleted) = (known.exe.clone(), known.exe_deleted);
            }
            self.processes.describe(id, info);
        }
        self.processes.get(id).map(|generation| generation.info.clone())
    }

    /// Scans /proc, at the start and after events were lost. Events that arrive during the scan stay in the buffer,
    /// because a fork can only be applied once its parent is known.
    fn scan(&mut self, first: bool) -> Result<(), HostError> {
        let begun_ns = monotonic_ns();
        let suspended_ns = suspended_ns();
        let pids = process::all_pids().map_err(HostError::Proc)?;
        let mut there = HashSet::with_capacity(pids.len());
        for pid in pids {
            let time_ns = monotonic_ns();
            // A process may exit after it was listed. Kernel threads are skipped.
            let Some(info) = ProcessInfo::read(pid).ok().filter(|info| !info.without_memory) else { continue };
            there.insert(pid);
            let maps = proc_maps::read(pid).unwrap_or_default();
            let since_ns = if first { 0 } else { info.start_ns.saturating_sub(suspended_ns) };
            self.processes.found(info, &maps, since_ns, time_ns, &mut self.modules);
            self.take_events();
        }
        let gone = |generation: &&Generation| {
            generation.until_ns.is_none() && generation.since_ns < begun_ns && !there.contains(&generation.id.pid)
        };
        let gone: Vec<u32> = self.processes.iter().filter(gone).map(|generation| generation.id.pid).collect();
        gone.into_iter().for_each(|pid| self.processes.end(pid, begun_ns));
        // Losses noticed from here on require another scan.
        self.rescan_due = false;
        self.rescanned_ns = monotonic_ns();
        Ok(())
    }
}

/// Readable when there is something to [`Host::poll`]; -1 without events. Edge-triggered: clear readiness, then poll.
impl AsRawFd for Host {
    fn as_raw_fd(&self) -> RawFd {
        self.events.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }
}

// Code shared with the fuzz targets refers to the crate by its name.
#[cfg(test)]
extern crate self as heapbpf_host;
