//! Executable mappings: they tell which byte of which module is at an address.

/// Identifies a module: a mapped file, the vDSO, or anonymous memory with JIT code. It is an index into the caller's
/// table of modules, and is never reused for another module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModuleId(pub u32);

/// An executable mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// End (exclusive).
    pub end: u64,
    /// File offset of `start`.
    pub file_offset: u64,
    /// What is mapped.
    pub module: ModuleId,
    /// When it was first seen, CLOCK_MONOTONIC in nanoseconds; 0 if that was before the recording.
    pub since_ns: u64,
}

impl Mapping {
    /// Whether `address` lies in the mapping.
    #[must_use]
    pub fn contains(&self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }

    /// File offset of `address`, which must lie in the mapping.
    #[must_use]
    pub fn offset_of(&self, address: u64) -> u64 {
        self.file_offset.wrapping_add(address.wrapping_sub(self.start))
    }

    /// Whether both mappings put the same byte of the same module at the same address.
    #[must_use]
    pub fn agrees_with(&self, other: &Self) -> bool {
        self.module == other.module && self.offset_of(other.start) == other.file_offset
    }

    /// Returns the part of the mapping inside `start..end`, if any.
    #[must_use]
    pub fn part(&self, start: u64, end: u64) -> Option<Self> {
        let (start, end) = (start.max(self.start), end.min(self.end));
        (start < end).then(|| Self { start, end, file_offset: self.offset_of(start), ..*self })
    }
}

/// The executable mappings of an address space.
pub trait Mappings {
    /// Returns the mapping that contains `address`.
    fn find(&self, address: u64) -> Option<&Mapping>;
}

/// A fixed list of mappings, which must be ascending by `start` and must not overlap.
impl Mappings for Vec<Mapping> {
    fn find(&self, address: u64) -> Option<&Mapping> {
        let after = self.partition_point(|mapping| mapping.start <= address);
        self[..after].last().filter(|mapping| mapping.contains(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPPING: Mapping =
        Mapping { start: 0x1000, end: 0x3000, file_offset: 0x500, module: ModuleId(1), since_ns: 7 };

    #[test]
    fn parts_keep_their_bytes_in_place() {
        let part = MAPPING.part(0x1800, 0x9000).expect("they overlap");
        assert_eq!(part, Mapping { start: 0x1800, file_offset: 0xd00, ..MAPPING });
        assert!(part.agrees_with(&MAPPING) && MAPPING.agrees_with(&part));
        assert_eq!(MAPPING.part(0, 0x1000), None);
        assert_eq!(MAPPING.part(0x3000, 0x4000), None);
        assert!(!part.agrees_with(&Mapping { file_offset: 0x501, ..MAPPING }));
        assert!(!part.agrees_with(&Mapping { module: ModuleId(2), ..MAPPING }));
    }

    #[test]
    fn an_address_is_in_at_most_one_mapping() {
        let second = Mapping { start: 0x3000, end: 0x3001, ..MAPPING };
        let mappings = vec![MAPPING, second];
        assert_eq!(mappings.find(0xfff), None);
        assert_eq!((mappings.find(0x1000), mappings.find(0x2fff)), (Some(&MAPPING), Some(&MAPPING)));
        assert_eq!((mappings.find(0x3000), mappings.find(0x3001)), (Some(&second), None));
    }
}
