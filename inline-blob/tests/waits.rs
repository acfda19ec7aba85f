//! Threads that have passed as many sites as were granted wait, but no longer than they are allowed to.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs)]

mod common;

use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{Functions, Hooked, Options, SiteKind, events, libc_path, record, turn};
use heapbpf_inline::abi::{Control, STATE, Totals};

/// A word of the control page.
fn word(hooked: &Hooked, offset: usize) -> &AtomicU64 {
    unsafe { AtomicU64::from_ptr((hooked.control() as usize + offset) as *mut u64) }
}

/// The words that the daemon writes: granted, most pauses; and those that threads write: passed, given up, pauses.
fn words(hooked: &Hooked) -> ([&AtomicU64; 2], [&AtomicU64; 3]) {
    use std::mem::offset_of;
    // No thread waits before the daemon knows the process, and all waits together have no limit of their own.
    unsafe {
        let at = hooked.base() + STATE + offset_of!(Totals, may_wait) as u64;
        AtomicU64::from_ptr(at as *mut u64).store(1, Ordering::SeqCst);
    }
    word(hooked, offset_of!(Control, pauses_end)).store(u64::MAX, Ordering::SeqCst);
    (
        [offset_of!(Control, granted), offset_of!(Control, most_pauses)].map(|at| word(hooked, at)),
        [offset_of!(Control, passed), offset_of!(Control, given_up), offset_of!(Control, pauses)]
            .map(|at| word(hooked, at)),
    )
}

/// Makes `calls` calls of malloc, each with its free: two sites each.
fn pairs(functions: Functions, calls: usize) {
    (0..calls).for_each(|_| unsafe { (functions.free)((functions.malloc)(100)) });
}

/// Whether a condition holds in a forked child.
fn in_a_child(is_so: impl FnOnce() -> bool) -> bool {
    let child = unsafe { libc::fork() };
    if child == 0 {
        unsafe { libc::_exit(i32::from(!is_so())) };
    }
    let mut status = 1;
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status == 0
}

fn until(what: &str, done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn threads_wait_until_they_may_go_on() {
    let _turn = turn();
    let hooked = Hooked::new(libc_path(), &Options::default());
    let functions = hooked.functions();
    record(false);
    let ([granted, most_pauses], [passed, given_up, pauses]) = words(&hooked);
    most_pauses.store(u64::MAX, Ordering::SeqCst);
    granted.store(10, Ordering::SeqCst);
    std::thread::scope(|scope| {
        // 200 sites: each call is sampled, and so is each free.
        let threads: [_; 4] = std::array::from_fn(|_| scope.spawn(|| pairs(functions, 25)));
        let sampled = || hooked.counts().reported + hooked.counts().frees_matched;
        // Each of the four is counted before it waits.
        until("all wait", || passed.load(Ordering::SeqCst) == 14);
        assert_eq!(sampled(), 14);
        granted.store(11, Ordering::SeqCst);
        until("one goes on", || passed.load(Ordering::SeqCst) == 15);
        granted.store(0, Ordering::SeqCst);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(sampled(), 200);
    });
    assert!(pauses.load(Ordering::SeqCst) > 0);
    assert_eq!(given_up.load(Ordering::SeqCst), 0);
}

#[test]
fn a_wait_that_is_given_up_is_everybodys_last_until_more_is_granted() {
    let _turn = turn();
    let hooked = Hooked::new(libc_path(), &Options::default());
    let functions = hooked.functions();
    record(false);
    let ([granted, most_pauses], [passed, given_up, pauses]) = words(&hooked);
    let said = || [passed, given_up, pauses].map(|word| word.load(Ordering::SeqCst));
    most_pauses.store(1024, Ordering::SeqCst);
    granted.store(3, Ordering::SeqCst);
    pairs(functions, 10);
    assert_eq!(said(), [20, 3, 1024], "one wait");
    granted.store(21, Ordering::SeqCst);
    pairs(functions, 1);
    assert_eq!(said(), [22, 21, 2048], "and another one, of what is not granted");
    granted.store(22, Ordering::SeqCst);
    pairs(functions, 1);
    assert_eq!(said(), [24, 22, 3072]);
}

/// Arguments and results are the same as without waits, at each kind of site.
#[test]
fn waits_change_nothing_else() {
    let _turn = turn();
    let hooked = Hooked::new(libc_path(), &Options::default());
    let f = hooked.functions();
    let ([granted, most_pauses], [_, given_up, _]) = words(&hooked);
    most_pauses.store(64, Ordering::SeqCst);
    record(true);
    let waits = || {
        let next = given_up.load(Ordering::SeqCst) + 1;
        granted.store(next, Ordering::SeqCst);
    };
    unsafe {
        waits();
        let block = (f.malloc)(100);
        waits();
        let grown = (f.realloc)(block, 1000);
        assert!(!block.is_null() && !grown.is_null());
        waits();
        let mut aligned = null_mut();
        assert_eq!((f.posix_memalign)(&raw mut aligned, 64, 200), 0);
        assert_eq!(aligned as usize % 64, 0);
        waits();
        (f.free)(grown);
        waits();
        (f.free)(aligned);
    }
    assert!(given_up.load(Ordering::SeqCst) >= 4, "they waited");
    let kinds: Vec<SiteKind> = events().iter().map(|event| event.kind()).collect();
    let (result, freeing, reallocating) = (SiteKind::Result, SiteKind::Freeing, SiteKind::Reallocating);
    assert_eq!(kinds, [result, reallocating, result, result, freeing, freeing]);
}

/// All that wait at once stop waiting together: each of them spins, so each one's share is smaller.
#[test]
fn threads_give_up_together() {
    let _turn = turn();
    let hooked = Hooked::new(libc_path(), &Options::default());
    let functions = hooked.functions();
    record(false);
    let ([granted, most_pauses], [passed, given_up, pauses]) = words(&hooked);
    most_pauses.store(u64::MAX, Ordering::SeqCst);
    word(&hooked, std::mem::offset_of!(Control, pauses_end)).store(1 << 16, Ordering::SeqCst);
    granted.store(1, Ordering::SeqCst);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| pairs(functions, 25));
        }
    });
    assert_eq!([passed, given_up].map(|word| word.load(Ordering::SeqCst)), [400, 1]);
    // Each may have been between two checks.
    let made = pauses.load(Ordering::SeqCst);
    assert!((1 << 16..(1 << 16) + 9 * 64).contains(&made), "{made}");
}

/// A forked child has what its parent had left, and does not wait before the daemon knows it.
#[test]
fn a_child_that_is_not_known_waits_for_nobody() {
    let _turn = turn();
    let hooked = Hooked::new(libc_path(), &Options::default());
    let functions = hooked.functions();
    record(false);
    let ([granted, most_pauses], [passed, given_up, _]) = words(&hooked);
    most_pauses.store(u64::MAX, Ordering::SeqCst);
    granted.store(12, Ordering::SeqCst);
    pairs(functions, 3);
    assert!(in_a_child(|| {
        pairs(functions, 10);
        passed.load(Ordering::SeqCst) == 26 && given_up.load(Ordering::SeqCst) == 0
    }));
    assert_eq!([passed, given_up].map(|word| word.load(Ordering::SeqCst)), [6, 0], "the parent's are its own");
}
