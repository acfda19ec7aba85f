//! Heaps that are sound, partly absent, or hold false data.

use crate::testing::{DATA, FIRST, HEAP, KEY, LARGE, MAIN, OTHER, PAGE, Process, SECOND, SIZE_OF_HEAPS, process};
use crate::{Heap, Memory, NotRead, Space, read};

fn found(process: &mut Process, space: &Space) -> Heap {
    read(process, space, 36).expect("a heap")
}

#[test]
fn what_is_in_use_and_what_is_free_is_found_in_all_arenas() {
    let (mut process, space) = process();
    let heap = found(&mut process, &space);
    assert!(heap.is_exact(), "{heap:?}");
    let main = 0x290 + 0x20 + 0x40 + 0x500 + 0x60 + 0x810;
    let others = 0x100 + 0x40 + 0x200;
    assert_eq!((heap.arenas, heap.inuse_blocks), (2, 6 + 3 + 2));
    assert_eq!(heap.inuse_bytes, main + others + 0x5000);
    // Two in a cache, one in a fast bin.
    assert_eq!(heap.cached_bytes, 0x30 + 0x30 + 0x20);
    assert_eq!(heap.mapped, [LARGE..LARGE + 0x2000, LARGE + 0x5000..LARGE + 0x8000]);
    // Only the header pages of the large blocks are present.
    assert_eq!(heap.absent_bytes, 0x5000 - 2 * PAGE);
    let (all, rests) = (space.heap.expect("a heap").end - HEAP, SIZE_OF_HEAPS + 0x1000);
    let headers = 0x30 + 0x8a0 + 0x30 + 0x20;
    assert_eq!(heap.free_bytes, all - main + rests - headers - others, "{heap:?}");
    let resident = process.pages.keys().filter(|page| !(DATA..DATA + 0x4000).contains(&(*page * PAGE))).count() as u64;
    // One page between the large blocks does not belong to the heap.
    assert_eq!(heap.resident_bytes, (resident - 1) * PAGE);
    assert!(heap.free_resident_bytes < heap.resident_bytes && heap.trimmable_bytes <= heap.free_resident_bytes);
}

#[test]
fn versions_without_a_key_have_bounds_and_unknown_ones_are_not_read() {
    let (mut process, space) = process();
    // The parameters are elsewhere, and links are not mangled.
    let old = read(&mut process, &space, 31).expect("a heap");
    assert!(!old.is_exact() && !old.mapped_is_known && old.doubtful_bytes > 0x60, "{old:?}");
    for version in [26, 42] {
        assert_eq!(read(&mut process, &space, version), Err(NotRead::Version));
    }
    assert_eq!(read(&mut process, &Space::default(), 36), Err(NotRead::NoArena));
}

#[test]
fn what_is_not_in_memory_is_not_read_and_bounded() {
    let (mut process, space) = process();
    let whole = found(&mut process, &space);
    process.pages.remove(&(SECOND / PAGE));
    let heap = found(&mut process, &space);
    assert_eq!((heap.absent_unread_bytes, heap.inconsistent_bytes), (SIZE_OF_HEAPS + 0x1000, 0));
    assert_eq!(heap.inuse_bytes, whole.inuse_bytes - 0x340, "the main arena stays");
    process.pages.remove(&(LARGE / PAGE));
    let heap = found(&mut process, &space);
    // glibc's own counters show what is in use.
    assert!(!heap.mapped_is_known && heap.inuse_bytes == whole.inuse_bytes - 0x340, "{heap:?}");
}

#[test]
fn structures_that_lie_cost_the_rest_of_their_arena_alone() {
    for (at, word) in [
        (HEAP + 0x290 + 8, 0),
        (HEAP + 0x290 + 8, 0x28 | 1),
        (HEAP + 0x290 + 8, u64::MAX),
        (HEAP + 0x290 + 8, 0x20 | 3),
        (HEAP + 0x290 + 8, 0x20 | 5),
        // The size of a free block, stored after it.
        (HEAP + 0x290 + 0x20 + 0x60 + 0x40 + 0x500 + 0x3000, 0x3010),
        (MAIN + 96, HEAP + 0x20),
    ] {
        let (mut process, space) = process();
        process.put(at, word);
        let heap = found(&mut process, &space);
        assert!(heap.inconsistent_bytes > 0 && !heap.is_exact(), "{at:#x} {word:#x}: {heap:?}");
        assert!(heap.inuse_bytes >= 0x340 + 0x5000, "the other arena stays: {heap:?}");
    }
    // A fast bin that links back to itself, and one that leads out of the arena.
    for next in [HEAP, LARGE] {
        let (mut process, space) = process();
        let block = HEAP + 0x290 + 0x20 + 0x60 + 0x40 + 0x500 + 0x3000;
        process.put(block + 16, next ^ ((block + 16) >> 12));
        let heap = found(&mut process, &space);
        assert!(heap.is_moving && !heap.is_exact() && heap.unread_bytes() == 0, "{heap:?}");
    }
    // Arenas that link to each other, but not back to the main one.
    let (mut process, space) = process();
    process.put(OTHER + 2160, OTHER);
    assert_eq!(read(&mut process, &space, 36), Err(NotRead::Inconsistent));
    // Heaps that link to each other.
    let (mut process, space) = crate::testing::process();
    process.put(FIRST + 8, SECOND);
    assert_eq!(found(&mut process, &space).inconsistent_bytes, SIZE_OF_HEAPS + 0x1000);
}

