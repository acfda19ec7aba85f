//! Addresses of the sampled mappings of an address space. Mappings are unmapped by address, possibly in parts, and new
//! ones may replace them.

use std::collections::BTreeMap;

/// A contiguous piece of a sampled mapping that is still mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    end: u64,
    sample: u64,
    /// When it was mapped (CLOCK_MONOTONIC).
    since_ns: u64,
}

/// Pieces by their first address. They do not overlap.
#[derive(Debug, Default)]
pub struct MappedPieces(BTreeMap<u64, Piece>);

impl MappedPieces {
    /// Adds a sampled mapping. Whatever was mapped there before must be removed first, with [`MappedPieces::unmap`].
    pub fn map(&mut self, start: u64, end: u64, sample: u64, since_ns: u64) {
        if start < end {
            self.0.insert(start, Piece { end, sample, since_ns });
        }
    }

    /// Removes the parts of pieces that lie in a range and were mapped no later than `until_ns`. Returns each sample
    /// with the number of bytes that it loses; a sample with several pieces may occur several times. An empty range
    /// removes nothing.
    pub fn unmap(&mut self, start: u64, end: u64, until_ns: u64) -> Vec<(u64, u64)> {
        if start >= end {
            return Vec::new();
        }
        let first =
            self.0.range(..start).next_back().filter(|(_, piece)| piece.end > start).map_or(start, |(at, _)| *at);
        let hit: Vec<(u64, Piece)> = self
            .0
            .range(first..end)
            .filter(|(_, piece)| piece.since_ns <= until_ns)
            .map(|(at, piece)| (*at, *piece))
            .collect();
        let mut lost = Vec::new();
        for (at, piece) in hit {
            self.0.remove(&at);
            self.map(at, start.min(piece.end), piece.sample, piece.since_ns);
            self.map(end, piece.end, piece.sample, piece.since_ns);
            lost.push((piece.sample, piece.end.min(end) - at.max(start)));
        }
        lost
    }

    /// Removes the parts of pieces that lie outside of `ranges` (in order of their starts) and were mapped no later
    /// than `until_ns`. Returns the same as [`MappedPieces::unmap`].
    pub fn keep_only(&mut self, ranges: &[(u64, u64)], until_ns: u64) -> Vec<(u64, u64)> {
        let (mut lost, mut from) = (Vec::new(), 0);
        for (start, end) in ranges {
            lost.extend(self.unmap(from, *start, until_ns));
            from = from.max(*end);
        }
        lost.extend(self.unmap(from, u64::MAX, until_ns));
        lost
    }

    /// First address, length in bytes and sample of each piece.
    pub fn pieces(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        self.0.iter().map(|(start, piece)| (*start, piece.end - start, piece.sample))
    }

    /// Number of pieces that were mapped no later than `until_ns`, and the sum of their bytes.
    pub fn mapped_by(&self, until_ns: u64) -> (u64, u64) {
        let mapped = self.0.iter().filter(|(_, piece)| piece.since_ns <= until_ns);
        mapped.fold((0, 0), |(pieces, bytes), (start, piece)| (pieces + 1, bytes + (piece.end - start)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(mapped: &MappedPieces) -> Vec<(u64, u64, u64)> {
        mapped.0.iter().map(|(start, piece)| (*start, piece.end, piece.sample)).collect()
    }

    #[test]
    fn a_mapping_is_unmapped_in_parts() {
        let mut mapped = MappedPieces::default();
        mapped.map(100, 200, 1, 0);
        assert_eq!(mapped.unmap(150, 160, 9), [(1, 10)]);
        assert_eq!(pieces(&mapped), [(100, 150, 1), (160, 200, 1)]);
        assert_eq!(mapped.unmap(140, 170, 9), [(1, 10), (1, 10)]);
        assert_eq!(mapped.unmap(0, 1000, 9), [(1, 40), (1, 30)]);
        assert_eq!(mapped.unmap(0, 1000, 9), []);
    }

    #[test]
    fn what_lies_outside_of_ranges_is_gone() {
        let mut mapped = MappedPieces::default();
        for (sample, since) in [(1, 1), (2, 2), (3, 3), (4, 9)] {
            mapped.map(sample * 100, sample * 100 + 50, sample, since);
        }
        assert_eq!(mapped.mapped_by(2), (2, 100));
        assert_eq!(
            mapped.keep_only(&[(0, 120), (110, 130), (290, 310), (305, 308), (320, 330)], 5),
            [(1, 20), (2, 50), (3, 10), (3, 20)]
        );
        assert_eq!(pieces(&mapped), [(100, 130, 1), (300, 310, 3), (320, 330, 3), (400, 450, 4)]);
        assert_eq!(mapped.mapped_by(u64::MAX), (4, 100));
    }

    #[test]
    fn neighbours_keep_their_bytes() {
        let mut mapped = MappedPieces::default();
        mapped.map(100, 200, 1, 0);
        mapped.map(200, 300, 2, 0);
        mapped.map(300, 400, 3, 0);
        assert_eq!(mapped.unmap(200, 300, 9), [(2, 100)]);
        assert_eq!(mapped.unmap(150, 350, 9), [(1, 50), (3, 50)]);
        assert_eq!(pieces(&mapped), [(100, 150, 1), (350, 400, 3)]);
    }

    #[test]
    fn an_empty_range_removes_nothing() {
        let mut mapped = MappedPieces::default();
        mapped.map(100, 200, 1, 0);
        for (start, end) in [(150, 150), (180, 120), (500, 400)] {
            assert_eq!(mapped.unmap(start, end, 9), []);
        }
        assert_eq!(pieces(&mapped), [(100, 200, 1)]);
    }

    #[test]
    fn what_was_mapped_later_stays() {
        let mut mapped = MappedPieces::default();
        mapped.map(100, 200, 1, 10);
        assert_eq!(mapped.unmap(100, 200, 9), []);
        assert_eq!(mapped.unmap(100, 200, 10), [(1, 100)]);
        mapped.map(7, 7, 2, 0);
        assert_eq!(pieces(&mapped), []);
    }
}
