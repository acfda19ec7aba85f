//! Captures a running recording in one quick step. Symbolization, encoding and serving then work on the copy: they
//! neither wait for the event path nor block it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use heapbpf_heap::live::{Heap, HeapRow, LiveBlock};
use heapbpf_heap::sample::SampleKey;
use heapbpf_host::Host;
use heapbpf_host::clock::{monotonic_ns, suspended_ns};
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::process::NO_USER;
use heapbpf_kernel::totals::Counts;
use heapbpf_profile::model::{LossBound, Losses, Module, Process, RowKey};
use heapbpf_symbols::runtime_functions::is_of_runtime;
use heapbpf_unwind::image::ModuleFiles;
use sampler_ebpf::abi::ProcessKey;

use super::describe::Descriptions;
use super::jit_code::JitCode;
use super::snapshot::{Content, Detail, Measured, Retired, SnapshotRow};
use super::symbolization::{Facts, ModuleFacts, UnsymbolizedStack};
use crate::attaching::probes::Attaching;
use crate::intake::losses::{EndedCounts, Exact, LossLedger};
use crate::intake::recorder::Recorder;

/// The parts of a session that a snapshot is made from.
pub struct Parts<'a> {
    /// Sums of samples, and the heap.
    pub recorder: &'a mut Recorder,
    /// Processes and modules of the host.
    pub host: &'a mut Host,
    /// Attached probes.
    pub attaching: &'a Attaching,
    /// Descriptions of processes, taken while they ran.
    pub descriptions: &'a mut Descriptions,
    /// Exact counts of processes that are still in the kernel's maps.
    pub counts: &'a Counts,
    /// Upper bound, by process, of what `counts` include from after the moment of the snapshot.
    pub slack: &'a HashMap<ProcessKey, LossBound>,
    /// Upper bound, by process, of what was in use at that moment without a record of it.
    pub unseen: &'a HashMap<ProcessKey, LossBound>,
    /// Bounds on the effect of lost records.
    pub ledger: &'a LossLedger,
    /// Exact counts of exited processes.
    pub ended: &'a EndedCounts,
    /// Processes that have a line even if nothing of them was counted.
    pub also: Vec<ProcessKey>,
    /// Moments that divide the blocks in use by age (CLOCK_MONOTONIC); ascending.
    pub marks_ns: Vec<u64>,
    /// Maximum number of blocks, of all processes together, that are looked up when memory is measured; `None`: memory
    /// is not measured, except for what of mappings is in use.
    pub most_blocks: Option<usize>,
    /// An empty list of rows, whose capacity is reused.
    pub emptied: Vec<SnapshotRow>,
}

