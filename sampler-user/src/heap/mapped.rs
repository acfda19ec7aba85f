//! Where the sampled mappings of an address space lie: parts of them may go, and others may come in their place.

use std::collections::BTreeMap;

/// A piece of a sampled mapping that is still there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    end: u64,
    sample: u64,
    /// CLOCK_MONOTONIC when it was mapped.
    since_ns: u64,
}

/// Pieces by their first address; they do not overlap.
#[derive(Debug, Default)]
pub struct MappedPieces(BTreeMap<u64, Piece>);

impl MappedPieces {
    /// A sampled mapping came into being. What was there before must have gone, seen or not: take it out first.
    pub fn map(&mut self, start: u64, end: u64, sample: u64, since_ns: u64) {
        if start < end {
            self.0.insert(start, Piece { end, sample, since_ns });
        }
    }

    /// Takes out what lies in a range and was mapped by `until_ns`: samples with the bytes that each loses.
    pub fn unmap(&mut self, start: u64, end: u64, until_ns: u64) -> Vec<(u64, u64)> {
        let first =
            self.0.range(..start).next_back().filter(|(_, piece)| piece.end > start).map_or(start, |(at, _)| *at);
        if first >= end {
            return Vec::new();
        }
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
            self.map(end.max(at), piece.end, piece.sample, piece.since_ns);
            lost.push((piece.sample, piece.end.min(end) - at.max(start)));
        }
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(mapped: &MappedPieces) -> Vec<(u64, u64, u64)> {
        mapped.0.iter().map(|(start, piece)| (*start, piece.end, piece.sample)).collect()
    }

    #[test]
    fn a_mapping_goes_in_parts() {
        let mut mapped = MappedPieces::default();
        mapped.map(100, 200, 1, 0);
        assert_eq!(mapped.unmap(150, 160, 9), [(1, 10)]);
        assert_eq!(pieces(&mapped), [(100, 150, 1), (160, 200, 1)]);
        assert_eq!(mapped.unmap(140, 170, 9), [(1, 10), (1, 10)]);
        assert_eq!(mapped.unmap(0, 1000, 9), [(1, 40), (1, 30)]);
        assert_eq!(mapped.unmap(0, 1000, 9), []);
    }

    #[test]
    fn neighbours_stay() {
        let mut mapped = MappedPieces::default();
        mapped.map(100, 200, 1, 0);
        mapped.map(200, 300, 2, 0);
        mapped.map(300, 400, 3, 0);
        assert_eq!(mapped.unmap(200, 300, 9), [(2, 100)]);
        assert_eq!(mapped.unmap(150, 350, 9), [(1, 50), (3, 50)]);
        assert_eq!(pieces(&mapped), [(100, 150, 1), (350, 400, 3)]);
        assert_eq!(mapped.unmap(500, 400, 9), []);
    }

    #[test]
    fn what_was_mapped_since_stays() {
        let mut mapped = MappedPieces::default();
        mapped.map(100, 200, 1, 10);
        assert_eq!(mapped.unmap(100, 200, 9), []);
        assert_eq!(mapped.unmap(100, 200, 10), [(1, 100)]);
        mapped.map(7, 7, 2, 0);
        assert_eq!(pieces(&mapped), []);
    }
}
