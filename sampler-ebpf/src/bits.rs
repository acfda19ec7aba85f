//! Bit counting for BPF, which has no instruction for it. The code is straight-line, because each branch doubles the
//! verifier's work.

/// The number of leading zeros; 64 for zero.
#[inline(always)]
pub fn leading_zeros(value: u64) -> u32 {
    // Six steps set every bit below the highest one. The bits that remain unset are counted.
    let mut filled = value;
    filled |= filled >> 1;
    filled |= filled >> 2;
    filled |= filled >> 4;
    filled |= filled >> 8;
    filled |= filled >> 16;
    filled |= filled >> 32;
    count_ones(!filled)
}

/// The number of ones, added up in ever wider fields.
#[inline(always)]
fn count_ones(value: u64) -> u32 {
    let pairs = value - ((value >> 1) & 0x5555_5555_5555_5555);
    let nibbles = (pairs & 0x3333_3333_3333_3333) + ((pairs >> 2) & 0x3333_3333_3333_3333);
    let bytes = (nibbles + (nibbles >> 4)) & 0x0f0f_0f0f_0f0f_0f0f;
    (bytes.wrapping_mul(0x0101_0101_0101_0101) >> 56) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_hardware() {
        let mut value = 1u64;
        for _ in 0..10_000 {
            value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let shifted = value >> (value >> 58);
            assert_eq!(leading_zeros(shifted), shifted.leading_zeros());
            assert_eq!(count_ones(value), value.count_ones());
        }
        assert_eq!((leading_zeros(0), leading_zeros(1), leading_zeros(u64::MAX)), (64, 63, 0));
    }
}