impl Parts<'_> {
    /// Copies the sums of the whole heap as of `now` (CLOCK_MONOTONIC).
    pub fn take(&mut self, detail: Detail, now: u64) -> Content {
        let mut keys: Vec<ProcessKey> = self
            .counts
            .processes
            .iter()
            .filter(|(_, counters)| counters.hits() > 0)
            .map(|(process, _)| *process)
            .chain(self.ended.processes().copied())
            .chain(self.also.iter().copied())
            .collect();
        let mut names = FunctionNames::default();
        let mut gather = Gather::default();
        let Self { recorder, host, attaching, marks_ns, emptied, .. } = self;
        let name = |function| name_of(function, &mut names, attaching);
        let mut rows = std::mem::take(emptied);
        let new = |row: &HeapRow| gather.row(row, host);
        let (of_row, place_of) = add_rows(&mut rows, &mut recorder.heap, detail, (now, marks_ns), name, new);
        // Rows of a process are mostly next to each other.
        keys.extend(of_row.chunk_by(|a, b| a == b).map(|same| same[0]));
        let mut content = self.finish(keys, rows, &of_row, gather, now);
        let heap = &self.recorder.heap;
        if self.most_blocks.is_some() || heap.mapped_spaces().next().is_some() {
            content.measured = measured(&content, &place_of, heap, self.most_blocks, self.attaching);
        }
        content
    }

    /// Removes the rows of exited processes from the heap. Also returns the processes that still have rows (see
    /// [`Heap::retire`]).
    pub fn retire(&mut self, ended: &HashSet<ProcessKey>) -> (Retired, HashSet<ProcessKey>) {
        let (taken, held) = self.recorder.heap.retire(ended);
        let mut names = FunctionNames::default();
        let mut gather = Gather::default();
        let mut of_row = Vec::new();
        let mut rows = Vec::new();
        for row in &taken {
            gather.row(row, self.host);
            of_row.push(row.key.process);
            rows.push(copy_of(row, name_of(row.key.function, &mut names, self.attaching)));
        }
        let counted = |process: &&ProcessKey| self.ended.get(process).is_some();
        let mut keys: Vec<ProcessKey> = ended.difference(&held).filter(counted).copied().collect();
        keys.extend(&of_row);
        let Content { keys, mut processes, rows, facts, .. } = self.finish(keys, rows, &of_row, gather, monotonic_ns());
        for (key, process) in keys.iter().zip(&mut processes) {
            if held.contains(key) {
                process.losses = Losses::default();
            }
        }
        (Retired { keys, processes, held: held.clone(), rows, facts }, held)
    }

    fn finish(
        &mut self,
        mut keys: Vec<ProcessKey>,
        mut rows: Vec<SnapshotRow>,
        of_row: &[ProcessKey],
        gather: Gather,
        now_ns: u64,
    ) -> Content {
        keys.sort_unstable_by_key(|key| (key.tgid, key.start_ns, key.exec_id));
        keys.dedup();
        let numbers: HashMap<ProcessKey, usize> = keys.iter().enumerate().map(|(i, key)| (*key, i)).collect();
        let mut last = None;
        for (row, process) in rows.iter_mut().zip(of_row) {
            let number = last.filter(|(known, _)| *known == process).map_or_else(|| numbers[process], |(_, it)| it);
            row.key.process = number;
            last = Some((process, number));
        }
        let heap = &self.recorder.heap;
        let processes: Vec<Process> = keys
            .iter()
            .map(|key| {
                // Add both: a thread may end after the process's other counts were taken out of the kernel.
                let counting = self.counts.processes.get(key).map(Exact::of);
                let exact = self.ended.get(key).into_iter().chain(counting).reduce(Exact::with);
                let exact = exact.or_else(|| self.also.contains(key).then(Exact::default));
                let process = self.descriptions.process(*key, now_ns, self.host, self.attaching, exact);
                let ended = self.ended.get(key).unwrap_or_default().lost;
                let slack = self.slack.get(key).copied().unwrap_or_default();
                let unseen = self.unseen.get(key).copied().unwrap_or_default();
                let mut losses = self.ledger.losses(key, self.counts.processes.get(key), ended, heap.recovered(key));
                losses.inuse_missing.add(&unseen);
                let undecided = self.recorder.undecided_mappings(key);
                losses.alloc.add(&undecided);
                losses.inuse_missing.add(&undecided);
                let mapped_by = |until_ns| heap.mapped_by(key, until_ns);
                losses.weights_unproven = self.recorder.announced.is_inconsistent(key);
                let counting = self.counts.processes.get(key);
                losses.inuse_stale.add(&self.ledger.stale_mappings(key, counting, ended, mapped_by));
                let inuse_unknown = process.inuse_unknown || heap.is_untracked(key);
                Process { inuse_unknown, losses, slack, ..process }
            })
            .collect();
        Content { keys, processes, rows, measured: Vec::new(), facts: gather.finish(self.host) }
    }
}

