//! Which outer frames of a stack need not be copied: those that are always there, and of which walks read only a few
//! words. A compiler's thread may start with a frame of half a megabyte, and a program's `main` with one of ten
//! kilobytes.
//!
//! The words that walks read are compared over a number of consecutive stacks of one thread. From the top of the stack
//! down to where they differ, only these words are copied from then on, in pieces, as long as the return addresses that
//! lead there are in place. If a walk still misses a word, other frames were there, and the return addresses matched by
//! chance. Such a stack is truncated, and says so. From then on, that thread's stacks are copied whole, and after some
//! such threads those of the whole process.

use std::collections::{HashMap, HashSet};

use heapbpf_unwind::memory::Reads;
use heapbpf_unwind::raw::{Completeness, RawStack};
use sampler_ebpf::abi::{
    FEW_STACK_BYTES, OUTER_PIECE_BYTES, OUTER_PIECES, OUTER_STACKS, OuterFrames, ProcessKey, StackKey, StackPiece,
    StackRecord, StackSlot,
};

/// Number of consecutive stacks that are compared.
const COMPARED: u32 = 64;
/// Number of stacks from the first compared one until comparing starts again. It starts sooner if more than
/// [`COMPARED`] had other outer frames.
const ROUND: u32 = 1024;
/// Minimum gap between two pieces, bytes: reading one more piece takes as long as copying a few hundred bytes.
const LEAST_GAP: u64 = 512;
/// Minimum number of bytes that must be left out of each copy.
const LEAST_LEFT_OUT: u64 = 2 << 10;
/// Number of a process's stacks that may miss a word before the process is no longer trusted.
const MOST_MISSES: u32 = 4;
const WORD: u64 = 8;

/// Changes for the kernel's map: what is copied of the outer frames from now on; `None` for everything.
pub type Changes = Vec<(StackKey, Option<OuterFrames>)>;

/// What is known about the outer frames of stacks.
#[derive(Default)]
pub struct OuterStacks {
    stacks: HashMap<StackKey, Stack>,
    /// Number of stacks that missed a word, by process.
    misses: HashMap<ProcessKey, u32>,
    changed: Changes,
}

#[derive(Default)]
struct Stack {
    /// Stacks of this round.
    seen: u32,
    /// The words that the walks of all of them have read, downwards from the top of the stack.
    common: Vec<Word>,
    used: Option<OuterFrames>,
    /// Stacks of this round that had other outer frames than `used`.
    others: u32,
    is_distrusted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word {
    address: u64,
    /// The word if it is a frame's return address, otherwise 0, because other words may change.
    return_address: u64,
}

impl OuterStacks {
    /// Notes a stack whose top is known, and what its walk has read.
    pub fn note(&mut self, head: &StackRecord, stack: &RawStack, reads: &Reads) {
        let key = StackKey { space: head.space, top: head.top };
        if reads.left_out {
            self.distrust(key);
        }
        if self.misses.get(&key.space).is_some_and(|misses| *misses >= MOST_MISSES) {
            return;
        }
        let is_long = head.top.saturating_sub(head.registers.sp) > FEW_STACK_BYTES + LEAST_LEFT_OUT;
        if !is_long || stack.completeness != Completeness::Complete {
            return;
        }
        if self.stacks.len() >= OUTER_STACKS && !self.stacks.contains_key(&key) {
            // A full table is cleared and filled again.
            self.drop_stacks(|_| true);
        }
        let known = self.stacks.entry(key).or_default();
        if known.is_distrusted {
            return;
        }
        known.seen += 1;
        known.others += u32::from(known.used.is_some() && head.pieces == 0);
        if known.seen >= ROUND || known.others > COMPARED {
            (known.seen, known.others) = (0, 0);
        } else if known.seen <= COMPARED {
            known.compare(words(head.registers.sp, stack, reads));
        }
        if known.seen != COMPARED {
            return;
        }
        let best = outer_frames(&std::mem::take(&mut known.common), head.top);
        if best != known.used {
            known.used = best;
            self.changed.push((key, best));
        }
    }

