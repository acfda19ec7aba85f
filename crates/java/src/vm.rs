//! A running JVM: its layout, and its code heaps.

use heapbpf_elf::Memory;

use crate::description::Description;
use crate::layout::Layout;
use crate::library::Tables;
use crate::memory::{self, Fields};
use crate::unsupported::Unsupported;

/// Most code heaps. There are one or three.
const MOST_HEAPS: u32 = 8;
/// Most bytes of a code heap that are believed.
const LARGEST_HEAP: u64 = 4 << 30;
/// Segments are 64 or 128 bytes.
const SHIFTS: std::ops::RangeInclusive<u32> = 4..=16;
/// Longest text of a version, bytes.
const LONGEST_VERSION: usize = 64;

/// A heap of code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeHeap {
    /// Its first address.
    pub start: u64,
    /// Its end, as far as it may grow.
    pub end: u64,
    /// Address of its map: a byte for each segment.
    pub map: u64,
    /// Logarithm of the size of a segment, bytes.
    pub shift: u32,
}

/// A running JVM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vm {
    /// Where it keeps what.
    pub layout: Layout,
    /// Its version as it states it: `17.0.15+6-Debian-1deb12u1`.
    pub release: String,
    /// Its code heaps.
    pub heaps: Vec<CodeHeap>,
    /// Where Java code returns to that native code has called.
    pub call_stub_return: u64,
}

impl Vm {
    /// Reads what a JVM says about itself.
    ///
    /// # Errors
    /// [`Unsupported`]; [`Unsupported::NotReady`] will pass.
    pub fn read(memory: &dyn Memory, tables: &Tables) -> Result<Self, Unsupported> {
        let (layout, release) = Self::layout(memory, tables)?;
        Self::with_layout(memory, layout, release)
    }

    /// Where a JVM keeps what, and the version that it states: `17.0.15+6-Debian-1deb12u1`. Known as soon as the library is
    /// loaded.
    ///
    /// # Errors
    /// [`Unsupported`]
    pub fn layout(memory: &dyn Memory, tables: &Tables) -> Result<(Layout, String), Unsupported> {
        let description = Description::read(memory, tables)?;
        let (version, release) = version(memory, &description)?;
        Ok((Layout::of(&description, version)?, release))
    }

    /// The JVM whose layout is known.
    ///
    /// # Errors
    /// As of [`Self::read`].
    pub fn with_layout(memory: &dyn Memory, layout: Layout, release: String) -> Result<Self, Unsupported> {
        let array = memory::word(memory, layout.heap.all)?;
        if array == 0 {
            return Err(Unsupported::NotReady);
        }
        let (length, data) = layout.heap.array;
        let count = memory::int(memory, array.wrapping_add(length.into()))?;
        if count > MOST_HEAPS {
            return Err(Unsupported::Malformed("code heaps"));
        }
        let data = memory::word(memory, array.wrapping_add(data.into()))?;
        let mut heaps = Vec::new();
        for number in 0..u64::from(count) {
            let heap = memory::word(memory, data.wrapping_add(number * 8))?;
            heaps.push(read_heap(memory, &layout, heap)?);
        }
        let call_stub_return = memory::word(memory, layout.call_stub_return)?;
        if heaps.is_empty() || call_stub_return == 0 {
            return Err(Unsupported::NotReady);
        }
        Ok(Self { layout, release, heaps, call_stub_return })
    }

    /// The code heap that an address lies in.
    #[must_use]
    pub fn heap(&self, address: u64) -> Option<&CodeHeap> {
        self.heaps.iter().find(|heap| (heap.start..heap.end).contains(&address))
    }
}

/// The version as a number, and as a text.
fn version(memory: &dyn Memory, description: &Description) -> Result<(u32, String), Unsupported> {
    let of = |field: &'static str| description.address("Abstract_VM_Version", field).ok_or(Unsupported::Lacks(field));
    let version = memory::int(memory, of("_vm_major_version")?)?;
    let release = memory::word(memory, of("_s_vm_release")?)?;
    let release = memory::text(memory, release, LONGEST_VERSION).unwrap_or_else(|_| version.to_string());
    // It goes into reports: nothing but what a version has.
    let is_usual = |letter: &char| letter.is_ascii_alphanumeric() || "+-._~ ".contains(*letter);
    Ok((version, release.chars().filter(is_usual).collect()))
}

fn read_heap(memory: &dyn Memory, layout: &Layout, heap: u64) -> Result<CodeHeap, Unsupported> {
    let at = layout.heap;
    let bytes = [at.bounds.0, at.bounds.1, at.segments, at.shift].into_iter().max().unwrap_or(0) + 8;
    let head = memory::bytes(memory, heap, bytes as usize)?;
    let fields = Fields(&head);
    let found = CodeHeap {
        start: fields.u64(at.bounds.0)?,
        end: fields.u64(at.bounds.1)?,
        map: fields.u64(at.segments)?,
        shift: fields.u32(at.shift)?,
    };
    let size = found.end.checked_sub(found.start);
    if size.is_none_or(|size| size > LARGEST_HEAP) || !SHIFTS.contains(&found.shift) {
        return Err(Unsupported::Malformed("code heaps"));
    }
    Ok(found)
}
