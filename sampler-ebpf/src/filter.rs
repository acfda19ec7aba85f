//! The filter before the live map: which of its counts an address belongs to.

/// Counts in the filter: 256 KiB of them, which a core's second-level cache holds.
pub const SLOTS: usize = 1 << 16;

/// The count that a block's address belongs to. Blocks are multiples of 16 bytes apart; the product spreads regular
/// distances (Fibonacci hashing: 2^64 divided by the golden ratio), the fold before it large powers of two.
#[inline(always)]
#[must_use]
pub const fn slot_of(address: u64) -> u32 {
    let block = address >> 4;
    ((block ^ (block >> 15)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SLOTS.trailing_zeros())) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks a constant distance apart are spread evenly: 65,536 of them leave no slot with more than a few.
    #[test]
    fn regular_distances_do_not_collide() {
        for distance in [16u64, 32, 112, 4096, 1 << 20] {
            let mut counts = vec![0u32; SLOTS];
            for i in 0..SLOTS as u64 {
                counts[slot_of(0x5555_5555_0000 + i * distance) as usize] += 1;
            }
            assert!(counts.iter().all(|count| *count <= 8), "{distance}: {:?}", counts.iter().max());
        }
    }
}
