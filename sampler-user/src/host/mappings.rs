//! The executable mappings of an address space over time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use heapbpf_unwind::mapping::Mappings;
pub use heapbpf_unwind::mapping::{Mapping, ModuleId};
use heapbpf_unwind::raw::SpaceView;
use sampler_ebpf::abi::ProcessKey;

/// A mapping that was replaced or unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Replaced {
    mapping: Mapping,
    until_ns: u64,
}

/// Result of an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// The mapping, or a part of it, is new.
    New,
    /// All of the mapping was known.
    Known,
    /// It was dropped and counted: it is empty, or the space has too many mappings.
    Dropped,
}

/// Most executable mappings kept of one address space, and most replaced ones: a bound on the memory that a hostile
/// process can make heapbpf use. (The kernel allows 65,530 mappings of all kinds; large programs have a few hundred
/// executable ones.)
pub const MAX_MAPPINGS: usize = 8192;

/// The executable mappings of one address space, current and earlier.
///
/// Cloning is cheap: after a fork, parent and child share a list until one of them changes. The kernel does not report
/// unmapping, so a mapping ends when another replaces it, or with the address space.
#[derive(Clone, Debug, Default)]
pub struct AddressSpace {
    /// Sorted by address, without overlaps.
    current: Arc<Vec<Mapping>>,
    /// In order of replacement.
    replaced: Arc<Vec<Replaced>>,
    dropped: u64,
    generation: u64,
    changed_ns: u64,
}

