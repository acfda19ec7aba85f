//! Tests of the live heap.

use super::*;
use crate::unwind::raw::{Completeness, UnwinderKind};

pub(super) fn stack() -> Arc<RawStack> {
    Arc::new(RawStack { frames: Box::new([]), unwinder: UnwinderKind::Caller, completeness: Completeness::Complete })
}

pub(super) fn process(tgid: u32) -> ProcessKey {
    ProcessKey { start_ns: 1, tgid, exec_id: 0 }
}

pub(super) fn sample(id: u64, tgid: u32, size_bytes: u64, stack: &Arc<RawStack>) -> Sample {
    Sample {
        id,
        process: process(tgid),
        space: process(tgid),
        time_ns: id * 1000,
        address: id * 4096,
        size_bytes,
        trials: size_bytes.max(1),
        offset: 0,
        interval: 1,
        thread: "main".into(),
        function: 0,
        stack: Arc::clone(stack),
        tracked: true,
        mapped: false,
    }
}

fn first_row(heap: &mut Heap) -> HeapRow {
    heap.snapshot(0, false).next().unwrap().row.clone()
}

fn inuse(heap: &mut Heap) -> Vec<(u64, f64)> {
    heap.snapshot(0, false).map(|s| (s.inuse.samples, s.inuse.bytes)).collect()
}

#[test]
fn what_is_allocated_and_not_freed_is_in_use() {
    let (mut heap, one) = (Heap::default(), stack());
    for id in 1..=10 {
        heap.allocate(sample(id, 1, 100, &one));
    }
    for id in 1..=4 {
        heap.free(process(1), id, 50_000, false);
    }
    heap.free(process(1), 4, 50_000, false);
    heap.free(process(2), 5, 50_000, false);
    assert_eq!(inuse(&mut heap), [(6, 600.0)]);
    assert_eq!(heap.estimated().live_samples, 6);
    assert_eq!(first_row(&mut heap).alloc.bytes, 1000.0);
}

#[test]
fn an_ended_process_keeps_its_last_state_and_a_replaced_one_does_not() {
    let (mut heap, one) = (Heap::default(), stack());
    heap.allocate(sample(1, 1, 10, &one));
    heap.allocate(sample(2, 2, 20, &one));
    let mut asked = Vec::new();
    let was_live = |address| {
        asked.push(address);
        true
    };
    assert_eq!(heap.end(process(1), was_live), 0);
    assert_eq!(asked, [4096]);
    assert_eq!(heap.replace(process(2)), [8192]);
    assert_eq!(inuse(&mut heap), [(1, 10.0), (0, 0.0)]);
    assert_eq!(heap.estimated().inuse_bytes, 0.0);
}

#[test]
fn what_the_kernel_no_longer_has_was_freed_before_the_end() {
    let (mut heap, one) = (Heap::default(), stack());
    for id in 1..=3 {
        heap.allocate(sample(id, 1, 8, &one));
    }
    assert_eq!(heap.end(process(1), |address| address == 2 * 4096), 2);
    assert_eq!(inuse(&mut heap), [(1, 8.0)]);
    assert_eq!(heap.estimated().live_samples, 0);
}

#[test]
fn what_is_sampled_while_probes_come_and_go_does_not_count() {
    let (mut heap, one) = (Heap::default(), stack());
    heap.window_begins(2000);
    heap.window_ends(3000);
    for id in 1..=4 {
        heap.allocate(sample(id, 1, 8, &one));
    }
    assert_eq!(heap.estimated().samples, 2);
    heap.window_begins(4000);
    heap.allocate(sample(4, 1, 8, &one));
    assert_eq!(heap.estimated().samples, 3);
}

#[test]
fn mappings_shrink_and_are_replaced() {
    let (mut heap, one) = (Heap::default(), stack());
    let mapping = |id: u64, address: u64, size: u64| Sample {
        address,
        mapped: true,
        trials: 2 * size,
        ..sample(id, 1, size, &one)
    };
    heap.allocate(mapping(1, 4096, 3 * 4096));
    heap.unmap(process(1), 2 * 4096, 3 * 4096, 5000);
    assert_eq!(inuse(&mut heap), [(1, 8192.0)]);
    assert_eq!(heap.estimated().inuse_bytes, 8192.0);
    // Less than a page replaces all of it.
    heap.allocate(mapping(6, 4096, 100));
    assert_eq!(inuse(&mut heap), [(2, 4196.0)]);
    heap.begin_reconciliation();
    let (found, _) = heap.reconcile(vec![], Afterwards::default(), |_, _| None);
    assert_eq!(found, Found::default(), "the kernel's map of blocks does not know mappings");
    heap.unmap(process(2), 0, u64::MAX, 9000);
    heap.unmap(process(1), 0, u64::MAX, 9000);
    assert_eq!((inuse(&mut heap), heap.estimated().live_samples), (vec![(0, 0.0)], 0));
}

