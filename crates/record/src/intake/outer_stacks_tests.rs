//! Tests with synthetic stacks of one thread: a return address every 64 bytes, and one large frame.

use heapbpf_unwind::Registers;
use heapbpf_unwind::raw::{RawFrame, Reason, UnwinderKind};

use super::*;

const TOP: u64 = 0x7fff_0010_0000;
/// Where a frame of 100 KB begins.
const LARGE: u64 = TOP - 0x400;
const LARGE_BYTES: u64 = 100_000;

fn key() -> StackKey {
    StackKey { space: ProcessKey { start_ns: 1, tgid: 7, exec_id: 0 }, top: TOP }
}

/// The slots of return addresses, downwards, of a stack with `inner` frames below the large one, and its stack pointer.
fn slots(inner: u64) -> (Vec<u64>, u64) {
    let outer = (1..=16).map(|at| TOP - at * 64);
    let below = LARGE - LARGE_BYTES;
    let slots: Vec<u64> = outer.chain((1..=inner).map(|at| below - at * 64)).collect();
    (slots, below - (inner + 1) * 64)
}

/// Notes a stack whose return addresses are `of(slot)`.
fn note(stacks: &mut OuterStacks, inner: u64, left_out: bool, of: impl Fn(u64) -> u64) {
    // Whether the expected return addresses are in their places.
    let used = stacks.stacks.get(&key()).and_then(|known| known.used);
    let pieces = used.map_or(0, |outer| {
        u32::from(
            outer
                .slots
                .iter()
                .all(|slot| slots(inner).0.contains(&slot.address) && of(slot.address) == slot.return_address),
        )
    });
    let (slots, sp) = slots(inner);
    let head = StackRecord {
        space: key().space,
        top: TOP,
        pieces,
        registers: Registers { sp, ..Registers::default() },
        ..StackRecord::default()
    };
    let frame = |slot: &u64| RawFrame { address: of(*slot) - 1, module: None, file_offset: 0 };
    let stack = RawStack {
        frames: slots.iter().rev().map(frame).collect(),
        unwinder: UnwinderKind::Dwarf,
        completeness: if left_out {
            Completeness::Truncated(Reason::OuterFramesChanged)
        } else {
            Completeness::Complete
        },
    };
    let reads = Reads {
        offsets: slots.iter().rev().map(|slot| (slot - sp) as u32).collect(),
        values: slots.iter().rev().map(|slot| of(*slot)).collect(),
        left_out,
        ..Reads::default()
    };
    stacks.note(&head, &stack, &reads);
}

/// A return address for each slot.
const fn plain(slot: u64) -> u64 {
    slot >> 3
}

fn changes(stacks: &mut OuterStacks) -> Vec<Option<OuterFrames>> {
    let changed = stacks.take_changed();
    assert!(changed.iter().all(|(of, _)| *of == key()));
    changed.into_iter().map(|(_, outer)| outer).collect()
}

/// Asserts that everything above the slot is left out, except the words there.
fn assert_leaves_out_the_large_frame(outer: &OuterFrames) {
    let slots = [LARGE - LARGE_BYTES - 64, LARGE];
    assert_eq!(outer.slots, slots.map(|address| StackSlot { address, return_address: plain(address) }), "next to it");
    let [piece, rest @ ..] = outer.pieces;
    assert_eq!((piece.start, piece.start + piece.bytes), (LARGE, TOP - 64 + 8));
    assert!(rest.iter().all(|piece| piece.bytes == 0));
}

#[test]
fn a_large_outer_frame_is_left_out_once_it_was_there_a_number_of_times() {
    let mut stacks = OuterStacks::default();
    for round in 1..u64::from(COMPARED) {
        note(&mut stacks, round % 5 + 2, false, plain);
        assert!(changes(&mut stacks).is_empty(), "{round}");
    }
    note(&mut stacks, 3, false, plain);
    let [Some(outer)] = changes(&mut stacks)[..] else { panic!("one change") };
    assert_leaves_out_the_large_frame(&outer);
    for round in 0..u64::from(3 * ROUND) {
        note(&mut stacks, round % 7 + 2, false, plain);
    }
    assert!(changes(&mut stacks).is_empty(), "it stays");
    stacks.forget(&HashSet::from([key().space]));
    assert_eq!(changes(&mut stacks), [None]);
}

