//! A workload with known results.

use std::ffi::c_void;
use std::ptr::null_mut;

use super::Functions;

/// What a thread did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Truth {
    pub calls: u64,
    pub bytes: u64,
}

impl std::ops::AddAssign for Truth {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.bytes += other.bytes;
    }
}

/// Allocates in all ways, and frees all of it.
pub fn work(f: &Functions, seed: u64, steps: usize) -> Truth {
    let mut state = seed | 1;
    let mut blocks: Vec<*mut c_void> = Vec::new();
    let mut truth = Truth::default();
    for _ in 0..steps {
        let random = sampler_ebpf::rng::next(&mut state);
        let size = (random >> 8) as usize % 2000;
        let count = |truth: &mut Truth, bytes: usize| {
            truth.calls += 1;
            truth.bytes += bytes as u64;
        };
        unsafe {
            match random % 8 {
                0 => blocks.push((f.malloc)(size)),
                1 => blocks.push((f.calloc)(size, 3)),
                2 => blocks.push((f.realloc)(null_mut(), size + 1)),
                3 => {
                    let mut block = null_mut();
                    assert_eq!((f.posix_memalign)(&mut block, 64, size), 0);
                    blocks.push(block);
                }
                4 | 5 if !blocks.is_empty() => {
                    let at = (random >> 32) as usize % blocks.len();
                    // Large blocks are mappings, which glibc reallocates with malloc.
                    let size = if random.is_multiple_of(7) { 300_000 } else { size + 1 };
                    blocks[at] = (f.realloc)(blocks[at], size);
                    count(&mut truth, size);
                    continue;
                }
                _ => {
                    if let Some(block) = blocks.pop() {
                        (f.free)(block);
                    }
                    (f.free)(null_mut());
                    continue;
                }
            }
        }
        count(
            &mut truth,
            match random % 8 {
                1 => size * 3,
                2 => size + 1,
                _ => size,
            },
        );
    }
    for block in blocks {
        unsafe { (f.free)(block) };
    }
    truth
}

pub fn threads(f: Functions, threads: u64, seed: u64, steps: usize) -> Truth {
    let running: Vec<_> =
        (0..threads).map(|i| std::thread::spawn(move || work(&f, sampler_ebpf::rng::seed(seed, i), steps))).collect();
    let mut truth = Truth::default();
    running.into_iter().for_each(|t| truth += t.join().unwrap());
    truth
}
