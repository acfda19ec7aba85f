//! The table of allocators: how a file is recognised as one, and how its functions are called.
//!
//! Adding an allocator is adding one entry to [`ALLOCATORS`].

use sampler_ebpf::abi::{NO_ARGUMENT, SITE_FREES, SITE_ZERO_FREES};

use super::elf::FileImage;
use super::placement::Arguments;
use super::versions;

/// How a function is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Which argument is what.
    pub arguments: Arguments,
    /// `SITE_FREES`, or 0.
    pub flags: u8,
}

impl Shape {
    /// `malloc(size)`, with the size in this argument.
    #[must_use]
    pub const fn allocates(size: u8) -> Self {
        Self { arguments: Arguments { size, ..Arguments::NONE }, flags: 0 }
    }
    /// `free(block)`, with the block in this argument.
    #[must_use]
    pub const fn frees(old: u8) -> Self {
        Self { arguments: Arguments { old, ..Arguments::NONE }, flags: SITE_FREES }
    }
    /// The size is multiplied by this argument.
    #[must_use]
    pub const fn times(mut self, times: u8) -> Self {
        self.arguments.times = times;
        self
    }
    /// The block in this argument is reallocated.
    #[must_use]
    pub const fn old(mut self, old: u8) -> Self {
        self.arguments.old = old;
        self
    }
    /// The result is stored where this argument points.
    #[must_use]
    pub const fn out(mut self, out: u8) -> Self {
        self.arguments.out = out;
        self
    }
    /// True if the function only frees.
    #[must_use]
    pub const fn is_free(self) -> bool {
        self.flags & SITE_FREES != 0
    }
    /// True if the function reallocates.
    #[must_use]
    pub const fn is_realloc(self) -> bool {
        !self.is_free() && self.arguments.old != NO_ARGUMENT
    }
}

/// A function of an allocator.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    /// What the audit calls it.
    pub name: &'static str,
    /// Symbols that it may be found under, besides its name. Each address is hooked once.
    pub aliases: &'static [&'static str],
    /// How it is called.
    pub shape: Shape,
}

/// One entry of the table.
#[derive(Clone, Copy, Debug)]
pub struct Allocator {
    /// What the profile calls it.
    pub name: &'static str,
    /// Symbols that only this allocator defines; one is enough.
    pub markers: &'static [&'static str],
    /// How its file names begin. Only a hint of where to look first: the symbols decide.
    pub file_names: &'static [&'static str],
    /// Its version as found in the file.
    pub version: fn(&FileImage) -> Option<String>,
    /// `realloc(p, 0)` frees `p` and returns NULL.
    pub realloc_zero_frees: bool,
    /// Its functions, in groups that several allocators share.
    pub functions: &'static [&'static [Function]],
}

impl Allocator {
    /// `SITE_*` flags of one of its functions.
    #[must_use]
    pub fn flags(&self, shape: Shape) -> u8 {
        if self.realloc_zero_frees && shape.is_realloc() { shape.flags | SITE_ZERO_FREES } else { shape.flags }
    }
}

const fn function(name: &'static str, aliases: &'static [&'static str], shape: Shape) -> Function {
    Function { name, aliases, shape }
}

/// The C interface under its own names.
const STANDARD: &[Function] = &[
    function("malloc", &["__libc_malloc"], Shape::allocates(0)),
    function("calloc", &["__libc_calloc"], Shape::allocates(1).times(0)),
    function("realloc", &["__libc_realloc"], Shape::allocates(1).old(0)),
    function("reallocarray", &["__libc_reallocarray"], Shape::allocates(2).times(1).old(0)),
    function("memalign", &["__libc_memalign"], Shape::allocates(1)),
    function("aligned_alloc", &[], Shape::allocates(1)),
    function("posix_memalign", &["__posix_memalign"], Shape::allocates(2).out(0)),
    function("valloc", &["__libc_valloc"], Shape::allocates(0)),
    function("pvalloc", &["__libc_pvalloc"], Shape::allocates(0)),
    function("free", &["__libc_free", "cfree"], Shape::frees(0)),
    // C23.
    function("free_sized", &[], Shape::frees(0)),
    function("free_aligned_sized", &[], Shape::frees(0)),
];

/// `operator new` and `delete` in all their forms (Itanium C++ ABI names; `m` is `size_t`).
#[expect(dead_code, reason = "used by the next entries")]
const OPERATORS: &[Function] = &[
    function("operator new", &["_Znwm"], Shape::allocates(0)),
    function("operator new[]", &["_Znam"], Shape::allocates(0)),
    function("operator new(nothrow)", &["_ZnwmRKSt9nothrow_t"], Shape::allocates(0)),
    function("operator new[](nothrow)", &["_ZnamRKSt9nothrow_t"], Shape::allocates(0)),
    function("operator new(align)", &["_ZnwmSt11align_val_t"], Shape::allocates(0)),
    function("operator new[](align)", &["_ZnamSt11align_val_t"], Shape::allocates(0)),
    function("operator new(align, nothrow)", &["_ZnwmSt11align_val_tRKSt9nothrow_t"], Shape::allocates(0)),
    function("operator new[](align, nothrow)", &["_ZnamSt11align_val_tRKSt9nothrow_t"], Shape::allocates(0)),
    function("operator delete", &["_ZdlPv"], Shape::frees(0)),
    function("operator delete[]", &["_ZdaPv"], Shape::frees(0)),
    function("operator delete(nothrow)", &["_ZdlPvRKSt9nothrow_t"], Shape::frees(0)),
    function("operator delete[](nothrow)", &["_ZdaPvRKSt9nothrow_t"], Shape::frees(0)),
    function("operator delete(size)", &["_ZdlPvm"], Shape::frees(0)),
    function("operator delete[](size)", &["_ZdaPvm"], Shape::frees(0)),
    function("operator delete(align)", &["_ZdlPvSt11align_val_t"], Shape::frees(0)),
    function("operator delete[](align)", &["_ZdaPvSt11align_val_t"], Shape::frees(0)),
    function("operator delete(size, align)", &["_ZdlPvmSt11align_val_t"], Shape::frees(0)),
    function("operator delete[](size, align)", &["_ZdaPvmSt11align_val_t"], Shape::frees(0)),
    function("operator delete(align, nothrow)", &["_ZdlPvSt11align_val_tRKSt9nothrow_t"], Shape::frees(0)),
    function("operator delete[](align, nothrow)", &["_ZdaPvSt11align_val_tRKSt9nothrow_t"], Shape::frees(0)),
];

/// Every allocator that heapbpf knows.
pub const ALLOCATORS: &[Allocator] = &[Allocator {
    name: "glibc",
    markers: &["__libc_malloc"],
    file_names: &["libc.so.6", "libc-2."],
    version: versions::glibc,
    realloc_zero_frees: true,
    functions: &[STANDARD],
}];
