//! Call stacks, their frames, and the modules that frames are in.

use std::sync::Arc;

/// The source of stacks that Go's runtime has recorded ([`Stack::source`]).
pub const GO_RUNTIME: &str = "go runtime";

/// A call stack.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stack {
    /// Frames, innermost first.
    pub frames: Vec<Frame>,
    /// The unwinder that produced it: `dwarf`, `fp` or `caller` (only the address of the caller is known), or
    /// [`GO_RUNTIME`].
    pub unwinder: &'static str,
    /// Why the stack was cut; `None` if it reaches the entry of the thread.
    pub cut: Option<Arc<str>>,
}

impl Stack {
    /// Who recorded it, if not heapbpf: [`GO_RUNTIME`]. Its row is of what the process has in use since it started, not
    /// since the recording began, and has no allocations.
    pub fn source(&self) -> Option<&'static str> {
        (self.unwinder == GO_RUNTIME).then_some(GO_RUNTIME)
    }
}

/// A frame. An inlined function is a frame of its own, before the function that it is inlined into.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Frame {
    /// Function name, demangled; `None` if unknown, then `reason` says why.
    pub function: Option<Arc<str>>,
    /// Symbol name before demangling, if it differs.
    pub system_name: Option<Arc<str>>,
    /// Source file.
    pub file: Option<Arc<str>>,
    /// Source line.
    pub line: Option<u32>,
    /// Whether this is a function inlined into the next frame.
    pub inlined: bool,
    /// Where the function begins, as an address of its ELF file, if its unwind entry tells so and nothing gives it a name.
    pub function_start: Option<u64>,
    /// Why nothing is known of the function. Why functions with a start have no name is the module's `reason`.
    pub reason: Option<Arc<str>>,
    /// Index into [`Profile::modules`](super::Profile::modules).
    pub module: Option<usize>,
    /// Address of the call in the process (return address − 1); 0 if unknown.
    pub address: u64,
    /// Offset of the address in the file of the module.
    pub file_offset: Option<u64>,
}

/// A module: a mapped file, the vDSO, or a region of JIT code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Module {
    /// Path as the process saw it.
    pub path: Arc<str>,
    /// GNU build ID.
    pub build_id: Option<Vec<u8>>,
    /// Start address of its executable mapping in the first process that had it.
    pub start: u64,
    /// End address of that mapping.
    pub end: u64,
    /// File offset of that mapping.
    pub file_offset: u64,
    /// Why functions of it have no names; `None` if all have one.
    pub reason: Option<Arc<str>>,
}
