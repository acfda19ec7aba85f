//! The live heap against a model: random events go to [`Heap`] and to plain lists, which are summed anew for each
//! comparison. The timing of cuts has its own tests (`record::intake::join`).

mod model;
mod operations;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use heapbpf_profile::model::{ByAddress, LossBound};
use sampler_ebpf::abi::FreeRecord;

use self::model::{CELL, Key, Model, Row, Sums, weight_of};
use self::operations::{Allocation, Draws, INTERVALS, Operation, PROCESSES, STACKS};
use super::tests::{process, stack};
use super::*;

/// Relative error allowed for rounding: the heap updates running totals, the model sums anew.
const ROUNDING: f64 = 1e-9;

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= ROUNDING * (1.0 + a.abs().max(b.abs()))
}

/// Address of a block that is not a mapping: each has its own, above the mappings.
const fn address_of(sample: u64) -> u64 {
    (1 << 40) + sample * PAGE
}

/// The heap and its model, which get the same events.
struct Pair {
    heap: Heap,
    model: Model,
    stacks: Vec<Arc<RawStack>>,
    ended_apart: bool,
    limited: bool,
    now_ns: u64,
    last_sample: u64,
}

impl Pair {
    fn new(ended_apart: bool, row_limit: Option<usize>) -> Self {
        Self {
            heap: Heap::new(ended_apart).with_row_limit(row_limit.unwrap_or(usize::MAX)),
            model: Model::default(),
            stacks: std::iter::repeat_with(stack).take(STACKS).collect(),
            ended_apart,
            limited: row_limit.is_some(),
            now_ns: 1_000,
            last_sample: 0,
        }
    }

    /// A new sample.
    fn sample(&mut self, it: &Allocation, mapped_at: Option<u64>) -> Sample {
        self.last_sample += 1;
        let interval = INTERVALS[it.interval];
        Sample {
            id: self.last_sample,
            key: SampleKey {
                process: process(it.process),
                thread: "main".into(),
                function: 0,
                interval,
                stack: ByAddress(Arc::clone(&self.stacks[it.stack])),
            },
            space: process(it.space),
            time_ns: self.now_ns,
            address: mapped_at.unwrap_or(address_of(self.last_sample)),
            size_bytes: it.size_bytes,
            trials: it.size_bytes,
            offset: 0,
            tracked: it.tracked,
            mapped: mapped_at.is_some(),
        }
    }

    fn allocate(&mut self, sample: &Sample, stack: usize) {
        self.heap.allocate(sample.clone());
        self.model.allocate(sample, stack);
    }

    fn apply(&mut self, operation: &Operation) {
        self.now_ns += 10;
        let now_ns = self.now_ns;
        match operation {
            Operation::Allocate(it) => {
                let sample = self.sample(it, None);
                self.allocate(&sample, it.stack);
            }
            Operation::Map(it, cell) => {
                let it = Allocation { size_bytes: it.size_bytes * CELL, ..*it };
                let sample = self.sample(&it, Some(cell * CELL));
                self.allocate(&sample, it.stack);
            }
            Operation::Free { sample, space, temporary } => {
                // Usually the free of a known block, but not always: a free may have been counted before its record.
                let known = self.model.live.keys().nth(*sample).copied();
                let (space, id) = known.filter(|_| *space == 0).unwrap_or((*space, *sample as u64));
                self.heap.free(process(space), id, now_ns, *temporary);
                self.model.free(space, id, *temporary);
            }
            Operation::Unmap { space, cells, late_ns } => {
                let (start, end, until_ns) = (cells.start * CELL, cells.end * CELL, now_ns - late_ns);
                self.heap.unmap(process(*space), start, end, until_ns);
                self.model.unmap(*space, start, end, until_ns);
            }
            Operation::KeepMapped { space, cells, late_ns } => {
                let ranges: Vec<_> = cells.iter().map(|cells| (cells.start * CELL, cells.end * CELL)).collect();
                let found = self.heap.keep_mapped(process(*space), &ranges, now_ns - late_ns);
                assert_eq!(found, self.model.keep_mapped(*space, &ranges, now_ns - late_ns));
            }
            Operation::End { space, freed } => {
                let was_live = |address: u64| freed >> (address / PAGE % 8) & 1 == 0;
                let lost_frees = self.heap.end(process(*space), now_ns, was_live);
                assert_eq!(lost_frees, self.model.end(*space, was_live));
            }
            Operation::Replace { space } => {
                let mut addresses = self.heap.replace(process(*space), now_ns);
                addresses.sort_unstable();
                assert_eq!(addresses, self.model.replace(*space));
            }
            Operation::StopTracking { space } => {
                let dropped = self.heap.stop_tracking(process(*space));
                assert_eq!(sorted(&dropped), self.model.stop_tracking(*space));
            }
            Operation::TrackAgain { space, late_ns } => {
                let dropped = self.heap.track_again(process(*space), now_ns - late_ns);
                assert_eq!(sorted(&dropped), self.model.track_again(*space, now_ns - late_ns));
            }
            Operation::Reconcile { missed, outside_map, unknown, late, behind } => {
                self.reconcile(*missed, *outside_map, unknown, *late, *behind);
            }
            Operation::Retire { process } => self.retire(*process),
            Operation::Look => self.look(),
        }
        self.compare();
    }

