//! Tests the counts of the BPF programs, with probes on functions of this test, which decides what each call returns
//! and what becomes of it. Needs root and the BPF object.

#![expect(clippy::unwrap_used, reason = "what fails ends the case")]

mod on_functions;

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use heapbpf_heap::event::{Event, decode};
use heapbpf_kernel::control::CountedBy;
use on_functions::*;
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use sampler_ebpf::abi::{AllocationRecord, fault};
use sampler_ebpf::constants::draw_constants;
use sampler_ebpf::trials::{CRITERION_SIZE_CLASS, SIZE_CLASSES, class_start};

/// The same instructions have links to one process and links for all processes. Only the links of the kind that a
/// target is listed for count its calls.
#[test]
fn a_call_counts_once_where_links_of_both_kinds_are() {
    let Some(mut kernel) = Kernel::start(&EVERY_CALL) else { return };
    let shared = kernel.attach(None);
    let blocks = |from: u64| {
        elsewhere(|| {
            (from..from + 50).for_each(|block| {
                allocate(100, block * 4096, RETURNS);
            });
            (from..from + 50).step_by(2).for_each(|block| release(block * 4096));
        });
    };
    let counted = |kernel: &Kernel| {
        let counters = kernel.counters();
        (counters.calls, counters.submitted, counters.frees_seen, counters.frees_matched)
    };
    blocks(1);
    assert_eq!(counted(&kernel), (50, 50, 25, 25), "by its own");
    kernel.control.add_target(std::process::id(), CountedBy::SharedLinks).unwrap();
    blocks(101);
    assert_eq!(counted(&kernel), (100, 100, 50, 50), "by the shared ones");
    kernel.links = None;
    blocks(201);
    assert_eq!(counted(&kernel), (150, 150, 75, 75), "by the shared ones, without its own");
    drop(shared);
    assert_eq!(kernel.live().len(), 75);
}

#[test]
fn who_ends_before_its_own_links_are_made_was_not_counted() {
    let Some(mut kernel) = Kernel::start(&EVERY_CALL) else { return };
    for (counted_by, uncounted) in
        [(CountedBy::OwnLinks, 0), (CountedBy::AwaitedLinks, 1), (CountedBy::SharedLinks, 2), (CountedBy::OwnLinks, 2)]
    {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut to = child.stdin.take().unwrap();
        to.write_all(b"x").unwrap();
        // The kernel's program that runs at an exec may run after `spawn` has returned: it is over once `cat` answers.
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        kernel.control.add_target(child.id(), counted_by).unwrap();
        drop(to);
        assert!(child.wait().unwrap().success());
        let progress = kernel.totals.progress().unwrap();
        assert_eq!(progress.ended_uncounted, uncounted, "{counted_by:?}");
        assert_eq!(progress.ended_uncounted_ns > 0, uncounted > 0, "{progress:?}");
        assert!(progress.ended_counted_ns > 0, "{progress:?}");
    }
}

/// A thread that was found not to belong to a target is looked at again once there is a new target. The interval is
/// still the one that was set last.
#[test]
fn a_process_that_becomes_a_target_is_counted_at_the_current_interval() {
    const INTERVAL: u64 = 2;
    let Some(mut kernel) = Kernel::start(&EVERY_CALL) else { return };
    kernel.control.set_draw(draw_constants(INTERVAL).unwrap()).unwrap();
    kernel.control.remove_target(std::process::id());
    // Larger than any draw.
    allocate(1 << 28, 4096, RETURNS);
    assert_eq!(kernel.counters().calls, 0);
    kernel.control.add_target(std::process::id(), CountedBy::OwnLinks).unwrap();
    allocate(1 << 28, 2 * 4096, RETURNS);
    assert_eq!(kernel.counters().calls, 1);
    let intervals: Vec<u64> = kernel.records().iter().map(|record| allocation(record).interval).collect();
    assert_eq!(intervals, [INTERVAL]);
}

/// Each size class has its own number of trials: none, or so many that its calls are always sampled.
#[test]
fn every_size_class_has_its_own_trials() {
    let setting = Setting { interval: 1 << 40, live: false, criterion: CRITERION_SIZE_CLASS, ..EVERY_CALL };
    let Some(mut kernel) = Kernel::start(&setting) else { return };
    // Larger requests fail.
    let sizes: Vec<u64> = (0..SIZE_CLASSES).map_while(class_start).filter(|size| *size <= 1 << 47).collect();
    assert!(sizes.len() > 150, "{sizes:?}");
    for remainder in 0..3 {
        let is_sampled = |class: usize| class % 3 == remainder;
        let trials: Vec<u64> = (0..SIZE_CLASSES).map(|class| if is_sampled(class) { u64::MAX } else { 0 }).collect();
        kernel.control.set_trials(&trials.try_into().unwrap()).unwrap();
        for size in &sizes {
            allocate(*size, 4096, RETURNS);
        }
        let sampled: Vec<u64> = kernel.records().iter().map(|record| allocation(record).size_bytes).collect();
        assert_eq!(sampled, sizes.iter().copied().skip(remainder).step_by(3).collect::<Vec<_>>());
    }
}

