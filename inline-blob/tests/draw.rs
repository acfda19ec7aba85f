//! The blob draws the same numbers as the BPF programs.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs)]

mod common;

use common::{Hooked, Options, events, libc_path, record, turn};
use heapbpf_inline::abi::CODE;
use sampler_ebpf::constants::draw_constants;
use sampler_ebpf::geometric::{DrawConstants, draw};
use sampler_ebpf::{rng, sampler};

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

/// One thread's samples, with their offsets, are those that the shared mathematics predicts.
#[test]
fn the_same_samples_as_the_bpf_side() {
    let _turn = turn();
    let (seed, interval) = (11, 1000);
    let hooked = Hooked::new(libc_path(), &Options { seed, interval, ..Options::default() });
    let f = hooked.functions();
    record(true);
    let sizes: Vec<u64> = (0..20_000u64).map(|i| i * 7919 % 300).collect();
    for size in &sizes {
        unsafe { (f.free)((f.malloc)(*size as usize)) };
    }
    let found = events();
    let mut expected = Vec::new();
    let constants = draw_constants(interval).unwrap();
    let mut state = rng::seed(seed, 0);
    let mut remaining = draw(rng::next(&mut state), &constants);
    for (call, size) in (1..).zip(&sizes) {
        if let Some(offset) = sampler::step(&mut remaining, (*size).max(1)) {
            expected.push((call, *size, offset, interval));
            remaining = draw(rng::next(&mut state), &constants);
        }
    }
    let found: Vec<_> = found.iter().filter(|e| e.site == 0).map(|e| (e.rdx, e.rsi, e.rcx, e.r8)).collect();
    assert_eq!(found, expected);
    assert!(found.len() > 2500);
}
