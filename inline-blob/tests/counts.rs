//! Every call counts exactly once, whichever code makes it.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs)]

mod common;

use std::ptr::null_mut;

use common::work::{Truth, threads};
use common::{Hooked, Options, SiteKind, calls_recorded, events, libc_path, record, turn};

fn glibc(options: &Options) -> Hooked {
    let hooked = Hooked::new(libc_path(), options);
    assert_eq!(hooked.plan.refused, []);
    hooked
}

/// At interval 1, at a common interval, and without sampling: eight threads on the machine's CPUs, with the migrations
/// that happen, in many runs.
#[test]
fn eight_threads_count_exactly() {
    let _turn = turn();
    let runs = std::env::var("HEAPBPF_RUNS").ok().and_then(|r| r.parse().ok()).unwrap_or(100);
    for interval in [1, 4096, 0] {
        let hooked = glibc(&Options { interval, seed: 7, set_log2: 18, ..Options::default() });
        record(false);
        let functions = hooked.functions();
        let mut truth = Truth::default();
        for run in 0..runs {
            truth += threads(functions, 8, run, 500);
            let counts = hooked.counts();
            assert_eq!((counts.calls, counts.bytes), (truth.calls, truth.bytes), "run {run}, interval {interval}");
            assert_eq!(counts.sampled, counts.reported + counts.failed);
        }
        let counts = hooked.counts();
        println!("interval {interval}: {counts:?}, sites {:?}", calls_recorded());
        match interval {
            1 => assert_eq!(counts.sampled, truth.calls),
            0 => assert_eq!(counts.sampled, 0),
            _ => assert!(counts.sampled > 0),
        }
        assert_eq!((counts.slots_full, counts.set_full), (0, 0));
        // All blocks were freed, and each free of a sampled one was noticed.
        assert_eq!(counts.frees_matched, counts.reported);
        assert_eq!(calls_recorded()[1] + calls_recorded()[2], counts.frees_matched);
    }
}