/// The programs wake the daemon at the first event after it has said that it sleeps, and at no other.
#[test]
fn the_first_event_wakes_a_daemon_that_sleeps() {
    let Some(mut kernel) = Kernel::start(&EVERY_CALL) else { return };
    let Kernel { control, events, .. } = &mut kernel;
    let waiting = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    // A record that is there does not count, only that the kernel wakes who waits.
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(&waiting, &*events, epoll::EventData::new_u64(0), flags).unwrap();
    let wakes_within = |seconds: i64| {
        allocate(100, 4096, RETURNS);
        let mut woken = Vec::<epoll::Event>::with_capacity(1);
        let limit = Timespec { tv_sec: seconds, tv_nsec: 0 };
        epoll::wait(&waiting, spare_capacity(&mut woken), Some(&limit)).unwrap()
    };
    assert_eq!(wakes_within(0), 0, "it has not said that it sleeps");
    control.set_sleeping(true).unwrap();
    assert_eq!(wakes_within(60), 1);
    assert_eq!(wakes_within(0), 0, "once is enough");
    control.set_sleeping(true).unwrap();
    control.set_sleeping(false).unwrap();
    assert_eq!(wakes_within(0), 0, "it is awake");
}

/// Causes one loss of each kind. Losses of threads without state have a separate test.
#[test]
fn every_kind_of_loss_has_its_counter_and_the_identity_holds() {
    let Some(mut kernel) = Kernel::start(&Setting { events_bytes: 4096, ..EVERY_CALL }) else { return };
    for block in 1..=100 {
        allocate(100, block * 4096, RETURNS);
    }
    allocate(100, 0, RETURNS);
    allocate(1 << 50, 0, RETURNS);
    // The call reports success, but address 8 cannot be read.
    allocate_to(8, 100);
    // SAFETY: the thread runs a function that needs no argument, and is joined.
    unsafe {
        let mut thread = std::mem::zeroed();
        let status = libc::pthread_create(&mut thread, std::ptr::null(), end_in_a_call, std::ptr::null_mut());
        assert_eq!(status, 0);
        libc::pthread_join(thread, std::ptr::null_mut());
    }
    HELD.store(1, Ordering::SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| allocate(100, 101 * 4096, WAITS));
        while WAITING.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let meanwhile = kernel.counters();
        HELD.store(0, Ordering::SeqCst);
        assert_eq!((meanwhile.lost_in_flight, meanwhile.lost_undecided), (1, 0), "{meanwhile:?}");
        assert_eq!((meanwhile.hits(), accounted(&meanwhile)), (105, 105), "{meanwhile:?}");
    });
    // A free, and not a hit.
    reallocate(4096, 0, 0);
    kernel.control.set_draw(draw_constants(1 << 40).unwrap()).unwrap();
    // The draw for the first one was made earlier.
    for block in 102..=152 {
        allocate(100, block * 4096, RETURNS);
    }
    let counters = kernel.counters();
    assert_eq!((counters.hits(), accounted(&counters)), (156, 156), "{counters:?}");
    assert_eq!((counters.calls, counters.zero_reallocs, counters.reentrant), (157, 1, 0), "{counters:?}");
    assert_eq!((counters.unsampled, counters.submitted + counters.lost_ring_full), (50, 102), "{counters:?}");
    assert!(counters.lost_ring_full > 50 && counters.submitted > 10, "a page holds some: {counters:?}");
    assert_eq!((counters.failed, counters.lost_result_unreadable, counters.lost_abandoned), (2, 1, 1), "{counters:?}");
    assert_eq!((counters.lost_in_flight, counters.lost_undecided, counters.lost_no_thread_state), (0, 0, 0));
    assert_eq!(samples(&kernel.records()).0.len() as u64, counters.submitted, "each that was submitted arrives");
}

