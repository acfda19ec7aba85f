//! Signal handlers that allocate, jumps out of an allocator, and more threads than slots.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs)]

mod common;

use std::process::Command;
use std::sync::Barrier;

use common::{Hooked, Options, libc_path, record, turn};
use heapbpf_inline::read::Counts;

/// Maximum rounds until a jump leaves a call.
const MOST_ROUNDS: u64 = 400;

fn toy(options: &Options) -> Hooked {
    let dir = tempfile::tempdir().unwrap();
    let library = dir.path().join("toy.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/toy.c");
    let built =
        Command::new("cc").args(["-O1", "-fno-builtin", "-shared", "-fPIC", "-o"]).arg(&library).arg(source).status();
    assert!(built.unwrap().success());
    Hooked::new(library.to_str().unwrap(), options)
}

fn call(hooked: &Hooked, name: &str, n: i64) -> u64 {
    let function: extern "C" fn(i64) -> u64 = unsafe { hooked.function(name) };
    function(n)
}

/// A signal handler may interrupt any instruction of the blob, and call it.
#[test]
fn signal_handlers_allocate() {
    let _turn = turn();
    record(false);
    for interval in [1, 40, 4096] {
        let hooked = toy(&Options { interval, set_log2: 18, ..Options::default() });
        // realloc's call of malloc belongs to realloc.
        assert_eq!(hooked.plan.refused, []);
        let before = hooked.counts();
        const ROUNDS: u64 = 20;
        const PAIRS: u64 = 10_000;
        let mut handled = 0;
        for _ in 0..ROUNDS {
            handled += call(&hooked, "toy_signals", PAIRS.cast_signed());
            call(&hooked, "toy_reset", 0);
        }
        let counts = hooked.counts();
        println!("interval {interval}: {handled} signals, {counts:?}");
        assert!(handled > 100, "{handled}");
        // The timer in that namespace's C library may allocate, too.
        let calls = counts.calls - before.calls;
        let least = 2 * ROUNDS * PAIRS + handled;
        assert!((least..least + 10 * ROUNDS).contains(&calls), "{calls}, {least}");
        assert_eq!(counts.sampled, counts.reported + counts.failed);
        if interval == 1 {
            assert_eq!(counts.sampled, counts.calls);
        }
        assert_eq!(counts.set_full, 0);
    }
}

/// Calls that are left by a jump are counted; everything else stays as it was.
#[test]
fn jumps_out_of_the_allocator() {
    let _turn = turn();
    record(false);
    let hooked = toy(&Options { interval: 50, set_log2: 18, ..Options::default() });
    let left = |counts: &Counts| counts.sampled - counts.reported - counts.failed;
    let mut counts = hooked.counts();
    // More than one, because the last call of a thread may look like an abandoned one.
    for _ in 0..MOST_ROUNDS {
        call(&hooked, "toy_jumps", 20_000);
        counts = hooked.counts();
        if left(&counts) > 1 {
            break;
        }
    }
    println!("{counts:?}");
    assert!(counts.sampled >= counts.reported + counts.failed);
    call(&hooked, "toy_reset", 0);
    // With this, the last call of each thread is one that has ended.
    call(&hooked, "toy_pairs", 1_000);
    // Counts cannot tell whether the last call of a thread, if it was sampled, is still in progress.
    let mut before = hooked.counts();
    for _ in 0..100 {
        if before.abandoned == left(&before) {
            break;
        }
        call(&hooked, "toy_pairs", 1);
        before = hooked.counts();
    }
    let left = left(&before);
    assert_eq!(before.abandoned, left, "{before:?}");
    assert!(left > 0, "{before:?}");
    call(&hooked, "toy_pairs", 50_000);
    let after = hooked.counts();
    assert_eq!(after.calls - before.calls, 100_000);
    assert_eq!(after.sampled - before.sampled, after.reported - before.reported);
}

/// Threads without their own slot share one, and still count exactly.
#[test]
fn more_threads_than_slots() {
    let _turn = turn();
    record(false);
    let hooked = Hooked::new(libc_path(), &Options { interval: 300, set_log2: 18, ..Options::default() });
    let f = hooked.functions();
    let (threads, pairs) = (1300, 300);
    let together = std::sync::Arc::new(Barrier::new(threads));
    let running: Vec<_> = (0..threads)
        .map(|_| {
            let together = together.clone();
            let body = move || {
                together.wait();
                for i in 0..pairs {
                    unsafe { (f.free)((f.malloc)(i + 1)) };
                }
                // All at the same time, so that no thread inherits another one's slot.
                together.wait();
            };
            std::thread::Builder::new().stack_size(64 << 10).spawn(body).unwrap()
        })
        .collect();
    running.into_iter().for_each(|t| t.join().unwrap());
    let counts = hooked.counts();
    println!("{counts:?}");
    assert!(counts.slots_full > 0);
    let bytes = (1..=pairs as u64).sum::<u64>() * threads as u64;
    assert_eq!((counts.calls, counts.bytes), ((threads * pairs) as u64, bytes));
    assert_eq!(counts.frees_matched, counts.reported);
    // Σ 1 − (1 − 1/300)^n over n from 1 to 300 is 110.8, so 144,040 samples; σ = 300 (threads draw alike from run to
    // run, but share slots in the order in which they come).
    assert!((142_000..146_000).contains(&counts.sampled), "{}", counts.sampled);
}