/// Each form of each function, one by one.
#[test]
fn each_event_says_what_happened() {
    let _turn = turn();
    let hooked = glibc(&Options::default());
    let f = hooked.functions();
    let (result, freeing, reallocating) = (SiteKind::Result, SiteKind::Freeing, SiteKind::Reallocating);
    let kinds = |events: &[common::Event]| events.iter().map(|e| e.kind()).collect::<Vec<_>>();
    record(true);
    unsafe {
        let block = (f.malloc)(100);
        let found = events();
        assert_eq!(kinds(&found), [result]);
        let event = &found[0];
        assert_eq!((event.rax, event.rdi, event.rsi, event.r9), (block as u64, block as u64, 100, 0));
        // Interval 1: no failed trial before the successful one.
        assert_eq!((event.rcx, event.r8, event.rdx, event.event_flags()), (0, 1, 1, 1));
        assert_eq!(hooked.names[usize::from(event.index())], "malloc");

        let block = (f.realloc)(block, 5000);
        let found = events();
        assert_eq!(kinds(&found), [reallocating, result]);
        assert_eq!((found[0].rdi, found[0].rsi), (found[0].r11, 5000));
        assert_eq!((found[1].rdi, found[1].rsi, found[1].r9), (block as u64, 5000, found[0].r11));

        // Fails: the old block stays.
        let huge = std::hint::black_box(usize::MAX / 4);
        assert!((f.realloc)(block, huge).is_null());
        assert_eq!(kinds(&events()), [], "no allocator has that much");
        assert!((f.realloc)(block, 1 << 46).is_null());
        let found = events();
        assert_eq!(kinds(&found), [reallocating, result]);
        assert_eq!((found[1].event_flags(), found[1].rdi, found[1].r9), (2, 0, block as u64));
        assert!((f.reallocarray)(block, huge, 8).is_null());
        assert_eq!(kinds(&events()), [], "it overflows");

        // reallocarray jumps to realloc: one call.
        let block = (f.reallocarray)(block, 10, 20);
        let found = events();
        assert_eq!(kinds(&found), [reallocating, result]);
        assert_eq!(found[1].rsi, 200);
        assert_eq!(hooked.names[usize::from(found[1].index())], "reallocarray");

        // realloc(p, 0) frees.
        assert!((f.realloc)(block, 0).is_null());
        assert_eq!(kinds(&events()), [freeing]);

        // A mapping is reallocated by malloc: one call.
        let block = (f.malloc)(400_000);
        let block = (f.realloc)(block, 100);
        let found = events();
        assert_eq!(kinds(&found), [result, reallocating, result]);
        (f.free)(block);
        let found = events();
        assert_eq!(kinds(&found), [freeing]);
        assert_eq!((found[0].rdi, found[0].r11), (block as u64, block as u64));

        let mut aligned = null_mut();
        assert_eq!((f.posix_memalign)(&mut aligned, 8, 10), 0);
        let found = events();
        assert_eq!(kinds(&found), [result], "a small alignment is malloc's: one call");
        assert_eq!((found[0].rax, found[0].rdi, found[0].rsi), (0, aligned as u64, 10));
        (f.free)(aligned);
        assert_eq!((f.posix_memalign)(&mut aligned, 3, 10), libc::EINVAL);
        assert_eq!(kinds(&events()), [freeing], "a refused alignment is no allocation");

        let block = (f.calloc)(0, 100);
        let found = events();
        assert_eq!((kinds(&found), found[0].rsi), (vec![result], 0));
        (f.free)(block);
        assert!((f.calloc)(huge, 8).is_null());
        assert!((f.malloc)(1 << 46).is_null());
        (f.free)(null_mut());
        assert_eq!(kinds(&events()), [freeing]);
    }
    let counts = hooked.counts();
    assert_eq!((counts.calls, counts.sampled, counts.reported), (13, 13, 7));
    assert_eq!((counts.failed, counts.unsampled_failed, counts.zero_reallocs), (6, 0, 1));
    assert_eq!(counts.bytes, 100 + 5000 + 200 + 400_000 + 100 + 10);
    assert_eq!(counts.frees_matched, counts.reported);
}

/// Sampling may pause and resume at any moment: each byte counts like any other, the first like the last.
#[test]
fn what_was_drawn_before_a_pause_holds_after_it() {
    let _turn = turn();
    let hooked = glibc(&Options { interval: 10_000, ..Options::default() });
    let f = hooked.functions();
    record(false);
    let (mut bytes, mut sampled_before) = (0, hooked.counts().sampled);
    let mut run = |calls: u64, size: u64| {
        for _ in 0..calls {
            unsafe { (f.free)((f.malloc)(size as usize)) };
        }
        let after = hooked.counts();
        bytes += calls * size;
        assert_eq!(after.bytes, bytes, "whatever is drawn");
        after.sampled - std::mem::replace(&mut sampled_before, after.sampled)
    };
    let mut sampled = 0;
    for round in 0..20_000 {
        hooked.set_interval(0);
        assert_eq!(run(1, 1 + round % 30_000), 0);
        hooked.set_interval(10_000);
        sampled += run(10, 100);
    }
    // As above: 1,990 ± 5 · 44.
    assert!((1770..2210).contains(&sampled), "{sampled}");
}

/// One trial per allocation.
#[test]
fn allocations_can_be_the_trials() {
    let _turn = turn();
    let hooked = glibc(&Options { interval: 100, criterion: 1, ..Options::default() });
    let f = hooked.functions();
    record(false);
    for size in 0..100_000 {
        unsafe { (f.free)((f.malloc)(size % 5000)) };
    }
    let counts = hooked.counts();
    // 1,000 ± 5 · 31.5; the seed is fixed.
    assert!((840..1160).contains(&counts.sampled), "{}", counts.sampled);
    assert_eq!((counts.calls, counts.bytes), (100_000, (0..100_000u64).map(|s| s % 5000).sum()));
}
