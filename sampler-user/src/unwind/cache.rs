//! Repeated stacks: the result of a walk, valid again if every word that the walk has read is the same.
//!
//! A walk depends on the mappings, on three registers and on the words it read, and on nothing else. So a later
//! sample with equal registers in the same address space, and with these words unchanged, has the same stack: that is
//! exact, no matter what else is in the copy.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use super::memory::{Reads, word};
use super::raw::{RawFrame, RawStack};
use sampler_ebpf::abi::{ProcessKey, Registers};

const SETS: usize = 2048;
const WAYS: usize = 4;
/// Most bytes of kept walks.
const MAX_BYTES: usize = 32 << 20;
/// Interned stacks below which unused ones are not looked for.
const FIRST_SWEEP: usize = 4096;

/// What a walk depends on besides memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackKey {
    /// Address space.
    pub space: ProcessKey,
    /// State of its mappings.
    pub generation: u64,
    /// Where the walk begins.
    pub registers: Registers,
}

struct Kept {
    key: StackKey,
    offsets: Box<[u32]>,
    values: Box<[u64]>,
    /// Length of the copy, if the walk asked for a word that was not in it.
    copied_bytes: Option<usize>,
    stack: Arc<RawStack>,
}

impl Kept {
    fn size_bytes(&self) -> usize {
        size_of::<Self>() + self.values.len() * 12 + self.stack.frames.len() * size_of::<RawFrame>()
    }

    fn fits(&self, key: &StackKey, copy: &[u8]) -> bool {
        self.key == *key
            && self.copied_bytes.is_none_or(|bytes| bytes == copy.len())
            && self.offsets.iter().zip(&self.values).all(|(offset, value)| word(copy, *offset) == Some(*value))
    }
}

/// Walks kept for repetition, set-associative, and the stacks they led to, interned.
pub struct StackCache {
    sets: Box<[[Option<Kept>; WAYS]]>,
    victim: usize,
    held_bytes: usize,
    /// The next set to be emptied when there is too much.
    emptied: usize,
    interned: HashSet<Arc<RawStack>, BuildHasherDefault<Mixer>>,
    sweep_at: usize,
}

impl Default for StackCache {
    fn default() -> Self {
        Self {
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
    fn set(key: &StackKey) -> usize {
        let Registers { ip, sp, fp, .. } = key.registers;
        let mut mixer = Mixer::default();
        for part in [key.space.start_ns, u64::from(key.space.tgid), key.generation, ip, sp, fp] {
            mixer.write_u64(part);
        }
        mixer.finish() as usize % SETS
    }

    /// The stack of an earlier walk that `copy` would repeat word for word.
    pub fn get(&self, key: &StackKey, copy: &[u8]) -> Option<Arc<RawStack>> {
        let set = &self.sets[Self::set(key)];
        let kept = set.iter().flatten().find(|kept| kept.fits(key, copy))?;
        Some(kept.stack.clone())
    }

    /// Keeps a walk.
    pub fn put(&mut self, key: StackKey, copy: &[u8], reads: &Reads, stack: &Arc<RawStack>) {
        let kept = Kept {
            key,
            offsets: reads.offsets.as_slice().into(),
            values: reads.values.as_slice().into(),
            copied_bytes: reads.missed.then_some(copy.len()),
            stack: stack.clone(),
        };
        self.victim = self.victim.wrapping_add(1);
        let set = &mut self.sets[Self::set(&key)];
        let way = set.iter().position(Option::is_none).unwrap_or(self.victim % WAYS);
        self.held_bytes += kept.size_bytes();
        self.held_bytes -= set[way].replace(kept).map_or(0, |gone| gone.size_bytes());
        while self.held_bytes > MAX_BYTES {
            let gone = self.sets[self.emptied].iter_mut().filter_map(Option::take);
            self.held_bytes -= gone.map(|gone| gone.size_bytes()).sum::<usize>();
            self.emptied = (self.emptied + 1) % SETS;
        }
    }

    /// Drops the walks of these address spaces: nothing of them will be repeated.
    pub fn forget(&mut self, ended: &HashSet<ProcessKey>) {
        for slot in self.sets.iter_mut().flatten() {
            if let Some(gone) = slot.take_if(|kept| ended.contains(&kept.key.space)) {
                self.held_bytes -= gone.size_bytes();
            }
        }
    }

    /// The one `Arc` for stacks equal to `stack`.
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

    /// Lets go of stacks that nobody else has any more.
    pub fn sweep(&mut self) {
        self.interned.retain(|stack| Arc::strong_count(stack) > 1);
        self.interned.shrink_to(2 * self.interned.len());
        self.sweep_at = (self.interned.len() * 2).max(FIRST_SWEEP);
    }
}

/// A fast hasher for keys that are checked for equality afterwards. What collides on purpose (a target that arranges
/// its addresses) only costs its own time: sets hold four walks, and interning compares few stacks of one process.
#[derive(Default)]
pub struct Mixer(u64);

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(value.into());
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(value.into());
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }

    fn write_u64(&mut self, value: u64) {
        let product =
            u128::from(self.0 ^ value ^ 0x2545_f491_4f6c_dd1d).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unwind::raw::{Completeness, UnwinderKind};

    #[test]
    fn bytes_held_are_bounded_and_counted_right() {
        let mut cache = StackCache::default();
        let (offsets, values): (Vec<u32>, Vec<u64>) = (0..2000).map(|at| (at * 8, 0)).unzip();
        let reads = Reads { offsets, values, missed: false };
        let frame = RawFrame { address: 0, module: None, file_offset: 0 };
        for ip in 0..5000 {
            let stack = RawStack {
                frames: vec![RawFrame { address: ip, ..frame }; 512].into(),
                unwinder: UnwinderKind::Dwarf,
                completeness: Completeness::Complete,
            };
            let registers = Registers { ip, ..Registers::default() };
            let key = StackKey { space: ProcessKey::default(), generation: 0, registers };
            cache.put(key, &[], &reads, &Arc::new(stack));
            assert!(cache.held_bytes <= MAX_BYTES);
        }
        let counted: usize = cache.sets.iter().flatten().flatten().map(Kept::size_bytes).sum();
        assert_eq!(cache.held_bytes, counted);
        assert!(counted > MAX_BYTES / 2);
    }

    #[test]
    fn walks_of_ended_processes_go() {
        let mut cache = StackCache::default();
        let reads = Reads { offsets: vec![0], values: vec![0], missed: false };
        let stack = Arc::new(RawStack {
            frames: Box::new([]),
            unwinder: UnwinderKind::Dwarf,
            completeness: Completeness::Complete,
        });
        let process = |tgid| ProcessKey { tgid, ..ProcessKey::default() };
        let key = |tgid| StackKey { space: process(tgid), generation: 0, registers: Registers::default() };
        for tgid in 1..=3 {
            cache.put(key(tgid), &[0; 8], &reads, &stack);
        }
        let of_one = cache.held_bytes / 3;
        cache.forget(&HashSet::from([process(1), process(3)]));
        assert_eq!(cache.held_bytes, of_one);
        assert!(cache.get(&key(1), &[0; 8]).is_none() && cache.get(&key(2), &[0; 8]).is_some());
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
