//! An object allocator on top of malloc: each call counts once, at the outermost level.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs)]

mod common;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use common::{Functions, Hooked, Options, SiteKind, calls_recorded, events, libc_path, record, turn};
use heapbpf_inline::ObjectFunction;
use sampler_ebpf::abi::{NO_ARGUMENT, SITE_FREES, Site};

type Pointer = *mut c_void;

/// The library's functions, which the object allocator calls.
static LIBRARY: std::sync::Mutex<Option<Functions>> = std::sync::Mutex::new(None);
/// The words through which the functions are called, in the order malloc, calloc, realloc, free.
static WORDS: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];
/// Small blocks.
static ARENA: [AtomicU64; 1 << 18] = [const { AtomicU64::new(0) }; 1 << 18];
static NEXT: AtomicUsize = AtomicUsize::new(0);
const SMALL: usize = 512;

fn library() -> Functions {
    LIBRARY.lock().unwrap().unwrap()
}

fn is_small(block: Pointer) -> bool {
    ARENA.as_ptr_range().contains(&block.cast_const().cast())
}

extern "C" fn object_malloc(_: Pointer, size: usize) -> Pointer {
    if size > SMALL {
        return unsafe { (library().malloc)(size) };
    }
    // Like an arena: now and then it allocates memory for its own use.
    let at = NEXT.fetch_add(size.div_ceil(8) + 1, Ordering::Relaxed);
    if at.is_multiple_of(64) {
        unsafe { (library().free)((library().calloc)(7, 11)) };
    }
    ARENA[at..at + size.div_ceil(8) + 1].as_ptr().cast::<c_void>().cast_mut()
}

extern "C" fn object_calloc(_: Pointer, count: usize, size: usize) -> Pointer {
    object_malloc(null_mut(), count * size)
}

extern "C" fn object_realloc(_: Pointer, block: Pointer, size: usize) -> Pointer {
    if block.is_null() || is_small(block) {
        return object_malloc(null_mut(), size);
    }
    unsafe { (library().realloc)(block, size) }
}

extern "C" fn object_free(_: Pointer, block: Pointer) {
    if !is_small(block) {
        unsafe { (library().free)(block) };
    }
}

fn objects() -> Vec<ObjectFunction> {
    let functions = [
        ("object malloc", object_malloc as *const () as u64, [1, NO_ARGUMENT, NO_ARGUMENT]),
        ("object calloc", object_calloc as *const () as u64, [2, 1, NO_ARGUMENT]),
        ("object realloc", object_realloc as *const () as u64, [2, NO_ARGUMENT, 1]),
        ("object free", object_free as *const () as u64, [NO_ARGUMENT, NO_ARGUMENT, 1]),
    ];
    let described = functions.into_iter().zip(&WORDS).enumerate().map(|(at, ((name, address, arguments), word))| {
        word.store(address, Ordering::SeqCst);
        let [size_argument, times_argument, old_argument] = arguments;
        let flags = if at == 3 { SITE_FREES } else { 0 };
        let out_argument = NO_ARGUMENT;
        let function = 1000 + at as u16;
        let site =
            Site { function, size_argument, times_argument, old_argument, out_argument, flags, ..Site::default() };
        ObjectFunction { name: name.to_owned(), address, word: word.as_ptr() as u64, site }
    });
    described.collect()
}

fn function<F: Copy>(at: usize) -> F {
    let address = WORDS[at].load(Ordering::SeqCst);
    assert_eq!(size_of::<F>(), size_of::<u64>());
    unsafe { std::mem::transmute_copy(&address) }
}

fn malloc(size: usize) -> Pointer {
    function::<extern "C" fn(Pointer, usize) -> Pointer>(0)(null_mut(), size)
}

fn calloc(count: usize, size: usize) -> Pointer {
    function::<extern "C" fn(Pointer, usize, usize) -> Pointer>(1)(null_mut(), count, size)
}

fn realloc(block: Pointer, size: usize) -> Pointer {
    function::<extern "C" fn(Pointer, Pointer, usize) -> Pointer>(2)(null_mut(), block, size)
}

