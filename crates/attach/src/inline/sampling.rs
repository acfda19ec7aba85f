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

/// What kept the set of sampled blocks in a process from being larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SetBound {
    /// It was made for this many blocks: as many as the process has at this interval when it has grown.
    Size(u64),
    /// `--live-max`.
    LiveMax(u32),
    /// A limit of the process on this.
    Limit(&'static str),
    /// No set is larger.
    Largest,
}

impl Sampling {
    /// Size of the set for the sampled blocks of a process with this much anonymous memory: it has 2^n entries. Half as
    /// many blocks always find a free entry. `most`: what the process has a limit on, and the maximum size of the set
    /// because of that, in bytes. The smallest set may be larger. Returns n and what decided it.
    pub(super) fn set(&self, anonymous_bytes: u64, most: Option<(&'static str, u64)>) -> (u32, SetBound) {
        let grown = anonymous_bytes.saturating_mul(GROWTH).max(GROWN_BYTES);
        let of_process = grown / self.draw.interval.max(LEAST_BLOCK_BYTES);
        let live_max = u64::from(self.live_max);
        let needed = (2 * of_process.min(live_max)).next_power_of_two().ilog2().max(LEAST_SET_LOG2);
        let most_log2 = most.map_or(MAX_SET_LOG2, |(_, bytes)| (bytes / ENTRY_BYTES).max(1).ilog2());
        let log2 = needed.min(most_log2).clamp(LEAST_SET_LOG2, MAX_SET_LOG2);
        let bound = match most {
            Some((name, _)) if log2 < needed && most_log2 < MAX_SET_LOG2 => SetBound::Limit(name),
            _ if log2 < needed => SetBound::Largest,
            _ if live_max <= of_process => SetBound::LiveMax(self.live_max),
            _ => SetBound::Size(1 << (log2 - 1)),
        };
        (log2, bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_space_for_the_blocks_of_a_heap_that_grows() {
        let log2 = |interval, live_max, anonymous_bytes| {
            let draw = DrawConstants { interval, ..DrawConstants::default() };
            Sampling { draw, seed: 0, criterion: 0, live_max, lossless: false }.set(anonymous_bytes, None).0
        };
        let most = 1 << 20;
        assert_eq!([512 << 10, 8 << 10, 4 << 10].map(|interval| log2(interval, most, 10 << 20)), [16, 16, 17]);
        assert_eq!([256, 1, 0].map(|interval| log2(interval, most, 10 << 20)), [21, 21, 21], "--live-max bounds it");
        assert_eq!(log2(512 << 10, most, 64 << 30), 20, "a large process, 256 GiB of blocks");
        assert_eq!(log2(1, 100, 0), 16);
        assert_eq!(log2(1, u32::MAX, u64::MAX), MAX_SET_LOG2);
    }

    #[test]
    fn what_decided_the_size_of_a_set_is_known() {
        let set = |interval, live_max, most_bytes: Option<u64>| {
            let draw = DrawConstants { interval, ..DrawConstants::default() };
            let sampling = Sampling { draw, seed: 0, criterion: 0, live_max, lossless: false };
            sampling.set(10 << 20, most_bytes.map(|bytes| ("bytes", bytes)))
        };
        assert_eq!(set(4 << 10, 1 << 20, None), (17, SetBound::Size(65_536)));
        assert_eq!(set(512 << 10, 1 << 20, Some(1)), (16, SetBound::Size(32_768)), "the smallest is large enough");
        assert_eq!(set(1, 1 << 20, None), (21, SetBound::LiveMax(1 << 20)));
        assert_eq!(set(1, 1 << 20, Some(ENTRY_BYTES << 18)), (18, SetBound::Limit("bytes")));
        assert_eq!(set(1, 1 << 20, Some(0)), (16, SetBound::Limit("bytes")));
        let draw = DrawConstants { interval: 1, ..DrawConstants::default() };
        let most = Sampling { draw, seed: 0, criterion: 0, live_max: u32::MAX, lossless: false };
        assert_eq!(most.set(64 << 30, Some(("bytes", u64::MAX))), (MAX_SET_LOG2, SetBound::Largest));
    }
}