fn measured(
    Content { keys, processes, rows, .. }: &Content,
    place_of: &[(usize, usize)],
    heap: &Heap,
    most: Option<usize>,
    attaching: &Attaching,
) -> Vec<Measured> {
    let mut inuse = vec![0.0; processes.len()];
    rows.iter().for_each(|row| inuse[row.key.process] += row.inuse.bytes);
    let runs = |process: &usize| !processes[*process].ended && attaching.is_current_program(keys[*process]);
    let mut living: Vec<usize> = (0..processes.len()).filter(runs).collect();
    living.sort_by(|a, b| inuse[*b].total_cmp(&inuse[*a]));
    let all: usize = living.iter().map(|process| heap.live_blocks(&keys[*process])).sum();
    let share = most.map_or(0.0, |most| (most as f64 / all.max(1) as f64).min(1.0));
    let in_snapshot = |block: LiveBlock| {
        let place = place_of.binary_search_by_key(&block.row, |(number, _)| *number).ok()?;
        Some(LiveBlock { row: place_of[place].1, ..block })
    };
    let measured = |process: usize| {
        let (key, there) = (keys[process], heap.live_blocks(&keys[process]));
        let looked_for = (there as f64 * share).ceil();
        Measured {
            process,
            key,
            blocks: heap.blocks(&key, looked_for as usize).into_iter().filter_map(in_snapshot).collect(),
            share: looked_for / there.max(1) as f64,
            at_attach: attaching.targets.at_attach(key.tgid),
        }
    };
    living.into_iter().map(measured).collect()
}

/// Adds the rows of a heap as of `now_ns` (CLOCK_MONOTONIC) to `rows`, which must be empty. `RowKey::process` is not
/// filled in yet. `name` gives the name of an allocator function. `new` is called for each row that is captured with
/// its stack for the first time. Returns the process of each row, and for each row of the heap its number and the index
/// of the row that it was added to, ascending.
fn add_rows(
    rows: &mut Vec<SnapshotRow>,
    heap: &mut Heap,
    detail: Detail,
    (now_ns, marks_ns): (u64, &[u64]),
    mut name: impl FnMut(u16) -> Arc<str>,
    mut new: impl FnMut(&HeapRow),
) -> (Vec<ProcessKey>, Vec<(usize, usize)>) {
    let (mut of_row, mut place_of) = (Vec::new(), Vec::new());
    let mut totals: HashMap<(ProcessKey, u64, bool), usize> = HashMap::new();
    let mut by_mark = if detail == Detail::Totals { HashMap::new() } else { heap.inuse_by_mark(marks_ns) };
    let snapshots = heap.snapshot(now_ns, detail == Detail::Lifetimes);
    if detail != Detail::Totals {
        rows.reserve_exact(snapshots.size_hint().0);
        of_row.reserve_exact(snapshots.size_hint().0);
    }
    for snapshot in snapshots {
        let row = snapshot.row;
        if detail == Detail::Totals {
            let number = *totals.entry((row.key.process, row.key.interval, row.mapped)).or_insert_with(|| {
                of_row.push(row.key.process);
                rows.push(total_row(row.key.interval, row.mapped));
                rows.len() - 1
            });
            place_of.push((snapshot.number, number));
            let total: &mut SnapshotRow = &mut rows[number];
            total.alloc.add(&row.alloc);
            total.inuse.add(&snapshot.inuse);
            total.at_exit.add(&snapshot.at_exit);
            snapshot.growth.iter().for_each(|growth| total.growth.get_or_insert_default().add(growth));
            continue;
        }
        if !row.named {
            new(row);
        }
        of_row.push(row.key.process);
        place_of.push((snapshot.number, rows.len()));
        rows.push(SnapshotRow {
            inuse: snapshot.inuse,
            at_exit: snapshot.at_exit,
            by_mark: by_mark.remove(&snapshot.number).unwrap_or_default(),
            ages: snapshot.ages,
            growth: snapshot.growth,
            ..copy_of(row, name(row.key.function))
        });
    }
    if detail != Detail::Totals {
        heap.mark_named();
    }
    (of_row, place_of)
}

/// Function of the rows with the totals of mappings. Rows of a process must differ.
const MAPPINGS: &str = "mmap";

fn total_row(interval: u64, mapped: bool) -> SnapshotRow {
    let function = if mapped { MAPPINGS } else { "" };
    let key = RowKey { function: function.into(), ..RowKey::total(0, interval, None) };
    SnapshotRow { key, mapped, ..SnapshotRow::default() }
}

