//! Tests of the live heap.

use heapbpf_profile::model::ByAddress;
use heapbpf_statistics::survival::Observation;
use heapbpf_unwind::raw::{Completeness, UnwinderKind};

use super::*;

pub(super) fn stack() -> Arc<RawStack> {
    Arc::new(RawStack { frames: Box::new([]), unwinder: UnwinderKind::Caller, completeness: Completeness::Complete })
}

pub(super) fn process(tgid: u32) -> ProcessKey {
    ProcessKey { start_ns: 1, tgid, exec_id: 0 }
}

pub(super) fn sample(id: u64, tgid: u32, size_bytes: u64, stack: &Arc<RawStack>) -> Sample {
    Sample {
        id,
        key: SampleKey {
            process: process(tgid),
            thread: "main".into(),
            function: 0,
            interval: 1,
            stack: ByAddress(Arc::clone(stack)),
        },
        space: process(tgid),
        time_ns: id * 1000,
        address: id * 4096,
        size_bytes,
        trials: size_bytes.max(1),
        offset: 0,
        tracked: true,
        mapped: false,
    }
}

fn with_key(mut sample: Sample, change: impl FnOnce(&mut SampleKey)) -> Sample {
    change(&mut sample.key);
    sample
}

fn inuse(heap: &mut Heap) -> Vec<(u64, f64)> {
    heap.snapshot(0, false).map(|s| (s.inuse.samples, s.inuse.bytes)).collect()
}

#[test]
fn rows_differ_by_thread_function_interval_and_stack() {
    let (mut heap, one, two) = (Heap::default(), stack(), stack());
    heap.allocate(sample(1, 1, 10, &one));
    heap.allocate(sample(2, 1, 10, &one));
    heap.allocate(sample(3, 1, 10, &two));
    heap.allocate(with_key(sample(4, 1, 10, &one), |key| key.thread = "other".into()));
    heap.allocate(with_key(sample(5, 1, 10, &one), |key| key.function = 1));
    heap.allocate(with_key(sample(6, 1, 10, &one), |key| key.interval = 64));
    assert_eq!(heap.snapshot(0, false).count(), 5);
}

#[test]
fn rows_of_ended_processes_are_removed_unless_blocks_live_in_another_space() {
    let (mut heap, one, two) = (Heap::new(true), stack(), stack());
    heap.allocate(sample(1, 1, 10, &one));
    heap.allocate(sample(2, 2, 20, &one));
    // A vfork child's block in its parent's address space.
    heap.allocate(Sample { space: process(2), ..sample(3, 1, 30, &two) });
    assert_eq!(heap.end(process(1), 9_000, |_| true), 0);
    assert_eq!(inuse(&mut heap), [(0, 0.0), (1, 20.0), (1, 30.0)]);
    let ended = HashSet::from([process(1)]);
    let (retired, held) = heap.retire(&ended);
    assert_eq!((retired.len(), retired[0].alloc.bytes, held), (1, 10.0, ended.clone()));
    heap.free(process(2), 3, 5, false);
    let (retired, held) = heap.retire(&ended);
    assert_eq!((retired.len(), retired[0].alloc.bytes, held.len()), (1, 30.0, 0));
    // Numbers of removed rows are reused.
    heap.allocate(sample(4, 3, 40, &two));
    heap.allocate(sample(5, 1, 50, &one));
    let mut remaining = inuse(&mut heap);
    remaining.sort_by(|a, b| a.1.total_cmp(&b.1));
    assert_eq!(remaining, [(1, 20.0), (1, 40.0), (1, 50.0)]);
}

/// The figures of a service only have the processes that it still knows, so their peak is that of these processes.
#[test]
fn a_retired_process_takes_its_peak_along() {
    let one = stack();
    let peak_bytes = |retires_last: bool| -> f64 {
        let mut heap = Heap::new(true);
        heap.allocate(sample(1, 1, 1000, &one));
        heap.allocate(sample(2, 2, 10, &one));
        heap.end(process(1), 9_000, |_| true);
        let retire = |heap: &mut Heap| drop(heap.retire(&HashSet::from([process(1)])));
        if !retires_last {
            retire(&mut heap);
        }
        heap.allocate(sample(3, 2, 500, &one));
        heap.free(process(2), 2, 9_000, false);
        if retires_last {
            retire(&mut heap);
        }
        heap.snapshot(10_000, false).map(|it| it.peak.bytes).sum()
    };
    assert_eq!([false, true].map(peak_bytes), [510.0, 500.0]);
}

#[test]
fn ages_are_those_of_live_blocks_at_the_moment_and_of_freed_ones_at_their_free() {
    let (mut heap, one) = (Heap::default(), stack());
    // Allocated at 1,000 and 2,000 ns.
    heap.allocate(sample(1, 1, 8, &one));
    heap.allocate(sample(2, 1, 8, &one));
    heap.free(process(1), 1, 1000 + 7, true);
    let rows: Vec<_> = heap.snapshot(5000, true).filter_map(|it| it.ages).collect();
    let [ages] = &rows[..] else { panic!("{} rows", rows.len()) };
    let is = |it: Observation, age_seconds: f64, freed| {
        (it.age_seconds / age_seconds - 1.0).abs() <= 1.0 / 15.0 && it.weight == 1.0 && it.freed == freed
    };
    let observations: Vec<_> = ages.observations().collect();
    assert!(matches!(observations[..], [a, b] if is(a, 7.5e-9, true) && is(b, 3000e-9, false)), "{observations:?}");
    assert_eq!((ages.freed(), ages.temporary()), (1.0, 1.0));
    assert!(heap.snapshot(5000, false).all(|it| it.ages.is_none()));
    // A block in use when its process ends was not freed. It stays, with the age that it reached.
    heap.end(process(1), 6000, |_| true);
    let ended: Vec<_> = heap.snapshot(9000, true).filter_map(|it| it.ages).collect();
    let observations: Vec<_> = ended[0].observations().collect();
    assert!(matches!(observations[..], [a, b] if is(a, 7.5e-9, true) && is(b, 4000e-9, false)), "{observations:?}");
}
