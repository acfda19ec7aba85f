//! Tests of cuts against a model. Its threads allocate, free and reallocate in small steps, as the kernel side does.
//! Its ring hands out what it can, loses records when it is full, and is read whenever the daemon gets to it. It also
//! has a live map. What is in use at a cut must equal what the model has in use at that moment, within the bounds on
//! losses.
//!
//! A step is what one CPU does without other CPUs observing it in between. There is one exception: a realloc's old
//! block moves from the thread's slot to the ring in one step.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};

use sampler_ebpf::abi::{AllocationRecord, Counters, FreeRecord, ProcessKey, kind};
use sampler_ebpf::rng;

use super::losses::{LossLedger, LostSamples};
use super::queue::RecordQueue;
use crate::heap::event::{Event, decode};
use crate::heap::live::{AfterCut, Heap};
use crate::heap::sample::{Sample, SampleKey};
use crate::kernel::totals::Counts;
use crate::side_by_side::on_all_processors;
use heapbpf_profile::model::Losses;
use heapbpf_unwind::raw::RawStack;

const PROCESS: ProcessKey = ProcessKey { start_ns: 1, tgid: 7, exec_id: 0 };
/// Number of addresses, so low that each is reused often.
const ADDRESSES: u64 = 96;
const LARGEST_BYTES: u64 = 1_000;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        (rng::next(&mut self.0) % limit as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// A sampled block as it really was (ground truth).
#[derive(Clone, Copy, Debug)]
struct Block {
    size_bytes: u64,
    allocated_ns: u64,
    freed_ns: u64,
}

/// A block in the live map.
#[derive(Clone, Copy, Debug)]
struct Entry {
    sample: u64,
    time_ns: u64,
    size_bytes: u64,
}

/// Index of a reserved place in the ring; `None`: the ring was full.
type Place = Option<usize>;

/// The next step of a thread.
#[derive(Clone, Copy, Debug)]
enum Step {
    Allocate,
    ReadAllocationTime(Place),
    Track(Place, Entry),
    SubmitAllocation(usize, Event, u64),
    Free(u64),
    Remove(u64, Place),
    ReadFreeTime(u64, Place, Entry),
    SubmitFree(u64, usize, Event),
    ReallocReturns(u64, Entry),
    ReallocHasFailed(u64),
}

/// Model of the targets and of the kernel side.
struct World {
    random: Random,
    clock_ns: u64,
    /// All records ever reserved; `None`: not submitted yet. The daemon has read the first `read` of them.
    ring: Vec<Option<Event>>,
    read: usize,
    capacity: usize,
    loss_percent: usize,
    threads: Vec<Option<Step>>,
    /// Samples that reallocs in flight took out of the live map, by thread.
    reallocated: HashMap<usize, u64>,
    owned: Vec<u64>,
    unused: Vec<u64>,
    live: BTreeMap<u64, Entry>,
    counters: Counters,
    records_lost: u64,
    blocks: Vec<Block>,
}

impl World {
    fn new(seed: u64, threads: usize, capacity: usize, loss_percent: usize) -> Self {
        Self {
            random: Random(rng::seed(seed, 0)),
            clock_ns: 1,
            ring: Vec::new(),
            read: 0,
            capacity,
            loss_percent,
            threads: vec![None; threads],
            reallocated: HashMap::new(),
            owned: Vec::new(),
            unused: (1..=ADDRESSES).map(|number| number * 16).collect(),
            live: BTreeMap::new(),
            counters: Counters::default(),
            records_lost: 0,
            blocks: Vec::new(),
        }
    }

    fn steps(&mut self, most: usize) {
        for _ in 0..self.random.below(most + 1) {
            self.clock_ns += self.random.below(3) as u64;
            let thread = self.random.below(self.threads.len());
            self.threads[thread] = match self.threads[thread].take() {
                None => self.begin(thread),
                Some(step) => self.go_on(thread, step),
            };
        }
    }

    fn begin(&mut self, thread: usize) -> Option<Step> {
        // On average, half of the addresses are in use.
        if self.owned.is_empty() || self.random.below(ADDRESSES as usize) >= self.owned.len() {
            return Some(Step::Allocate);
        }
        let index = self.random.below(self.owned.len());
        let address = self.owned.swap_remove(index);
        if self.random.chance(80) {
            return Some(Step::Free(address));
        }
        let entry = self.live.remove(&address).expect("owned");
        self.reallocated.insert(thread, entry.sample);
        Some(Step::ReallocReturns(address, entry))
    }

    fn reserve(&mut self) -> Place {
        if self.ring.len() - self.read >= self.capacity || self.random.chance(self.loss_percent) {
            return None;
        }
        self.ring.push(None);
        Some(self.ring.len() - 1)
    }

    fn go_on(&mut self, thread: usize, step: Step) -> Option<Step> {
        Some(match step {
            Step::Allocate => Step::ReadAllocationTime(self.reserve()),
            Step::ReadAllocationTime(place) => {
                let size_bytes = 1 + self.random.below(LARGEST_BYTES as usize) as u64;
                let entry = Entry { sample: self.blocks.len() as u64, time_ns: self.clock_ns, size_bytes };
                self.blocks.push(Block { size_bytes, allocated_ns: self.clock_ns, freed_ns: u64::MAX });
                if place.is_none() {
                    self.counters.lost_ring_full += 1;
                    self.counters.lost_ring_full_bytes += size_bytes;
                    self.records_lost += 1;
                }
                Step::Track(place, entry)
            }
            Step::Track(place, entry) => return self.track(place, entry),
            Step::SubmitAllocation(place, event, address) => {
                self.ring[place] = Some(event);
                self.owned.push(address);
                return None;
            }
            Step::Free(address) => Step::Remove(address, self.reserve()),
            Step::Remove(address, place) => {
                let entry = self.live.remove(&address).expect("owned");
                self.free(address, place, entry)
            }
            Step::ReadFreeTime(address, place, entry) => {
                let Some(place) = place else {
                    self.counters.frees_lost += 1;
                    self.counters.frees_lost_bytes += entry.size_bytes;
                    self.records_lost += 1;
                    self.unused.push(address);
                    return None;
                };
                // If there is a record, the time in it is the time of the free.
                self.blocks[entry.sample as usize].freed_ns = self.clock_ns;
                let record = FreeRecord {
                    kind: kind::FREE,
                    space: PROCESS,
                    sample: entry.sample,
                    time_ns: self.clock_ns,
                    size_bytes: entry.size_bytes,
                    ..FreeRecord::default()
                };
                Step::SubmitFree(address, place, Event::Free(record))
            }
            Step::SubmitFree(address, place, event) => {
                self.ring[place] = Some(event);
                self.unused.push(address);
                return None;
            }
            Step::ReallocReturns(address, entry) => {
                if self.random.chance(30) {
                    self.live.insert(address, entry);
                    return Some(Step::ReallocHasFailed(address));
                }
                self.reallocated.remove(&thread);
                let place = self.reserve();
                self.free(address, place, entry)
            }
            Step::ReallocHasFailed(address) => {
                self.reallocated.remove(&thread);
                self.counters.failed += 1;
                self.owned.push(address);
                return None;
            }
        })
    }

    /// Adds a sampled block to the live map, at an unused address. If there is none, the step is repeated later.
    fn track(&mut self, place: Place, entry: Entry) -> Option<Step> {
        if self.unused.is_empty() {
            return Some(Step::Track(place, entry));
        }
        let index = self.random.below(self.unused.len());
        let address = self.unused.swap_remove(index);
        self.live.insert(address, entry);
        let Some(place) = place else {
            self.owned.push(address);
            return None;
        };
        let record = AllocationRecord {
            kind: kind::ALLOCATION,
            process: PROCESS,
            space: PROCESS,
            sample: entry.sample,
            time_ns: entry.time_ns,
            address,
            size_bytes: entry.size_bytes,
            ..AllocationRecord::default()
        };
        Some(Step::SubmitAllocation(place, Event::Allocation(record), address))
    }

    /// Continues the free of a block that has left the live map.
    fn free(&mut self, address: u64, place: Place, entry: Entry) -> Step {
        if place.is_none() {
            self.blocks[entry.sample as usize].freed_ns = self.clock_ns;
        }
        Step::ReadFreeTime(address, place, entry)
    }

    /// Samples that are in use at this time.
    fn live_at(&self, time_ns: u64) -> HashSet<u64> {
        let lives = |block: &Block| block.allocated_ns <= time_ns && block.freed_ns > time_ns;
        (0..).zip(&self.blocks).filter(|(_, block)| lives(block)).map(|(sample, _)| sample).collect()
    }

    fn bytes_of<'a>(&self, samples: impl Iterator<Item = &'a u64>) -> u64 {
        samples.map(|sample| self.blocks[*sample as usize].size_bytes).sum()
    }

    /// Counters, and the blocks held by reallocs. On a real system, threads continue while these are read one after the
    /// other.
    fn counts(&self) -> Counts {
        Counts {
            processes: [(PROCESS, self.counters)].into(),
            reallocated: self.reallocated.values().copied().collect(),
            ..Counts::default()
        }
    }
}

