//! The buckets of the heap profile: a list that the runtime only ever extends. A bucket's header and stack never
//! change, but its counts do.
//!
//! The counts of a bucket are in four parts (src/runtime/mprof.go): `active`, which is published, and three for garbage
//! collection cycles that are not. `runtime.MemProfile` returns the sum of `active` and the current cycle's part, or
//! the sum of all parts if nothing has been published yet. This module computes the same.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use heapbpf_elf::Memory;

use crate::memory::{Window, words};
use crate::version::Unread;

/// Maximum number of buckets of a program.
pub const MOST_BUCKETS: usize = 1 << 20;
/// Maximum number of addresses in a stack. Go records up to 1,026.
pub const MOST_DEPTH: u64 = 2048;
/// Number of buckets between checks of the deadline.
const LOOK_EVERY: usize = 1024;
/// Size of a bucket's header, bytes.
const HEADER_BYTES: usize = 48;
/// Type of a bucket of the heap profile.
const MEMORY_PROFILE: u64 = 1;
/// Maximum number of words in a part.
const MOST_WORDS: usize = 4;
/// How often buckets that change while they are read are read again, and the pause before that, because a thread may
/// have lost its CPU.
const ROUNDS: usize = 100;
const PAUSE: Duration = Duration::from_millis(2);
/// Number of parts of a bucket's counts: the published one, and one for each of three cycles.
const PARTS: usize = 4;

/// Sampled objects of one size in use that were allocated by one call stack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bucket {
    /// Size of each object, bytes.
    pub size: u64,
    /// Number of objects.
    pub objects: u64,
    /// Return addresses, innermost first.
    pub stack: Vec<u64>,
}

/// How many moments a heap profile may represent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Moments {
    /// One: nothing changed while it was read.
    #[default]
    One,
    /// One per stack. If a program collects garbage all the time, the figures come from different collections.
    OnePerStack,
}

/// A bucket as read from memory.
struct Raw {
    size: u64,
    stack: Vec<u64>,
    /// Address of its counts.
    counts_at: u64,
    /// `None` if they were changing.
    counts: Option<Counts>,
}

/// Counts, by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts([Count; PARTS]);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    allocations: u64,
    frees: u64,
}

impl Count {
    fn plus(self, other: Self) -> Self {
        Self {
            allocations: self.allocations.wrapping_add(other.allocations),
            frees: self.frees.wrapping_add(other.frees),
        }
    }
}

impl Counts {
    /// Parses the counts; `None` if they were changing.
    fn parse(bytes: &[u8], size: u64, cycle_words: usize) -> Option<Self> {
        let all: Vec<u64> = words(bytes).collect();
        let mut counts = Self::default();
        for (count, part) in counts.0.iter_mut().zip(all.chunks_exact(cycle_words)) {
            *count = Count { allocations: part[0], frees: part[1] };
            let agrees = |objects: u64, bytes: u64| objects.wrapping_mul(size) == bytes;
            if let &[allocations, frees, allocated, freed] = part
                && !(agrees(allocations, allocated) && agrees(frees, freed))
            {
                return None;
            }
        }
        Some(counts)
    }

    /// Returns the published counts, if the current cycle's part is number `current`.
    fn published(&self, current: usize) -> Count {
        self.0[0].plus(self.0[1 + current])
    }

    /// Returns the sum of all parts.
    fn all(&self) -> Count {
        self.0.iter().fold(Count::default(), |sum, part| sum.plus(*part))
    }
}

/// Reads all buckets from the one at `head` on, and their counts twice. `cycle`: address of `mProfCycle`.
pub(crate) fn read<M: Memory + ?Sized>(
    memory: &M,
    (head, cycle): (u64, u64),
    cycle_words: usize,
    moments: Moments,
    deadline: Instant,
) -> Result<Vec<Bucket>, Unread> {
    let current = current_part(memory, cycle)?;
    let first = walk(memory, head, cycle_words, deadline)?;
    let again = match moments {
        Moments::One => counts_again(memory, &first, current, cycle_words, deadline)?,
        Moments::OnePerStack => counts_apart(memory, &first, cycle, cycle_words, deadline)?,
    };
    // Before the first garbage collection, nothing has been published and nothing was freed, so a change between the
    // two reads does not matter.
    let is_fresh = again.iter().all(|(published, _)| *published == Count::default());
    if moments == Moments::One {
        let published = |bucket: &Raw| bucket.counts.map(|counts| counts.published(current));
        let is_torn = |(bucket, (again, _)): (&Raw, &(Count, Count))| published(bucket) != Some(*again);
        if current_part(memory, cycle)? != current || !is_fresh && first.iter().zip(&again).any(is_torn) {
            return Err(Unread::Torn);
        }
    }
    let mut buckets = Vec::new();
    for (bucket, (published, all)) in first.into_iter().zip(again) {
        let count = if is_fresh { all } else { published };
        let objects = count.allocations.checked_sub(count.frees).ok_or(Unread::Torn)?;
        objects.checked_mul(bucket.size).filter(|bytes| *bytes < 1 << 56).ok_or(Unread::Malformed("its sizes"))?;
        if objects > 0 && bucket.size > 0 {
            buckets.push(Bucket { size: bucket.size, objects, stack: bucket.stack });
        }
    }
    Ok(buckets)
}

/// Returns the number of the current cycle's part.
fn current_part<M: Memory + ?Sized>(memory: &M, cycle: u64) -> Result<usize, Unread> {
    let mut bytes = [0; 4];
    if !memory.read(cycle, &mut bytes) {
        return Err(Unread::Unreadable);
    }
    let value = u32::from_le_bytes(bytes);
    // The lowest bit says whether the cycle has already been published, which makes no difference.
    Ok((value >> 1) as usize % (PARTS - 1))
}

