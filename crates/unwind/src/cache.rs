//! A cache of walks: a stack whose relevant words repeat does not need another walk.
//!
//! A walk depends only on the mappings, the registers that it begins with, and the words that it reads. So a later
//! sample in the same address space with equal registers and the same words in these places has the same stack,
//! whatever else its copy contains.

use std::collections::HashSet;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use foldhash::fast::RandomState;

use crate::memory::{Reads, StackCopy};
use crate::raw::{RawFrame, RawStack};
use sampler_ebpf::abi::{ProcessKey, Registers};

const SETS: usize = 2048;
const WAYS: usize = 4;
/// Maximum memory of cached walks, bytes.
const MAX_BYTES: usize = 32 << 20;
/// Unused interned stacks are kept until there are at least this many stacks.
const FIRST_SWEEP: usize = 4096;

/// Everything that a walk depends on, except memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackKey {
    /// Address space.
    pub space: ProcessKey,
    /// State of its mappings: [`SpaceView::generation`](crate::raw::SpaceView::generation).
    pub generation: u64,
    /// State of what is known about its runtime: [`RuntimeCode::version`](crate::runtime::RuntimeCode::version).
    pub runtime: u64,
    /// Registers that the walk begins with.
    pub registers: Registers,
}

struct Kept {
    key: StackKey,
    offsets: Box<[u32]>,
    values: Box<[u64]>,
    /// End of the copy, if the walk requested a word outside of it.
    copy_end: Option<u64>,
    stack: Arc<RawStack>,
}

impl Kept {
    fn size_bytes(&self) -> usize {
        size_of::<Self>() + self.values.len() * 12 + self.stack.frames.len() * size_of::<RawFrame>()
    }

    fn fits(&self, key: &StackKey, copy: StackCopy) -> bool {
        self.key == *key
            && self.copy_end.is_none_or(|end| end == copy.end())
            && self.offsets.iter().zip(&self.values).all(|(offset, value)| copy.word(*offset) == Some(*value))
    }
}

/// A set-associative cache of walks, and the interned stacks that they led to.
///
/// Keys are hashed with a fast function and a random seed, and then compared. A target that provokes collisions (for
/// which it would have to guess the seed) only slows down its own stacks: a set holds four walks, and interning
/// compares few stacks of one process.
pub struct StackCache {
    hasher: RandomState,
    sets: Box<[[Option<Kept>; WAYS]]>,
    victim: usize,
    held_bytes: usize,
    /// The next set to be emptied when the walks exceed their memory limit.
    emptied: usize,
    interned: HashSet<Arc<RawStack>, RandomState>,
    sweep_at: usize,
}

impl Default for StackCache {
    fn default() -> Self {
        Self {
            hasher: RandomState::default(),
            sets: std::iter::repeat_with(|| [const { None }; WAYS]).take(SETS).collect(),
            victim: 0,
            held_bytes: 0,
            emptied: 0,
            interned: HashSet::default(),
            sweep_at: FIRST_SWEEP,
        }
    }
}

impl StackCache {
    fn set(&self, key: &StackKey) -> usize {
        let Registers { ip, sp, fp, .. } = key.registers;
        let mut hasher = self.hasher.build_hasher();
        for part in [key.space.start_ns, u64::from(key.space.tgid), key.generation, key.runtime, ip, sp, fp] {
            hasher.write_u64(part);
        }
        hasher.finish() as usize % SETS
    }

    /// Returns the stack of an earlier walk that read the same words as a walk over `copy` would. Stores those reads in
    /// `reads`.
    pub fn get(&self, key: &StackKey, copy: StackCopy, reads: &mut Reads) -> Option<Arc<RawStack>> {
        let set = &self.sets[self.set(key)];
        let kept = set.iter().flatten().find(|kept| kept.fits(key, copy))?;
        reads.clear();
        reads.offsets.extend_from_slice(&kept.offsets);
        reads.values.extend_from_slice(&kept.values);
        reads.missed = kept.copy_end.is_some();
        Some(kept.stack.clone())
    }

    /// Caches a walk over `copy` that read `reads` and led to `stack`.
    pub fn put(&mut self, key: StackKey, copy: StackCopy, reads: &Reads, stack: &Arc<RawStack>) {
        let kept = Kept {
            key,
            offsets: reads.offsets.as_slice().into(),
            values: reads.values.as_slice().into(),
            copy_end: reads.missed.then(|| copy.end()),
            stack: stack.clone(),
        };
        self.victim = self.victim.wrapping_add(1);
        let set = self.set(&key);
        let set = &mut self.sets[set];
        let way = set.iter().position(Option::is_none).unwrap_or(self.victim % WAYS);
        self.held_bytes += kept.size_bytes();
        self.held_bytes -= set[way].replace(kept).map_or(0, |gone| gone.size_bytes());
        while self.held_bytes > MAX_BYTES {
            let gone = self.sets[self.emptied].iter_mut().filter_map(Option::take);
            self.held_bytes -= gone.map(|gone| gone.size_bytes()).sum::<usize>();
            self.emptied = (self.emptied + 1) % SETS;
        }
    }