/// A number that no state of any address space had before.
fn next_generation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl AddressSpace {
    /// The current mappings, by address.
    #[must_use]
    pub fn current(&self) -> &[Mapping] {
        &self.current
    }

    /// Number of mappings, current or replaced, that were dropped because there were too many.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Identifies this state of the mappings: it grows with every change, and only unchanged clones share it.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// CLOCK_MONOTONIC of the last change. For later times only the current mappings matter.
    #[must_use]
    pub fn changed_ns(&self) -> u64 {
        self.changed_ns
    }

    fn note_change(&mut self, time_ns: u64) {
        self.generation = next_generation();
        self.changed_ns = self.changed_ns.max(time_ns);
    }

    /// Bytes of memory held, and the number of address spaces that share them.
    #[must_use]
    pub fn memory(&self) -> (usize, usize) {
        let bytes = self.current.capacity() * size_of::<Mapping>() + self.replaced.capacity() * size_of::<Replaced>();
        (bytes, Arc::strong_count(&self.current))
    }

    /// Adds a mapping. What it overlaps counts as replaced at `new.since_ns`.
    pub fn insert(&mut self, new: Mapping) -> Inserted {
        if new.start >= new.end {
            self.dropped += 1;
            return Inserted::Dropped;
        }
        let first = self.current.partition_point(|mapping| mapping.end <= new.start);
        let last = first + self.current[first..].partition_point(|mapping| mapping.start < new.end);
        let overlapped = &self.current[first..last];
        if self.current.len() >= MAX_MAPPINGS && overlapped.is_empty() {
            self.dropped += 1;
            return Inserted::Dropped;
        }
        // Parts that agree with the new mapping keep their own time; the new mapping fills the gaps between them.
        let mut pieces = Vec::with_capacity(overlapped.len() + 2);
        let (mut filled_to, mut right, mut known_bytes) = (new.start, None, 0);
        for known in overlapped {
            if known.agrees_with(&new) {
                pieces.extend(new.part(filled_to, known.start));
                pieces.push(*known);
                filled_to = known.end;
                known_bytes += known.end.min(new.end) - known.start.max(new.start);
                continue;
            }
            pieces.extend(known.part(0, new.start));
            right = known.part(new.end, u64::MAX);
            if let Some(gone) = known.part(new.start, new.end).filter(|gone| gone.since_ns < new.since_ns) {
                remember(&mut self.replaced, &mut self.dropped, Replaced { mapping: gone, until_ns: new.since_ns });
            }
        }
        if known_bytes == new.end - new.start {
            return Inserted::Known;
        }
        pieces.extend(new.part(filled_to, new.end));
        pieces.extend(right);
        Arc::make_mut(&mut self.current).splice(first..last, pieces);
        self.note_change(new.since_ns);
        Inserted::New
    }

    /// Makes `mappings` the current ones, as read from /proc at `time_ns`. Others count as unmapped at that time.
    pub fn replace_all(&mut self, mappings: impl IntoIterator<Item = Mapping>, time_ns: u64) {
        let old = std::mem::take(&mut self.current);
        self.note_change(time_ns);
        for mapping in mappings {
            self.insert(mapping);
        }
        for mapping in old.iter() {
            let still = self.find_current(mapping.start).is_some_and(|now| now.agrees_with(mapping));
            if !still {
                remember(&mut self.replaced, &mut self.dropped, Replaced { mapping: *mapping, until_ns: time_ns });
            }
        }
    }

    /// Unmaps `start..end` at `time_ns`.
    pub fn remove(&mut self, start: u64, end: u64, time_ns: u64) {
        let first = self.current.partition_point(|mapping| mapping.end <= start);
        let last = first + self.current[first..].partition_point(|mapping| mapping.start < end);
        if first >= last || start >= end {
            return;
        }
        let mut pieces = [None, None];
        for known in &self.current[first..last] {
            pieces[0] = pieces[0].or(known.part(0, start));
            pieces[1] = pieces[1].or(known.part(end, u64::MAX));
            if let Some(gone) = known.part(start, end) {
                remember(&mut self.replaced, &mut self.dropped, Replaced { mapping: gone, until_ns: time_ns });
            }
        }
        Arc::make_mut(&mut self.current).splice(first..last, pieces.into_iter().flatten());
        self.note_change(time_ns);
    }

    /// The mapping at `address` at `time_ns`; if several were, the most recent.
    #[must_use]
    pub fn resolve(&self, address: u64, time_ns: u64) -> Option<&Mapping> {
        let current = self.find_current(address).filter(|mapping| mapping.since_ns <= time_ns);
        // Replacements are ordered by time, so in the common case of none since `time_ns` the loop ends at once.
        let later = self.replaced.iter().rev().take_while(|replaced| replaced.until_ns > time_ns);
        later
            .map(|replaced| &replaced.mapping)
            .filter(|mapping| mapping.contains(address) && mapping.since_ns <= time_ns)
            .chain(current)
            .max_by_key(|mapping| mapping.since_ns)
    }

    fn find_current(&self, address: u64) -> Option<&Mapping> {
        let index = self.current.partition_point(|mapping| mapping.end <= address);
        self.current.get(index).filter(|mapping| mapping.contains(address))
    }
}

fn remember(list: &mut Arc<Vec<Replaced>>, dropped: &mut u64, replaced: Replaced) {
    let list = Arc::make_mut(list);
    if list.len() >= MAX_MAPPINGS {
        // Dropping the older half at once amortises the cost of moving the rest.
        list.drain(..MAX_MAPPINGS / 2);
        *dropped += (MAX_MAPPINGS / 2) as u64;
    }
    let index = list.partition_point(|earlier| earlier.until_ns <= replaced.until_ns);
    list.insert(index, replaced);
}

/// An address space as it was at some time.
#[derive(Clone, Copy, Debug)]
pub struct AtTime<'a> {
    space: &'a AddressSpace,
    time_ns: u64,
}

impl<'a> AtTime<'a> {
    /// `space` at CLOCK_MONOTONIC `time_ns`.
    pub fn new(space: &'a AddressSpace, time_ns: u64) -> Self {
        Self { space, time_ns }
    }

    /// The view that the unwinder takes. It has a generation only if `time_ns` is not before the last change.
    pub fn view(&self, key: ProcessKey) -> SpaceView<'_> {
        let is_current = self.time_ns >= self.space.changed_ns();
        SpaceView { key, generation: is_current.then(|| self.space.generation()), mappings: self }
    }
}