fn free(block: Pointer) {
    function::<extern "C" fn(Pointer, Pointer)>(3)(null_mut(), block);
}

/// Calls and bytes of one round of work.
fn round(library: Functions, n: usize) -> [u64; 2] {
    let sizes = [1 + n % 300, 600 + n, 200 + n % 100, 700];
    let blocks = [malloc(sizes[0]), malloc(sizes[1]), calloc(2, sizes[2] / 2), realloc(null_mut(), sizes[3])];
    let moved = realloc(blocks[1], 5000 + n);
    let grown = realloc(blocks[0], 900);
    let own = unsafe { (library.malloc)(333) };
    let zero = malloc(0);
    for block in [blocks[2], blocks[3], moved, grown, zero] {
        free(block);
    }
    free(blocks[0]);
    unsafe { (library.free)(own) };
    let bytes = sizes[0] + sizes[1] + sizes[2] / 2 * 2 + sizes[3] + 5000 + n + 900 + 333;
    [8, bytes as u64]
}

#[test]
fn each_call_counts_once_at_every_interval() {
    let _turn = turn();
    for interval in [1, 512, 0] {
        NEXT.store(0, Ordering::SeqCst);
        let hooked = Hooked::new(libc_path(), &Options { interval, objects: objects(), ..Options::default() });
        let functions = hooked.functions();
        *LIBRARY.lock().unwrap() = Some(functions);
        record(false);
        let threads: Vec<_> = (0..4)
            .map(|_| {
                std::thread::spawn(move || {
                    (0..100).map(|n| round(functions, n)).fold([0, 0], |[c, b], [calls, bytes]| [c + calls, b + bytes])
                })
            })
            .collect();
        let truth = threads.into_iter().map(|it| it.join().unwrap()).fold([0, 0], |[c, b], [x, y]| [c + x, b + y]);
        let counts = hooked.counts();
        assert_eq!([counts.calls, counts.bytes], truth, "interval {interval}: {counts:?}");
        assert_eq!(counts.sampled, counts.reported + counts.failed);
        if interval == 1 {
            // Blocks of the first malloc were reallocated, so their frees after that match nothing.
            assert_eq!((counts.sampled, counts.frees_matched), (truth[0], counts.reported), "{counts:?}");
            assert_eq!(calls_recorded()[1] + calls_recorded()[2], counts.frees_matched);
        }
    }
}

#[test]
fn an_object_is_told_of_once_and_malloc_s_blocks_are_known_above_it() {
    let _turn = turn();
    NEXT.store(0, Ordering::SeqCst);
    let hooked = Hooked::new(libc_path(), &Options { objects: objects(), ..Options::default() });
    let functions = hooked.functions();
    *LIBRARY.lock().unwrap() = Some(functions);
    let numbers = |events: &[common::Event]| events.iter().map(|e| (e.kind(), e.function())).collect::<Vec<_>>();
    record(true);
    let large = malloc(1000);
    let found = events();
    assert_eq!(numbers(&found), [(SiteKind::Result, 1000)]);
    assert_eq!((found[0].rdi, found[0].rsi), (large as u64, 1000));
    free(large);
    assert_eq!(numbers(&events()), [(SiteKind::Freeing, 1003)]);
    // The object allocator frees and reallocates blocks of malloc.
    let own = unsafe { (functions.malloc)(700) };
    let of_malloc = events()[0].function();
    let own = realloc(own, 800);
    assert_eq!(numbers(&events()), [(SiteKind::Reallocating, 1002), (SiteKind::Result, 1002)]);
    free(own);
    assert_eq!(numbers(&events()), [(SiteKind::Freeing, 1003)]);
    // And the reverse.
    let block = malloc(900);
    unsafe { (functions.free)(block) };
    let found = events();
    assert_eq!((found.len(), found[1].kind()), (2, SiteKind::Freeing));
    assert!(of_malloc < 1000 && found[1].function() < 1000);
    // After that, malloc counts again.
    drop(events());
    unsafe { (functions.free)((functions.malloc)(5)) };
    assert_eq!(events().len(), 2);
    assert_eq!(hooked.counts().calls, 5);
}