fn copy_of(row: &HeapRow, function: Arc<str>) -> SnapshotRow {
    let SampleKey { process, thread, interval, stack, .. } = &row.key;
    let stack = UnsymbolizedStack { process: *process, stack: Arc::clone(stack) };
    let key = RowKey { process: 0, thread: Arc::clone(thread), function, interval: *interval, stack: Some(stack) };
    SnapshotRow {
        key,
        alloc: row.alloc,
        at_exit: row.at_exit(),
        peak: row.peak(),
        mapped: row.mapped,
        ..SnapshotRow::default()
    }
}

/// Names of allocator functions.
type FunctionNames = HashMap<u16, Arc<str>, foldhash::fast::RandomState>;

fn name_of(function: u16, names: &mut FunctionNames, attaching: &Attaching) -> Arc<str> {
    let name = || Arc::<str>::from(attaching.hooks.files.table.function_name(function).unwrap_or("?"));
    Arc::clone(names.entry(function).or_insert_with(name))
}

/// Collects what symbolization needs: the modules that stacks refer to, and the processes with JIT code on their
/// stacks.
#[derive(Default)]
struct Gather {
    /// The first frame found in each module: process, time, address.
    modules: HashMap<ModuleId, (ProcessKey, u64, u64)>,
    jit_code: HashMap<ProcessKey, u64>,
}

impl Gather {
    fn row(&mut self, row: &HeapRow, host: &Host) {
        for frame in &row.key.stack.frames {
            if let Some(module) = frame.module.filter(|_| !is_of_runtime(frame)) {
                self.modules.entry(module).or_insert((row.key.process, row.first_ns, frame.address));
            }
        }
        if row.key.stack.has_jit_code(host.modules()) {
            self.jit_code.insert(row.key.process, row.first_ns);
        }
    }

    fn finish(self, host: &mut Host) -> Facts {
        let mut facts = Facts::default();
        for (module, (process, time_ns, address)) in self.modules {
            let generation = host.processes().at(process.tgid, time_ns);
            // The mapping at that time: it may have been unmapped since.
            let mapping = generation.and_then(|generation| generation.space.resolve(address, time_ns));
            let mapping = mapping.filter(|mapping| mapping.module == module);
            let (start, end, file_offset) =
                mapping.map_or((0, 0, 0), |mapping| (mapping.start, mapping.end, mapping.file_offset));
            let image = ModuleFiles::image(host.modules_mut(), module);
            let modules = host.modules();
            let (path, build_id) = (ModuleFiles::path(modules, module), ModuleFiles::build_id(modules, module));
            let is_anonymous = ModuleFiles::is_anonymous(modules, module);
            let root = ModuleFiles::root(modules, module);
            let listed = Module { path, build_id, start, end, file_offset, reason: None };
            facts.modules.insert(module, ModuleFacts { module: listed, is_anonymous, root, image });
        }
        for (process, time_ns) in self.jit_code {
            facts.jit_code.insert(process, jit_code_of(process, time_ns, host));
        }
        facts
    }
}

/// Where to find the names of a process's JIT code.
pub fn jit_code_of(process: ProcessKey, time_ns: u64, host: &mut Host) -> JitCode {
    let generation = host.processes().at(process.tgid, time_ns).map(|generation| generation.id);
    let info = generation.and_then(|generation| host.describe(generation));
    let namespace_pid = info.as_ref().and_then(|info| info.namespace_pid).unwrap_or(process.tgid);
    let age = monotonic_ns().checked_add(suspended_ns()).and_then(|now| now.checked_sub(process.start_ns));
    let started = age.and_then(|age_ns| SystemTime::now().checked_sub(Duration::from_nanos(age_ns)));
    JitCode { pid: process.tgid, namespace_pid, owner: info.map_or(NO_USER, |info| info.uid), started }
}

#[cfg(test)]
mod tests {
    use heapbpf_heap::sample::Sample;
    use heapbpf_profile::model::ByAddress;
    use heapbpf_unwind::raw::RawStack;