/// Frees and reallocs by a thread without state do not count as lost allocations, and their blocks are not live
/// afterwards.
#[test]
fn a_thread_without_state_loses_its_allocations_and_nothing_else() {
    let Some(mut kernel) = Kernel::start(&Setting { faults: fault::NO_THREAD_STATE, ..EVERY_CALL }) else { return };
    for block in 1..=10 {
        allocate(100, block * 4096, RETURNS);
    }
    elsewhere(|| {
        for block in 1..=4 {
            release(block * 4096);
        }
        release(99 * 4096);
        // The new block is not tracked. The old one is gone.
        reallocate(5 * 4096, 200, 50 * 4096);
        for block in 20..=22 {
            allocate(100, block * 4096, RETURNS);
        }
    });
    release(6 * 4096);
    let counters = kernel.counters();
    assert_eq!((counters.submitted, counters.lost_no_thread_state, counters.hits()), (10, 4, 14), "{counters:?}");
    assert_eq!((counters.frees_no_thread_state, counters.frees_matched), (5, 6), "{counters:?}");
    // A realloc is a free of its old block, but not a call of free.
    assert_eq!((counters.frees_seen, counters.frees_lost), (6, 0), "{counters:?}");
    assert_eq!(kernel.live(), [7, 8, 9, 10].map(|block| block * 4096));
    let (allocated, freed) = samples(&kernel.records());
    assert_eq!(allocated.len(), 10);
    assert_eq!(freed, allocated[..6], "each block's free is reported once");
}

/// While a call takes the slot of an earlier one, the block that the earlier one reallocated must not be reported.
/// Otherwise a block that is known to have been freed would be live again.
#[test]
fn a_block_that_was_reallocated_is_not_told_of_in_the_next_call() {
    const READS: usize = 5_000;
    let Some(mut kernel) = Kernel::start(&EVERY_CALL) else { return };
    let (goes_on, mut freed) = (AtomicU64::new(1), HashMap::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while goes_on.load(Ordering::SeqCst) != 0 {
                allocate(100, 4096, RETURNS);
                reallocate(4096, 200, 2 * 4096);
                // A read may begin and end here.
                (0..10_000).for_each(|step| _ = std::hint::black_box(step));
                allocate(100, 3 * 4096, RETURNS);
                release(2 * 4096);
                release(3 * 4096);
            }
        });
        let mut stale = Vec::new();
        for _ in 0..READS {
            let counts = kernel.totals.read(&kernel.programs).unwrap();
            for record in kernel.records() {
                if let Event::Free(free) = record {
                    freed.insert(free.sample, free.time_ns);
                }
            }
            let is_stale = |sample: &u64| freed.get(sample).is_some_and(|freed_ns| *freed_ns < counts.read_ns.0);
            stale.extend(counts.reallocated.into_iter().filter(is_stale));
            freed.retain(|_, freed_ns| *freed_ns + 1_000_000_000 > counts.read_ns.0);
        }
        goes_on.store(0, Ordering::SeqCst);
        assert!(stale.is_empty(), "{} of {READS} reads told of freed blocks", stale.len());
    });
}

/// The kernel refuses to remove the entry of a freed block. The free is reported once, whatever becomes of the entry.
#[test]
fn a_block_that_cannot_be_removed_is_freed_once() {
    let Some(mut kernel) = Kernel::start(&Setting { faults: fault::REMOVAL_REFUSED, ..EVERY_CALL }) else { return };
    for round in 0..3 {
        // At the same addresses, so that each allocation finds the entry of the previous round.
        for block in 1..=10 {
            allocate(100, block * 4096, RETURNS);
        }
        for block in 1..=10 {
            release(block * 4096);
            release(block * 4096);
        }
        assert!(kernel.live().is_empty(), "round {round}");
    }
    allocate(100, 77 * 4096, RETURNS);
    reallocate(77 * 4096, 100, 78 * 4096);
    // A realloc that fails keeps its block.
    reallocate(78 * 4096, 100, 0);
    assert_eq!(kernel.live(), [78 * 4096]);
    let counters = kernel.counters();
    assert_eq!((counters.submitted, counters.failed, counters.frees_seen), (32, 1, 60), "{counters:?}");
    assert_eq!((counters.frees_matched, counters.stale_replaced), (31, 0), "{counters:?}");
    assert_eq!(counters.removals_refused, 32, "{counters:?}");
    let (allocated, freed) = samples(&kernel.records());
    assert_eq!(freed, allocated[..31]);
}

