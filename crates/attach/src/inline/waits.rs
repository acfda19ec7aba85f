//! Waiting in hooked processes: reads how many sites they have passed, decides by the space in the rings how many they
//! may pass, and writes that into their memory.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::mem::offset_of;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use heapbpf_host::side_by_side::online_processors;
use heapbpf_inline::abi::{CONTROL, Control, PASSED_OFFSET, STATE, Totals};
use sampler_ebpf::abi::{FIRST_STACK_BYTES, ProcessKey};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

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

/// Sites that a process may pass before its first poll.
pub(super) const FIRST_SITES: u64 = 256;
/// The rings divided by this number are available for what processes may send. The rest is reserve, because copies
/// differ in size and other sources use the rings, too.
const CAPACITY_DIVISOR: f64 = 2.0;
/// Minimum and maximum number of sites that all processes together may be ahead.
const SITES: std::ops::Range<f64> = 64.0..1e6;
/// Maximum number of sites that an idle process may be ahead. Any number of idle processes may start sending at once.
const IDLE_SITES: u64 = 64;
/// Number of polls without sending after which a process is idle.
const IDLE_LOOKS: u32 = 16;
/// Minimum number of records from which the size of a record is learned.
const LEARNED_FROM: u64 = 64;
/// What was learned fades over about this many times [`LEARNED_FROM`] records.
const HOLDS_FOR: f64 = 64.0;
/// Maximum number of polls to keep until what was sent before them has been taken in.
const MOST_LOOKS: usize = 64;

/// Positions in a ring, in bytes since the recording began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Level {
    /// Written up to here.
    pub reserved_up_to: u64,
    /// Taken in up to here.
    pub read_up_to: u64,
    /// Size of the ring. 0 if there is none.
    pub size_bytes: u64,
}

/// The state of the rings at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Levels {
    /// The ring of events, and the ring of stack copies.
    pub rings: [Level; 2],
    /// Number of records of allocations and frees that have been taken in.
    pub records: u64,
}

/// A place where sites are passed: PID, and address of the mapped code.
pub(super) type Place = (u32, u64);

/// The flow control of a recording.
#[derive(Debug, Default)]
pub(super) struct Credit {
    /// The last poll before which everything has been taken in, and the polls after it.
    taken_in: Look,
    looks: VecDeque<Look>,
    known: HashMap<Place, PlaceCredit>,
    /// The levels when the size of a record was last learned.
    learned: Option<Levels>,
    /// The share of a ring that a record takes, between 0 and 1. 0 if it is not known yet.
    record_share: f64,
    /// Whether, at the last poll, a process had passed half of what it was granted.
    was_short: bool,
}

/// What had been sent at one moment.
#[derive(Debug, Default, PartialEq, Eq)]
struct Look {
    reserved_up_to: [u64; 2],
    passed: HashMap<Place, u64>,
}

impl Look {
    fn is_taken_in(&self, now: &Levels) -> bool {
        std::iter::zip(self.reserved_up_to, now.rings).all(|(reserved, ring)| reserved <= ring.read_up_to)
    }