impl Mappings for AtTime<'_> {
    fn find(&self, address: u64) -> Option<&Mapping> {
        self.space.resolve(address, self.time_ns)
    }
}

#[cfg(test)]
mod tests {
    use heapbpf_own_process::{OwnProcess, captured, unwind};
    use heapbpf_unwind::dwarf::{Capture, Flaws, Unwinder};

    use super::*;

    const A: ModuleId = ModuleId(1);
    const B: ModuleId = ModuleId(2);

    fn mapping(start: u64, end: u64, file_offset: u64, module: ModuleId, since_ns: u64) -> Mapping {
        Mapping { start, end, file_offset, module, since_ns }
    }

    fn found(space: &AddressSpace, address: u64, time_ns: u64) -> Option<(ModuleId, u64)> {
        space.resolve(address, time_ns).map(|mapping| (mapping.module, mapping.offset_of(address)))
    }

    #[test]
    fn an_address_used_again_resolves_by_time() {
        let mut space = AddressSpace::default();
        assert_eq!(space.insert(mapping(0x1000, 0x3000, 0x100, A, 10)), Inserted::New);
        assert_eq!(space.insert(mapping(0x1000, 0x2000, 0x500, B, 20)), Inserted::New);
        assert_eq!(found(&space, 0x1800, 9), None);
        assert_eq!(found(&space, 0x1800, 10), Some((A, 0x900)));
        assert_eq!(found(&space, 0x1800, 19), Some((A, 0x900)));
        assert_eq!(found(&space, 0x1800, 20), Some((B, 0xd00)));
        // The part that was not overlapped remains, with the right offset.
        assert_eq!(found(&space, 0x2000, 30), Some((A, 0x1100)));
        assert_eq!(found(&space, 0x3000, 30), None);
    }

    #[test]
    fn a_hole_splits() {
        let mut space = AddressSpace::default();
        space.insert(mapping(0x1000, 0x9000, 0, A, 1));
        space.insert(mapping(0x3000, 0x4000, 0x7000, B, 2));
        let parts: Vec<_> = space.current().iter().map(|m| (m.start, m.end, m.file_offset, m.module)).collect();
        assert_eq!(parts, [(0x1000, 0x3000, 0, A), (0x3000, 0x4000, 0x7000, B), (0x4000, 0x9000, 0x3000, A)]);
        space.remove(0x2000, 0x5000, 3);
        assert_eq!(space.current().len(), 2);
        assert_eq!(found(&space, 0x3800, 2), Some((B, 0x7800)));
        assert_eq!(found(&space, 0x3800, 3), None);
        assert_eq!(found(&space, 0x3800, 1), Some((A, 0x2800)));
        assert_eq!(found(&space, 0x4800, 2), Some((A, 0x3800)));
    }

    #[test]
    fn the_same_again_changes_nothing_and_growth_keeps_its_own_time() {
        let mut space = AddressSpace::default();
        space.insert(mapping(0x1000, 0x3000, 0x1000, A, 1));
        let shared = space.clone();
        assert_eq!(space.insert(mapping(0x1000, 0x2000, 0x1000, A, 5)), Inserted::Known);
        assert_eq!(space.memory().1, 2, "a known mapping must not unshare the list");
        assert_eq!(space.insert(mapping(0x1000, 0x5000, 0x1000, A, 6)), Inserted::New);
        assert_eq!(space.current(), [mapping(0x1000, 0x3000, 0x1000, A, 1), mapping(0x3000, 0x5000, 0x3000, A, 6)]);
        assert_eq!(shared.current(), [mapping(0x1000, 0x3000, 0x1000, A, 1)]);
        assert!(space.replaced.is_empty());
    }