/// Model of the daemon: what `Session::cut` does, without a kernel.
struct Daemon {
    queue: RecordQueue,
    heap: Heap,
    ledger: LossLedger,
    stack: Arc<RawStack>,
}

impl Daemon {
    fn new() -> Self {
        Self {
            queue: RecordQueue::default(),
            heap: Heap::default(),
            ledger: LossLedger::default(),
            stack: Arc::new(RawStack::lost()),
        }
    }

    fn sample(&self, address: u64, entry: Entry) -> Sample {
        Sample {
            id: entry.sample,
            key: SampleKey {
                process: PROCESS,
                thread: "".into(),
                function: 0,
                interval: 1,
                stack: Arc::clone(&self.stack).into(),
            },
            space: PROCESS,
            time_ns: entry.time_ns,
            address,
            size_bytes: entry.size_bytes,
            trials: entry.size_bytes,
            offset: 0,
            tracked: true,
            mapped: false,
        }
    }

    /// Reads submitted records up to the mark, or half of the time as far as the ring goes.
    fn read(&mut self, world: &mut World) {
        let position = self.queue.read_up_to(|| (world.clock_ns, world.ring.len() as u64)) as usize;
        let up_to = if world.random.chance(50) { world.ring.len() } else { position };
        while world.read < up_to {
            let Some(event) = world.ring[world.read] else { break };
            self.queue.push(event.to_bytes().into());
            world.read += 1;
        }
        self.queue.has_read_up_to(world.read as u64);
    }

