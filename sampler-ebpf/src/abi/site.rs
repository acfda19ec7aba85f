//! Probe sites, the cookies of their links, and the code ranges of a file that belong to its allocator.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Makes methods that return one byte each of a word, from this bit on.
macro_rules! bytes_of_word {
    ($($(#[$about:meta])* $name:ident: $bit:literal,)*) => {$(
        $(#[$about])*
        #[inline(always)]
        #[must_use]
        pub const fn $name(self) -> u8 {
            (self.0 >> $bit) as u8
        }
    )*};
}

/// A probe site, and how to read the call there. The link's cookie contains its index in the `SITES` map.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Site {
    /// File offset of the probed instruction.
    pub offset: u64,
    /// First file offset of the code of hooked functions in this file (their bounding range).
    pub reentrant_start: u64,
    /// End of that range; equal to `reentrant_start` if there is none.
    pub reentrant_end: u64,
    /// Index into the `FILES` map, which has the exact ranges.
    pub file: u32,
    /// Row of the allocator table that names the function; not used by the kernel side.
    pub function: u16,
    /// Argument that holds the size, or [`NO_ARGUMENT`].
    pub size_argument: u8,
    /// Argument that the size is multiplied by (calloc), or [`NO_ARGUMENT`].
    pub times_argument: u8,
    /// Argument that holds the block to be freed or reallocated, or [`NO_ARGUMENT`].
    pub old_argument: u8,
    /// Argument that points to where the result is stored (posix_memalign), or [`NO_ARGUMENT`] if the function returns
    /// it.
    pub out_argument: u8,
    /// The `SITE_*` flags.
    pub flags: u8,
    /// Zero.
    pub reserved: [u8; 5],
    /// Locations of an announcement's arguments, each an [`Operand`].
    pub operands: [u64; 3],
}

/// Location of an announcement's argument (x86-64). From the lowest byte: place, register by its number in the
/// instruction set, size in bytes, whether it is signed, then 32 bits of displacement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operand(pub u64);

/// Kinds of [`Operand`]s.
pub mod place {
    /// There is no such argument.
    pub const NONE: u8 = 0;
    /// In a register.
    pub const REGISTER: u8 = 1;
    /// In memory, at a register plus the displacement.
    pub const MEMORY: u8 = 2;
    /// The displacement is the value itself.
    pub const CONSTANT: u8 = 3;
}

impl Operand {
    const fn new(place: u8, register: u8, displacement: i32, bytes: u8, is_signed: bool) -> Self {
        Self(
            place as u64
                | (register as u64) << 8
                | (bytes as u64) << 16
                | (is_signed as u64) << 24
                | (displacement.cast_unsigned() as u64) << 32,
        )
    }

    /// In a register.
    #[must_use]
    pub const fn register(number: u8, bytes: u8, is_signed: bool) -> Self {
        Self::new(place::REGISTER, number, 0, bytes, is_signed)
    }

    /// In memory, at a register plus a displacement.
    #[must_use]
    pub const fn memory(base: u8, displacement: i32, bytes: u8, is_signed: bool) -> Self {
        Self::new(place::MEMORY, base, displacement, bytes, is_signed)
    }

    /// A number.
    #[must_use]
    pub const fn constant(value: i32) -> Self {
        Self::new(place::CONSTANT, 0, value, 8, true)
    }

    /// One of [`place`].
    #[inline(always)]
    #[must_use]
    pub const fn place(self) -> u8 {
        self.0 as u8
    }

    bytes_of_word! {
        /// Number of the register.
        register_number: 8,
        /// Size of the value, bytes.
        bytes: 16,
    }

    /// The displacement, sign-extended.
    #[inline(always)]
    #[must_use]
    pub const fn displacement(self) -> u64 {
        ((self.0 as i64) >> 32) as u64
    }

    /// Returns the argument whose lowest bytes are in `word`.
    #[inline(always)]
    #[must_use]
    pub const fn value(self, word: u64) -> u64 {
        let unused = match self.bytes() {
            1 => 56,
            2 => 48,
            4 => 32,
            _ => 0,
        };
        if self.0 >> 24 & 1 == 0 { word << unused >> unused } else { ((word << unused) as i64 >> unused) as u64 }
    }
}

impl Site {
    /// Returns the cookie of the site's links, given the site's index.
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

/// Position of the kind of link in the lower half of a cookie. The index is in the bits below.
const LINK_KIND_SHIFT: u32 = 30;

/// A link's cookie: the index of its [`Site`], and the fields that an unsampled call needs, which saves the lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cookie(pub u64);

impl Cookie {
    /// Index into the `SITES` map.
    #[inline(always)]
    #[must_use]
    pub const fn index(self) -> u32 {
        self.0 as u32 & ((1 << LINK_KIND_SHIFT) - 1)
    }

    /// Kind of the link, one of [`link_kind`](super::link_kind).
    #[inline(always)]
    #[must_use]
    pub const fn link_kind(self) -> u32 {
        self.0 as u32 >> LINK_KIND_SHIFT
    }

    /// Returns the cookie of a link of this kind to the same site.
    #[must_use]
    pub const fn of_kind(self, link_kind: u32) -> Self {
        Self((self.0 & !(3 << LINK_KIND_SHIFT)) | ((link_kind as u64) << LINK_KIND_SHIFT))
    }

    bytes_of_word! {
        /// [`Site::size_argument`].
        size_argument: 32,
        /// [`Site::times_argument`].
        times_argument: 40,
        /// [`Site::old_argument`].
        old_argument: 48,
        /// [`Site::flags`].
        flags: 56,
    }

    /// Everything except the index: equal for all functions with the same calling convention.
    #[inline(always)]
    #[must_use]
    pub const fn shape(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The location of a call's result at one of its return sites, and the distance from that site to the return. It
/// replaces everything except the index in the [`Site`]'s cookie. x86-64 only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResultLocation {
    /// The register with the result, by its number in the instruction set (0 is rax).
    pub register: u8,
    /// The condition (low four bits of a conditional jump) under which the call continues to its return; [`ALWAYS`] if
    /// it always does.
    pub condition: u8,
    /// Number of words between the stack pointer there and the return address.
    pub words_to_return: u8,
    /// Number of words between the stack pointer there and the caller's frame pointer; [`IN_REGISTER`] if the frame
    /// pointer register holds it.
    pub words_to_frame_pointer: u8,
}

/// Not a condition: the call always returns from there.
pub const ALWAYS: u8 = 0xff;
/// Not a distance: the frame pointer is in its register.
pub const IN_REGISTER: u8 = 0xff;

impl ResultLocation {
    /// At a return instruction.
    pub const RETURN: Self =
        Self { register: 0, condition: ALWAYS, words_to_return: 0, words_to_frame_pointer: IN_REGISTER };

    /// Returns the cookie of a return site's links, given the index of its site.
    #[must_use]
    pub const fn cookie(self, index: u32) -> Cookie {
        Cookie(
            index as u64
                | (self.register as u64) << 32
                | (self.condition as u64) << 40
                | (self.words_to_return as u64) << 48
                | (self.words_to_frame_pointer as u64) << 56,
        )
    }

    /// Decodes a [`cookie`](Self::cookie).
    #[inline(always)]
    #[must_use]
    pub const fn of(cookie: Cookie) -> Self {
        Self {
            register: (cookie.0 >> 32) as u8,
            condition: (cookie.0 >> 40) as u8,
            words_to_return: (cookie.0 >> 48) as u8,
            words_to_frame_pointer: (cookie.0 >> 56) as u8,
        }
    }
}

/// [`Cookie::shape`] of malloc and operator new: the size is the first argument, and nothing else matters.
pub const SHAPE_MALLOC: u32 = Site { size_argument: 0, ..PLAIN }.cookie(0).shape();
/// [`Cookie::shape`] of calloc: the size is the product of the first two arguments.
pub const SHAPE_CALLOC: u32 = Site { size_argument: 1, times_argument: 0, ..PLAIN }.cookie(0).shape();

const PLAIN: Site = Site {
    offset: 0,
    reentrant_start: 0,
    reentrant_end: 0,
    file: 0,
    function: 0,
    size_argument: NO_ARGUMENT,
    times_argument: NO_ARGUMENT,
    old_argument: NO_ARGUMENT,
    out_argument: NO_ARGUMENT,
    flags: 0,
    reserved: [0; 5],
    operands: [0; 3],
};

/// No such argument.
pub const NO_ARGUMENT: u8 = 0xff;
/// Number of argument registers that a [`Site`] can name: 0 to 5.
pub const ARGUMENTS: u8 = 6;
/// Stands for x86-64's `rax` instead of an argument's number: it may hold a copy of an argument, or the product of two.
/// Not on aarch64.
pub const ACCUMULATOR: u8 = ARGUMENTS;
/// `realloc(p, 0)` frees `p` (glibc) instead of returning a minimal block (musl).
pub const SITE_ZERO_FREES: u8 = 1;
/// The function can end in a jump to another hooked function (glibc: `realloc(NULL, n)` jumps to malloc).
pub const SITE_MAY_TAIL_JUMP: u8 = 2;
/// The function only frees.
pub const SITE_FREES: u8 = 4;
/// The function may get its memory from another allocator, whose calls are then reentrant. Its return is probed, and
/// allocations that the thread makes until then are not counted.
pub const SITE_CALLS_OUT: u8 = 8;
/// Code that the function runs in its own file may call a hooked function (glibc: memalign's helper calls malloc).
pub const SITE_MAY_CALL_INSIDE: u8 = 16;
/// The function may throw an exception. The program's unwinder cannot unwind past a probed return: it would terminate
/// the program. Without [`SITE_RETURN_SITES_PROBED`], the results of its calls are not seen.
pub const SITE_THROWS: u8 = 32;
/// The function can end in a jump to another function that takes over the old block (reallocarray jumps to realloc).
/// Without this flag, a call with an old block is assumed not to end in a jump, because the block would be lost.
pub const SITE_PASSES_BLOCK_ON: u8 = 64;
/// The function may throw at any time, or switch to another stack before it returns. Instead of its return, its return
/// sites are probed (return instructions, or others that only lead to one), so its return address stays in place.
/// x86-64 only.
pub const SITE_RETURN_SITES_PROBED: u8 = 128;

/// Maximum number of exact code ranges of hooked functions per file.
pub const MAX_REENTRANT_RANGES: usize = 32;

/// Code ranges of one file (file offsets) whose allocator calls are reentrant: the ranges of the hooked functions
/// themselves.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct FileRanges {
    /// Number of used entries of `ranges`.
    pub count: u64,
    /// `[start, end)` pairs.
    pub ranges: [[u64; 2]; MAX_REENTRANT_RANGES],
}

impl Default for FileRanges {
    fn default() -> Self {
        Self { count: 0, ranges: [[0; 2]; MAX_REENTRANT_RANGES] }
    }
}

#[cfg(test)]
mod tests {
    use super::super::link_kind;
    use super::*;

    #[test]
    fn an_operand_has_a_value_of_its_size_and_sign() {
        let word = 0x8877_6655_4433_80f0;
        let value = |bytes, is_signed| Operand::register(7, bytes, is_signed).value(word);
        assert_eq!([value(1, false), value(2, false), value(4, false)], [0xf0, 0x80f0, 0x4433_80f0]);
        assert_eq!((value(8, false), value(8, true)), (word, word));
        assert_eq!([value(1, true), value(2, true)], [0xf0_u64.wrapping_sub(256), 0x80f0_u64.wrapping_sub(65536)]);
        let memory = Operand::memory(4, -16, 4, true);
        assert_eq!((memory.place(), memory.register_number(), memory.bytes()), (place::MEMORY, 4, 4));
        assert_eq!((memory.displacement(), Operand::constant(5).displacement()), (16_u64.wrapping_neg(), 5));
    }

    #[test]
    fn the_kind_of_a_link_leaves_the_rest_of_its_cookie_alone() {
        let cookie = Site { size_argument: 1, old_argument: 2, flags: SITE_ZERO_FREES, ..PLAIN }.cookie(8191);
        for kind in [link_kind::SHARED, link_kind::OWN, link_kind::ANNOUNCED] {
            let linked = cookie.of_kind(3).of_kind(kind);
            assert_eq!((linked.link_kind(), linked.index(), linked.shape()), (kind, 8191, cookie.shape()));
        }
        assert_eq!(cookie.index(), 8191);
    }
}
