//! A JVM: offsets of the needed fields in its build's structures, according to its own description, and its code heaps.

use heapbpf_elf::Memory;

use crate::description::{Description, Tables};
use crate::memory::{self, Fields, Unsupported};

/// Supported versions: their interpreter's frames match [`crate::frames`], and their description is understood. (23 and
/// 24 store pointers to methods in a third way.)
const KNOWN: [u32; 7] = [17, 18, 19, 20, 21, 22, 25];

/// The first version whose compressed numbers contain no zero bytes.
const WITHOUT_ZEROS: u32 = 20;

/// A reference from an object to something that belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The field at this offset is a pointer to the target.
    Pointer(u32),
    /// The field at this offset is the target's distance from the object, bytes (32 bits).
    Distance(u32),
}

/// Code heaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapLayout {
    /// Address of the pointer to the array of heaps.
    pub all: u64,
    /// Fields of that array: the number of elements, and the pointer to them.
    pub array: (u32, u32),
    /// Boundaries of a heap's reserved memory.
    pub bounds: (u32, u32),
    /// Pointer to a heap's segment map.
    pub segments: u32,
    /// Binary logarithm of the segment size.
    pub shift: u32,
    /// Offset in a block of the flag that says whether it is in use.
    pub used: u32,
    /// Number of bytes in a block before its code blob.
    pub block_head: u32,
}

/// Code blobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobLayout {
    /// Name: a pointer to a string.
    pub name: u32,
    /// Size, bytes (32 bits).
    pub size: u32,
    /// Size of a frame, words (32 bits).
    pub frame_size: u32,
    /// Its code.
    pub code: Reach,
}

/// Compiled methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompiledLayout {
    /// Pointer to the method.
    pub method: u32,
    /// A number that distinguishes compilations.
    pub compile_id: u32,
    /// Return address of frames whose method is no longer valid.
    pub deopt_handler: Option<Reach>,
    /// Distance from a frame's stack pointer to its real return address, if its method is no longer valid (32 bits).
    pub original_pc: u32,
    /// Start and end of the descriptions of code places.
    pub places: (Reach, Reach),
    /// The descriptions of scopes.
    pub scopes: Reach,
    /// Pointers to methods.
    pub metadata: Metadata,
    /// Pointer that places and scopes are relative to; `None` if they are relative to the object itself.
    pub immutable_data: Option<u32>,
}

/// Where a compiled method stores its pointers to methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metadata {
    /// At a distance from the object.
    Inside(u32),
    /// In memory that the first field points to, after as many bytes as the second field says.
    Behind(u32, u32),
}

/// Methods, their constant parts, and the classes that these refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MethodLayout {
    /// Pointer from a method to its constant part.
    pub constant: u32,
    /// Size of a constant part, bytes; the bytecodes follow it.
    pub constant_bytes: u32,
    /// Size of the constant part together with everything that follows it, words (32 bits).
    pub constant_words: u32,
    /// Flags (16 bits), and the flag of methods with line numbers.
    pub flags: (u32, u16),
    /// Size of the bytecodes (16 bits).
    pub code_size: u32,
    /// Index of the name (16 bits).
    pub name: u32,
    /// Pointer to the constant pool.
    pub pool: u32,
    /// Size of a pool's head, bytes; its constants follow it.
    pub pool_bytes: u32,
    /// Number of constants (32 bits).
    pub pool_length: u32,
    /// Pointer to the class that a pool belongs to.
    pub holder: u32,
    /// Index of the source file's name in the pool (16 bits).
    pub source_file: Option<u32>,
    /// Pointer from a class to its name.
    pub class_name: u32,
    /// Length of a symbol (16 bits), and its bytes.
    pub symbol: (u32, u32),
}

/// The layout of one build's structures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Java version, such as 17.
    pub version: u32,
    /// Whether compressed numbers contain no zero bytes.
    pub without_zeros: bool,
    /// Address of the pointer to the return address of Java code that was called from native code.
    pub call_stub_return: u64,
    /// Code heaps.
    pub heap: HeapLayout,
    /// Code blobs.
    pub blob: BlobLayout,
    /// Compiled methods.
    pub compiled: CompiledLayout,
    /// Methods.
    pub method: MethodLayout,
}

/// Looks up fields, and names the first missing one.
struct FieldLookup<'a>(&'a Description);

impl FieldLookup<'_> {
    fn offset(&self, class: &str, field: &'static str) -> Result<u32, Unsupported> {
        self.0.offset(class, field).ok_or(Unsupported::Lacks(field))
    }

    fn address(&self, class: &str, field: &'static str) -> Result<u64, Unsupported> {
        self.0.address(class, field).ok_or(Unsupported::Lacks(field))
    }

    fn size(&self, class: &'static str) -> Result<u32, Unsupported> {
        self.0.size(class).ok_or(Unsupported::Lacks(class))
    }

    /// Looks up a field of a compiled method. Up to version 22, two classes shared these fields.
    fn compiled(&self, field: &str) -> Option<u32> {
        self.0.offset("nmethod", field).or_else(|| self.0.offset("CompiledMethod", field))
    }

    /// Looks up a reference that is either a pointer or a distance, under different names.
    fn reach(&self, pointer: &str, distance: &'static str) -> Result<Reach, Unsupported> {
        let reach = self.compiled(pointer).map(Reach::Pointer);
        reach.or_else(|| self.compiled(distance).map(Reach::Distance)).ok_or(Unsupported::Lacks(distance))
    }
}