#[test]
fn what_changes_while_it_is_read_is_read_again() {
    let (mut sound, space) = process();
    let expected = found(&mut sound.clone(), &space);
    let page = HEAP / PAGE;
    sound.later.insert(page, sound.pages[&page].clone());
    sound.put(HEAP + 0x290 + 8, 0x28 | 1);
    assert_eq!(found(&mut sound, &space), expected);
}

/// Whoever links a block into a list may be interrupted between the two links, and then gets no processor for a while.
#[test]
fn lists_that_are_half_linked_do_not_hide_the_arena() {
    let (mut process, space) = process();
    let expected = found(&mut process, &space);
    for list in 0..8 {
        process.put(MAIN + 112 + 16 * list, HEAP + 0x290);
    }
    assert_eq!(found(&mut process, &space), expected);
    process.put(MAIN + 112 + 16 * 8, HEAP + 0x290);
    assert_eq!(read(&mut process, &space, 36), Err(NotRead::NoArena), "that many do not change at once");
}

#[test]
fn a_heap_that_grows_meanwhile_is_read() {
    let (mut process, mut space) = process();
    let expected = found(&mut process, &space);
    // The main heap has grown since its mapping was read.
    if let Some(heap) = &mut space.heap {
        heap.end -= 4 * PAGE;
    }
    assert_eq!(found(&mut process, &space), expected);
    // The size of the other arena's newest heap does not cover its last block yet, or still covers what it has given
    // back.
    for size in [0, 0x3000] {
        let mut process = process.clone();
        process.put(SECOND + 16, size);
        let heap = found(&mut process, &space);
        assert_eq!((heap.inuse_bytes, heap.inconsistent_bytes), (expected.inuse_bytes, 0), "{size:#x}: {heap:?}");
    }
}

#[test]
fn a_word_that_is_no_key_is_no_cache() {
    let (mut process, space) = process();
    process.put(DATA + 0x1c00, KEY ^ 1);
    let heap = found(&mut process, &space);
    assert_eq!(heap.cached_bytes, 0x20);
    // A key that follows a word which is not a link.
    let (mut process, space) = crate::testing::process();
    process.put(HEAP + 0x290 + 0x20 + 16, 0x1234_5678_9abc_def1);
    assert_eq!(found(&mut process, &space).cached_bytes, 0x50);
}

/// Memory that counts the bytes read from it.
struct Counted<'c>(&'c mut Process, u64);

impl Memory for Counted<'_> {
    fn page_bytes(&self) -> u64 {
        self.0.page_bytes()
    }

    fn present(&mut self, first: u64, pages: &mut [bool]) {
        self.0.present(first, pages);
    }

    fn read(&mut self, address: u64, buffer: &mut [u8]) -> bool {
        self.1 += buffer.len() as u64;
        self.0.read(address, buffer)
    }
}

/// Replaces some words of the structures at a time with others that may mean something.
#[test]
fn whatever_is_in_memory_is_read_in_bounds() {
    let (sound, space) = process();
    let starts = [DATA + 0x400, DATA + 0x2000, HEAP, FIRST, SECOND, LARGE, LARGE + 0x5000];
    let values = [0, 1, 2, 0x10, 0x20, 0x21, 0x1000, 1 << 32, 1 << 47, u64::MAX, u64::MAX - 15, 1 << 63];
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..1_000 {
        let mut process = sound.clone();
        for _ in 0..random.usize(1..6) {
            let at = starts[random.usize(..starts.len())] + 8 * random.u64(..300);
            let word = match random.usize(..3) {
                0 => values[random.usize(..values.len())],
                1 => starts[random.usize(..starts.len())] + 8 * random.u64(..300),
                _ => random.u64(..),
            };
            process.put(at, word);
        }
        let version = random.u32(25..44);
        let mut counted = Counted(&mut process, 0);
        let heap = read(&mut counted, &space, version);
        assert!(counted.1 < 64 << 20, "{} bytes were read", counted.1);
        let Ok(heap) = heap else { continue };
        let all = 1_u64 << 48;
        assert!(heap.inuse_bytes < all && heap.free_bytes < all && heap.doubtful_bytes <= heap.inuse_bytes, "{heap:?}");
        assert!(heap.free_resident_bytes <= heap.free_bytes && heap.cached_bytes <= heap.free_bytes, "{heap:?}");
        assert!(heap.resident_bytes <= process.pages.len() as u64 * PAGE, "{heap:?}");
    }
}
