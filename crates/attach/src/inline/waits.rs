//! Waiting in hooked processes: reads how many sites they have passed, and writes how many they may pass, in their
//! memory.

use std::collections::HashMap;
use std::fs::File;
use std::mem::offset_of;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use heapbpf_host::side_by_side::online_processors;
use heapbpf_inline::abi::{CONTROL, Control, PASSED_OFFSET, STATE, Totals};
use sampler_ebpf::abi::ProcessKey;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::credit::{Credit, Levels, Place};
use super::memory;

/// Maximum time that a thread waits at once, even if the daemon is stopped; also the maximum for all threads that run
/// in parallel. On a busy machine, the daemon first polled a command 0.3 s after the command had begun.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// Number of pauses to time.
const TIMED_PAUSES: u32 = 4096;

/// What a process is allowed.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Allowance {
    granted: u64,
    most_pauses: u64,
    pauses_end: u64,
}

/// A part of [`Control`]: what a process is allowed, and what it reports.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Words {
    allowance: Allowance,
    passed: u64,
    given_up: u64,
    pauses: u64,
}

const WORDS: u64 = CONTROL + offset_of!(Control, granted) as u64;
const _: () = assert!(
    PASSED_OFFSET == (offset_of!(Control, granted) + size_of::<Allowance>()) as u64
        && WORDS + size_of::<Words>() as u64 == CONTROL + offset_of!(Control, drawn) as u64
);

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

    /// Lets a process wait from its first site on. Called before a jump leads there.
    pub(super) fn begin(pid: u32, base: u64) {
        if let Ok(memory) = memory::open(pid) {
            let_wait(&memory, (pid, base));
        }
    }

    /// Number of pauses after which a thread's wait ends.
    pub(super) fn most_pauses(&self) -> u64 {
        (LONGEST_WAIT.as_nanos() as f64 / self.ns_per_pause.max(1.0)) as u64
    }

    /// Whether a process is waiting, or may have to soon.
    pub(super) fn are_likely(&self) -> bool {
        self.credit.is_short()
    }

    /// Total time in nanoseconds that threads have waited.
    pub(super) const fn waited_ns(&self) -> u64 {
        self.waited_ns as u64
    }

    /// Lets processes pass as many more sites as the rings can hold. `levels` is called after their numbers of passed
    /// sites are read.
    pub(super) fn grant<'a>(
        &mut self,
        memories: impl Iterator<Item = (ProcessKey, &'a File, u64)>,
        levels: impl FnOnce() -> Levels,
    ) {
        let (mut files, mut passed, mut pauses) = (HashMap::new(), HashMap::new(), HashMap::new());
        // Waiting threads occupy a CPU, so this is the longest possible wait. A process that reports more is not
        // believed.
        let most_ns = self.looked.elapsed().as_nanos() as f64 * online_processors() as f64;
        self.looked = Instant::now();
        for (process, memory, base) in memories {
            let mut words = [0; size_of::<Words>()];
            let Ok(()) = memory.read_exact_at(&mut words, base + WORDS) else { continue };
            let Ok(said) = Words::read_from_bytes(&words) else { continue };
            if said.allowance.most_pauses == 0 {
                continue;
            }
            let place: Place = (process.tgid, base);
            // What a child has in common with its parent is not counted again.
            let before = self.pauses.get(&(process, base)).copied();
            let paused = said.pauses.saturating_sub(before.unwrap_or(said.pauses)) as f64;
            self.waited_ns += (paused * self.ns_per_pause).min(most_ns);
            if before.is_none() {
                let_wait(memory, place);
            }
            pauses.insert((process, base), said.pauses);
            passed.insert(place, said.passed);
            files.insert(place, (memory, said.pauses));
        }
        self.pauses = pauses;
        let most_pauses = self.most_pauses();
        for (place, granted) in self.credit.look(passed, &levels()) {
            let Some((memory, pauses)) = files.get(&place) else { continue };
            let pauses_end = pauses.saturating_add(most_pauses.saturating_mul(online_processors() as u64));
            write(memory, (place, WORDS), Allowance { granted, most_pauses, pauses_end }.as_bytes());
        }
    }

    /// Ends all waits.
    pub(super) fn end<'a>(&mut self, memories: impl Iterator<Item = (ProcessKey, &'a File, u64)>) {
        memories.for_each(|(process, memory, base)| write(memory, ((process.tgid, base), WORDS), 0_u64.as_bytes()));
    }
}

/// Allows a process to wait. A forked child begins without this permission.
fn let_wait(memory: &File, place: Place) {
    write(memory, (place, STATE + offset_of!(Totals, may_wait) as u64), 1_u64.as_bytes());
}

/// Writes bytes at an offset from where the code is mapped.
fn write(memory: &File, ((pid, base), at): (Place, u64), bytes: &[u8]) {
    if let Err(error) = memory.write_all_at(bytes, base + at) {
        // The process has exited; if not, it waits once for nothing.
        log::debug!("process {pid} is not told how many sites it may pass: {error}");
    }
}