    /// A scan of the kernel's live map. `missed` and `outside_map` have a bit for each block's number: whether the scan
    /// misses it, and whether a realloc had taken it out of the map. The first `late` of the unknown blocks are
    /// allocated during the scan. If there are unknown blocks, one more block is added after the scan passed its place;
    /// the map has it if `behind` has its bit.
    fn reconcile(&mut self, missed: u64, outside_map: u64, unknown: &[Allocation], late: usize, behind: u64) {
        let bit = |bits: u64, id: u64| bits >> (id % 64) & 1 == 1;
        self.heap.begin_reconciliation();
        let mut seen: HashSet<u64> = HashSet::new();
        for ((space, id), block) in &self.model.live {
            if !block.mapped && !bit(missed, *id) {
                assert!(self.heap.observe(&process(*space), *id));
                seen.insert(*id);
            }
        }
        let unknown: Vec<(Sample, usize)> = unknown.iter().map(|it| (self.sample(it, None), it.stack)).collect();
        for (sample, _) in &unknown {
            assert!(!self.heap.observe(&sample.space, sample.id));
        }
        for (sample, stack) in unknown.iter().take(late) {
            self.allocate(sample, *stack);
        }
        let announced: HashSet<u64> = unknown.iter().take(late).map(|(sample, _)| sample.id).collect();
        // The scan has observed all of the unknown blocks, so those that were allocated during the scan stay as well.
        let newcomer = unknown.first().map(|(first, stack)| {
            let id = self.last_sample + 1;
            (Sample { id, address: address_of(id), ..first.clone() }, *stack)
        });
        self.last_sample += 1;
        if let Some((sample, stack)) = &newcomer {
            self.allocate(sample, *stack);
        }
        let newcomer = newcomer.map(|(sample, _)| sample.id);
        // Frees after the cut: of a block that is otherwise unknown, of one that was allocated after the cut, and of
        // blocks that have left the map. Other blocks are outside of the map because of a realloc.
        let free = |sample| FreeRecord { space: process(1), sample, size_bytes: 77, ..FreeRecord::default() };
        let outside = self.model.live.keys().filter(|(_, id)| bit(outside_map, *id));
        let (freed, reallocated): (Vec<_>, Vec<_>) = outside.partition(|(_, id)| id % 2 == 0);
        let freed = freed.into_iter().map(|(space, id)| FreeRecord { space: process(space), ..free(id) });
        let after = AfterCut {
            outside_map: reallocated.into_iter().map(|(_, id)| id).collect(),
            freed: freed.chain([free(u64::MAX), free(u64::MAX - 1)]).collect(),
            allocated: HashSet::from([u64::MAX - 1]),
            ..AfterCut::default()
        };
        // The map has the added block, or no longer has it. At other addresses it has other blocks.
        let is_behind = |id: u64| Some(id) == newcomer && bit(behind, id);
        let in_map = |_: &ProcessKey, address: u64| {
            let at = self.model.live.iter().find(|(_, block)| !block.mapped && block.address == address);
            at.map(|((_, id), _)| if is_behind(*id) { *id } else { id + 1 })
        };
        let samples = unknown.iter().map(|(sample, _)| sample.clone()).collect();
        let (lost, unseen) = self.heap.reconcile(samples, after, in_map);
        let keeps = |id: u64| seen.contains(&id) || announced.contains(&id) || bit(outside_map, id) || is_behind(id);
        assert_eq!(lost, self.model.reconcile(&unknown, keeps));
        assert_eq!(unseen, HashMap::from([(process(1), LossBound { samples: 1, sampled_bytes: 77 })]));
    }

    fn retire(&mut self, ended: u32) {
        // Merged rows are retired together, which the model does not do.
        if !self.limited {
            let ended_processes = HashSet::from([process(ended)]);
            let (rows, held) = self.heap.retire(&ended_processes);
            self.heap.forget_processes(&ended_processes);
            assert_eq!((rows.len(), !held.is_empty()), self.model.retire(ended));
        }
    }

