//! The filter before the live map: maps an address to one of its counts.

/// Number of counts in the filter, which takes 64 KiB.
pub const SLOTS: usize = 1 << 14;

/// Blocks of one region share a cache line of the filter. A program usually frees blocks near those that it freed
/// before, so the line is usually cached already.
const REGION_SHIFT: u32 = 10;
/// Block addresses are multiples of 16 bytes apart.
const BLOCK_SHIFT: u32 = 4;
/// Number of counts in a cache line.
const LINE: u64 = 16;

/// The index of the count for a block's address. The multiplication spreads regions at regular distances (Fibonacci
/// hashing: 2^64 divided by the golden ratio). The fold before it spreads distances that are large powers of two.
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

    /// As many blocks as there are slots, a constant distance apart: no slot gets more than a few.
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

    /// Blocks of a region share one line of 64 bytes.
    #[test]
    fn neighbours_share_a_line() {
        let line = |address: u64| u64::from(slot_of(address)) / LINE;
        assert!((0..64).all(|block| line(0x7f00_1234_0400 + 16 * block) == line(0x7f00_1234_0400)));
        assert_ne!(line(0x7f00_1234_0400), line(0x7f00_1234_0800));
    }
}