    /// Estimates how many sites each place had passed when what has been taken in by now was sent: between this poll
    /// and the next.
    fn between(&self, next: &Self, now: &Levels) -> HashMap<Place, u64> {
        let ends = std::iter::zip(self.reserved_up_to, next.reserved_up_to);
        let part = std::iter::zip(ends, now.rings).map(|((start, end), ring)| match end.saturating_sub(start) {
            0 => 1.0,
            bytes => ring.read_up_to.saturating_sub(start) as f64 / bytes as f64,
        });
        let part = part.fold(1.0, f64::min);
        let passed = next.passed.iter().map(|(place, after)| {
            let before = *self.passed.get(place).unwrap_or(after);
            (*place, before.saturating_add((part * after.saturating_sub(before) as f64) as u64))
        });
        passed.collect()
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct PlaceCredit {
    passed: u64,
    granted: u64,
    /// Number of sites that it may be ahead of what was taken in.
    ahead: u64,
    quiet_looks: u32,
}

impl PlaceCredit {
    fn is_short(&self) -> bool {
        self.granted.saturating_sub(self.passed) <= self.ahead / 2
    }
}

impl Credit {
    /// Takes the number of sites that each place has passed, and the levels of the rings read afterwards. Returns new
    /// grants where they changed.
    pub(super) fn look(&mut self, passed: HashMap<Place, u64>, now: &Levels) -> Vec<(Place, u64)> {
        self.learn(now);
        let before = std::mem::take(&mut self.known);
        for (place, passed) in &passed {
            let mut known = before.get(place).copied().unwrap_or_default();
            let is_quiet = known.passed == *passed && *passed < known.granted;
            known.quiet_looks = if is_quiet { known.quiet_looks.saturating_add(1) } else { 0 };
            known.passed = *passed;
            self.known.insert(*place, known);
        }
        self.was_short = self.known.values().any(|known| known.ahead > 0 && known.is_short());
        let look = Look { reserved_up_to: now.rings.map(|ring| ring.reserved_up_to), passed };
        if self.looks.len() < MOST_LOOKS && self.looks.back() != Some(&look) {
            self.looks.push_back(look);
        }
        while let Some(look) = self.looks.pop_front_if(|look| look.is_taken_in(now)) {
            self.taken_in = look;
        }
        let taken_in = match self.looks.front() {
            Some(next) => self.taken_in.between(next, now),
            None => self.taken_in.passed.clone(),
        };
        self.grants(taken_in, now)
    }

    /// Whether a process has passed half of its grant, so that it waits, or may have to soon. This includes processes
    /// that were granted more at the last poll, because they will soon have passed that, too.
    pub(super) fn is_short(&self) -> bool {
        self.was_short || self.known.values().any(PlaceCredit::is_short)
    }

    fn grants(&mut self, taken_in: HashMap<Place, u64>, now: &Levels) -> Vec<(Place, u64)> {
        let active = self.known.values().filter(|known| known.quiet_looks < IDLE_LOOKS).count().max(1);
        let each = (self.sites(now) / active as u64).max(1);
        let mut grants = Vec::new();
        for (place, passed) in taken_in {
            let Some(known) = self.known.get_mut(&place) else { continue };
            let ahead = if known.quiet_looks < IDLE_LOOKS { each } else { each.min(IDLE_SITES) };
            let granted = passed.saturating_add(ahead);
            known.ahead = ahead;
            if known.granted != granted {
                known.granted = granted;
                grants.push((place, granted));
            }
        }
        grants
    }

    /// Number of sites that all processes together may be ahead of what has been taken in.
    fn sites(&self, now: &Levels) -> u64 {
        let unknown = share(FIRST_STACK_BYTES, &now.rings[1]);
        let record_share = if self.record_share > 0.0 { self.record_share } else { unknown };
        (1.0 / (CAPACITY_DIVISOR * record_share)).clamp(SITES.start, SITES.end) as u64
    }

    /// Learns which share of the rings a record takes. Does not use what processes report, so that no process can make
    /// others wait.
    fn learn(&mut self, now: &Levels) {
        let learned = *self.learned.get_or_insert(*now);
        let records = now.records.saturating_sub(learned.records);
        if records < LEARNED_FROM {
            return;
        }
        let shares = std::iter::zip(now.rings, learned.rings)
            .map(|(now, learned)| share(now.read_up_to.saturating_sub(learned.read_up_to), &now) / records as f64);
        let fades = (-(records as f64) / (HOLDS_FOR * LEARNED_FROM as f64)).exp();
        self.record_share = shares.fold(self.record_share * fades, f64::max);
        self.learned = Some(*now);
    }
}

/// The share of a ring that this many bytes take.
fn share(bytes: u64, ring: &Level) -> f64 {
    if ring.size_bytes == 0 { 0.0 } else { bytes as f64 / ring.size_bytes as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING_BYTES: u64 = 1 << 20;

    /// A daemon that takes in a given number of records per turn, and processes that send as much as they may.
    struct Model {
        credit: Credit,
        levels: Levels,
        passed: HashMap<Place, u64>,
        granted: HashMap<Place, u64>,
        fullest_bytes: u64,
    }

    impl Model {
        fn new(processes: u32) -> Self {
            let ring = Level { size_bytes: RING_BYTES, ..Level::default() };
            let places = || (0..processes).map(|pid| ((pid, 0), 0));
            Self {
                credit: Credit::default(),
                levels: Levels { rings: [ring; 2], records: 0 },
                passed: places().collect(),
                granted: places().map(|(place, _)| (place, 4)).collect(),
                fullest_bytes: 0,
            }
        }

        /// One turn: each of `senders` sends records of `record_bytes` bytes, and the daemon takes in at most
        /// `taken_in` of them.
        fn turn(&mut self, senders: std::ops::Range<u32>, record_bytes: u64, taken_in: u64) {
            for place in senders.map(|pid| (pid, 0)) {
                let left = self.granted[&place].saturating_sub(self.passed[&place]);
                *self.passed.entry(place).or_default() += left;
                self.levels.rings.iter_mut().for_each(|ring| ring.reserved_up_to += left * record_bytes);
            }
            let ring = &self.levels.rings[1];
            self.fullest_bytes = self.fullest_bytes.max(ring.reserved_up_to - ring.read_up_to);
            let records = taken_in.min((ring.reserved_up_to - ring.read_up_to) / record_bytes);
            self.levels.rings.iter_mut().for_each(|ring| ring.read_up_to += records * record_bytes);
            self.levels.records += records;
            let passed = self.passed.iter().map(|(place, passed)| (*place, *passed)).collect();
            self.granted.extend(self.credit.look(passed, &self.levels));
        }
    }

    #[test]
    fn rings_never_overflow_however_slow_the_daemon_is_and_it_always_has_work() {
        for (processes, record_bytes, taken_in) in [(1, 512, 10), (1, 512, 5000), (7, 4096, 3), (100, 1024, 40)] {
            let mut model = Model::new(processes);
            for _ in 0..2000 {
                model.turn(0..processes, record_bytes, taken_in);
            }
            let what = format!("{processes} processes, records of {record_bytes} bytes, {taken_in} a turn");
            assert!(model.fullest_bytes < RING_BYTES, "{what}: {}", model.fullest_bytes);
            let most = taken_in.min(RING_BYTES / record_bytes / 4) * 2000;
            assert!(model.levels.records >= most * 9 / 10, "{what}: {} of {most}", model.levels.records);
        }
    }

    #[test]
    fn who_waits_between_two_looks_is_short_although_all_is_taken_in_at_each() {
        let mut model = Model::new(1);
        (0..10).for_each(|_| model.turn(0..1, 1024, u64::MAX));
        assert!(model.credit.is_short());
        (0..2).for_each(|_| model.turn(0..0, 1024, u64::MAX));
        assert!(!model.credit.is_short());
    }

    #[test]
    fn who_sends_gets_the_capacity_of_those_who_do_not() {
        let mut model = Model::new(50);
        (0..200).for_each(|_| model.turn(0..1, 1024, 100));
        let ahead = |pid| model.granted[&(pid, 0)] - model.passed[&(pid, 0)];
        assert_eq!(ahead(1), IDLE_SITES);
        let before = model.levels.records;
        (0..10).for_each(|_| model.turn(0..1, 1024, 100));
        assert_eq!(model.levels.records - before, 1000);
    }

    #[test]
    fn a_process_that_says_anything_has_others_wait_no_longer() {
        let mut model = Model::new(2);
        for turn in 0..200_u64 {
            model.turn(0..1, 1024, 100);
            model.passed.insert((1, 0), turn.wrapping_mul(u64::MAX / 3));
        }
        assert!(model.levels.records >= 15_000, "{}", model.levels.records);
        assert!(model.fullest_bytes <= RING_BYTES * 3 / 4);
    }

    #[test]
    fn what_was_not_taken_in_is_not_granted_again() {
        let mut model = Model::new(1);
        model.turn(0..1, 512, 0);
        let granted = model.granted.clone();
        (0..100).for_each(|_| model.turn(0..1, 512, 0));
        assert_eq!(model.granted, granted);
        model.turn(0..1, 512, 1000);
        assert_ne!(model.granted, granted);
    }
}