    /// Compares everything that can be queried at any time.
    fn compare(&mut self) {
        let (found, model) = (self.heap.estimated(), &mut self.model);
        assert_eq!((found.samples, found.live_samples), (model.samples, model.live.len() as u64));
        assert!(near(found.alloc_bytes, model.alloc_bytes), "{found:?}, {}", model.alloc_bytes);
        assert!(near(found.inuse_bytes, model.inuse_bytes()), "{found:?}");
        assert!(near(self.heap.by_class().iter().sum(), model.objects));
        for space in PROCESSES {
            let key = process(space);
            assert_eq!(self.heap.is_untracked(&key), model.untracked.contains(&space));
            assert_eq!(self.heap.tracked_since(&key), model.since.get(&space).copied());
            assert_eq!(self.heap.recovered(&key), model.recovered.get(&space).copied().unwrap_or_default());
            for until_ns in [self.now_ns - 25, self.now_ns] {
                assert_eq!(self.heap.mapped_by(&key, until_ns), model.mapped_by(space, until_ns));
                assert_eq!(self.heap.ignores(&key, until_ns), model.ignores(space, until_ns));
            }
            let live = (1..=self.last_sample).filter(|id| self.heap.knows(&key, *id));
            assert!(live.eq(model.live.keys().filter(|(of, _)| *of == space).map(|(_, id)| *id)));
        }
        assert_eq!(sorted(&self.heap.take_untracked_blocks()), std::mem::take(&mut model.ignored));
    }

    /// The comparison key of a row. If rows are merged, all rows of a process and interval share one.
    fn group(&self, (process, interval, stack): Key) -> Key {
        (process, interval, if self.limited { 0 } else { stack })
    }

    /// Compares a snapshot, row by row.
    fn look(&mut self) {
        let marks_ns = [self.now_ns / 3, self.now_ns / 2, self.now_ns - 30];
        let by_mark = self.heap.inuse_by_mark(&marks_ns);
        let mut spans = [(0, 0); 3];
        for (mark, sums) in by_mark.values().flatten() {
            spans[*mark].0 += sums.samples;
            spans[*mark].1 += sums.sampled_bytes;
        }
        assert_eq!(spans, self.model.inuse_by_mark(&marks_ns));

        let mut expected: BTreeMap<Key, (Row, Sums)> = BTreeMap::new();
        for (key, row, inuse) in self.model.snapshot(self.ended_apart) {
            let sum = expected.entry(self.group(key)).or_default();
            sum.0.add(&row);
            sum.1.add(&inuse);
        }
        let rows: Vec<_> = self.heap.snapshot(self.now_ns, true).map(|it| read_row(&self.stacks, &it)).collect();
        let mut found: BTreeMap<Key, (Row, Sums)> = BTreeMap::new();
        for (key, row, inuse) in rows {
            let sum = found.entry(self.group(key)).or_default();
            sum.0.add(&row);
            sum.1.add(&inuse);
        }
        assert!(found.keys().eq(expected.keys()), "{found:?}, {expected:?}");
        for (key, (row, inuse)) in &found {
            let (of_model, inuse_of_model) = &expected[key];
            assert!(row.is_near(of_model, near), "{key:?}: {row:?}, {of_model:?}");
            assert!(inuse.is_near(inuse_of_model, near), "{key:?}: {inuse:?}, {inuse_of_model:?}");
        }
    }
}

/// A row of the heap, and its sums in use, in the model's terms.
fn read_row(stacks: &[Arc<RawStack>], it: &RowSnapshot<'_>) -> (Key, Row, Sums) {
    let sums = |of: &SampleSums| Sums { samples: of.samples, sampled_bytes: of.sampled_bytes, bytes: of.bytes };
    let stack = stacks.iter().position(|stack| Arc::ptr_eq(stack, &it.row.key.stack)).unwrap_or(STACKS);
    let ages = it.ages.as_ref().expect("requested");
    let left = ages.observations().filter(|it| !it.freed).map(|it| it.weight).sum();
    let freed: f64 = ages.observations().filter(|it| it.freed).map(|it| it.weight).sum();
    assert!(near(freed, ages.freed()));
    let row = Row {
        alloc: sums(&it.row.alloc),
        untracked: it.row.untracked,
        at_exit: sums(&it.at_exit),
        peak: sums(&it.peak),
        freed,
        temporary: ages.temporary(),
        left,
    };
    ((it.row.key.process.tgid, it.row.key.interval, stack), row, sums(&it.inuse))
}

/// Space, sample and address of each block.
fn sorted(blocks: &[UntrackedBlock]) -> Vec<(u32, u64, u64)> {
    let mut blocks: Vec<_> = blocks.iter().map(|it| (it.space.tgid, it.sample, it.address)).collect();
    blocks.sort_unstable();
    blocks
}

#[test]
fn the_models_weights_are_those_of_the_statistics() {
    for (trials, interval) in [(1, 1), (500, 1), (1, 64), (500, 64)] {
        assert!(near(weight_of(trials, interval), super::weight_of(trials, interval)));
    }
}

/// Every run has the same cases. Prints the number of each, so that a failure shows its case.
#[test]
fn the_heap_is_what_its_model_is() {
    for case in 0..600 {
        println!("case {case}");
        let mut draws = Draws(fastrand::Rng::with_seed(case));
        let row_limit = draws.one_in(2).then(|| draws.0.usize(2..9));
        let mut pair = Pair::new(draws.one_in(2), row_limit);
        for _ in 0..draws.0.u32(1..80) {
            pair.apply(&draws.operation());
        }
        pair.apply(&Operation::Look);
    }
}