/// A ring is replaced while records arrive: none is lost, each arrives once, and positions continue.
#[test]
fn a_ring_grows_and_shrinks_without_loss() {
    const CALLS: u64 = 30_000;
    let setting = Setting { live: false, events_bytes: 1 << 20, ..EVERY_CALL };
    let Some(mut kernel) = Kernel::start(&setting) else { return };
    for block in 1..=10 {
        allocate(100, block * 4096, RETURNS);
    }
    let reserved = kernel.events.reserved_up_to();
    assert!(kernel.events.resize(8 << 20).unwrap());
    assert_eq!((kernel.events.size_bytes(), kernel.events.fill_bytes()), (8 << 20, 0));
    assert_eq!(kernel.events.reserved_up_to(), reserved, "what is in the old ring is still to be read");
    assert!(!kernel.events.resize(1 << 20).unwrap(), "not before the old one has been read");
    for block in 11..=20 {
        allocate(100, block * 4096, RETURNS);
    }
    assert_eq!(kernel.events.reserved_up_to(), 2 * reserved);
    let addresses: Vec<u64> = kernel.records().iter().map(address).collect();
    assert_eq!(addresses, (1..=20).map(|block| block * 4096).collect::<Vec<_>>(), "the old ring's records first");
    assert_eq!(kernel.events.read_up_to(), 2 * reserved);

    let (mut arrived, mut sizes) =
        (Vec::new(), (12..=23).map(|bits| 1 << bits).chain((12..=23).rev().map(|bits| 1 << bits)));
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 1..=2 {
            let done = &done;
            scope.spawn(move || {
                for call in 0..CALLS {
                    allocate(100, (thread << 32) + (call << 4), RETURNS);
                }
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        let events = &mut kernel.events;
        loop {
            let ended = done.load(Ordering::SeqCst) == 2;
            while events.drain(|record| arrived.extend(decode(&record).as_ref().map(address))) > 0 {}
            if let Some(bytes) = sizes.next() {
                let _ = events.resize(bytes).unwrap();
            } else if ended {
                break;
            }
        }
    });
    let counters = kernel.counters();
    assert_eq!(counters.submitted + counters.lost_ring_full, 2 * CALLS + 20, "{counters:?}");
    assert_eq!(kernel.events.reserved_up_to(), kernel.events.read_up_to());
    assert_eq!(arrived.len() as u64, counters.submitted - 20, "each that was submitted arrives");
    for thread in 1..=2 {
        let of_thread: Vec<u64> = arrived.iter().copied().filter(|address| address >> 32 == thread).collect();
        assert!(of_thread.is_sorted_by(|a, b| a < b), "once, and in order");
    }
}

/// Address of the block that a record is about.
fn address(record: &Event) -> u64 {
    allocation(record).address
}

fn allocation(record: &Event) -> &AllocationRecord {
    match record {
        Event::Allocation(record) => record,
        other => panic!("{other:?}"),
    }
}

/// While the interval changes all the time, each sample has the interval that its draw was made with. A draw with mean
/// 2 exceeds 64 once in 2^64 samples; a draw with mean 2^20 often does.
#[test]
fn an_interval_and_its_draw_belong_together() {
    const CALLS: u32 = 200_000;
    const FEW: u64 = 2;
    const MANY: u64 = 1 << 20;
    let setting = Setting { interval: FEW, live: false, events_bytes: 16 << 20, ..EVERY_CALL };
    let Some(mut kernel) = Kernel::start(&setting) else { return };
    let (mut few, mut many, mut wrong) = (0, 0, Vec::new());
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let Kernel { control, events, .. } = &mut kernel;
        scope.spawn(|| {
            while done.load(Ordering::SeqCst) == 0 {
                for interval in [MANY, FEW] {
                    control.set_draw(draw_constants(interval).unwrap()).unwrap();
                }
            }
        });
        for call in 1..=CALLS {
            // Larger than any draw: it is always sampled, and its offset is the draw minus one.
            allocate(1 << 28, 4096, RETURNS);
            if call % 10_000 == 0 {
                let mut each = |record: bytes::Bytes| match decode(&record) {
                    Some(Event::Allocation(it)) if it.interval == FEW => {
                        few += 1;
                        wrong.extend((it.offset > 64).then_some((it.interval, it.offset)));
                    }
                    Some(Event::Allocation(it)) => {
                        many += 1;
                        wrong
                            .extend((it.interval != MANY || it.offset > 64 * MANY).then_some((it.interval, it.offset)));
                    }
                    _ => {}
                };
                while events.drain(&mut each) > 0 {}
            }
        }
        done.store(1, Ordering::SeqCst);
    });
    assert_eq!(few + many, CALLS);
    assert!(few > 1000 && many > 1000, "the interval did not change: {few}, {many}");
    assert!(wrong.is_empty(), "{} of {CALLS}: {:?}", wrong.len(), &wrong[..wrong.len().min(10)]);
}