    /// Drops the walks of these processes, which have ended.
    pub fn forget(&mut self, ended: &HashSet<ProcessKey>) {
        for slot in self.sets.iter_mut().flatten() {
            if let Some(gone) = slot.take_if(|kept| ended.contains(&kept.key.space)) {
                self.held_bytes -= gone.size_bytes();
            }
        }
    }

    /// Returns the `Arc` that all stacks equal to `stack` share.
    pub fn intern(&mut self, stack: RawStack) -> Arc<RawStack> {
        if let Some(known) = self.interned.get(&stack) {
            return known.clone();
        }
        if self.interned.len() >= self.sweep_at {
            self.sweep();
        }
        let stack = Arc::new(stack);
        self.interned.insert(stack.clone());
        stack
    }

    /// All interned stacks.
    pub fn interned(&self) -> impl Iterator<Item = &RawStack> {
        self.interned.iter().map(|stack| &**stack)
    }

    /// Drops interned stacks that are not in use elsewhere.
    pub fn sweep(&mut self) {
        self.interned.retain(|stack| Arc::strong_count(stack) > 1);
        self.interned.shrink_to(2 * self.interned.len());
        self.sweep_at = (self.interned.len() * 2).max(FIRST_SWEEP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::{Completeness, UnwinderKind};

    #[test]
    fn bytes_held_are_bounded_and_counted_right() {
        let mut cache = StackCache::default();
        let (offsets, values): (Vec<u32>, Vec<u64>) = (0..2000).map(|at| (at * 8, 0)).unzip();
        let reads = Reads { offsets, values, ..Reads::default() };
        let frame = RawFrame { address: 0, module: None, file_offset: 0 };
        for ip in 0..5000 {
            let stack = RawStack {
                frames: vec![RawFrame { address: ip, ..frame }; 512].into(),
                unwinder: UnwinderKind::Dwarf,
                completeness: Completeness::Complete,
            };
            let registers = Registers { ip, ..Registers::default() };
            let key = StackKey { space: ProcessKey::default(), generation: 0, runtime: 0, registers };
            cache.put(key, StackCopy::default(), &reads, &Arc::new(stack));
            assert!(cache.held_bytes <= MAX_BYTES);
        }
        let counted: usize = cache.sets.iter().flatten().flatten().map(Kept::size_bytes).sum();
        assert_eq!(cache.held_bytes, counted);
        assert!(counted > MAX_BYTES / 2);
    }

    #[test]
    fn walks_of_ended_processes_go() {
        let mut cache = StackCache::default();
        let mut reads = Reads { offsets: vec![0], values: vec![0], ..Reads::default() };
        let copy = StackCopy::from([0; 8].as_slice());
        let stack = Arc::new(RawStack {
            frames: Box::new([]),
            unwinder: UnwinderKind::Dwarf,
            completeness: Completeness::Complete,
        });
        let process = |tgid| ProcessKey { tgid, ..ProcessKey::default() };
        let key = |tgid| StackKey { space: process(tgid), generation: 0, runtime: 0, registers: Registers::default() };
        for tgid in 1..=3 {
            cache.put(key(tgid), copy, &reads, &stack);
        }
        let of_one = cache.held_bytes / 3;
        cache.forget(&HashSet::from([process(1), process(3)]));
        assert_eq!(cache.held_bytes, of_one);
        assert!(cache.get(&key(1), copy, &mut reads).is_none() && cache.get(&key(2), copy, &mut reads).is_some());
    }

    #[test]
    fn interned_stacks_that_nobody_holds_go() {
        let mut cache = StackCache::default();
        let stack = |address| RawStack {
            frames: Box::new([RawFrame { address, module: None, file_offset: 0 }]),
            unwinder: UnwinderKind::Caller,
            completeness: Completeness::Complete,
        };
        let held: Vec<_> = (0..10).map(|address| cache.intern(stack(address))).collect();
        for address in 0..50_000 {
            cache.intern(stack(address));
        }
        assert!(cache.interned.len() <= FIRST_SWEEP, "{}", cache.interned.len());
        for (address, stack_held) in held.iter().enumerate() {
            assert!(Arc::ptr_eq(stack_held, &cache.intern(stack(address as u64))));
        }
    }
}
