//! The buckets of the heap profile: a list, to which the runtime only adds. A bucket's header and stack never change; its
//! counts do.
//!
//! The counts of one bucket are in four parts, as src/runtime/mprof.go tells: `active`, which is published, and three for
//! cycles of garbage collection that are not. What `runtime.MemProfile` returns is `active` and the part of the current
//! cycle, or all parts if nothing was ever published. That is what is computed here.

use std::collections::HashSet;
use std::time::Instant;

use crate::memory::{Memory, Window, words};
use crate::unread::Unread;

/// Most buckets of a program.
pub const MOST_BUCKETS: usize = 1 << 20;
/// Most addresses of a stack. Go records up to 1,026.
pub const MOST_DEPTH: u64 = 2048;
/// Buckets after which the time is looked at.
const LOOK_EVERY: usize = 1024;
/// Bytes of a bucket's header.
const HEADER_BYTES: usize = 48;
/// Type of a bucket of the heap profile.
const MEMORY_PROFILE: u64 = 1;
/// Parts of a bucket's counts: the published one, and those of three cycles.
const PARTS: usize = 4;

/// Sampled objects of one size that one call stack has allocated and that are in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bucket {
    /// Bytes of each object.
    pub size: u64,
    /// Their number.
    pub objects: u64,
    /// Return addresses, innermost first.
    pub stack: Vec<u64>,
}

/// A bucket as it was read.
struct Raw {
    size: u64,
    stack: Vec<u64>,
    /// Address of its counts.
    counts_at: u64,
    counts: Counts,
}

/// Counts by part.
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
    /// The counts in some bytes; `None` if they were changing.
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

    /// What is published, if the part of the current cycle is number `current`.
    fn published(&self, current: usize) -> Count {
        self.0[0].plus(self.0[1 + current])
    }

    /// All parts together.
    fn all(&self) -> Count {
        self.0.iter().fold(Count::default(), |sum, part| sum.plus(*part))
    }
}

/// Reads all buckets from the first one at `head`, twice. `cycle`: address of `mProfCycle`.
pub(crate) fn read<M: Memory + ?Sized>(
    memory: &M,
    (head, cycle): (u64, u64),
    cycle_words: usize,
    deadline: Instant,
) -> Result<Vec<Bucket>, Unread> {
    let current = current_part(memory, cycle)?;
    let first = walk(memory, head, cycle_words, deadline)?;
    let again = counts_again(memory, &first, cycle_words, deadline)?;
    if current_part(memory, cycle)? != current {
        return Err(Unread::Torn);
    }
    let published = |counts: &Counts| counts.published(current);
    // Before the first garbage collection nothing is published. Nothing was freed then, so each count is as good as another.
    let is_fresh = again.iter().all(|counts| published(counts) == Count::default());
    let is_torn = |(bucket, again): (&Raw, &Counts)| published(&bucket.counts) != published(again);
    if !is_fresh && first.iter().zip(&again).any(is_torn) {
        return Err(Unread::Torn);
    }
    let mut buckets = Vec::new();
    for (bucket, counts) in first.into_iter().zip(again) {
        let count = if is_fresh { counts.all() } else { published(&counts) };
        let objects = count.allocations.checked_sub(count.frees).ok_or(Unread::Torn)?;
        objects.checked_mul(bucket.size).filter(|bytes| *bytes < 1 << 56).ok_or(Unread::Malformed("its sizes"))?;
        if objects > 0 && bucket.size > 0 {
            buckets.push(Bucket { size: bucket.size, objects, stack: bucket.stack });
        }
    }
    Ok(buckets)
}

/// Number of the part of the current cycle.
fn current_part<M: Memory + ?Sized>(memory: &M, cycle: u64) -> Result<usize, Unread> {
    let value = Window::new(memory).u32(cycle).ok_or(Unread::Unreadable)?;
    // The lowest bit says whether it was published already, which makes no difference.
    Ok((value >> 1) as usize % (PARTS - 1))
}

fn walk<M: Memory + ?Sized>(memory: &M, head: u64, cycle_words: usize, deadline: Instant) -> Result<Vec<Raw>, Unread> {
    let mut window = Window::new(memory);
    let (mut all, mut seen, mut at) = (Vec::new(), HashSet::new(), head);
    while at != 0 {
        if all.len() >= MOST_BUCKETS || all.len() % LOOK_EVERY == 0 && Instant::now() >= deadline {
            return Err(Unread::TooMany);
        }
        if at % 8 != 0 || !seen.insert(at) {
            return Err(Unread::Malformed("its list"));
        }
        let header: Vec<u64> = words(window.bytes(at, HEADER_BYTES).ok_or(Unread::Unreadable)?).collect();
        let [_, next, kind, hash, size, depth] = header[..] else { return Err(Unread::Unreadable) };
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
        let counts = Counts::parse(bytes, size, cycle_words).ok_or(Unread::Torn)?;
        all.push(Raw { size, stack, counts_at, counts });
        at = next;
    }
    Ok(all)
}

fn counts_again<M: Memory + ?Sized>(
    memory: &M,
    buckets: &[Raw],
    cycle_words: usize,
    deadline: Instant,
) -> Result<Vec<Counts>, Unread> {
    let mut window = Window::new(memory);
    let mut all = Vec::with_capacity(buckets.len());
    for bucket in buckets {
        if all.len() % LOOK_EVERY == 0 && Instant::now() >= deadline {
            return Err(Unread::TooMany);
        }
        let bytes = window.bytes(bucket.counts_at, 8 * PARTS * cycle_words).ok_or(Unread::Unreadable)?;
        all.push(Counts::parse(bytes, bucket.size, cycle_words).ok_or(Unread::Torn)?);
    }
    Ok(all)
}

/// The hash that the runtime keeps in a bucket.
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