fn walk<M: Memory + ?Sized>(memory: &M, head: u64, cycle_words: usize, deadline: Instant) -> Result<Vec<Raw>, Unread> {
    let mut window = Window::new(memory);
    let (mut all, mut seen, mut at) = (Vec::new(), HashSet::new(), head);
    while at != 0 {
        if all.len() >= MOST_BUCKETS {
            return Err(Unread::TooMany);
        }
        in_time(all.len(), deadline)?;
        if at % 8 != 0 || !seen.insert(at) {
            return Err(Unread::Malformed("its list"));
        }
        let mut header = [0; HEADER_BYTES / 8];
        let bytes = window.bytes(at, HEADER_BYTES).ok_or(Unread::Unreadable)?;
        header.iter_mut().zip(words(bytes)).for_each(|(field, word)| *field = word);
        let [_, next, kind, hash, size, depth] = header;
        if kind != MEMORY_PROFILE || depth > MOST_DEPTH {
            return Err(Unread::Malformed("its buckets"));
        }
        let stack_at = at.checked_add(HEADER_BYTES as u64).ok_or(Unread::Malformed("its list"))?;
        let bytes = window.bytes(stack_at, 8 * depth as usize).ok_or(Unread::Unreadable)?;
        let stack: Vec<u64> = words(bytes).collect();
        if hash_of(&stack, size) != hash {
            return Err(Unread::Malformed("its stacks"));
        }
        let counts_at = stack_at.checked_add(8 * depth).ok_or(Unread::Malformed("its list"))?;
        let bytes = window.bytes(counts_at, 8 * PARTS * cycle_words).ok_or(Unread::Unreadable)?;
        let counts = Counts::parse(bytes, size, cycle_words);
        all.push(Raw { size, stack, counts_at, counts });
        at = next;
    }
    Ok(all)
}

/// Checks the deadline after every `LOOK_EVERY` buckets.
fn in_time(done: usize, deadline: Instant) -> Result<(), Unread> {
    if done.is_multiple_of(LOOK_EVERY) && Instant::now() >= deadline { Err(Unread::Slow) } else { Ok(()) }
}

/// Reads the counts of all buckets again. Returns the published counts and the sum of all parts.
fn counts_again<M: Memory + ?Sized>(
    memory: &M,
    buckets: &[Raw],
    current: usize,
    cycle_words: usize,
    deadline: Instant,
) -> Result<Vec<(Count, Count)>, Unread> {
    let mut window = Window::new(memory);
    let mut all = Vec::with_capacity(buckets.len());
    for bucket in buckets {
        in_time(all.len(), deadline)?;
        let bytes = window.bytes(bucket.counts_at, 8 * PARTS * cycle_words).ok_or(Unread::Unreadable)?;
        let counts = Counts::parse(bytes, bucket.size, cycle_words).ok_or(Unread::Torn)?;
        all.push((counts.published(current), counts.all()));
    }
    Ok(all)
}

/// Same as [`counts_again`], but checks each bucket on its own: no other cycle began while it was read, and its counts
/// are consistent. Buckets that a stopped thread of the program is still changing are read again later.
fn counts_apart<M: Memory + ?Sized>(
    memory: &M,
    buckets: &[Raw],
    cycle: u64,
    cycle_words: usize,
    deadline: Instant,
) -> Result<Vec<(Count, Count)>, Unread> {
    let mut all = vec![None; buckets.len()];
    let mut left: Vec<usize> = (0..buckets.len()).collect();
    for round in 0..ROUNDS {
        if round > 0 {
            std::thread::sleep(PAUSE);
        }
        for (done, &index) in left.iter().enumerate() {
            in_time(done, deadline)?;
            all[index] = counts_of(memory, &buckets[index], cycle, cycle_words)?;
        }
        left.retain(|index| all[*index].is_none());
        if left.is_empty() {
            break;
        }
    }
    all.into_iter().collect::<Option<_>>().ok_or(Unread::Torn)
}

/// Reads the counts of a bucket; `None` if they were changing.
fn counts_of<M: Memory + ?Sized>(
    memory: &M,
    bucket: &Raw,
    cycle: u64,
    cycle_words: usize,
) -> Result<Option<(Count, Count)>, Unread> {
    let mut bytes = [0; 8 * PARTS * MOST_WORDS];
    let bytes = &mut bytes[..8 * PARTS * cycle_words.min(MOST_WORDS)];
    let current = current_part(memory, cycle)?;
    if !memory.read(bucket.counts_at, bytes) {
        return Err(Unread::Unreadable);
    }
    let is_same = current_part(memory, cycle)? == current;
    let counts = Counts::parse(bytes, bucket.size, cycle_words).filter(|_| is_same);
    let counts = counts.map(|counts| (counts.published(current), counts.all()));
    Ok(counts.filter(|(published, _)| published.allocations >= published.frees))
}

/// Computes the hash that the runtime stores in a bucket.
pub(crate) fn hash_of(stack: &[u64], size: u64) -> u64 {
    let mix = |hash: u64, value: u64| {
        let hash = hash.wrapping_add(value);
        let hash = hash.wrapping_add(hash << 10);
        hash ^ hash >> 6
    };
    let hash = mix(stack.iter().fold(0, |hash, address| mix(hash, *address)), size);
    let hash = hash.wrapping_add(hash << 3);
    hash ^ hash >> 11
}

#[cfg(test)]
#[path = "buckets_tests.rs"]
mod tests;
