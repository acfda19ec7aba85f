//! Replays an input of the fuzz target `glibc`, variants of it, and its seeds.

#[path = "../../../fuzz/shared/damage.rs"]
mod damage;
#[path = "../../../fuzz/shared/seeds.rs"]
mod seeds;
#[path = "../../../fuzz/shared/glibc.rs"]
mod shared;

use crate::census_tests::pooled;
use crate::testing::PAGE;

/// The memory of the tests' process, without words that are 0.
fn input(version: u8) -> Vec<u8> {
    let (process, _) = pooled();
    let mut input = vec![version];
    let mut pages: Vec<_> = process.pages.iter().collect();
    pages.sort_unstable();
    for (page, bytes) in pages {
        let (words, _) = bytes.as_chunks::<8>();
        let numbered: Vec<_> = words.iter().zip((page * PAGE..).step_by(8)).collect();
        for run in numbered.chunk_by(|a, b| (*a.0 == [0; 8]) == (*b.0 == [0; 8])).filter(|run| *run[0].0 != [0; 8]) {
            let bytes: Vec<u8> = run.iter().flat_map(|(word, _)| **word).collect();
            shared::memory::piece(&mut input, run[0].1, &bytes);
        }
    }
    input
}

#[test]
fn seeds_of_glibc_are_checked() {
    seeds::replay("glibc", shared::check);
}

mod long {
    use super::*;

    #[test]
    fn inputs_of_the_fuzz_target_are_checked() {
        for version in [31, 36] {
            damage::replay("glibc", &format!("two-arenas-2.{version}"), &input(version), shared::check);
        }
    }
}

/// The input exercises what it was made for.
#[test]
fn the_inputs_heap_is_read() {
    let (_, space) = pooled();
    let mut memory = shared::memory::Pieces::parse(&input(36)[1..]);
    let heap = crate::read(&mut memory, &space, 36).expect("it is sound");
    assert_eq!((heap.arenas, heap.inuse_blocks, heap.mapped.len()), (2, 11, 2));
}
