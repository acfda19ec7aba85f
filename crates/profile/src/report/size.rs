//! Sizes of blocks in powers of two, for the table by size.

use std::fmt;

use crate::model::Row;
use crate::units;

/// Explanation below the table.
pub(super) const NOTE: &str = "each range includes its first size, but not its second; a stack whose samples have several sizes is in \
     a range that covers them all";

/// Width of the longest bar, in columns.
const BAR: f64 = 12.0;

/// Sizes of a row's samples: a power of two, or a range of several. Unknown ones sort last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Sizes {
    /// From the first power of two up to the second; `None`: zero bytes.
    Range(Option<u32>, Option<u32>),
    /// The profile does not contain the sizes.
    Unknown,
}

impl Sizes {
    /// Sizes of a row's samples.
    pub(super) fn of(row: &Row) -> Self {
        let sums = if row.alloc.samples > 0 { &row.alloc } else { &row.inuse };
        if sums.samples == 0 || sums.largest_bytes == u64::MAX || sums.largest_bytes < sums.smallest_bytes {
            return Self::Unknown;
        }
        Self::Range(sums.smallest_bytes.checked_ilog2(), sums.largest_bytes.checked_ilog2())
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let power = |exponent: u32| units::bytes(2_f64.powi(exponent as i32));
        match self {
            Self::Unknown => out.write_str("unknown"),
            Self::Range(_, None) => out.write_str("0 B"),
            Self::Range(first, Some(last)) => {
                write!(out, "{} – {}", first.map_or_else(|| "0 B".to_owned(), power), power(last + 1))
            }
        }
    }
}

/// A bar whose length is the value's share of the largest one.
pub(super) fn bar(value: f64, largest: f64) -> String {
    let length = if largest > 0.0 { (value / largest * BAR).clamp(0.0, BAR) } else { 0.0 };
    let halves = (2.0 * length).round() as usize;
    "█".repeat(halves / 2) + if halves % 2 == 1 { "▌" } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn sizes_are_powers_of_two_and_ranges() {
        let sizes = |smallest_bytes, largest_bytes| {
            let mut row = testing::small().rows[0].clone();
            (row.alloc.smallest_bytes, row.alloc.largest_bytes) = (smallest_bytes, largest_bytes);
            Sizes::of(&row)
        };
        let named = |smallest, largest| sizes(smallest, largest).to_string();
        assert_eq!(named(496, 496), "256 B – 512 B");
        assert_eq!(named(512, 512), "512 B – 1.00 KiB");
        assert_eq!(named(0, 0), "0 B");
        assert_eq!(named(0, 24), "0 B – 32 B");
        assert_eq!(named(256, 2048), "256 B – 4.00 KiB");
        assert_eq!(named(0, u64::MAX), "unknown");
        assert_eq!(named(1 << 63, u64::MAX - 1), "8.00 EiB – 16.0 EiB");
        assert!(sizes(16, 16) < sizes(16, 32) && sizes(0, 8) < sizes(8, 8) && sizes(1, 1) < sizes(0, u64::MAX));
    }

    #[test]
    fn bars_are_shares_of_the_largest() {
        assert_eq!(bar(10.0, 10.0).chars().count(), 12);
        assert_eq!(bar(5.0, 10.0), "█".repeat(6));
        assert_eq!((bar(0.0, 10.0), bar(0.3, 10.0), bar(1.0, 0.0)), (String::new(), "▌".into(), String::new()));
    }
}
