use std::time::Duration;

use super::*;
use crate::testing::MadeUp;

const HEAD: u64 = 0x1000;
const CYCLE: u64 = 0x8000;
const STACK: &[u64] = &[0x401000, 0x402000];

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

fn read_all(memory: &MadeUp) -> Result<Vec<Bucket>, Unread> {
    read(memory, (HEAD, CYCLE), 4, Moments::One, soon())
}

/// Two buckets in cycle number 4, which uses the second of three parts.
fn two() -> MadeUp {
    let mut memory = MadeUp::default();
    memory.put(CYCLE, &[4 << 1]);
    memory.bucket(HEAD, 0x2000, (64, STACK), [(10, 3), (100, 100), (5, 1), (0, 50)]);
    memory.bucket(0x2000, 0, (8, &STACK[..1]), [(7, 7), (9, 0), (0, 0), (9, 0)]);
    memory
}

#[test]
fn what_is_published_counts_and_what_is_not_does_not() {
    let bucket = Bucket { size: 64, objects: 10 + 5 - 3 - 1, stack: STACK.to_vec() };
    assert_eq!(read_all(&two()), Ok(vec![bucket]));
}

#[test]
fn before_the_first_collection_everything_counts() {
    let mut memory = MadeUp::default();
    memory.put(CYCLE, &[1]);
    memory.bucket(HEAD, 0, (16, STACK), [(0, 0), (0, 0), (0, 0), (6, 0)]);
    let bucket = Bucket { size: 16, objects: 6, stack: STACK.to_vec() };
    assert_eq!(read_all(&memory), Ok(vec![bucket]));
}

#[test]
fn counts_without_bytes_are_read_too() {
    let mut memory = MadeUp::default();
    memory.put(CYCLE, &[0]);
    memory.put(HEAD, &[0, 0, 1, hash_of(&[5], 32), 32, 1, 5, 4, 1, 3, 2, 0, 0, 0, 0]);
    let bucket = Bucket { size: 32, objects: 4, stack: vec![5] };
    assert_eq!(read(&memory, (HEAD, CYCLE), 2, Moments::One, soon()), Ok(vec![bucket]));
}

#[test]
fn an_empty_list_is_an_empty_heap() {
    let mut memory = MadeUp::default();
    memory.put(CYCLE, &[0]);
    assert_eq!(read(&memory, (0, CYCLE), 4, Moments::One, soon()), Ok(Vec::new()));
}

#[test]
fn a_list_that_comes_back_to_itself_ends() {
    let mut memory = two();
    memory.bucket(0x2000, HEAD, (8, STACK), [(0, 0); 4]);
    assert_eq!(read_all(&memory), Err(Unread::Malformed("its list")));
    memory.bucket(0x2000, 0x2000, (8, STACK), [(0, 0); 4]);
    assert_eq!(read_all(&memory), Err(Unread::Malformed("its list")));
    memory.bucket(0x2000, 0x2004, (8, STACK), [(0, 0); 4]);
    assert_eq!(read_all(&memory), Err(Unread::Malformed("its list")));
}

#[test]
fn what_is_no_bucket_is_not_believed() {
    for (field, value) in [(2, 2), (3, 1), (4, 65), (5, u64::MAX), (5, MOST_DEPTH + 1)] {
        let mut memory = two();
        memory.change_after(0, HEAD + 8 * field, value);
        assert!(matches!(read_all(&memory), Err(Unread::Malformed(_))), "field {field}");
    }
    // A size that no heap can have.
    let mut memory = two();
    memory.bucket(HEAD, 0, (1 << 40, STACK), [(1 << 20, 0), (0, 0), (0, 0), (0, 0)]);
    assert_eq!(read_all(&memory), Err(Unread::Malformed("its sizes")));
}

#[test]
fn memory_that_is_not_there_is_told() {
    let mut memory = two();
    memory.bucket(HEAD, 0x9_0000, (64, STACK), [(10, 3); 4]);
    assert_eq!(read_all(&memory), Err(Unread::Unreadable));
    assert_eq!(read(&two(), (HEAD, 0x10), 4, Moments::One, soon()), Err(Unread::Unreadable));
    assert_eq!(read(&two(), (u64::MAX - 7, CYCLE), 4, Moments::One, soon()), Err(Unread::Unreadable));
}

#[test]
fn counts_that_change_meanwhile_are_not_taken() {
    let counts = HEAD + 48 + 16;
    // The number of bytes does not match the count.
    let mut memory = two();
    memory.change_after(0, counts, 11);
    assert_eq!(read_all(&memory), Err(Unread::Torn));
    // By the second read, three more objects have been freed.
    let reads = {
        let memory = two();
        walk(&memory, HEAD, 4, soon()).expect("it is sound");
        // The cycle number is read first.
        1 + 2 * 3
    };
    let mut memory = two();
    memory.change_after(reads, counts + 8, 6);
    memory.change_after(reads, counts + 24, 6 * 64);
    assert_eq!(read_all(&memory), Err(Unread::Torn));
    // A collection has ended in between.
    let mut memory = two();
    memory.change_after(1, CYCLE, 5 << 1);
    assert_eq!(read_all(&memory), Err(Unread::Torn));
    // More frees than allocations.
    let mut memory = two();
    memory.bucket(HEAD, 0, (64, STACK), [(1, 3), (0, 0), (1, 0), (0, 0)]);
    assert_eq!(read_all(&memory), Err(Unread::Torn));
}

#[test]
fn each_stack_by_itself_may_change_while_others_are_read() {
    let counts = HEAD + 48 + 16;
    let read_apart = |memory: &MadeUp| read(memory, (HEAD, CYCLE), 4, Moments::OnePerStack, soon());
    let changing = |frees: u64, bytes: u64| {
        let mut memory = two();
        memory.change_after(1 + 2 * 3, counts + 8, frees);
        memory.change_after(1 + 2 * 3, counts + 24, bytes);
        memory
    };
    assert_eq!(read_apart(&two()), read_all(&two()));
    let later = Bucket { size: 64, objects: 8, stack: STACK.to_vec() };
    assert_eq!(read_apart(&changing(6, 6 * 64)), Ok(vec![later]));
    assert_eq!(read_apart(&changing(6, 0)), Err(Unread::Torn), "its counts do not agree");
    assert_eq!(read_apart(&changing(60, 60 * 64)), Err(Unread::Torn), "more frees than allocations");
}

#[test]
fn there_is_an_end_in_time() {
    assert_eq!(read(&two(), (HEAD, CYCLE), 4, Moments::One, Instant::now()), Err(Unread::Slow));
}