    fn work_off(&mut self) {
        while let Some((_, record)) = self.queue.front() {
            match decode(record).expect("a record") {
                Event::Allocation(AllocationRecord { sample, time_ns, size_bytes, address, .. }) => {
                    self.heap.allocate(self.sample(address, Entry { sample, time_ns, size_bytes }));
                }
                Event::Free(free) => self.heap.free(free.space, free.sample, free.time_ns, false),
                event => unreachable!("{event:?}"),
            }
            self.queue.pop_front();
        }
    }

    /// Takes in everything up to now. Returns that moment, and the bounds on errors in what is known about it.
    fn cut(&mut self, world: &mut World) -> (u64, Losses) {
        let records_lost = world.records_lost;
        world.steps(10);
        let before = world.counts();
        world.steps(10);
        let time_ns = world.clock_ns;
        world.steps(10);
        let at_cut = world.counts();
        self.queue.cut_at(time_ns);
        let is_lossy = records_lost > self.ledger.records_lost();
        let reading = is_lossy.then(|| self.read_live_map(world, time_ns));
        let reserved = world.ring.len();
        while !(self.queue.is_at_cut() && world.read >= reserved) {
            world.steps(20);
            self.read(world);
            self.work_off();
        }
        let mut unseen = Losses::default();
        if let Some((unknown, after, put_back)) = reading {
            let later = after.processes[&PROCESS];
            let then = before.processes[&PROCESS];
            unseen.inuse_missing.samples = later.frees_lost - then.frees_lost;
            unseen.inuse_missing.sampled_bytes = later.frees_lost_bytes - then.frees_lost_bytes;
            let mut after_cut = AfterCut::of(self.queue.beyond().map(|(_, record)| &record[..]));
            after_cut.outside_map.extend(after.reallocated);
            after_cut.outside_map.extend(put_back);
            let unknown = unknown.into_iter().map(|(address, entry)| self.sample(address, entry)).collect();
            let sample_at = |_: &ProcessKey, address| Some(world.live.get(&address)?.sample);
            let (_, freed) = self.heap.reconcile(unknown, after_cut, sample_at);
            for blocks in freed.values() {
                unseen.inuse_missing.samples += blocks.samples;
                unseen.inuse_missing.sampled_bytes += blocks.bytes;
            }
            self.ledger.reconciled(records_lost, at_cut.clone());
        }
        let recovered = self.heap.recovered(&PROCESS);
        let mut losses =
            self.ledger.losses(&PROCESS, at_cut.processes.get(&PROCESS), LostSamples::default(), recovered);
        losses.add(&unseen);
        (time_ns, losses)
    }

    /// Reads the live map entry by entry, while threads continue.
    fn read_live_map(&mut self, world: &mut World, cut_ns: u64) -> (Vec<(u64, Entry)>, Counts, HashSet<u64>) {
        let before = world.counters.failed;
        self.heap.begin_reconciliation();
        let mut unknown = Vec::new();
        scan(world, |world, address, entry| {
            if entry.time_ns <= cut_ns && !self.heap.observe(&PROCESS, entry.sample) {
                unknown.push((address, entry));
            }
            self.read(world);
        });
        let after = world.counts();
        let mut put_back = HashSet::new();
        if after.processes[&PROCESS].failed != before {
            scan(world, |_, _, entry| put_back.extend([entry.sample]));
        }
        (unknown, after, put_back)
    }
}