    use super::*;

    const MALLOC: u16 = 3;
    const CALLOC: u16 = 4;

    fn key(tgid: u32) -> ProcessKey {
        ProcessKey { start_ns: 1, tgid, exec_id: 0 }
    }

    fn rows_of(
        heap: &mut Heap,
        detail: Detail,
        now_ns: u64,
        marks_ns: &[u64],
        name: impl FnMut(u16) -> Arc<str>,
        new: impl FnMut(&HeapRow),
    ) -> (Vec<SnapshotRow>, Vec<ProcessKey>) {
        let mut rows = Vec::new();
        let (of_row, place_of) = add_rows(&mut rows, heap, detail, (now_ns, marks_ns), name, new);
        assert!(place_of.is_sorted() && place_of.iter().all(|(_, row)| *row < rows.len()));
        (rows, of_row)
    }

    fn sample(stack: &Arc<RawStack>, (id, tgid, function, size_bytes): (u64, u32, u16, u64), time_ns: u64) -> Sample {
        Sample {
            id,
            key: SampleKey {
                process: key(tgid),
                thread: "main".into(),
                function,
                interval: 1,
                stack: ByAddress(Arc::clone(stack)),
            },
            space: key(tgid),
            time_ns,
            address: 16 * id,
            size_bytes,
            trials: size_bytes,
            offset: 0,
            tracked: true,
            mapped: false,
        }
    }

    /// Three rows: two functions of process 1, and one of process 2, which frees half of its bytes at 500 ns.
    fn heap() -> Heap {
        let (mut heap, stack) = (Heap::new(false), Arc::new(RawStack::lost()));
        for it in [(1, 1, MALLOC, 10), (2, 1, CALLOC, 20), (3, 2, MALLOC, 300), (4, 2, MALLOC, 300)] {
            heap.allocate(sample(&stack, it, 100 * it.0));
        }
        heap.free(key(2), 3, 500, false);
        heap
    }

    fn name(function: u16) -> Arc<str> {
        if function == MALLOC { "malloc".into() } else { "calloc".into() }
    }

    /// Process, function, allocated bytes and bytes in use of each row, sorted by process and function.
    fn figures((rows, of_row): &(Vec<SnapshotRow>, Vec<ProcessKey>)) -> Vec<(u32, String, f64, f64)> {
        let figure = |(row, process): (&SnapshotRow, &ProcessKey)| {
            (process.tgid, row.key.function.to_string(), row.alloc.bytes, row.inuse.bytes)
        };
        let mut figures: Vec<_> = rows.iter().zip(of_row).map(figure).collect();
        figures.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        figures
    }

    #[test]
    fn with_stacks_each_row_is_copied_and_new_ones_are_told_once() {
        let mut heap = heap();
        let mut new = Vec::new();
        let taken = rows_of(&mut heap, Detail::Stacks, 1_000, &[], name, |row| new.push(row.key.process.tgid));
        let expected = [
            (1, "calloc".to_owned(), 20.0, 20.0),
            (1, "malloc".into(), 10.0, 10.0),
            (2, "malloc".into(), 600.0, 300.0),
        ];
        assert_eq!(figures(&taken), expected);
        assert!(taken.0.iter().all(|row| row.key.stack.is_some() && row.ages.is_none()));
        new.sort_unstable();
        assert_eq!(new, [1, 1, 2]);
        let again =
            rows_of(&mut heap, Detail::Stacks, 2_000, &[], name, |row| panic!("{:?} was told", row.key.process));
        assert_eq!(figures(&again), expected);
    }

    #[test]
    fn totals_are_one_row_for_each_process_with_the_sums_of_its_rows() {
        let mut heap = heap();
        let taken = rows_of(
            &mut heap,
            Detail::Totals,
            1_000,
            &[],
            |_| panic!("totals have no function"),
            |_| panic!("no stack"),
        );
        assert_eq!(figures(&taken), [(1, String::new(), 30.0, 30.0), (2, String::new(), 600.0, 300.0)]);
        assert!(taken.0.iter().all(|row| row.key.stack.is_none() && row.ages.is_none()));
        // A totals snapshot does not mark stacks as captured.
        let mut new = 0;
        rows_of(&mut heap, Detail::Stacks, 1_000, &[], name, |_| new += 1);
        assert_eq!(new, 3);
    }

