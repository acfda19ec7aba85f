//! Settings for how hooked processes sample, and how many sampled blocks they can hold.

use heapbpf_inline::abi::{ENTRY_BYTES, MAX_SET_LOG2};
use sampler_ebpf::geometric::DrawConstants;

/// The set of sampled blocks has at least 2^16 entries. A page of the set becomes memory when a block is first noted in
/// it.
pub(super) const LEAST_SET_LOG2: u32 = 16;
/// The set is large enough for a process that grows to this size.
const GROWN_BYTES: u64 = 256 << 20;
/// Or to this many times the size that it has when it is hooked.
const GROWTH: u64 = 4;
/// Minimum size of a block in bytes.
const LEAST_BLOCK_BYTES: u64 = 32;

/// How hooked processes sample.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Constants of the draw.
    pub draw: DrawConstants,
    /// Seed of the draws; 0 for unpredictable ones.
    pub seed: u64,
    /// What a trial is: bytes or allocations.
    pub criterion: u32,
    /// Maximum number of sampled blocks that are tracked, over all processes.
    pub live_max: u32,
    /// Whether processes wait when samples come faster than they are taken in, so that none is lost.
    pub lossless: bool,
}

impl Sampling {
    /// The set for the sampled blocks of a process with this much anonymous memory has 2^`set_log2` entries. Half as
    /// many blocks always find a free entry. The set has at most `most_bytes`, unless it is the smallest.
    pub(super) fn set_log2(&self, anonymous_bytes: u64, most_bytes: u64) -> u32 {
        let grown = anonymous_bytes.saturating_mul(GROWTH).max(GROWN_BYTES);
        let blocks = u64::from(self.live_max).min(grown / self.draw.interval.max(LEAST_BLOCK_BYTES));
        let most_log2 = (most_bytes / ENTRY_BYTES).max(1).ilog2();
        (2 * blocks).next_power_of_two().ilog2().min(most_log2).clamp(LEAST_SET_LOG2, MAX_SET_LOG2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_the_blocks_of_a_heap_that_grows() {
        let log2 = |interval, live_max, anonymous_bytes| {
            let draw = DrawConstants { interval, ..DrawConstants::default() };
            Sampling { draw, seed: 0, criterion: 0, live_max, lossless: false }.set_log2(anonymous_bytes, u64::MAX)
        };
        let most = 1 << 20;
        assert_eq!([512 << 10, 8 << 10, 4 << 10].map(|interval| log2(interval, most, 10 << 20)), [16, 16, 17]);
        assert_eq!([256, 1, 0].map(|interval| log2(interval, most, 10 << 20)), [21, 21, 21], "--live-max bounds it");
        assert_eq!(log2(512 << 10, most, 64 << 30), 20, "a large process, 256 GiB of blocks");
        assert_eq!(log2(1, 100, 0), 16);
        assert_eq!(log2(1, u32::MAX, u64::MAX), MAX_SET_LOG2);
    }
}
