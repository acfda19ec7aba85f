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
    /// The mapping, or part of it, is new.
    New,
    /// All of the mapping was known.
    Known,
    /// The mapping is not kept, but its file is recorded as mapped. It is the first dropped mapping of this file.
    FileOnly,
    /// The mapping was dropped: it is empty, or the space has too many mappings of its kind.
    Dropped,
}

/// What kind of memory is mapped. It decides how many mappings are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Memory without a file: JIT code.
    Anonymous,
    /// A file.
    File,
    /// A file with an allocator, or one of the few mappings that the kernel makes.
    Essential,
}

/// Maximum number of executable file mappings to keep for one address space, and also of anonymous mappings and of
/// replaced mappings. It bounds the memory that a hostile process can make heapbpf use. (The kernel allows 65,530
/// mappings of all kinds; large programs have a few hundred executable ones.) The same number again is kept for files
/// with allocators and for what the kernel maps.
pub const MAX_MAPPINGS: usize = 8192;

/// Maximum number of mappings of all kinds. A mapping that replaces part of another can split it even when the limit of
/// its kind is reached.
const MAX_ALL: usize = 4 * MAX_MAPPINGS;

/// Maximum number of files that are known to be mapped although their mappings are not kept: as many as a process can
/// have mappings.
const MAX_FILES_ONLY: usize = 1 << 16;

/// Mappings that were dropped because there were too many of their kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Anonymous memory.
    pub anonymous: u64,
    /// Files.
    pub files: u64,
    /// Replaced mappings.
    pub replaced: u64,
}

/// The executable mappings of one address space, current and earlier.
///
/// Cloning is cheap: after a fork, parent and child share a list until one of them changes. The kernel does not report
/// unmapping, so a mapping ends when another one replaces it, or with the address space.
#[derive(Clone, Debug, Default)]
pub struct AddressSpace {
    /// Sorted by address, without overlaps.
    current: Arc<Vec<Mapping>>,
    /// How many of them are anonymous.
    anonymous: usize,
    /// Files of which mappings were dropped, sorted.
    files_only: Arc<Vec<ModuleId>>,
    /// In order of replacement.
    replaced: Arc<Vec<Replaced>>,
    /// Mappings that were dropped because there were too many.
    pub dropped: Dropped,
    /// Identifies this state of the mappings: it grows with every change, and only unchanged clones share it.
    pub generation: u64,
    /// CLOCK_MONOTONIC of the last change. At later times only the current mappings matter.
    changed_ns: u64,
}

/// Returns a number that no state of any address space has had before.
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

    /// The modules that are mapped, including those whose mappings are not kept. A module may occur several times.
    pub fn modules(&self) -> impl Iterator<Item = ModuleId> {
        self.current.iter().map(|mapping| mapping.module).chain(self.files_only.iter().copied())
    }

    /// Like [`Self::modules`], with the replaced ones.
    pub fn modules_ever(&self) -> impl Iterator<Item = ModuleId> {
        self.modules().chain(self.replaced.iter().map(|replaced| replaced.mapping.module))
    }

    /// The files whose mappings were dropped.
    #[must_use]
    pub fn files_only(&self) -> &[ModuleId] {
        &self.files_only
    }

    fn note_change(&mut self, time_ns: u64) {
        self.generation = next_generation();
        self.changed_ns = self.changed_ns.max(time_ns);
    }

    /// Adds a mapping. What it overlaps counts as replaced at `new.since_ns`. `kind_of` returns the kind of a module;
    /// whether a module is anonymous must never change.
    pub fn insert(&mut self, new: Mapping, kind_of: &dyn Fn(ModuleId) -> Kind) -> Inserted {
        if new.start >= new.end {
            return Inserted::Dropped;
        }
        let first = self.current.partition_point(|mapping| mapping.end <= new.start);
        let last = first + self.current[first..].partition_point(|mapping| mapping.start < new.end);
        let overlapped = &self.current[first..last];
        let kind = kind_of(new.module);
        if self.current.len() >= MAX_ALL || overlapped.is_empty() && !self.has_space(kind) {
            return self.drop_new(new.module, kind);
        }
        // Parts that agree with the new mapping keep their own time. The new mapping fills the gaps between them.
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
                remember(&mut self.replaced, &mut self.dropped, gone, new.since_ns);
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

    fn has_space(&self, kind: Kind) -> bool {
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

    /// Adds mappings of a file with an allocator that were dropped before the file was known to have one.
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
        // If there is still no space, the file stays in the list.
        if self.dropped.files < before
            && let Ok(at) = self.files_only.binary_search(&module)
        {
            Arc::make_mut(&mut self.files_only).remove(at);
        }
    }

    /// Makes `mappings`, as read from /proc at `time_ns`, the current ones. All others count as unmapped at that time.
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
                remember(&mut self.replaced, &mut self.dropped, *mapping, time_ns);
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
                remember(&mut self.replaced, &mut self.dropped, gone, time_ns);
            }
        }
        self.replace_range(first..last, pieces.into_iter().flatten().collect(), kind_of);
        self.note_change(time_ns);
    }

    /// Returns the mapping at `address` at `time_ns`; if there were several, the most recent.
    #[must_use]
    pub fn resolve(&self, address: u64, time_ns: u64) -> Option<&Mapping> {
        let current = self.find_current(address).filter(|mapping| mapping.since_ns <= time_ns);
        // Replaced mappings are ordered by time. In the common case that none was replaced since `time_ns`, the loop
        // ends at once.
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

fn remember(list: &mut Arc<Vec<Replaced>>, dropped: &mut Dropped, mapping: Mapping, until_ns: u64) {
    let list = Arc::make_mut(list);
    if list.len() >= MAX_MAPPINGS {
        // Dropping the older half at once amortises the cost of moving the rest.
        list.drain(..MAX_MAPPINGS / 2);
        dropped.replaced += (MAX_MAPPINGS / 2) as u64;
    }
    let index = list.partition_point(|earlier| earlier.until_ns <= until_ns);
    list.insert(index, Replaced { mapping, until_ns });
}

/// An address space as it was at a given time.
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

    /// The view for the unwinder. It has a generation only if `time_ns` is not before the last change.
    pub fn view(&self, key: ProcessKey) -> SpaceView<'_> {
        let is_current = self.time_ns >= self.space.changed_ns;
        SpaceView { key, generation: is_current.then_some(self.space.generation), mappings: self }
    }
}

impl Mappings for AtTime<'_> {
    fn find(&self, address: u64) -> Option<&Mapping> {
        self.space.resolve(address, self.time_ns)
    }
}

#[cfg(test)]
#[path = "mappings_tests.rs"]
mod tests;
