//! Where probes sit, what their links' cookies say, and which code of a file is its allocator's own.

/// Where a probe sits and how to read the call there. Its index in the `SITES` map is in the link's cookie.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Site {
    /// File offset of the probed instruction.
    pub offset: u64,
    /// First file offset of the code of hooked functions in this file (bounding range).
    pub inner_start: u64,
    /// End of that range; equal to `inner_start` if there is none.
    pub inner_end: u64,
    /// Index into the `FILES` map, where the exact ranges are.
    pub file: u32,
    /// Row of the allocator table that names the function; opaque to the kernel side.
    pub function: u16,
    /// Argument that holds the size, see [`NO_ARGUMENT`].
    pub size_argument: u8,
    /// Argument that the size is multiplied by (calloc), or [`NO_ARGUMENT`].
    pub times_argument: u8,
    /// Argument that holds the block to be freed or reallocated, or [`NO_ARGUMENT`].
    pub old_argument: u8,
    /// Argument that points to where the result is stored (posix_memalign), or [`NO_ARGUMENT`]: returned.
    pub out_argument: u8,
    /// `SITE_*` bits.
    pub flags: u8,
    /// Zero.
    pub reserved: [u8; 29],
}

impl Site {
    /// The cookie of its links, if its index is this.
    #[must_use]
    pub const fn cookie(&self, index: u32) -> Cookie {
        Cookie(
            index as u64
                | (self.size_argument as u64) << 32
                | (self.times_argument as u64) << 40
                | (self.old_argument as u64) << 48
                | (self.flags as u64) << 56,
        )
    }
}

/// A link's cookie: where its [`Site`] is, and what an unsampled call needs to know of it, which spares it the look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cookie(pub u64);

impl Cookie {
    /// Index into the `SITES` map.
    #[inline(always)]
    #[must_use]
    pub const fn index(self) -> u32 {
        self.0 as u32
    }

    /// [`Site::size_argument`].
    #[inline(always)]
    #[must_use]
    pub const fn size_argument(self) -> u8 {
        (self.0 >> 32) as u8
    }

    /// [`Site::times_argument`].
    #[inline(always)]
    #[must_use]
    pub const fn times_argument(self) -> u8 {
        (self.0 >> 40) as u8
    }

    /// [`Site::old_argument`].
    #[inline(always)]
    #[must_use]
    pub const fn old_argument(self) -> u8 {
        (self.0 >> 48) as u8
    }

    /// [`Site::flags`].
    #[inline(always)]
    #[must_use]
    pub const fn flags(self) -> u8 {
        (self.0 >> 56) as u8
    }

    /// All but the index: the same for all functions that are called alike.
    #[inline(always)]
    #[must_use]
    pub const fn shape(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// [`Cookie::shape`] of malloc and operator new: the size is the first argument, and nothing else matters.
pub const SHAPE_MALLOC: u32 = Site { size_argument: 0, ..PLAIN }.cookie(0).shape();
/// [`Cookie::shape`] of calloc: the size is the product of the first two arguments.
pub const SHAPE_CALLOC: u32 = Site { size_argument: 1, times_argument: 0, ..PLAIN }.cookie(0).shape();

const PLAIN: Site = Site {
    offset: 0,
    inner_start: 0,
    inner_end: 0,
    file: 0,
    function: 0,
    size_argument: NO_ARGUMENT,
    times_argument: NO_ARGUMENT,
    old_argument: NO_ARGUMENT,
    out_argument: NO_ARGUMENT,
    flags: 0,
    reserved: [0; 29],
};

/// No such argument.
pub const NO_ARGUMENT: u8 = 0xff;
/// Arguments in registers that a [`Site`] can name: 0 to 5.
pub const ARGUMENTS: u8 = 6;
/// In place of an argument's number: x86-64's `rax`, where a copy of one or their product may be. Not on aarch64.
pub const ACCUMULATOR: u8 = ARGUMENTS;
/// `realloc(p, 0)` frees `p` (glibc) instead of returning a minimal block (musl).
pub const SITE_ZERO_FREES: u8 = 1;
/// The function can end in a jump to another hooked function (glibc: `realloc(NULL, n)` jumps to malloc).
pub const SITE_MAY_TAIL_JUMP: u8 = 2;
/// The function only frees.
pub const SITE_FREES: u8 = 4;
/// The function may get its memory from another allocator, whose calls are then inner ones: its return is awaited, and
/// what the thread allocates until then is not counted.
pub const SITE_CALLS_OUT: u8 = 8;
/// Code of the file that the function runs may call a hooked function (glibc: memalign's helper calls malloc).
pub const SITE_MAY_CALL_INSIDE: u8 = 16;
/// The function throws an exception where others return NULL. The unwinder of the program cannot find its way past a return
/// that is awaited: it would end the program.
pub const SITE_THROWS: u8 = 32;
/// The function can end in a jump to another that takes the old block over (reallocarray jumps to realloc). Without this
/// flag, one that was given a block cannot end in a jump: the block would be lost.
pub const SITE_PASSES_BLOCK_ON: u8 = 64;
/// The function may throw at any time: probes on its return instructions see its end, so that the way of an exception stays
/// open. x86-64 only.
pub const SITE_ENDS_PROBED: u8 = 128;

/// Most exact code ranges of hooked functions in one file.
pub const MAX_INNER_RANGES: usize = 32;

/// Code ranges of one file (file offsets) whose allocator calls are inner ones: of the hooked functions themselves.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRanges {
    /// Used entries of `ranges`.
    pub count: u64,
    /// `[start, end)` pairs.
    pub ranges: [[u64; 2]; MAX_INNER_RANGES],
}

impl Default for FileRanges {
    fn default() -> Self {
        Self { count: 0, ranges: [[0; 2]; MAX_INNER_RANGES] }
    }
}
