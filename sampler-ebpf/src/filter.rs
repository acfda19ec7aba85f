//! The filter before the live map: which of its counts an address belongs to.

/// Counts in the filter: 64 KiB of them.
pub const SLOTS: usize = 1 << 14;

/// Blocks of one region share one cache line of the filter: a program frees what lies near what it freed before, and so
/// finds that line in the cache where it would have to fetch another one for each block.
const REGION_SHIFT: u32 = 10;
/// Blocks are multiples of 16 bytes apart.
const BLOCK_SHIFT: u32 = 4;
/// Counts in a cache line.
const LINE: u64 = 16;

/// The count that a block's address belongs to. The product spreads regular distances of regions (Fibonacci hashing: 2^64
/// divided by the golden ratio), the fold before it large powers of two.
#[inline(always)]
#[must_use]
pub const fn slot_of(address: u64) -> u32 {
    let region = address >> REGION_SHIFT;
    let hash = (region ^ (region >> 15)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SLOTS.trailing_zeros());
    (hash ^ (address >> BLOCK_SHIFT & (LINE - 1))) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As many blocks as there are slots, a constant distance apart, leave no slot with more than a few.
    #[test]
    fn regular_distances_do_not_collide() {
        for distance in [16u64, 32, 112, 1024, 4096, 65_536, 1 << 20, 1 << 26, 1 << 30] {
            let mut counts = vec![0u32; SLOTS];
            for i in 0..SLOTS as u64 {
                counts[slot_of(0x5555_5555_0010 + i * distance) as usize] += 1;
            }
            assert!(counts.iter().all(|count| *count <= 10), "{distance}: {:?}", counts.iter().max());
        }
    }

    /// Blocks of a region lie in one line of 64 bytes.
    #[test]
    fn neighbours_share_a_line() {
        let line = |address: u64| u64::from(slot_of(address)) / LINE;
        assert!((0..64).all(|block| line(0x7f00_1234_0400 + 16 * block) == line(0x7f00_1234_0400)));
        assert_ne!(line(0x7f00_1234_0400), line(0x7f00_1234_0800));
    }
}
