//! The executable mappings of an address space over time.

use std::ops::Range;
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
    /// It is of a file of which no mapping was dropped before: it is not kept, but its file is known to be mapped.
    FileOnly,
    /// It was dropped: it is empty, or the space has too many mappings of its kind.
    Dropped,
}

/// What a mapping is of, which decides how many are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Memory without a file: JIT code.
    Anonymous,
    /// A file.
    File,
    /// A file with an allocator, or a mapping that the kernel makes, of which there are few.
    Essential,
}

/// Most executable mappings of files kept of one address space, most of anonymous memory, and most replaced ones: a bound
/// on the memory that a hostile process can make heapbpf use. (The kernel allows 65,530 mappings of all kinds; large
/// programs have a few hundred executable ones.) As many more are kept of files with allocators and of what the kernel maps.
pub const MAX_MAPPINGS: usize = 8192;

/// Most mappings of all kinds: a mapping that replaces a part of another can split it, whatever there is room for.
const MAX_ALL: usize = 4 * MAX_MAPPINGS;

/// Most files that are known to be mapped although their mappings are not kept: as many as a process can have mappings.
const MAX_FILES_ONLY: usize = 1 << 16;

/// Mappings that were dropped because there were too many of their kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Of anonymous memory.
    pub anonymous: u64,
    /// Of files.
    pub files: u64,
    /// Replaced ones.
    pub replaced: u64,
}

/// The executable mappings of one address space, current and earlier.
///
/// Cloning is cheap: after a fork, parent and child share a list until one of them changes. The kernel does not report
/// unmapping, so a mapping ends when another replaces it, or with the address space.
#[derive(Clone, Debug, Default)]
pub struct AddressSpace {
    /// Sorted by address, without overlaps.
    current: Arc<Vec<Mapping>>,
    /// How many of them are of anonymous memory.
    anonymous: usize,
    /// Files of which mappings were dropped, sorted.
    files_only: Arc<Vec<ModuleId>>,
    /// In order of replacement.
    replaced: Arc<Vec<Replaced>>,
    dropped: Dropped,
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

    /// The modules that are mapped, also those whose mappings are not kept. One may come several times.
    pub fn modules(&self) -> impl Iterator<Item = ModuleId> {
        self.current.iter().map(|mapping| mapping.module).chain(self.files_only.iter().copied())
    }

    /// The files of which mappings were dropped.
    #[must_use]
    pub fn files_only(&self) -> &[ModuleId] {
        &self.files_only
    }

    /// Mappings that were dropped because there were too many.
    #[must_use]
    pub fn dropped(&self) -> Dropped {
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
        let bytes = self.current.capacity() * size_of::<Mapping>()
            + self.replaced.capacity() * size_of::<Replaced>()
            + self.files_only.capacity() * size_of::<ModuleId>();
        (bytes, Arc::strong_count(&self.current))
    }

