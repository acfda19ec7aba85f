//! Tests of the recorder: the stack that each sample gets, the handling of other records, and their order.

use std::cell::Cell;
use std::rc::Rc;

use heapbpf_unwind::dwarf::Limits;
use heapbpf_unwind::raw::Completeness;
use sampler_ebpf::abi::{FreeRecord, ProcessRecord, kind, stack_kind};

use super::*;

const PROCESS: ProcessKey = ProcessKey { start_ns: 1, tgid: 7, exec_id: 0 };

/// A recorder, and how often it has read a stack that the kernel walked.
fn recorder() -> (Recorder, Host, Rc<Cell<u32>>) {
    let reads = Rc::new(Cell::new(0));
    let counted = Rc::clone(&reads);
    let walked = move |id: i32| {
        counted.set(counted.get() + 1);
        vec![0x1000, 0x2000 + id as u64]
    };
    let mut recorder = Recorder::new(
        Unwinder::new(Limits::default(), heapbpf_host::arch::address_bits()),
        walked,
        64,
        Heap::new(false),
        Arc::default(),
    );
    recorder.set_functions(&[11, 22]);
    (recorder, Host::snapshot().unwrap(), reads)
}

fn allocation(sample: u64, stack_kind: u32) -> AllocationRecord {
    AllocationRecord {
        kind: kind::ALLOCATION,
        sample,
        time_ns: 10 * sample,
        process: PROCESS,
        space: PROCESS,
        address: 16 * sample,
        size_bytes: 100,
        trials: 100,
        interval: 1,
        caller: 0x4000,
        stack_id: 5,
        stack_kind,
        ..Default::default()
    }
}

/// Takes in all these events. Returns the events of processes.
fn take_in(recorder: &mut Recorder, host: &mut Host, events: &[Event]) -> Vec<Event> {
    let queue = &mut recorder.join.queue;
    queue.read_up_to(|| (1_000_000, 1));
    events.iter().for_each(|event| queue.push(event.to_bytes().into()));
    queue.has_read_up_to(1);
    let mut processes = Vec::new();
    assert!(recorder.work_off(true, u64::MAX, host, &mut processes));
    processes
}

/// Function, stack length and number of samples of each row, sorted.
fn rows(recorder: &mut Recorder) -> Vec<(u16, usize, u64)> {
    let rows = recorder.heap.snapshot(0, false);
    let mut rows: Vec<_> =
        rows.map(|it| (it.row.key.function, it.row.key.stack.frames.len(), it.row.alloc.samples)).collect();
    rows.sort_unstable();
    rows
}

#[test]
fn a_sample_gets_the_stack_that_was_copied_for_it_or_its_caller_alone() {
    let (mut recorder, mut host, _) = recorder();
    let lost = recorder.intern(RawStack::lost());
    recorder.join.arrive(1, Arc::clone(&lost));
    let copied = [1, 2].map(|sample| Event::Allocation(allocation(sample, stack_kind::COPIED)));
    // The samples are so old that the stack of the second counts as lost.
    take_in(&mut recorder, &mut host, &copied);
    assert_eq!((recorder.counters.stacks_missing, recorder.records_taken_in()), (1, 2));
    assert_eq!(recorder.processes, HashMap::from([(PROCESS, 10)]), "with the time of its first sample");
    assert!(recorder.heap.stacks().any(|(_, stack)| Arc::ptr_eq(stack, &lost)));
    let missing = recorder.heap.stacks().find(|(_, stack)| stack.frames.len() == 1).expect("the caller");
    assert_eq!(missing.1.completeness, Completeness::Truncated(Reason::CopyMissing));
}

#[test]
fn a_stack_of_the_kernels_walk_is_read_once_for_each_place() {
    let (mut recorder, mut host, reads) = recorder();
    let record = |sample, stack_id, site| {
        let record = allocation(sample, stack_kind::FRAME_POINTERS);
        Event::Allocation(AllocationRecord { stack_id, site, ..record })
    };
    take_in(&mut recorder, &mut host, &[record(1, 5, 0), record(2, 5, 1), record(3, 6, 1)]);
    assert_eq!(reads.get(), 2);
    // The function comes from the probe site. Nothing is mapped at these addresses, so both stacks consist of the
    // caller only.
    assert_eq!(rows(&mut recorder), [(11, 1, 1), (22, 1, 2)]);
    // Cached stacks of an exited process are dropped.
    recorder.forget_stacks(&HashSet::from([PROCESS]));
    take_in(&mut recorder, &mut host, &[record(4, 5, 0)]);
    assert_eq!(reads.get(), 3);
}