    /// Copies this stack whole from now on.
    fn distrust(&mut self, key: StackKey) {
        let Some(known) = self.stacks.get_mut(&key) else { return };
        if std::mem::replace(&mut known.is_distrusted, true) {
            return;
        }
        known.common = Vec::new();
        if known.used.take().is_some() {
            self.changed.push((key, None));
        }
        let misses = self.misses.entry(key.space).or_default();
        *misses += 1;
        if *misses >= MOST_MISSES {
            self.drop_stacks(|of| of.space == key.space);
        }
    }

    /// Changes since the last call.
    pub fn take_changed(&mut self) -> Changes {
        std::mem::take(&mut self.changed)
    }

    /// Drops what is known about processes that have ended.
    pub fn forget(&mut self, ended: &HashSet<ProcessKey>) {
        self.misses.retain(|process, _| !ended.contains(process));
        self.drop_stacks(|of| ended.contains(&of.space));
    }

    fn drop_stacks(&mut self, which: impl Fn(&StackKey) -> bool) {
        let gone = self.stacks.extract_if(|key, _| which(key));
        self.changed.extend(gone.filter(|(_, stack)| stack.used.is_some()).map(|(key, _)| (key, None)));
    }
}

impl Stack {
    /// Keeps only what this round's stacks have in common with another one.
    fn compare(&mut self, words: Vec<Word>) {
        if self.seen == 1 {
            self.common = words;
            return;
        }
        let same = self.common.iter().zip(&words).take_while(|(one, other)| one == other).count();
        self.common.truncate(same);
    }
}

/// The words that a walk has read, downwards.
fn words(sp: u64, stack: &RawStack, reads: &Reads) -> Vec<Word> {
    let frames: HashSet<u64> = stack.frames.iter().map(|frame| frame.address).collect();
    let read = reads.offsets.iter().zip(&reads.values).map(|(offset, value)| Word {
        address: sp + u64::from(*offset),
        return_address: if frames.contains(&value.wrapping_sub(1)) { *value } else { 0 },
    });
    let mut words: Vec<Word> = read.collect();
    words.sort_unstable_by_key(|word| std::cmp::Reverse(word.address));
    words.dedup();
    words
}

/// What to copy of the outer frames that read these words, downwards from `top`. `None` if that would save little.
///
/// Chooses the outermost frames that leave out at least half of the maximum: the further in a frame is, the sooner it
/// changes.
fn outer_frames(words: &[Word], top: u64) -> Option<OuterFrames> {
    let begins = (1..words.len()).filter(|at| words[*at].return_address != 0);
    let known: Vec<(OuterFrames, u64)> = begins.filter_map(|at| above(&words[..at], words[at], top)).collect();
    let most = known.iter().map(|(_, left_out)| *left_out).max()?;
    let found = known.into_iter().find(|(_, left_out)| *left_out >= most / 2)?;
    (found.1 >= LEAST_LEFT_OUT).then_some(found.0)
}

/// The pieces that hold `words`, which lie above the return address `slot`, and how many bytes they leave out. `None`
/// if there are too many pieces.
fn above(words: &[Word], slot: Word, top: u64) -> Option<(OuterFrames, u64)> {
    let mut pieces = [StackPiece::default(); OUTER_PIECES];
    let mut used = 0;
    for Word { address, .. } in words.iter().rev() {
        let last = pieces[..used].last_mut().filter(|last| {
            *address < last.start + last.bytes + LEAST_GAP && *address + WORD - last.start <= OUTER_PIECE_BYTES as u64
        });
        if let Some(last) = last {
            last.bytes = last.bytes.max(*address + WORD - last.start);
        } else {
            *pieces.get_mut(used)? = StackPiece { start: *address, bytes: WORD };
            used += 1;
        }
    }
    // The frame's own return address is checked, too: only frames that the same function calls have theirs in the same
    // place, so it tells most other frames apart.
    let own = words.iter().rev().find(|word| word.return_address != 0)?;
    let copied: u64 = pieces.iter().map(|piece| piece.bytes).sum();
    let left_out = top.checked_sub(slot.address + WORD)?.saturating_sub(copied);
    let slots = [slot, *own].map(|Word { address, return_address }| StackSlot { address, return_address });
    Some((OuterFrames { slots, pieces }, left_out))
}

#[cfg(test)]
#[path = "outer_stacks_tests.rs"]
mod tests;
