//! Blocks that probes have sampled, made known to code that is mapped, and to which no jump leads yet.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use super::Refused;

/// What the mapped code holds of sampled blocks. Some may have been freed since: their free is told once more, and the programs
/// find no block.
pub(super) struct Noted {
    noted: heapbpf_inline::noted::Noted,
    memory: File,
    base: u64,
}

impl Noted {
    /// Nothing so far, in the code that is mapped at `base`, whose set has 2^`set_log2` entries. No jump leads to it yet.
    pub(super) fn new((memory, base): (File, u64), set_log2: u32) -> Self {
        Self { noted: heapbpf_inline::noted::Noted::new(set_log2), memory, base }
    }

    /// Has it hold these blocks, too.
    pub(super) fn add(&mut self, blocks: &[u64]) -> Result<(), Refused> {
        let failed = |source| Refused::Read { what: "the target's memory", source };
        let written = self.noted.add(blocks).ok_or(Refused::Blocks)?;
        let mut writes = written.iter().map(|(at, bytes)| self.memory.write_all_at(bytes, self.base + at));
        writes.try_for_each(|written| written).map_err(failed)
    }
}