#[test]
fn the_peak_is_what_was_in_use_at_the_highest_total() {
    let (mut heap, one, two) = (Heap::default(), stack(), stack());
    heap.allocate(sample(1, 1, 1000, &one));
    heap.allocate(sample(2, 1, 500, &two));
    heap.free(process(1), 1, 0, false);
    heap.allocate(sample(3, 1, 600, &two));
    heap.free(process(1), 2, 0, false);
    let peaks: Vec<f64> = heap.snapshot(0, false).map(|s| s.peak.bytes).collect();
    assert_eq!(peaks, [1000.0, 500.0]);
}

#[test]
fn a_sample_that_cannot_be_followed_counts_as_allocated_only() {
    let (mut heap, one) = (Heap::default(), stack());
    heap.allocate(Sample { tracked: false, ..sample(1, 1, 10, &one) });
    assert_eq!(inuse(&mut heap), [(0, 0.0)]);
    assert_eq!(first_row(&mut heap).untracked, 1);
}

#[test]
fn rows_differ_by_thread_function_interval_and_stack() {
    let (mut heap, one, two) = (Heap::default(), stack(), stack());
    heap.allocate(sample(1, 1, 10, &one));
    heap.allocate(sample(2, 1, 10, &one));
    heap.allocate(sample(3, 1, 10, &two));
    heap.allocate(Sample { thread: "other".into(), ..sample(4, 1, 10, &one) });
    heap.allocate(Sample { function: 1, ..sample(5, 1, 10, &one) });
    heap.allocate(Sample { interval: 64, ..sample(6, 1, 10, &one) });
    assert_eq!(heap.snapshot(0, false).count(), 5);
}

#[test]
fn rows_of_ended_processes_are_taken_out_but_not_what_lives_elsewhere() {
    let (mut heap, one, two) = (Heap::new(true), stack(), stack());
    heap.allocate(sample(1, 1, 10, &one));
    heap.allocate(sample(2, 2, 20, &one));
    // A vfork child's block in its parent's address space.
    heap.allocate(Sample { space: process(2), ..sample(3, 1, 30, &two) });
    assert_eq!(heap.end(process(1), |_| true), 0);
    assert_eq!(inuse(&mut heap), [(0, 0.0), (1, 20.0), (1, 30.0)]);
    let ended = HashSet::from([process(1)]);
    let (retired, held) = heap.retire(&ended);
    assert_eq!((retired.len(), retired[0].alloc.bytes, held), (1, 10.0, ended.clone()));
    heap.free(process(2), 3, 5, false);
    let (retired, held) = heap.retire(&ended);
    assert_eq!((retired.len(), retired[0].alloc.bytes, held.len()), (1, 30.0, 0));
    // The places of taken rows are used again.
    heap.allocate(sample(4, 3, 40, &two));
    heap.allocate(sample(5, 1, 50, &one));
    let mut left = inuse(&mut heap);
    left.sort_by(|a, b| a.1.total_cmp(&b.1));
    assert_eq!(left, [(1, 20.0), (1, 40.0), (1, 50.0)]);
}

#[test]
fn where_frees_go_unseen_nothing_is_in_use_and_all_is_allocated() {
    let (mut heap, one) = (Heap::default(), stack());
    for id in 1..=4 {
        heap.allocate(sample(id, 1 + (id % 2) as u32, 100, &one));
    }
    // A child of vfork, in its parent's address space.
    heap.allocate(Sample { space: process(1), ..sample(5, 3, 100, &one) });
    assert_eq!((heap.inuse_bytes_of(&process(1)), heap.inuse_bytes_of(&process(2))), (300.0, 200.0));
    let mut addresses = heap.leave(process(1));
    addresses.sort_unstable();
    assert_eq!(addresses, [2, 4, 5].map(|id| id * 4096));
    assert_eq!([1, 2, 3].map(|tgid| heap.has_left(&process(tgid))), [true, false, true]);
    assert_eq!((heap.estimated().inuse_bytes, heap.estimated().live_samples), (200.0, 2));

    heap.allocate(sample(6, 1, 100, &one));
    heap.allocate(sample(7, 2, 100, &one));
    heap.allocate(Sample { space: process(1), ..sample(8, 4, 100, &one) });
    assert_eq!(heap.take_left(), [(process(1), 6 * 4096), (process(1), 8 * 4096)]);
    assert!(heap.take_left().is_empty() && heap.has_left(&process(4)));
    heap.free(process(1), 2, 90_000, false);
    let mut rows: Vec<_> = heap
        .snapshot(0, false)
        .map(|it| (it.row.process.tgid, it.row.alloc.samples, it.inuse.samples, it.peak.samples))
        .collect();
    rows.sort_unstable();
    // The peak is of those whose frees are followed.
    assert_eq!(rows, [(1, 3, 0, 0), (2, 3, 3, 3), (3, 1, 0, 0), (4, 1, 0, 0)]);
    heap.forget_left(&HashSet::from([process(1)]));
    assert!(!heap.has_left(&process(1)) && heap.has_left(&process(3)));
}
