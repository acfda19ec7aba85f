//! Tests with target memory that may contain anything.

use super::*;
use crate::abi::{DRAWS, Header};
use zerocopy::FromZeros as _;

#[test]
fn counts_are_the_sums_of_all_slots() {
    let mut state = vec![0; COUNTS_BYTES];
    assert_eq!(Counts::of(&state), Ok(Counts::default()));
    let slot = |calls, bytes| Slot { key: 1, calls, bytes, sampled: 3, reported: 2, failed: 1, ..Slot::default() };
    let mut put = |at: usize, bytes: &[u8]| state[at..at + bytes.len()].copy_from_slice(bytes);
    put((SLOTS_OFFSET - STATE) as usize, slot(5, 50).as_bytes());
    put(COUNTS_BYTES - size_of::<Slot>(), slot(u64::MAX, 7).as_bytes());
    put(0, Totals { set_full: 4, slots_full: 6, shared: slot(1, 1), ..Totals::default() }.as_bytes());
    let counts = Counts::of(&state).unwrap();
    assert_eq!((counts.calls, counts.bytes, counts.threads), (5, 58, 3), "it wraps, and does not panic");
    assert_eq!((counts.sampled, counts.reported, counts.failed), (9, 6, 3));
    assert_eq!((counts.set_full, counts.slots_full), (4, 6));
    assert_eq!(Counts::of(&state[..COUNTS_BYTES - 1]), Err(ForeignBlob::Truncated));
    assert_eq!(Counts::of(&[]), Err(ForeignBlob::Truncated));
}

#[test]
fn a_call_that_did_not_end_before_the_next_one_was_left() {
    let abandoned = |slot: Slot| {
        let mut state = vec![0; COUNTS_BYTES];
        state[(SLOTS_OFFSET - STATE) as usize..][..size_of::<Slot>()].copy_from_slice(slot.as_bytes());
        Counts::of(&state).unwrap().abandoned
    };
    let slot = Slot { key: 1, calls: 9, sampled: 5, reported: 3, failed: 1, sampled_call: 9, ..Slot::default() };
    assert_eq!(abandoned(slot), 0, "it is in progress");
    assert_eq!(abandoned(Slot { calls: 10, ..slot }), 1);
    assert_eq!(abandoned(Slot { sampled: 7, ..slot }), 2);
    assert_eq!(abandoned(Slot { reported: 9, ..slot }), 0, "whatever the target writes");
}

#[test]
fn a_control_page_must_make_sense() {
    let right = Control { magic: MAGIC, version: u64::from(VERSION), draw: 3, ..Control::new_zeroed() };
    assert_eq!(control(right.as_bytes()), Ok(right));
    assert_eq!(control(&right.as_bytes()[..100]), Err(ForeignBlob::Truncated));
    for (wrong, why) in [
        (Control { magic: 0, ..right }, ForeignBlob::Magic),
        (Control { version: u64::from(VERSION) + 1, ..right }, ForeignBlob::Version(u64::from(VERSION) + 1)),
        (Control { draw: DRAWS as u64, ..right }, ForeignBlob::Nonsense),
    ] {
        assert_eq!(control(wrong.as_bytes()), Err(why));
    }
}

/// Any bytes are read without a panic.
#[test]
fn random_bytes_are_refused() {
    let bytes = [0x90; 64];
    let entries = crate::abi::Entries {
        allocation_ends_countdown: 0,
        allocation: 0,
        reallocation: 0,
        free: 0,
        refused: 0,
        claim: 0,
        draw: 0,
        site_result: 0,
        site_freeing: 0,
        site_reallocating: 0,
        site_unseen: 0,
        framed: 0,
        framed_end: 0,
    };
    let code = Code { bytes: &bytes, entries };
    let mut state = sampler_ebpf::rng::seed(1, 0);
    for length in [0, 8, 4096, 5000, TEXT_BYTES as usize] {
        let text: Vec<u8> = (0..length).map(|_| sampler_ebpf::rng::next(&mut state) as u8).collect();
        assert!(CheckedBlob::check(&text, &code).is_err());
        let _ = (Counts::of(&text), control(&text));
    }
    let mut text = vec![0; TEXT_BYTES as usize];
    let header = Header {
        magic: MAGIC,
        version: VERSION,
        code_hash: code_hash(&code),
        set_log2: MIN_SET_LOG2,
        functions: MAX_FUNCTIONS as u32,
        ..Header::default()
    };
    text[HEADER as usize..][..size_of::<Header>()].copy_from_slice(header.as_bytes());
    text[crate::abi::CODE as usize..][..64].copy_from_slice(&bytes);
    assert_eq!(CheckedBlob::check(&text, &code).unwrap().functions.len(), MAX_FUNCTIONS);
}
