//! The number of trials that an allocation takes, by criterion. This is the only difference between the criteria.

use crate::bits::leading_zeros;

/// One trial per byte; a zero-byte request takes one trial.
pub const CRITERION_BYTES: u64 = 0;
/// One trial per allocation.
pub const CRITERION_ALLOCATIONS: u64 = 1;
/// A number of trials for each size class, taken from a table.
pub const CRITERION_SIZE_CLASS: u64 = 2;

/// Number of size classes: one for each value of a `u8`, of which 252 are in use.
pub const SIZE_CLASSES: usize = 256;

/// Trials per allocation of each size class. The daemon computes them so that class c has sampling interval R_c: (1 −
/// 1/R)^trials = 1 − 1/R_c.
pub type TrialTable = [u64; SIZE_CLASSES];

/// Trials of an allocation of `size_bytes`. `table` is called only under [`CRITERION_SIZE_CLASS`].
#[inline(always)]
pub fn trials(criterion: u64, size_bytes: u64, table: impl FnOnce(usize) -> u64) -> u64 {
    match criterion {
        CRITERION_ALLOCATIONS => 1,
        CRITERION_SIZE_CLASS => table(size_class(size_bytes)),
        _ => {
            if size_bytes == 0 {
                1
            } else {
                size_bytes
            }
        }
    }
}

/// The size class. Sizes 0 to 7 have one class each, then there are four classes per doubling (8–9, 10–11, 12–13,
/// 14–15, 16–19, …). Always below 252.
#[inline(always)]
pub fn size_class(size_bytes: u64) -> usize {
    if size_bytes < 4 {
        return size_bytes as usize & 3;
    }
    let exponent = 63u32.wrapping_sub(leading_zeros(size_bytes));
    let quarter = size_bytes.wrapping_shr(exponent.wrapping_sub(2)) & 3;
    // The mask changes nothing; it is a bound for the BPF verifier.
    (((exponent as u64).wrapping_sub(1) << 2) | quarter) as usize & (SIZE_CLASSES - 1)
}

/// The smallest size of a class in bytes; `None` for a class that contains no 64-bit size.
pub const fn class_start(class: usize) -> Option<u64> {
    match class {
        0..=3 => Some(class as u64),
        4..=251 => Some((4 | (class as u64 & 3)) << (class / 4 - 1)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_begin_where_they_say() {
        for class in 0..252 {
            let start = class_start(class).expect("in use");
            assert_eq!(size_class(start), class);
            if class > 0 {
                assert_eq!(size_class(start - 1), class - 1);
            }
        }
        assert_eq!(class_start(252), None);
        assert_eq!(size_class(u64::MAX), 251);
        assert_eq!((size_class(7), size_class(8), size_class(9), size_class(10)), (7, 8, 8, 9));
    }

    #[test]
    fn trials_by_criterion() {
        assert_eq!(trials(CRITERION_BYTES, 0, |_| 9), 1);
        assert_eq!(trials(CRITERION_BYTES, 100, |_| 9), 100);
        assert_eq!(trials(CRITERION_ALLOCATIONS, 100, |_| 9), 1);
        assert_eq!(trials(CRITERION_SIZE_CLASS, 100, |class| class as u64), size_class(100) as u64);
    }
}