    /// Adds a mapping. What it overlaps counts as replaced at `new.since_ns`. `kind_of` says what a module is; whether it
    /// is anonymous never changes.
    pub fn insert(&mut self, new: Mapping, kind_of: &dyn Fn(ModuleId) -> Kind) -> Inserted {
        if new.start >= new.end {
            return Inserted::Dropped;
        }
        let first = self.current.partition_point(|mapping| mapping.end <= new.start);
        let last = first + self.current[first..].partition_point(|mapping| mapping.start < new.end);
        let overlapped = &self.current[first..last];
        let kind = kind_of(new.module);
        if self.current.len() >= MAX_ALL || overlapped.is_empty() && !self.has_room(kind) {
            return self.drop_new(new.module, kind);
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
                remember(
                    &mut self.replaced,
                    &mut self.dropped.replaced,
                    Replaced { mapping: gone, until_ns: new.since_ns },
                );
            }
        }
        if known_bytes == new.end - new.start {
            return Inserted::Known;
        }
        pieces.extend(new.part(filled_to, new.end));
        pieces.extend(right);
        self.replace_range(first..last, pieces, kind_of);
        self.note_change(new.since_ns);
        Inserted::New
    }

    /// Replaces current mappings.
    fn replace_range(&mut self, range: Range<usize>, by: Vec<Mapping>, kind_of: &dyn Fn(ModuleId) -> Kind) {
        let anonymous =
            |mappings: &[Mapping]| mappings.iter().filter(|mapping| kind_of(mapping.module) == Kind::Anonymous).count();
        self.anonymous = self.anonymous + anonymous(&by) - anonymous(&self.current[range.clone()]);
        Arc::make_mut(&mut self.current).splice(range, by);
    }

    fn has_room(&self, kind: Kind) -> bool {
        let of_files = self.current.len() - self.anonymous;
        match kind {
            Kind::Anonymous => self.anonymous < MAX_MAPPINGS,
            Kind::File => of_files < MAX_MAPPINGS,
            Kind::Essential => of_files < 2 * MAX_MAPPINGS,
        }
    }

    fn drop_new(&mut self, module: ModuleId, kind: Kind) -> Inserted {
        if kind == Kind::Anonymous {
            self.dropped.anonymous += 1;
            return Inserted::Dropped;
        }
        self.dropped.files += 1;
        match self.files_only.binary_search(&module) {
            Err(at) if self.files_only.len() < MAX_FILES_ONLY => {
                Arc::make_mut(&mut self.files_only).insert(at, module);
                Inserted::FileOnly
            }
            _ => Inserted::Dropped,
        }
    }

    /// Adds the mappings of a file with an allocator that were dropped before it was known to have one.
    pub fn keep(
        &mut self,
        module: ModuleId,
        mappings: impl IntoIterator<Item = Mapping>,
        kind_of: &dyn Fn(ModuleId) -> Kind,
    ) {
        let before = self.dropped.files;
        for mapping in mappings {
            let inserted = self.insert(mapping, kind_of);
            self.dropped.files -= u64::from(inserted == Inserted::New && self.dropped.files > 0);
        }
        // If there is still no room, it stays in the list.
        if self.dropped.files < before
            && let Ok(at) = self.files_only.binary_search(&module)
        {
            Arc::make_mut(&mut self.files_only).remove(at);
        }
    }

    /// Makes `mappings` the current ones, as read from /proc at `time_ns`. Others count as unmapped at that time.
    pub fn replace_all(
        &mut self,
        mappings: impl IntoIterator<Item = Mapping>,
        time_ns: u64,
        kind_of: &dyn Fn(ModuleId) -> Kind,
    ) {
        let old = std::mem::take(&mut self.current);
        (self.anonymous, self.files_only) = (0, Arc::default());
        self.dropped = Dropped { replaced: self.dropped.replaced, ..Dropped::default() };
        self.note_change(time_ns);
        for mapping in mappings {
            self.insert(mapping, kind_of);
        }
        for mapping in old.iter() {
            let still = self.find_current(mapping.start).is_some_and(|now| now.agrees_with(mapping));
            if !still {
                remember(
                    &mut self.replaced,
                    &mut self.dropped.replaced,
                    Replaced { mapping: *mapping, until_ns: time_ns },
                );
            }
        }
    }

    /// Unmaps `start..end` at `time_ns`.
    pub fn remove(&mut self, start: u64, end: u64, time_ns: u64, kind_of: &dyn Fn(ModuleId) -> Kind) {
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
                remember(&mut self.replaced, &mut self.dropped.replaced, Replaced { mapping: gone, until_ns: time_ns });
            }
        }
        self.replace_range(first..last, pieces.into_iter().flatten().collect(), kind_of);
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

    fn files(_: ModuleId) -> Kind {
        Kind::File
    }

    fn found(space: &AddressSpace, address: u64, time_ns: u64) -> Option<(ModuleId, u64)> {
        space.resolve(address, time_ns).map(|mapping| (mapping.module, mapping.offset_of(address)))
    }

    #[test]
    fn an_address_used_again_resolves_by_time() {
        let mut space = AddressSpace::default();
        assert_eq!(space.insert(mapping(0x1000, 0x3000, 0x100, A, 10), &files), Inserted::New);
        assert_eq!(space.insert(mapping(0x1000, 0x2000, 0x500, B, 20), &files), Inserted::New);
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
        space.insert(mapping(0x1000, 0x9000, 0, A, 1), &files);
        space.insert(mapping(0x3000, 0x4000, 0x7000, B, 2), &files);
        let parts: Vec<_> = space.current().iter().map(|m| (m.start, m.end, m.file_offset, m.module)).collect();
        assert_eq!(parts, [(0x1000, 0x3000, 0, A), (0x3000, 0x4000, 0x7000, B), (0x4000, 0x9000, 0x3000, A)]);
        space.remove(0x2000, 0x5000, 3, &files);
        assert_eq!(space.current().len(), 2);
        assert_eq!(found(&space, 0x3800, 2), Some((B, 0x7800)));
        assert_eq!(found(&space, 0x3800, 3), None);
        assert_eq!(found(&space, 0x3800, 1), Some((A, 0x2800)));
        assert_eq!(found(&space, 0x4800, 2), Some((A, 0x3800)));
    }

    #[test]
    fn the_same_again_changes_nothing_and_growth_keeps_its_own_time() {
        let mut space = AddressSpace::default();
        space.insert(mapping(0x1000, 0x3000, 0x1000, A, 1), &files);
        let shared = space.clone();
        assert_eq!(space.insert(mapping(0x1000, 0x2000, 0x1000, A, 5), &files), Inserted::Known);
        assert_eq!(space.memory().1, 2, "a known mapping must not unshare the list");
        assert_eq!(space.insert(mapping(0x1000, 0x5000, 0x1000, A, 6), &files), Inserted::New);
        assert_eq!(space.current(), [mapping(0x1000, 0x3000, 0x1000, A, 1), mapping(0x3000, 0x5000, 0x3000, A, 6)]);
        assert_eq!(shared.current(), [mapping(0x1000, 0x3000, 0x1000, A, 1)]);
        assert!(space.replaced.is_empty());
    }

    #[test]
    fn reading_proc_again_ends_mappings_that_are_gone() {
        let mut space = AddressSpace::default();
        space.insert(mapping(0x1000, 0x2000, 0, A, 1), &files);
        space.insert(mapping(0x5000, 0x6000, 0, B, 2), &files);
        space.replace_all([mapping(0x5000, 0x6000, 0, B, 0), mapping(0x7000, 0x8000, 0, A, 0)], 50, &files);
        assert_eq!(found(&space, 0x1000, 49), Some((A, 0)));
        assert_eq!(found(&space, 0x1000, 50), None);
        assert_eq!(found(&space, 0x5000, 60), Some((B, 0)));
        assert_eq!(found(&space, 0x7000, 10), Some((A, 0)));
    }

    #[test]
    fn the_number_of_mappings_kept_is_bounded() {
        let mut space = AddressSpace::default();
        for index in 0..3 * MAX_MAPPINGS as u64 {
            space.insert(mapping(index * 0x2000, index * 0x2000 + 0x1000, 0, A, 1), &files);
        }
        let dropped = Dropped { files: 2 * MAX_MAPPINGS as u64, ..Dropped::default() };
        assert_eq!((space.current().len(), space.dropped()), (MAX_MAPPINGS, dropped));
        for time in 2..3 * MAX_MAPPINGS as u64 {
            space.insert(mapping(0, 0x1000, time << 12, A, time), &files);
        }
        assert!(space.replaced.len() <= MAX_MAPPINGS && space.dropped().replaced > 0);
        assert_eq!(space.insert(mapping(5, 5, 0, A, 0), &files), Inserted::Dropped);
        // A mapping that is cut into pieces needs room, too.
        let mut pieces = AddressSpace::default();
        pieces.insert(mapping(0, 1 << 40, 0, A, 1), &files);
        for index in 0..MAX_ALL as u64 {
            pieces.insert(mapping(index * 0x2000, index * 0x2000 + 0x1000, 0x7000, B, 2), &files);
        }
        assert!(pieces.current().len() <= MAX_ALL + 2, "{}", pieces.current().len());
    }

    /// What a program makes many of does not push out its libraries, neither memory nor files.
    #[test]
    fn mappings_of_one_kind_leave_room_for_the_others_and_files_with_allocators_have_room_in_any_case() {
        const CODE: ModuleId = ModuleId(u32::MAX);
        const LIBC: ModuleId = ModuleId(u32::MAX - 1);
        let unknown = |module| if module == CODE { Kind::Anonymous } else { Kind::File };
        let known = |module| if module == LIBC { Kind::Essential } else { unknown(module) };
        let page = |index: u64, module| mapping(index * 0x2000, index * 0x2000 + 0x1000, 0, module, 1);
        let (many, libc) = (12_000, page(30_000, LIBC));
        let over = many - MAX_MAPPINGS as u64;

        let mut space = AddressSpace::default();
        (0..many).for_each(|index| _ = space.insert(page(index, CODE), &unknown));
        assert_eq!(space.dropped(), Dropped { anonymous: over, ..Dropped::default() });
        assert_eq!(space.insert(libc, &unknown), Inserted::New);
        assert!(space.files_only().is_empty());

        // As many files, in the order of their addresses: what is beyond the bound is known to be there.
        let files = (0..many).map(|index| page(index, ModuleId(index as u32)));
        space.replace_all(files.chain([libc]), 5, &unknown);
        assert_eq!(space.dropped(), Dropped { files: over + 1, ..space.dropped() });
        assert_eq!((found(&space, libc.start, 9), space.files_only().len() as u64), (None, over + 1));
        assert!(space.modules().any(|module| module == LIBC));
        assert_eq!(space.insert(page(20_000, ModuleId(8_500)), &unknown), Inserted::Dropped, "told once");
        assert_eq!(space.insert(page(20_000, ModuleId(12_500)), &unknown), Inserted::FileOnly);
        space.keep(LIBC, [libc], &known);
        assert_eq!(found(&space, libc.start, 9), Some((LIBC, 0)));
        assert_eq!(space.dropped().files, over + 2);
        assert!(!space.files_only().contains(&LIBC));
        // Once it is known, it is kept at once.
        space.replace_all((0..many).map(|index| page(index, B)).chain([libc]), 9, &known);
        assert_eq!(found(&space, libc.start, 9), Some((LIBC, 0)));
        // Pieces of it are bounded, too, and those that find no room stay told.
        let pieces: Vec<_> = (40_000..60_000).map(|index| page(index, LIBC)).collect();
        pieces.iter().for_each(|piece| _ = space.insert(*piece, &known));
        assert_eq!(space.current().len(), 2 * MAX_MAPPINGS);
        space.keep(LIBC, pieces.last().copied(), &known);
        assert!(space.files_only().contains(&LIBC));
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
                    space.remove(start << 12, end << 12, time, &files);
                    pages[start as usize..end as usize].fill(None);
                } else {
                    let (module, offset) = (ModuleId(random(3) as u32), random(4) << 12);
                    space.insert(mapping(start << 12, end << 12, offset, module, time), &files);
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
        space.replace_all(process.mappings().iter().copied(), 0, &files);
        let key = process.space().key;
        let mut unwinder = Unwinder::default();
        assert_eq!(unwinder.unwind(&mut process, &AtTime::new(&space, 500).view(key), input), expected);

        // At time 1000 another module replaces this program's code.
        let code = *process.mappings().iter().find(|mapping| mapping.contains(capture.registers.ip)).expect("mapped");
        space.insert(Mapping { module: ModuleId(u32::MAX), since_ns: 1000, ..code }, &files);
        let before = unwinder.unwind(&mut process, &AtTime::new(&space, 999).view(key), input);
        assert_eq!(before, expected);
        let after = unwinder.unwind(&mut process, &AtTime::new(&space, 1000).view(key), input);
        assert_eq!(after.frames[0].module, Some(ModuleId(u32::MAX)));
    }
}
