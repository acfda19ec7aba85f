//! Processes whose frees are not followed any more: what they have in use is forgotten, what they allocate is not.

use std::collections::HashSet;

use sampler_ebpf::abi::ProcessKey;

use super::{Heap, LiveSample, weight_of};
use crate::heap::sums::SampleSums;

/// What is known of them.
#[derive(Default)]
pub(super) struct Left {
    /// Address spaces in which frees go unseen, and processes with blocks there.
    spaces: HashSet<ProcessKey>,
    /// Blocks sampled there since, by address.
    blocks: Vec<(ProcessKey, u64)>,
}

impl Left {
    /// Whether a block's free will go unseen; if so it is taken note of, with who allocated it.
    pub(super) fn takes(&mut self, space: ProcessKey, process: ProcessKey, address: u64) -> bool {
        let left = self.spaces.contains(&space);
        if left {
            self.spaces.insert(process);
            self.blocks.push((space, address));
        }
        left
    }
}

impl Heap {
    /// Bytes in use in an address space, estimated.
    pub fn inuse_bytes_of(&self, space: &ProcessKey) -> f64 {
        let bytes =
            |live: &LiveSample| live.size_bytes as f64 * weight_of(live.trials, self.rows[live.row as usize].interval);
        self.spaces.get(space).map_or(0.0, |samples| samples.values().map(bytes).sum())
    }

    /// Frees in an address space go unseen from here on: its blocks are forgotten, and later ones are counted as allocated
    /// alone. Returns the blocks' addresses.
    pub fn leave(&mut self, space: ProcessKey) -> Vec<u64> {
        self.note_peak();
        self.left.spaces.insert(space);
        self.mappings.remove(&space);
        let samples = self.spaces.remove(&space).unwrap_or_default();
        for live in samples.values() {
            self.forget(live);
            // A child of vfork allocates in its parent's.
            self.left.spaces.insert(self.rows[live.row as usize].process);
        }
        // The peak is that of the others from here on: of the moment that is known.
        self.peak_bytes = 0.0;
        for (_, row) in &mut self.rows {
            if self.left.spaces.contains(&row.process) {
                row.peak = SampleSums::default();
            }
            self.peak_bytes += row.peak.bytes;
        }
        samples.into_values().map(|live| live.address).collect()
    }

    /// Whether it is unknown what a process has in use.
    pub fn has_left(&self, process: &ProcessKey) -> bool {
        self.left.spaces.contains(process)
    }

    /// Blocks sampled where frees go unseen since the last call: address space and address.
    pub fn take_left(&mut self) -> Vec<(ProcessKey, u64)> {
        std::mem::take(&mut self.left.blocks)
    }

    /// Drops processes that have ended.
    pub fn forget_left(&mut self, ended: &HashSet<ProcessKey>) {
        self.left.spaces.retain(|process| !ended.contains(process));
        self.forget_recovered(ended);
    }
}