    #[test]
    fn totals_of_mappings_are_rows_of_their_own() {
        let mut heap = heap();
        let stack = Arc::new(RawStack::lost());
        let mapping = Sample { mapped: true, address: 1 << 20, ..sample(&stack, (9, 1, MALLOC - 1, 4_096), 900) };
        heap.allocate(mapping);
        let name = |_| -> Arc<str> { panic!("totals have no function") };
        let taken = rows_of(&mut heap, Detail::Totals, 1_000, &[], name, |_| {});
        let expected = [
            (1, String::new(), 30.0, 30.0),
            (1, "mmap".to_owned(), 4_096.0, 4_096.0),
            (2, String::new(), 600.0, 300.0),
        ];
        assert_eq!(figures(&taken), expected);
        let mapped: Vec<f64> = taken.0.iter().filter(|row| row.mapped).map(|row| row.inuse.bytes).collect();
        assert_eq!(mapped, [4_096.0]);
        // All mappings are looked up, however few of the other blocks are.
        let blocks = heap.blocks(&key(1), 0).into_iter().map(|it| (it.address, it.size_bytes, it.mapping));
        assert_eq!(blocks.collect::<Vec<_>>(), [(1 << 20, 4_096, Some(9))]);
    }

    #[test]
    fn totals_grow_by_what_their_rows_grow_by() {
        let (mut heap, stack) = (Heap::new(false), Arc::new(RawStack::lost()));
        for (id, function, time_ns) in
            [(1, MALLOC, 1_000_000), (2, MALLOC, 2_500_000), (3, MALLOC, 3_000_000), (4, CALLOC, 3_100_000)]
        {
            heap.allocate(sample(&stack, (id, 1, function, 10), time_ns));
        }
        for detail in [Detail::Totals, Detail::Stacks, Detail::Lifetimes] {
            let (rows, _) = rows_of(&mut heap, detail, 3_200_000, &[], |_| "".into(), |_| {});
            let kept: f64 = rows.iter().map(|row| row.growth.expect("there are marks").kept.bytes).sum();
            assert_eq!(kept, 20.0, "{detail:?}");
        }
    }

    #[test]
    fn lifetimes_come_with_the_ages_of_freed_blocks_and_of_those_that_live() {
        let mut heap = heap();
        let (rows, of_row) = rows_of(&mut heap, Detail::Lifetimes, 1_000, &[], name, |_| {});
        let row = of_row.iter().position(|process| process.tgid == 2).unwrap();
        let ages: Vec<_> = rows[row].ages.as_ref().unwrap().observations().collect();
        // Block 3 was freed. Block 4, allocated at 400 ns, is still live.
        let of = |freed| ages.iter().filter(move |it| it.freed == freed).map(|it| (it.age_seconds, it.weight));
        let [(age_seconds, weight)] = of(false).collect::<Vec<_>>()[..] else { panic!("{ages:?}") };
        assert!((600e-9 / age_seconds - 1.0).abs() <= 1.0 / 16.0 && weight == 1.0, "{ages:?}");
        assert_eq!(of(true).map(|(_, weight)| weight).sum::<f64>(), 1.0);
    }

    #[test]
    fn the_sums_of_a_moment_do_not_change_with_what_comes_later() {
        let mut heap = heap();
        let before = rows_of(&mut heap, Detail::Stacks, 1_000, &[], name, |_| {});
        heap.free(key(2), 4, 1_500, false);
        let after = rows_of(&mut heap, Detail::Stacks, 2_000, &[], name, |_| {});
        assert_eq!(figures(&before)[2].3, 300.0);
        assert_eq!(figures(&after)[2].3, 0.0);
    }
}
