//! A place for the blob: unmapped addresses within reach of the allocator's text.

use std::ops::Range;

use crate::abi::PAGE_BYTES;

/// How far a 32-bit distance reaches, less some slack for the distances within the blob, bytes.
const REACH_BYTES: u64 = (1 << 31) - (64 << 20);
/// Kept free on either side: a heap or a mapping there may grow.
const MARGIN_BYTES: u64 = 64 << 10;
/// Lowest address that is used; the kernel refuses lower ones (`vm.mmap_min_addr`).
const LOWEST: u64 = 1 << 20;
/// End of user addresses (47 bits), less a page.
const HIGHEST: u64 = (1 << 47) - PAGE_BYTES;

/// A mapping of the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Its addresses.
    pub addresses: Range<u64>,
    /// Whether it grows upwards: `[heap]`.
    pub grows_up: bool,
    /// Whether it grows downwards: `[stack]`.
    pub grows_down: bool,
}

/// Finds the address nearest to `text` at which `bytes` (whole pages) are unmapped and all within reach of all of
/// `text`.
///
/// `mappings` are all mappings of the target, ascending. Places right above a mapping that grows up, or right below one
/// that grows down, are not used.
#[must_use]
pub fn find(mappings: &[Mapping], text: &Range<u64>, bytes: u64) -> Option<u64> {
    let mut best: Option<(u64, u64)> = None;
    let mut previous = (LOWEST, false);
    let end = Mapping { addresses: HIGHEST..HIGHEST, grows_up: false, grows_down: false };
    for mapping in mappings.iter().chain([&end]) {
        let (low, high) = (previous.0.checked_add(MARGIN_BYTES)?, mapping.addresses.start.saturating_sub(MARGIN_BYTES));
        let low = low.next_multiple_of(PAGE_BYTES);
        let high = high / PAGE_BYTES * PAGE_BYTES;
        if high.checked_sub(low).is_some_and(|room| room >= bytes) {
            let lowest = (!previous.1).then_some(low);
            let highest = (!mapping.grows_down).then_some(high - bytes);
            for at in lowest.into_iter().chain(highest) {
                let span = text.end.max(at + bytes) - text.start.min(at);
                if span <= REACH_BYTES && best.is_none_or(|(_, least)| span < least) {
                    best = Some((at, span));
                }
            }
        }
        previous = (mapping.addresses.end.max(previous.0), mapping.grows_up);
    }
    best.map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(start: u64, end: u64) -> Mapping {
        Mapping { addresses: start..end, grows_up: false, grows_down: false }
    }

    const TEXT: Range<u64> = 0x7f00_0010_0000..0x7f00_0020_0000;

    #[test]
    fn takes_the_nearest_place_with_margins() {
        let mappings = [mapping(0x7f00_0000_0000, 0x7f00_0020_0000), mapping(0x7f00_0040_0000, 0x7f00_0050_0000)];
        assert_eq!(find(&mappings, &TEXT, 0x10_0000), Some(0x7f00_0021_0000));
        // Too large for the gap above: it goes below, or beyond.
        assert_eq!(find(&mappings, &TEXT, 0x30_0000), Some(0x7eff_ffcf_0000));
    }

    #[test]
    fn keeps_away_from_what_grows() {
        let mut mappings =
            vec![mapping(0x7f00_0010_0000, 0x7f00_0020_0000), mapping(0x7f00_0080_0000, 0x7f00_0090_0000)];
        mappings[0].grows_up = true;
        mappings[1].grows_down = true;
        let found = find(&mappings, &TEXT, 0x1000).expect("below the text");
        assert!(found < TEXT.start);
    }

    #[test]
    fn nothing_within_reach() {
        let mappings = [mapping(0x7e00_0000_0000, 0x7fff_0000_0000)];
        assert_eq!(find(&mappings, &TEXT, 0x1000), None);
        assert_eq!(find(&[mapping(0, u64::MAX)], &TEXT, 0x1000), None);
    }
}
