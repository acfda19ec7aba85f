//! What glibc had in use in processes when they joined the recording. A thread of its own reads it without stopping the
//! process, so allocations made during the read are included: the result is an upper bound of what is older than the
//! recording.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use heapbpf_host::Host;
use heapbpf_host::arenas::{ArenaReader, ArenaRequest};
use heapbpf_host::privileges::restrict_worker;
use heapbpf_host::process::ProcessInfo;
use heapbpf_profile::model::glibc_version;

use super::probes::Attaching;

/// Time limit for reading the arenas of all processes together.
const LONGEST: Duration = Duration::from_secs(10);

/// Blocks, and their sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InUse {
    /// Number of blocks.
    pub blocks: u64,
    /// Their sizes, bytes.
    pub bytes: u64,
}

/// Resident memory of a process at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidentAt {
    /// CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// All of it, bytes.
    pub bytes: u64,
}

/// What processes had when they joined the recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtAttach {
    /// CLOCK_MONOTONIC when the process joined the recording, or began its program if that was later; 0 if unknown.
    pub since_ns: u64,
    /// Private anonymous memory that was resident or swapped out, bytes; `None` if unknown.
    pub anonymous_bytes: Option<u64>,
    /// All resident memory when it was first read; `None` if it was not.
    pub resident: Option<ResidentAt>,
    /// What glibc had in use; `None` if that was not read, or has not been yet.
    pub inuse: Option<InUse>,
}

impl AtAttach {
    /// The same for a process whose program began at `began_ns`: memory of the program before is not its own.
    #[must_use]
    pub fn of_program(self, began_ns: u64) -> Self {
        if began_ns > self.since_ns { Self { since_ns: began_ns, resident: None, ..self } } else { self }
    }
}

/// What glibc had in use, by process. The reading thread fills it in.
pub(super) type InUseByProcess = Arc<Mutex<HashMap<u32, InUse>>>;

impl Attaching {
    /// Starts reading the arenas of running processes, the largest process first.
    pub(super) fn read_arenas(&self, host: &Host, running: &[ProcessInfo]) {
        let wanted = |process: &ProcessInfo| {
            let pid = process.pid;
            let size = self.targets.at_attach(pid).anonymous_bytes?;
            let version = glibc_version(self.allocators_in(host.processes().current(pid)?))?;
            let start_ns = process.start_ns;
            Some((size, ArenaRequest { pid, start_ns, version, longest: LONGEST, with_python: false }))
        };
        let mut wanted: Vec<(u64, ArenaRequest)> = running.iter().filter_map(wanted).collect();
        if wanted.is_empty() {
            return;
        }
        wanted.sort_by_key(|(size, _)| std::cmp::Reverse(*size));
        let found = Arc::clone(&self.targets.found_at_attach);
        let read = move || {
            restrict_worker(false);
            let (mut reader, deadline) = (ArenaReader::default(), Instant::now() + LONGEST);
            for (_, it) in wanted {
                let longest = deadline.saturating_duration_since(Instant::now());
                let Ok((Some(heap), _)) = reader.read(ArenaRequest { longest, ..it }) else { continue };
                let bytes = heap.inuse_bytes.saturating_add(heap.unread_bytes());
                let inuse = InUse { blocks: heap.inuse_blocks, bytes };
                found.lock().unwrap_or_else(PoisonError::into_inner).insert(it.pid, inuse);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("at attach".into()).spawn(read) {
            log::info!("cannot read what was in use before the recording: {error}");
        }
    }
}
