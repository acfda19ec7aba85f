//! CPython's object allocator as data: what [`crate::object_search`] finds.

use std::ops::Range;

/// A function that every interpreter exports.
pub const MARKER: &str = "PyObject_Malloc";

/// Functions of a domain, in the order of the table.
pub const FUNCTIONS: usize = 4;
/// Distance between two jumps in the room behind the code.
pub const JUMP_BYTES: u64 = 16;

/// Why the object allocator of an interpreter is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoObjectTable {
    /// No structure, or several, agree with the code that reads them.
    #[error("its table of allocators is not found in its code")]
    NotFound,
    /// The table leads out of the file's code.
    #[error("its table of allocators does not lead to functions of the file")]
    Elsewhere,
    /// The interpreter was built without an allocator of its own.
    #[error("it was built to call malloc for every object")]
    CallsMalloc,
}

/// The object allocator of an interpreter. Addresses are those of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectTable {
    /// The first of the four pointers of each domain that the allocator serves: objects, and `PyMem_Malloc` (the same functions in
    /// every usual build).
    pub domains: Vec<u64>,
    /// `malloc`, `calloc`, `realloc`, `free`, as the file initializes the table.
    pub functions: [u64; FUNCTIONS],
    /// Whether copies of these functions run in place of them, where the table leads to them.
    pub has_copies: bool,
    /// The functions of the raw domain, which call malloc.
    pub raw: Option<[u64; FUNCTIONS]>,
    /// The addresses of the interpreter's code.
    pub code: Vec<Range<u64>>,
    /// The addresses of its variables.
    pub data: Vec<Range<u64>>,
    /// Unused executable bytes for a jump to each function.
    pub(crate) room: Option<u64>,
}

impl ObjectTable {
    /// Where a part of the interpreter's data, words from an address on, leads to the functions: the table itself, and copies of it
    /// that debug hooks and tracemalloc have. Indexes of the first of four pointers each. `bias`: address in the process less
    /// address in the file.
    pub fn pointers_in(&self, words: &[u64], bias: u64) -> impl Iterator<Item = usize> {
        let wanted = self.functions.map(|function| function.wrapping_add(bias));
        words.windows(FUNCTIONS).enumerate().filter(move |(_, four)| **four == wanted).map(|(at, _)| at)
    }

    /// Jumps in unused bytes behind the file's code: the address of each, and its code. They do what the functions do, and have
    /// other addresses. `None` if there is no room.
    #[must_use]
    pub fn detours(&self) -> Option<[(u64, [u8; 5]); FUNCTIONS]> {
        let mut room = self.room?;
        let mut detours = [(0, [0; 5]); FUNCTIONS];
        for (detour, function) in detours.iter_mut().zip(self.functions) {
            let distance = i32::try_from(function.wrapping_sub(room + 5).cast_signed()).ok()?.to_le_bytes();
            *detour = (room, [0xe9, distance[0], distance[1], distance[2], distance[3]]);
            room += JUMP_BYTES;
        }
        Some(detours)
    }
}
