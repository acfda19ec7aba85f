//! A Rust program with its own global allocator, which does not use malloc and never reuses a block of its store.
//! The protocol is that of truth.h. One site allocates ROUNDS blocks of 100 bytes; every fourth stays allocated.
use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};

const BYTES: usize = 64 << 20;
struct Store(UnsafeCell<[u8; BYTES]>);
unsafe impl Sync for Store {}
static STORE: Store = Store(UnsafeCell::new([0; BYTES]));
static USED: AtomicUsize = AtomicUsize::new(0);
struct OfStore;
unsafe impl GlobalAlloc for OfStore {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let room = layout.size() + layout.align();
        let at = USED.fetch_add(room, Ordering::Relaxed);
        let start = STORE.0.get() as usize + at;
        if at + room > BYTES { std::ptr::null_mut() } else { start.next_multiple_of(layout.align()) as *mut u8 }
    }
    unsafe fn dealloc(&self, block: *mut u8, _: Layout) {
        std::hint::black_box(block);
    }
}
#[global_allocator]
static GLOBAL: OfStore = OfStore;

#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn site_00(fill: u8) -> *mut [u8; 100] {
    std::hint::black_box(Box::into_raw(Box::new([fill; 100])))
}

fn wait() {
    let mut byte = [0];
    while std::io::stdin().read(&mut byte).is_ok_and(|n| n > 0) && byte[0] != b'\n' {}
}

fn main() {
    let rounds: u64 = std::env::args().nth(1).and_then(|word| word.parse().ok()).unwrap_or(100);
    let pid = std::process::id();
    println!("READY {pid}");
    wait();
    for round in 0..rounds {
        let block = site_00(round as u8);
        if round % 4 != 0 {
            drop(unsafe { Box::from_raw(block) });
        }
    }
    let live = rounds.div_ceil(4);
    println!(
        "{{\"failed\":0,\"abandoned\":0,\"sites\":[{{\"pid\":{pid},\"site\":\"site_00\",\"allocs\":{rounds},\"bytes\":{},\
         \"live_allocs\":{live},\"live_bytes\":{},\"sizes\":[[100,{rounds},{live}]]}}]}}",
        rounds * 100,
        live * 100
    );
    std::io::stdout().flush().unwrap();
    wait();
}