#[test]
fn frames_that_change_are_copied() {
    let mut stacks = OuterStacks::default();
    for round in 0..u64::from(COMPARED) {
        // The same slots, but a different function has called below the large frame.
        let of = |slot: u64| if slot < LARGE && round % 9 == 0 { plain(slot) + 1 } else { plain(slot) };
        note(&mut stacks, 8, false, of);
    }
    assert!(changes(&mut stacks).is_empty(), "nothing outside of the large frame is worth it");
    // In the next round the same function calls each time.
    (0..ROUND).for_each(|_| note(&mut stacks, 8, false, plain));
    let [Some(outer)] = changes(&mut stacks)[..] else { panic!("one change") };
    assert_leaves_out_the_large_frame(&outer);
    // Then a different one each time, which is noticed soon.
    for round in 0..u64::from(4 * COMPARED) {
        note(&mut stacks, 8, false, |slot| plain(slot) + if slot < LARGE { round } else { 0 });
    }
    assert_eq!(changes(&mut stacks), [None]);
}

#[test]
fn a_stack_that_misses_a_word_is_the_last_one() {
    let mut stacks = OuterStacks::default();
    (0..COMPARED).for_each(|_| note(&mut stacks, 3, false, plain));
    assert_eq!(changes(&mut stacks).len(), 1);
    note(&mut stacks, 3, true, plain);
    assert_eq!(changes(&mut stacks), [None]);
    (0..3 * ROUND).for_each(|_| note(&mut stacks, 3, false, plain));
    assert!(changes(&mut stacks).is_empty());
}

#[test]
fn a_process_with_several_such_stacks_is_not_trusted() {
    let mut stacks = OuterStacks::default();
    let stack = RawStack { frames: [].into(), unwinder: UnwinderKind::Dwarf, completeness: Completeness::Complete };
    let missed = Reads { left_out: true, ..Reads::default() };
    (0..COMPARED).for_each(|_| note(&mut stacks, 3, false, plain));
    assert_eq!(changes(&mut stacks).len(), 1);
    for thread in 1..=u64::from(MOST_MISSES) {
        let head = StackRecord { space: key().space, top: thread << 20, ..StackRecord::default() };
        assert_eq!(changes(&mut stacks), []);
        // The same stack counts once.
        for reads in [&Reads::default(), &missed, &missed] {
            stacks.note(&head, &stack, reads);
        }
    }
    assert_eq!(changes(&mut stacks), [None]);
    (0..2 * ROUND).for_each(|_| note(&mut stacks, 3, false, plain));
    assert!(changes(&mut stacks).is_empty() && stacks.stacks.is_empty());
    stacks.forget(&HashSet::from([key().space]));
    assert!(stacks.misses.is_empty());
}

#[test]
fn pieces_are_neither_too_long_nor_too_many() {
    let words = |distances: &[u64]| -> Vec<Word> {
        let mut address = TOP;
        let word = |distance: &u64| {
            address -= distance;
            Word { address, return_address: plain(address) }
        };
        distances.iter().map(word).collect()
    };
    // A word every 256 bytes, for 4 KiB, above a large gap.
    let mut distances = vec![256; 17];
    distances.push(1 << 20);
    let outer = outer_frames(&words(&distances), TOP).unwrap();
    let pieces: Vec<u64> = outer.pieces.iter().map(|piece| piece.bytes).take_while(|bytes| *bytes > 0).collect();
    assert_eq!(pieces, [776, 776, 776, 776, 8]);
    assert_eq!(outer.pieces[0].start, TOP - 17 * 256, "upwards");
    for word in &words(&distances)[..17] {
        let holds = |piece: &StackPiece| (piece.start..piece.start + piece.bytes).contains(&word.address);
        assert!(outer.pieces.iter().any(holds), "{:x}", word.address);
    }
    // With twenty frames of 4 KiB, eight pieces are possible, which leave out nine frames. Five frames are half as
    // much.
    let outer = outer_frames(&words(&[4096; 20]), TOP).unwrap();
    assert_eq!(outer.slots[0].address, TOP - 4096 * 5);
    assert_eq!(outer_frames(&words(&[64; 20]), TOP), None);
    assert_eq!(outer_frames(&[], TOP), None);
}

#[test]
fn the_number_of_stacks_is_bounded() {
    let mut stacks = OuterStacks::default();
    (0..COMPARED).for_each(|_| note(&mut stacks, 3, false, plain));
    assert_eq!(changes(&mut stacks).len(), 1);
    let stack = RawStack { frames: [].into(), unwinder: UnwinderKind::Dwarf, completeness: Completeness::Complete };
    for top in 1..OUTER_STACKS as u64 + 1 {
        let head = StackRecord { space: key().space, top: top << 20, ..StackRecord::default() };
        stacks.note(&head, &stack, &Reads::default());
    }
    assert_eq!(changes(&mut stacks), [None], "it began anew");
    assert_eq!(stacks.stacks.len(), 1);
}
