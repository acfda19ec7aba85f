//! Adds blocks that probes have sampled to the set in mapped code, before any jump leads to that code.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use super::Refused;

/// The sampled blocks that the mapped code knows. Some may have been freed since. Their free is then reported once
/// more, and the programs find no such block.
pub(super) struct Noted {
    noted: heapbpf_inline::noted::Noted,
    memory: File,
    base: u64,
}

impl Noted {
    /// Starts with an empty set for the code that is mapped at `base`, whose set has 2^`set_log2` entries. No jump
    /// leads there yet.
    pub(super) fn new((memory, base): (File, u64), set_log2: u32) -> Self {
        Self { noted: heapbpf_inline::noted::Noted::new(set_log2), memory, base }
    }

    /// Adds these blocks to the set.
    pub(super) fn add(&mut self, blocks: &[u64]) -> Result<(), Refused> {
        let failed = |source| Refused::Read { what: "the target's memory", source };
        let written = self.noted.add(blocks).ok_or(Refused::Blocks)?;
        let mut writes = written.iter().map(|(at, bytes)| self.memory.write_all_at(bytes, self.base + at));
        writes.try_for_each(|written| written).map_err(failed)
    }
}