/// Walks the live map in order of address. Blocks inserted behind the current position are not seen.
fn scan(world: &mut World, mut see: impl FnMut(&mut World, u64, Entry)) {
    let mut from = 0;
    while let Some((&address, &entry)) = world.live.range(from..).next() {
        see(world, address, entry);
        from = address + 1;
        world.steps(3);
    }
}

/// Figures of the cuts of one run.
#[derive(Debug, Default)]
struct Shown {
    cuts: usize,
    lossy: usize,
    missing: usize,
    stale: usize,
}

/// Runs one recording, with up to `most_steps` steps of the threads between two reads by the daemon.
fn run(seed: u64, threads: usize, capacity: usize, loss_percent: usize, most_steps: usize) -> Shown {
    let mut world = World::new(seed, threads, capacity, loss_percent);
    let (mut daemon, mut shown) = (Daemon::new(), Shown::default());
    for _ in 0..30 {
        for _ in 0..world.random.below(6) {
            world.steps(most_steps);
            daemon.read(&mut world);
            daemon.work_off();
        }
        let (time_ns, losses) = daemon.cut(&mut world);
        let truth = world.live_at(time_ns);
        let known: HashSet<u64> =
            (0..world.blocks.len() as u64).filter(|sample| daemon.heap.knows(&PROCESS, *sample)).collect();
        assert_eq!(daemon.heap.estimated().live_samples, known.len() as u64);
        let missing: Vec<u64> = truth.difference(&known).copied().collect();
        let stale: Vec<u64> = known.difference(&truth).copied().collect();
        let about = (seed, time_ns, &missing, &stale, losses);
        if world.records_lost == 0 {
            assert!(missing.is_empty() && stale.is_empty() && losses.is_none(), "{about:?}");
        }
        // Each thread may have ended a block without having counted it yet.
        let inexact = threads as u64;
        assert!(missing.len() as u64 <= losses.inuse_missing.samples + inexact, "{about:?}");
        assert!(stale.len() as u64 <= losses.inuse_stale.samples + inexact, "{about:?}");
        let inexact_bytes = inexact * LARGEST_BYTES;
        assert!(world.bytes_of(missing.iter()) <= losses.inuse_missing.sampled_bytes + inexact_bytes, "{about:?}");
        assert!(world.bytes_of(stale.iter()) <= losses.inuse_stale.sampled_bytes + inexact_bytes, "{about:?}");
        // No block is counted twice, and the bounds cover the unknown ones.
        let allocated = world.blocks.iter().filter(|block| block.allocated_ns <= time_ns).count() as u64;
        let seen = daemon.heap.estimated().samples;
        assert!(
            seen <= allocated && allocated <= seen + losses.alloc.samples + inexact,
            "{allocated} {seen} {about:?}"
        );
        // The rows' sums in use equal the bytes of the known blocks.
        let of_rows: u64 = daemon.heap.snapshot(time_ns, false).map(|snapshot| snapshot.inuse.sampled_bytes).sum();
        assert_eq!(of_rows, world.bytes_of(known.iter()));
        shown.cuts += 1;
        shown.lossy += usize::from(!losses.is_none());
        shown.missing += missing.len();
        shown.stale += stale.len();
        daemon.queue.end_cut();
    }
    shown
}

fn runs(threads: usize, capacity: usize, loss_percent: usize, most_steps: usize) -> Shown {
    let all = Mutex::new(Shown::default());
    on_all_processors((0..150).collect(), |seed| {
        let shown = run(seed, threads, capacity, loss_percent, most_steps);
        let mut all = all.lock().expect("every cut is right");
        all.cuts += shown.cuts;
        all.lossy += shown.lossy;
        all.missing += shown.missing;
        all.stale += shown.stale;
    });
    let all = all.into_inner().expect("every cut is right");
    println!("{threads} threads, room for {capacity}, {loss_percent} % lost: {all:?}");
    all
}

#[test]
fn without_losses_a_cut_is_the_truth_of_its_moment() {
    for threads in [1, 3, 8] {
        let shown = runs(threads, usize::MAX, 0, 200);
        assert_eq!((shown.lossy, shown.missing + shown.stale), (0, 0));
    }
}

#[test]
fn with_losses_a_cut_is_the_truth_within_what_it_says() {
    for threads in [1, 3, 8] {
        for (capacity, loss_percent, most_steps) in
            [(usize::MAX, 1, 200), (usize::MAX, 10, 200), (usize::MAX, 80, 200), (40, 0, 200), (8, 0, 2_000)]
        {
            let shown = runs(threads, capacity, loss_percent, most_steps);
            assert!(shown.lossy > 0);
            // Of about 48 blocks in use, most are recovered from the live map.
            assert!(shown.missing + shown.stale < 8 * shown.cuts, "{shown:?}");
        }
    }
}