#[test]
fn mappings_are_functions_of_their_own() {
    let (mut recorder, mut host, _) = recorder();
    let sites = [mapping::MMAP, mapping::MREMAP, mapping::BRK, 999];
    let events: Vec<_> = (1..)
        .zip(sites)
        .map(|(sample, site)| {
            Event::Allocation(AllocationRecord { site, ..allocation(sample, stack_kind::FRAME_POINTERS) })
        })
        .collect();
    take_in(&mut recorder, &mut host, &events);
    let mut functions: Vec<u16> = rows(&mut recorder).into_iter().map(|(function, ..)| function).collect();
    let mut expected = vec![MMAP, MREMAP, BRK, u16::MAX];
    functions.sort_unstable();
    expected.sort_unstable();
    assert_eq!(functions, expected, "a site that nobody knows has no name");
}

/// Announced mappings come with the index of a site. They are not sorted by their stacks.
#[test]
fn mappings_count_unless_their_stacks_leave_open_who_made_them() {
    let (mut recorder, mut host, _) = recorder();
    recorder.set_functions(&[11, ANNOUNCED_MMAP]);
    recorder.allocators = Some(AllocatorCode::default());
    let record = |sample: u64, site: u32, stack_kind: u32| {
        Event::Allocation(AllocationRecord { site, address: 4_096 * sample, ..allocation(sample, stack_kind) })
    };
    recorder.join.arrive(1, Arc::new(RawStack::lost()));
    let walked = stack_kind::FRAME_POINTERS;
    let lost = record(1, mapping::MMAP, stack_kind::COPIED);
    let events = [lost, record(2, mapping::MMAP, walked), record(3, 0, walked), record(4, 1, walked)];
    take_in(&mut recorder, &mut host, &events);
    // Code that is in no file is the program's.
    assert_eq!(rows(&mut recorder), [(11, 1, 1), (ANNOUNCED_MMAP, 1, 1), (MMAP, 1, 1)]);
    assert_eq!((recorder.counters.mappings_undecided, recorder.records_taken_in()), (1, 4));
    assert_eq!(recorder.undecided_mappings(&PROCESS), LossBound { samples: 1, sampled_bytes: 100 });
    let pieces = recorder.heap.blocks(&PROCESS, 0).into_iter().filter_map(|block| block.mapping);
    assert_eq!(pieces.collect::<HashSet<_>>(), HashSet::from([2, 4]));
    recorder.forget(&HashSet::from([PROCESS]));
    assert_eq!(recorder.undecided_mappings(&PROCESS), LossBound::default());
}

#[test]
fn what_happens_to_processes_is_handed_over_in_order_and_frees_end_blocks() {
    const CHILD: ProcessKey = ProcessKey { start_ns: 15, tgid: 9, exec_id: 0 };
    let (mut recorder, mut host, _) = recorder();
    let process = |kind, time_ns| ProcessRecord { kind, time_ns, process: PROCESS, next: CHILD, ..Default::default() };
    let free = FreeRecord { kind: kind::FREE, sample: 1, time_ns: 40, space: PROCESS, ..Default::default() };
    let [fork, reset, uncounted, exec, exit] = [
        Event::Fork(process(kind::FORK, 20)),
        Event::Reset(process(kind::RESET, 50)),
        Event::Uncounted(process(kind::UNCOUNTED, 55)),
        Event::Exec(process(kind::EXEC, 60)),
        Event::Exit(ProcessRecord { cpu_us: 9, ..process(kind::EXIT, 70) }),
    ];
    let allocation = Event::Allocation(allocation(1, stack_kind::FRAME_POINTERS));
    let events = [exit, Event::Free(free), allocation, fork, exec, reset, uncounted];
    let processes = take_in(&mut recorder, &mut host, &events);
    assert_eq!(processes, [fork, reset, uncounted, exec, exit]);
    let estimated = recorder.heap.estimated();
    assert_eq!((estimated.samples, estimated.live_samples, recorder.records_taken_in()), (1, 0, 2));
}
