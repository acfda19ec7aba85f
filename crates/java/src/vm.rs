//! A running JVM: its layout and its code heaps.

use heapbpf_elf::Memory;

use crate::description::Description;
use crate::layout::Layout;
use crate::library::Tables;
use crate::memory::{self, Fields};
use crate::unsupported::Unsupported;

/// Maximum number of code heaps. Real JVMs have one or three.
const MOST_HEAPS: u32 = 8;
/// Largest code heap that is accepted, bytes.
const LARGEST_HEAP: u64 = 4 << 30;
/// Range of the binary logarithm of a segment's size. Real segments have 64 or 128 bytes.
const SHIFTS: std::ops::RangeInclusive<u32> = 4..=16;
/// Maximum length of a version string, bytes.
const LONGEST_VERSION: usize = 64;

/// A code heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeHeap {
    /// Its first address.
    pub start: u64,
    /// The end of its reserved memory.
    pub end: u64,
    /// Address of its segment map, which has one byte per segment.
    pub map: u64,
    /// Binary logarithm of the segment size, bytes.
    pub shift: u32,
}

/// A running JVM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vm {
    /// Its layout.
    pub layout: Layout,
    /// Its version string, such as `17.0.15+6-Debian-1deb12u1`.
    pub release: String,
    /// Its code heaps.
    pub heaps: Vec<CodeHeap>,
    /// Return address of Java code that was called from native code.
    pub call_stub_return: u64,
}

impl Vm {
    /// Reads a JVM's description of itself.
    ///
    /// # Errors
    /// [`Unsupported`]; [`Unsupported::NotReady`] is temporary.
    pub fn read(memory: &dyn Memory, tables: &Tables) -> Result<Self, Unsupported> {
        let (layout, release) = Self::layout(memory, tables)?;
        Self::with_layout(memory, layout, release)
    }

    /// Returns the layout of a JVM and its version string, such as `17.0.15+6-Debian-1deb12u1`. They are available once
    /// the library is loaded.
    ///
    /// # Errors
    /// [`Unsupported`]
    pub fn layout(memory: &dyn Memory, tables: &Tables) -> Result<(Layout, String), Unsupported> {
        let description = Description::read(memory, tables)?;
        let (version, release) = version(memory, &description)?;
        Ok((Layout::of(&description, version)?, release))
    }

    /// Reads the rest of a JVM whose layout is known.
    ///
    /// # Errors
    /// Same as [`Self::read`].
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

    /// Returns the code heap that contains an address.
    #[must_use]
    pub fn heap(&self, address: u64) -> Option<&CodeHeap> {
        self.heaps.iter().find(|heap| (heap.start..heap.end).contains(&address))
    }
}

/// Returns the version as a number and as a string.
fn version(memory: &dyn Memory, description: &Description) -> Result<(u32, String), Unsupported> {
    let of = |field: &'static str| description.address("Abstract_VM_Version", field).ok_or(Unsupported::Lacks(field));
    let version = memory::int(memory, of("_vm_major_version")?)?;
    let release = memory::word(memory, of("_s_vm_release")?)?;
    let release = memory::text(memory, release, LONGEST_VERSION).unwrap_or_else(|_| version.to_string());
    // The string goes into reports, so only the usual characters of a version are kept.
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
