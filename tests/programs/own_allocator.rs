//! A Rust program with its own global allocator, which does not use malloc and never reuses a block of its store.
//! The protocol is that of truth.h. One site allocates ROUNDS blocks of 100 bytes; every fourth stays allocated.
use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicUsize, Ordering};

mod rounds;

const BYTES: usize = 64 << 20;
struct Store(UnsafeCell<[u8; BYTES]>);
unsafe impl Sync for Store {}
static STORE: Store = Store(UnsafeCell::new([0; BYTES]));
static USED: AtomicUsize = AtomicUsize::new(0);
struct OfStore;
unsafe impl GlobalAlloc for OfStore {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let needed = layout.size() + layout.align();
        let at = USED.fetch_add(needed, Ordering::Relaxed);
        let start = STORE.0.get() as usize + at;
        if at + needed > BYTES { std::ptr::null_mut() } else { start.next_multiple_of(layout.align()) as *mut u8 }
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

fn main() {
    rounds::run(site_00, |block| drop(unsafe { Box::from_raw(block) }));
}