    #[test]
    fn reading_proc_again_ends_mappings_that_are_gone() {
        let mut space = AddressSpace::default();
        space.insert(mapping(0x1000, 0x2000, 0, A, 1));
        space.insert(mapping(0x5000, 0x6000, 0, B, 2));
        space.replace_all([mapping(0x5000, 0x6000, 0, B, 0), mapping(0x7000, 0x8000, 0, A, 0)], 50);
        assert_eq!(found(&space, 0x1000, 49), Some((A, 0)));
        assert_eq!(found(&space, 0x1000, 50), None);
        assert_eq!(found(&space, 0x5000, 60), Some((B, 0)));
        assert_eq!(found(&space, 0x7000, 10), Some((A, 0)));
    }

    #[test]
    fn the_number_of_mappings_kept_is_bounded() {
        let mut space = AddressSpace::default();
        for index in 0..3 * MAX_MAPPINGS as u64 {
            space.insert(mapping(index * 0x2000, index * 0x2000 + 0x1000, 0, A, 1));
        }
        assert_eq!((space.current().len(), space.dropped()), (MAX_MAPPINGS, 2 * MAX_MAPPINGS as u64));
        for time in 2..3 * MAX_MAPPINGS as u64 {
            space.insert(mapping(0, 0x1000, time << 12, A, time));
        }
        assert!(space.replaced.len() <= MAX_MAPPINGS);
        assert_eq!(space.insert(mapping(5, 5, 0, A, 0)), Inserted::Dropped);
    }

    /// Compares with a model that records every page at every time (seeded, 300 spaces).
    #[test]
    fn agrees_with_a_page_by_page_model() {
        const PAGES: u64 = 24;
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut random = move |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) % below
        };
        for _ in 0..300 {
            let mut space = AddressSpace::default();
            let mut model: Vec<Vec<Option<(ModuleId, u64)>>> = vec![vec![None; PAGES as usize]];
            for time in 1..40 {
                let start = random(PAGES);
                let end = start + 1 + random(PAGES - start);
                let mut pages = model.last().expect("never empty").clone();
                if random(5) == 0 {
                    space.remove(start << 12, end << 12, time);
                    pages[start as usize..end as usize].fill(None);
                } else {
                    let (module, offset) = (ModuleId(random(3) as u32), random(4) << 12);
                    space.insert(mapping(start << 12, end << 12, offset, module, time));
                    for page in start..end {
                        pages[page as usize] = Some((module, offset + ((page - start) << 12)));
                    }
                }
                model.push(pages);
            }
            for (time, pages) in model.iter().enumerate() {
                for (page, expected) in pages.iter().enumerate() {
                    assert_eq!(found(&space, (page as u64) << 12, time as u64), *expected);
                }
            }
        }
    }

    #[test]
    fn a_stack_is_resolved_against_the_mappings_of_its_time() {
        let mut process = OwnProcess::read().expect("/proc");
        let capture = captured(10);
        let input =
            Capture { registers: &capture.registers, stack: &capture.stack, in_flight: &[], flaws: Flaws::default() };
        let expected = unwind(&process, &capture);
        let mut space = AddressSpace::default();
        space.replace_all(process.mappings().iter().copied(), 0);
        let key = process.space().key;
        let mut unwinder = Unwinder::default();
        assert_eq!(unwinder.unwind(&mut process, &AtTime::new(&space, 500).view(key), input), expected);

        // At time 1000 another module replaces this program's code.
        let code = *process.mappings().iter().find(|mapping| mapping.contains(capture.registers.ip)).expect("mapped");
        space.insert(Mapping { module: ModuleId(u32::MAX), since_ns: 1000, ..code });
        let before = unwinder.unwind(&mut process, &AtTime::new(&space, 999).view(key), input);
        assert_eq!(before, expected);
        let after = unwinder.unwind(&mut process, &AtTime::new(&space, 1000).view(key), input);
        assert_eq!(after.frames[0].module, Some(ModuleId(u32::MAX)));
    }
}
