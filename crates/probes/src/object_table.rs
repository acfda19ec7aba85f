//! CPython's object allocator as data: the result of [`crate::object_search`].

use std::ops::Range;

/// A function that every interpreter exports.
pub const MARKER: &str = "PyObject_Malloc";

/// Number of functions of a domain, in the order of the table.
pub const FUNCTIONS: usize = 4;
/// Distance between two jumps in the space behind the code.
pub const JUMP_BYTES: u64 = 16;

/// Why the object allocator of an interpreter is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoObjectTable {
    /// No structure, or more than one, agrees with the code that reads them.
    #[error("its table of allocators cannot be found in its code")]
    NotFound,
    /// The table leads out of the file's code.
    #[error("its table of allocators does not point to functions of the file")]
    Elsewhere,
    /// The interpreter was built without an allocator of its own.
    #[error("it was built to call malloc for every object")]
    CallsMalloc,
}

/// A jump to a function, through a word behind the jump: 16 bytes, aligned to 16. So one write of an aligned word can
/// redirect it, and restore it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Detour {
    /// Its address in the file.
    pub address: u64,
    /// The function's address.
    pub function: u64,
}

impl Detour {
    /// Its code, up to the word with the function's address: `jmp [rip + 2]`, and two bytes that never run.
    pub const CODE: [u8; 8] = [0xff, 0x25, 2, 0, 0, 0, 0xcc, 0xcc];

    /// Address in the file of the word that holds the function's address in the process.
    #[must_use]
    pub const fn word(&self) -> u64 {
        self.address.wrapping_add(Self::CODE.len() as u64)
    }
}

/// The object allocator of an interpreter. Addresses are those of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectTable {
    /// The first of the four pointers of each domain that the allocator serves: objects, and `PyMem_Malloc` (the same
    /// functions in every usual build).
    pub domains: Vec<u64>,
    /// `malloc`, `calloc`, `realloc`, `free`, as the file initializes the table.
    pub functions: [u64; FUNCTIONS],
    /// Whether copies of these functions run instead of them where the table leads to them.
    pub has_copies: bool,
    /// The functions of the raw domain, which call malloc.
    pub raw: Option<[u64; FUNCTIONS]>,
    /// Address ranges of the interpreter's code.
    pub code: Vec<Range<u64>>,
    /// Address ranges of its variables.
    pub data: Vec<Range<u64>>,
    /// Unused executable bytes for a jump to each function.
    pub(crate) unused: Option<u64>,
}

impl ObjectTable {
    /// Where `words`, a part of the interpreter's data, lead to the functions: in the table itself, and in copies of it
    /// that debug hooks and tracemalloc keep. Returns the index of the first of four pointers each. `bias` is the
    /// address in the process less the address in the file.
    pub fn pointers_in(&self, words: &[u64], bias: u64) -> impl Iterator<Item = usize> {
        let wanted = self.functions.map(|function| function.wrapping_add(bias));
        words.windows(FUNCTIONS).enumerate().filter(move |(_, four)| **four == wanted).map(|(at, _)| at)
    }

    /// Jumps in unused bytes behind the file's code, each to a function. They do the same as the functions, at other
    /// addresses. `None` if there is no space.
    #[must_use]
    pub fn detours(&self) -> Option<[Detour; FUNCTIONS]> {
        let unused = self.unused?;
        let mut at = (unused..).step_by(JUMP_BYTES as usize);
        Some(self.functions.map(|function| Detour { address: at.next().unwrap_or(unused), function }))
    }
}
