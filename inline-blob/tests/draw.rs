//! The blob draws the same numbers as the BPF programs.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs)]

mod common;

use common::{Functions, Hooked, Options, events, libc_path, record, turn};
use heapbpf_inline::abi::CODE;
use sampler_ebpf::constants::draw_constants;
use sampler_ebpf::geometric::{DrawConstants, draw};
use sampler_ebpf::{countdown, rng};

type Draw = unsafe extern "C" fn(u64, *const DrawConstants) -> u64;

/// The blob's own function, at its mapped address.
fn draw_of(hooked: &Hooked) -> impl Fn(u64, &DrawConstants) -> u64 {
    let entry = heapbpf_inline_blob::code().unwrap().entries.draw;
    let address = hooked.base() + CODE + u64::from(entry);
    // SAFETY: the entry is documented as this function.
    let draw: Draw = unsafe { std::mem::transmute(address) };
    move |random, constants| unsafe { draw(random, constants) }
}

#[test]
fn the_same_numbers_as_the_bpf_side() {
    let _turn = turn();
    let hooked = Hooked::new(libc_path(), &Options::default());
    let draw_here = draw_of(&hooked);
    let mut state = rng::seed(3, 0);
    let edges = [0, 1, 2, u64::MAX, u64::MAX - 1, 1 << 63, (1 << 63) - 1, (1 << 63) - 2];
    for interval in [0, 1, 2, 3, 10, 4096, 524_288, 1 << 26, 1 << 40] {
        let constants = draw_constants(interval).unwrap();
        let random = (0..100_000).map(|i| rng::next(&mut state) >> (i & 63));
        for random in edges.into_iter().chain(random) {
            assert_eq!(draw_here(random, &constants), draw(random, &constants), "{random}, {interval}");
        }
    }
}

/// A sampled call: its number in the thread, its size, the offset, and the interval.
type Sample = (u64, u64, u64, u64);

/// Allocates and frees blocks of these sizes. Returns the samples.
fn samples(f: &Functions, sizes: &[u64]) -> Vec<Sample> {
    record(true);
    for size in sizes {
        unsafe { (f.free)((f.malloc)(*size as usize)) };
    }
    events().iter().filter(|e| e.site == 0).map(|e| (e.rdx, e.rsi, e.rcx, e.r8)).collect()
}

/// The samples that the shared mathematics predicts for the first thread.
fn predicted(seed: u64, interval: u64, sizes: &[u64]) -> Vec<Sample> {
    let mut expected = Vec::new();
    let constants = draw_constants(interval).unwrap();
    let mut state = rng::seed(seed, 0);
    let mut remaining = draw(rng::next(&mut state), &constants);
    for (call, size) in (1..).zip(sizes) {
        if let Some(offset) = countdown::step(&mut remaining, (*size).max(1)) {
            expected.push((call, *size, offset, interval));
            remaining = draw(rng::next(&mut state), &constants);
        }
    }
    expected
}

/// One thread's samples, with their offsets, are those that the shared mathematics predicts.
#[test]
fn the_same_samples_as_the_bpf_side() {
    let _turn = turn();
    let (seed, interval) = (11, 1000);
    let hooked = Hooked::new(libc_path(), &Options { seed, interval, ..Options::default() });
    let sizes: Vec<u64> = (0..20_000u64).map(|i| i * 7919 % 300).collect();
    let found = samples(&hooked.functions(), &sizes);
    assert_eq!(found, predicted(seed, interval, &sizes));
    assert!(found.len() > 2500);
}

/// A child's slots are as empty as its parent's were. With the parent's seed it would draw the parent's numbers again.
#[test]
fn forked_children_draw_other_numbers_than_their_parent_and_each_other() {
    /// Set in the exit status of a child that draws by a seed of its own.
    const HAS_ITS_OWN: i32 = 0x80;
    let _turn = turn();
    let (seed, interval) = (11, 1000);
    let hooked = Hooked::new(libc_path(), &Options { seed, interval, ..Options::default() });
    let f = hooked.functions();
    let sizes: Vec<u64> = (0..2_000u64).map(|i| i * 7919 % 300).collect();
    let mut statuses = Vec::new();
    for has_drawn in [false, true, true, true] {
        // The parent draws in between: without random numbers of the machine, children differ by that alone.
        assert!(!has_drawn || !samples(&f, &sizes).is_empty());
        let child = unsafe { libc::fork() };
        if child == 0 {
            let found = samples(&f, &sizes);
            let own = unsafe { (&raw const (*hooked.control()).seed).read_volatile() };
            let is_right = own != seed && found == predicted(own, interval, &sizes);
            let status = if is_right { HAS_ITS_OWN | (own & 0x7f) as i32 } else { 0 };
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        statuses.push(libc::WEXITSTATUS(status));
    }
    assert!(statuses.iter().all(|status| status & HAS_ITS_OWN != 0), "{statuses:x?}");
    // By chance the low bits of all four are equal once in two million times.
    assert!(statuses.iter().any(|status| *status != statuses[0]), "{statuses:x?}");
    assert_eq!(unsafe { (*hooked.control()).seed }, seed, "the parent keeps its own");
}
