//! Hooked processes that wait: what they have passed is read, and what they may pass is written, in their memory.

use std::collections::HashMap;
use std::fs::File;
use std::mem::offset_of;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use heapbpf_host::side_by_side::online_processors;
use heapbpf_inline::abi::{CONTROL, Control, PASSED_OFFSET};
use sampler_ebpf::abi::ProcessKey;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::credit::{Credit, Levels, Place};

/// A thread waits no longer than this at once, even if the daemon is stopped.
const LONGEST_WAIT: Duration = Duration::from_millis(100);
/// Pauses that are timed.
const TIMED_PAUSES: u32 = 4096;

/// What a process says of its waits: the end of [`Control`].
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Said {
    passed: u64,
    given_up: u64,
    pauses: u64,
}

const _: () = assert!(PASSED_OFFSET + size_of::<Said>() as u64 == size_of::<Control>() as u64);

/// The waits of all processes.
#[derive(Debug)]
pub(super) struct Waits {
    credit: Credit,
    ns_per_pause: f64,
    /// By process and address of the mapped code.
    pauses: HashMap<(ProcessKey, u64), u64>,
    waited_ns: f64,
    looked: Instant,
}

impl Waits {
    pub(super) fn new() -> Self {
        let begun = Instant::now();
        (0..TIMED_PAUSES).for_each(|_| std::hint::spin_loop());
        let ns_per_pause = begun.elapsed().as_nanos() as f64 / f64::from(TIMED_PAUSES);
        Self { credit: Credit::default(), ns_per_pause, pauses: HashMap::new(), waited_ns: 0.0, looked: begun }
    }

    /// After so many pauses a wait ends.
    pub(super) fn most_pauses(&self) -> u64 {
        (LONGEST_WAIT.as_nanos() as f64 / self.ns_per_pause.max(1.0)) as u64
    }

    /// Whether somebody waits, or may have to soon.
    pub(super) fn are_likely(&self) -> bool {
        self.credit.is_short()
    }

    /// Time that threads have waited, of all together, nanoseconds.
    pub(super) const fn waited_ns(&self) -> u64 {
        self.waited_ns as u64
    }

    /// Lets processes pass as many more sites as there is room for. `levels` are read after what they have passed.
    pub(super) fn grant<'a>(
        &mut self,
        memories: impl Iterator<Item = (ProcessKey, &'a File, u64)>,
        levels: impl FnOnce() -> Levels,
    ) {
        let (mut files, mut passed, mut pauses) = (HashMap::new(), HashMap::new(), HashMap::new());
        // Threads that wait run. A process that says more is not believed.
        let most_ns = self.looked.elapsed().as_nanos() as f64 * online_processors() as f64;
        self.looked = Instant::now();
        for (process, memory, base) in memories {
            let mut said = [0; size_of::<Said>()];
            let Ok(()) = memory.read_exact_at(&mut said, base + CONTROL + PASSED_OFFSET) else { continue };
            let Ok(said) = Said::read_from_bytes(&said) else { continue };
            let place: Place = (process.tgid, base);
            files.insert(place, memory);
            passed.insert(place, said.passed);
            // Of a child, what it has in common with its parent is not counted again.
            let before = self.pauses.get(&(process, base)).copied().unwrap_or(said.pauses);
            self.waited_ns += (said.pauses.saturating_sub(before) as f64 * self.ns_per_pause).min(most_ns);
            pauses.insert((process, base), said.pauses);
        }
        self.pauses = pauses;
        for (place, granted) in self.credit.look(passed, &levels()) {
            let Some(memory) = files.get(&place) else { continue };
            write_granted(memory, place, granted);
        }
    }

    /// Has nobody wait any more.
    pub(super) fn end<'a>(&mut self, memories: impl Iterator<Item = (ProcessKey, &'a File, u64)>) {
        memories.for_each(|(process, memory, base)| write_granted(memory, (process.tgid, base), 0));
    }
}

fn write_granted(memory: &File, (pid, base): Place, granted: u64) {
    let at = base + CONTROL + offset_of!(Control, granted) as u64;
    if let Err(error) = memory.write_all_at(&granted.to_ne_bytes(), at) {
        // It has ended, or else waits in vain for once.
        log::debug!("process {pid} is not told how many sites it may pass: {error}");
    }
}