impl Layout {
    /// Returns the layout of a version, according to its description.
    ///
    /// # Errors
    /// [`Unsupported`]
    pub fn of(description: &Description, version: u32) -> Result<Self, Unsupported> {
        if !KNOWN.contains(&version) {
            return Err(Unsupported::Version(version));
        }
        // This constant represents the layout of the interpreter's frames; the other fields follow from it.
        let sender = description.constant("frame::interpreter_frame_sender_sp_offset");
        if sender.is_some_and(|value| value.cast_signed() != -1) {
            return Err(Unsupported::Malformed("interpreted frames"));
        }
        let wanted = FieldLookup(description);
        Ok(Self {
            version,
            without_zeros: version >= WITHOUT_ZEROS,
            call_stub_return: wanted.address("StubRoutines", "_call_stub_return_address")?,
            heap: heap(&wanted)?,
            blob: BlobLayout {
                name: wanted.offset("CodeBlob", "_name")?,
                size: wanted.offset("CodeBlob", "_size")?,
                frame_size: wanted.offset("CodeBlob", "_frame_size")?,
                code: match description.offset("CodeBlob", "_code_begin") {
                    Some(at) => Reach::Pointer(at),
                    None => Reach::Distance(wanted.offset("CodeBlob", "_code_offset")?),
                },
            },
            compiled: compiled(&wanted)?,
            method: method(&wanted)?,
        })
    }
}

fn heap(wanted: &FieldLookup) -> Result<HeapLayout, Unsupported> {
    let memory = wanted.offset("CodeHeap", "_memory")?;
    let low = wanted.offset("VirtualSpace", "_low")?;
    let bound = |field| Ok::<_, Unsupported>(memory + wanted.offset("VirtualSpace", field)?);
    let length =
        wanted.0.offset("GrowableArrayBase", "_len").or_else(|| wanted.0.offset("GenericGrowableArray", "_len"));
    Ok(HeapLayout {
        all: wanted.address("CodeCache", "_heaps")?,
        array: (
            length.ok_or(Unsupported::Lacks("GrowableArrayBase"))?,
            // All arrays of pointers store their elements at the same offset.
            wanted.offset("GrowableArray<int>", "_data")?,
        ),
        bounds: (bound("_low_boundary")?, bound("_high_boundary")?),
        segments: wanted.offset("CodeHeap", "_segmap")? + low,
        shift: wanted.offset("CodeHeap", "_log2_segment_size")?,
        used: wanted.offset("HeapBlock::Header", "_used")?,
        block_head: wanted.size("HeapBlock")?,
    })
}

fn compiled(wanted: &FieldLookup) -> Result<CompiledLayout, Unsupported> {
    let needed = |field: &'static str| wanted.compiled(field).ok_or(Unsupported::Lacks(field));
    let immutable_data = wanted.compiled("_immutable_data");
    let places = needed("_scopes_pcs_offset")?;
    // The field that follows the places.
    let end = match immutable_data {
        Some(_) => needed("_scopes_data_offset")?,
        None => needed("_dependencies_offset")?,
    };
    let metadata = match (wanted.0.offset("CodeBlob", "_mutable_data"), wanted.0.offset("CodeBlob", "_relocation_size"))
    {
        (Some(data), Some(relocations)) => Metadata::Behind(data, relocations),
        _ if immutable_data.is_some() => return Err(Unsupported::Lacks("_mutable_data")),
        _ => Metadata::Inside(needed("_metadata_offset")?),
    };
    Ok(CompiledLayout {
        method: needed("_method")?,
        compile_id: needed("_compile_id")?,
        deopt_handler: wanted.reach("_deopt_handler_begin", "_deopt_handler_offset").ok(),
        original_pc: needed("_orig_pc_offset")?,
        places: (Reach::Distance(places), Reach::Distance(end)),
        scopes: wanted.reach("_scopes_data_begin", "_scopes_data_offset")?,
        metadata,
        immutable_data,
    })
}

fn method(wanted: &FieldLookup) -> Result<MethodLayout, Unsupported> {
    let either = |names: [&'static str; 2]| {
        let found = names.iter().find_map(|name| wanted.0.offset("ConstMethod", name));
        found.ok_or(Unsupported::Lacks(names[0]))
    };
    let has_lines = ["ConstMethod::_has_linenumber_table", "ConstMethodFlags::_misc_has_linenumber_table"];
    let has_lines = has_lines.iter().find_map(|name| wanted.0.constant(name)).unwrap_or(0);
    Ok(MethodLayout {
        constant: wanted.offset("Method", "_constMethod")?,
        constant_bytes: wanted.size("ConstMethod")?,
        constant_words: wanted.offset("ConstMethod", "_constMethod_size")?,
        flags: (either(["_flags", "_flags._flags"])?, has_lines as u16),
        code_size: wanted.offset("ConstMethod", "_code_size")?,
        name: wanted.offset("ConstMethod", "_name_index")?,
        pool: wanted.offset("ConstMethod", "_constants")?,
        pool_bytes: wanted.size("ConstantPool")?,
        pool_length: wanted.offset("ConstantPool", "_length")?,
        holder: wanted.offset("ConstantPool", "_pool_holder")?,
        source_file: wanted.0.offset("ConstantPool", "_source_file_name_index"),
        class_name: wanted.offset("Klass", "_name")?,
        symbol: (wanted.offset("Symbol", "_length")?, wanted.offset("Symbol", "_body")?),
    })
}

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
