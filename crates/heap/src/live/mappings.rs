//! Sampled mappings (`--mmap`): unmapped in parts, or found unmapped after records were lost.

use sampler_ebpf::abi::ProcessKey;

use super::{Heap, LostBlocks, PAGE, weight_of};

impl Heap {
    /// Removes an unmapped address range, as of `time_ns`. A mapping shrinks by the bytes that it loses and keeps its
    /// weight. It is freed when it loses the last one.
    pub fn unmap(&mut self, space: ProcessKey, start: u64, end: u64, time_ns: u64) {
        let Some(pieces) = self.mappings.get_mut(&space) else { return };
        let lost = pieces.unmap(start, end, time_ns);
        if !lost.is_empty() {
            self.note_peak();
        }
        for (id, bytes) in lost {
            if self.shrink(space, id, bytes) {
                self.free(space, id, time_ns, false);
            }
        }
    }

    /// Takes bytes away from a mapping. If it has no more than these, leaves it unchanged and returns `true`.
    fn shrink(&mut self, space: ProcessKey, id: u64, bytes: u64) -> bool {
        let Some(live) = self.spaces.get_mut(&space).and_then(|samples| samples.get_mut(&id)) else { return false };
        if live.size_bytes <= bytes {
            return true;
        }
        live.size_bytes -= bytes;
        let (trials, row) = (live.trials, live.row);
        self.totals.inuse_bytes -= bytes as f64 * weight_of(trials, self.rows[row as usize].key.interval);
        false
    }

    /// Address spaces with sampled mappings.
    pub fn mapped_spaces(&self) -> impl Iterator<Item = &ProcessKey> {
        self.mappings.keys()
    }

    /// Removes sampled mappings that turned out to be unmapped although no record said so: those from up to `until_ns`
    /// that lie outside of `ranges` (in order of their starts). Returns the number of pieces and their bytes, in whole
    /// pages as the kernel unmaps them.
    pub fn keep_mapped(&mut self, space: ProcessKey, ranges: &[(u64, u64)], until_ns: u64) -> LostBlocks {
        let Some(pieces) = self.mappings.get_mut(&space) else { return LostBlocks::default() };
        let lost = pieces.keep_only(ranges, until_ns);
        // The total so far lacks unmappings, so it is not recorded as a peak.
        self.rising &= lost.is_empty();
        let mut found = LostBlocks::default();
        for (id, bytes) in lost {
            let samples = self.spaces.get(&space);
            // The brk heap is the only mapping that ends within a page.
            let in_pages = samples.and_then(|samples| samples.get(&id)).is_some_and(|live| live.address % PAGE == 0);
            let bytes_unmapped = if in_pages { bytes.next_multiple_of(PAGE) } else { bytes };
            found.add(LostBlocks { samples: 1, bytes: bytes_unmapped });
            if self.shrink(space, id, bytes)
                && let Some(live) = self.spaces.get_mut(&space).and_then(|samples| samples.remove(&id))
            {
                self.note_freed(&live, self.marks.last_event_ns());
                self.subtract_live(&live);
            }
        }
        found
    }

    /// The remaining pieces of sampled mappings from up to `until_ns`: their number and bytes.
    pub fn mapped_by(&self, space: &ProcessKey, until_ns: u64) -> LostBlocks {
        let (samples, bytes) = self.mappings.get(space).map_or((0, 0), |pieces| pieces.mapped_by(until_ns));
        LostBlocks { samples, bytes }
    }
}
