//! The known allocators: how to recognise their files, and how their functions are called.
//!
//! To add an allocator, add an entry to [`ALLOCATORS`].

use sampler_ebpf::abi::{NO_ARGUMENT, SITE_FREES};

use crate::elf::FileImage;
use crate::placement::Arguments;

/// The shape of a function: what its arguments mean, and whether it allocates or frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// What the arguments mean.
    pub arguments: Arguments,
    /// `SITE_FREES`, or 0.
    pub flags: u8,
}

impl Shape {
    /// A function like `malloc`, with the size in this argument.
    #[must_use]
    pub const fn allocates(size: u8) -> Self {
        Self { arguments: Arguments { size, ..Arguments::NONE }, flags: 0 }
    }
    /// A function like `free`, with the block in this argument.
    #[must_use]
    pub const fn frees(old: u8) -> Self {
        Self { arguments: Arguments { old, ..Arguments::NONE }, flags: SITE_FREES }
    }
    /// The same, with the size multiplied by this argument.
    #[must_use]
    pub const fn times(mut self, times: u8) -> Self {
        self.arguments.times = times;
        self
    }
    /// The same, reallocating the block in this argument.
    #[must_use]
    pub const fn old(mut self, old: u8) -> Self {
        self.arguments.old = old;
        self
    }
    /// The same, with the result stored where this argument points.
    #[must_use]
    pub const fn out(mut self, out: u8) -> Self {
        self.arguments.out = out;
        self
    }
    /// Whether the function only frees.
    #[must_use]
    pub const fn is_free(self) -> bool {
        self.flags & SITE_FREES != 0
    }
    /// Whether the function reallocates.
    #[must_use]
    pub const fn is_realloc(self) -> bool {
        !self.is_free() && self.arguments.old != NO_ARGUMENT
    }
}

/// A function of an allocator.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    /// Its name in the audit, which is also one of its symbols.
    pub name: &'static str,
    /// Further symbols. An address with several symbols is hooked once.
    pub aliases: &'static [&'static str],
    /// Its shape.
    pub shape: Shape,
    /// Whether it throws an exception where others return NULL.
    pub throws: bool,
}

/// A known allocator.
#[derive(Clone, Copy, Debug)]
pub struct Allocator {
    /// Its name in profiles.
    pub name: &'static str,
    /// Symbols that only this allocator defines; one is enough.
    pub markers: &'static [&'static str],
    /// Symbols that rule it out; one is enough.
    pub unless: &'static [&'static str],
    /// Returns its version, from the file.
    pub version: fn(&FileImage) -> Option<String>,
    /// Whether `realloc(p, 0)` frees `p` and returns NULL.
    pub realloc_zero_frees: bool,
    /// Whether to look for it only in files without another allocator.
    pub last_resort: bool,
    /// Prefixes of its symbols, before the names of the functions.
    pub prefixes: &'static [&'static str],
    /// Its functions, in groups that allocators share.
    pub functions: &'static [&'static [Function]],
    /// Functions that probes cannot follow, and the consequence.
    pub limits: &'static [(&'static str, &'static str)],
    /// Whether its functions are found through an interpreter's table of allocators
    /// ([`ObjectTable`](crate::ObjectTable)). They have no symbols, and are in the order of that table. Only on
    /// request.
    pub is_of_objects: bool,
}

const fn function(name: &'static str, aliases: &'static [&'static str], shape: Shape) -> Function {
    Function { name, aliases, shape, throws: false }
}

const fn throwing(name: &'static str, aliases: &'static [&'static str], shape: Shape) -> Function {
    Function { throws: true, ..function(name, aliases, shape) }
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
const OPERATORS: &[Function] = &[
    throwing("operator new", &["_Znwm"], Shape::allocates(0)),
    throwing("operator new[]", &["_Znam"], Shape::allocates(0)),
    function("operator new(nothrow)", &["_ZnwmRKSt9nothrow_t"], Shape::allocates(0)),
    function("operator new[](nothrow)", &["_ZnamRKSt9nothrow_t"], Shape::allocates(0)),
    throwing("operator new(align)", &["_ZnwmSt11align_val_t"], Shape::allocates(0)),
    throwing("operator new[](align)", &["_ZnamSt11align_val_t"], Shape::allocates(0)),
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

/// jemalloc's own interface.
const JEMALLOC: &[Function] = &[
    function("mallocx", &[], Shape::allocates(0)),
    function("rallocx", &[], Shape::allocates(1).old(0)),
    function("dallocx", &[], Shape::frees(0)),
    function("sdallocx", &[], Shape::frees(0)),
];

/// mimalloc's own interface, apart from the standard one under its prefix.
const MIMALLOC: &[Function] = &[
    function("mi_zalloc", &[], Shape::allocates(0)),
    function("mi_malloc_small", &[], Shape::allocates(0)),
    function("mi_zalloc_small", &[], Shape::allocates(0)),
    function("mi_mallocn", &[], Shape::allocates(1).times(0)),
    function("mi_reallocn", &[], Shape::allocates(2).times(1).old(0)),
    function("mi_reallocf", &[], Shape::allocates(1).old(0)),
    function("mi_rezalloc", &[], Shape::allocates(1).old(0)),
    function("mi_recalloc", &[], Shape::allocates(2).times(1).old(0)),
    function("mi_malloc_aligned", &[], Shape::allocates(0)),
    function("mi_zalloc_aligned", &[], Shape::allocates(0)),
    function("mi_calloc_aligned", &[], Shape::allocates(1).times(0)),
    function("mi_realloc_aligned", &[], Shape::allocates(1).old(0)),
    function("mi_rezalloc_aligned", &[], Shape::allocates(1).old(0)),
    throwing("mi_new", &[], Shape::allocates(0)),
    throwing("mi_new_n", &[], Shape::allocates(1).times(0)),
    throwing("mi_new_aligned", &[], Shape::allocates(0)),
    function("mi_new_nothrow", &[], Shape::allocates(0)),
    throwing("mi_new_realloc", &[], Shape::allocates(1).old(0)),
    function("mi_heap_malloc", &[], Shape::allocates(1)),
    function("mi_heap_zalloc", &[], Shape::allocates(1)),
    function("mi_heap_malloc_small", &[], Shape::allocates(1)),
    function("mi_heap_calloc", &[], Shape::allocates(2).times(1)),
    function("mi_heap_mallocn", &[], Shape::allocates(2).times(1)),
    function("mi_heap_realloc", &[], Shape::allocates(2).old(1)),
    function("mi_heap_malloc_aligned", &[], Shape::allocates(1)),
    function("mi_malloc_aligned_at", &[], Shape::allocates(0)),
    function("mi_zalloc_aligned_at", &[], Shape::allocates(0)),
    function("mi_calloc_aligned_at", &[], Shape::allocates(1).times(0)),
    function("mi_realloc_aligned_at", &[], Shape::allocates(1).old(0)),
    function("mi_rezalloc_aligned_at", &[], Shape::allocates(1).old(0)),
    function("mi_recalloc_aligned", &[], Shape::allocates(2).times(1).old(0)),
    function("mi_recalloc_aligned_at", &[], Shape::allocates(2).times(1).old(0)),
    function("mi_new_aligned_nothrow", &[], Shape::allocates(0)),
    throwing("mi_new_reallocn", &[], Shape::allocates(2).times(1).old(0)),
    throwing("mi_heap_alloc_new", &[], Shape::allocates(1)),
    throwing("mi_heap_alloc_new_n", &[], Shape::allocates(2).times(1)),
    function("mi_heap_reallocn", &[], Shape::allocates(3).times(2).old(1)),
    function("mi_heap_reallocf", &[], Shape::allocates(2).old(1)),
    function("mi_heap_rezalloc", &[], Shape::allocates(2).old(1)),
    function("mi_heap_recalloc", &[], Shape::allocates(3).times(2).old(1)),
    function("mi_heap_zalloc_aligned", &[], Shape::allocates(1)),
    function("mi_heap_calloc_aligned", &[], Shape::allocates(2).times(1)),
    function("mi_heap_realloc_aligned", &[], Shape::allocates(2).old(1)),
    function("mi_heap_rezalloc_aligned", &[], Shape::allocates(2).old(1)),
    function("mi_heap_recalloc_aligned", &[], Shape::allocates(3).times(2).old(1)),
    function("mi_heap_malloc_aligned_at", &[], Shape::allocates(1)),
    function("mi_heap_zalloc_aligned_at", &[], Shape::allocates(1)),
    function("mi_heap_calloc_aligned_at", &[], Shape::allocates(2).times(1)),
    function("mi_heap_realloc_aligned_at", &[], Shape::allocates(2).old(1)),
    function("mi_heap_rezalloc_aligned_at", &[], Shape::allocates(2).old(1)),
    function("mi_heap_recalloc_aligned_at", &[], Shape::allocates(3).times(2).old(1)),
    function("mi_free_size", &[], Shape::frees(0)),
    function("mi_free_aligned", &[], Shape::frees(0)),
    function("mi_free_size_aligned", &[], Shape::frees(0)),
];

/// snmalloc's interface for Rust.
const SNMALLOC: &[Function] = &[
    function("sn_rust_alloc", &[], Shape::allocates(1)),
    function("sn_rust_alloc_zeroed", &[], Shape::allocates(1)),
    function("sn_rust_realloc", &[], Shape::allocates(3).old(0)),
    function("sn_rust_dealloc", &[], Shape::frees(0)),
];

/// Firefox's functions for arenas. The first argument is the arena's number (memory/build/malloc_decls.h).
const MOZJEMALLOC: &[Function] = &[
    function("moz_arena_malloc", &[], Shape::allocates(1)),
    function("moz_arena_calloc", &[], Shape::allocates(2).times(1)),
    function("moz_arena_realloc", &[], Shape::allocates(2).old(1)),
    function("moz_arena_memalign", &[], Shape::allocates(2)),
    function("moz_arena_free", &[], Shape::frees(1)),
];

/// A Rust program's own `#[global_allocator]`.
const RUST: &[Function] = &[
    function("__rg_alloc", &["__rust_alloc"], Shape::allocates(0)),
    function("__rg_alloc_zeroed", &["__rust_alloc_zeroed"], Shape::allocates(0)),
    function("__rg_realloc", &["__rust_realloc"], Shape::allocates(3).old(0)),
    function("__rg_dealloc", &["__rust_dealloc"], Shape::frees(0)),
];

/// CPython's object allocator, in the order of the interpreter's table. The first argument is each function's context.
const PYTHON: &[Function] = &[
    function("python malloc", &[], Shape::allocates(1)),
    function("python calloc", &[], Shape::allocates(2).times(1)),
    function("python realloc", &[], Shape::allocates(2).old(1)),
    function("python free", &[], Shape::frees(1)),
];

/// Default values for the entries.
const BASE: Allocator = Allocator {
    name: "",
    markers: &[],
    unless: &[],
    version: |_| None,
    realloc_zero_frees: false,
    last_resort: false,
    prefixes: &[""],
    functions: &[],
    limits: &[],
    is_of_objects: false,
};

/// Every known allocator. A symbol that several of them define belongs to the first one that is in the file. So the C
/// libraries come after the allocators that replace their functions.
pub const ALLOCATORS: &[Allocator] = &[
    Allocator {
        name: "jemalloc",
        // The prefixes belong to builds that do not replace malloc, and to Rust's jemalloc crates.
        markers: &["mallocx", "je_mallocx", "_rjem_mallocx", "_rjem_malloc"],
        version: jemalloc_version,
        realloc_zero_frees: true,
        prefixes: &["", "je_", "_rjem_"],
        functions: &[STANDARD, OPERATORS, JEMALLOC],
        limits: &[("xallocx", "resizes a block in place: the profile keeps the old size")],
        ..BASE
    },
    Allocator {
        name: "tcmalloc",
        markers: &["tc_malloc", "TCMallocInternalMalloc"],
        version: tcmalloc_version,
        realloc_zero_frees: true,
        prefixes: &["", "tc_"],
        functions: &[STANDARD, OPERATORS],
        ..BASE
    },
    Allocator {
        name: "mimalloc",
        markers: &["mi_malloc"],
        version: mimalloc_version,
        prefixes: &["", "mi_"],
        functions: &[STANDARD, OPERATORS, MIMALLOC],
        limits: &[("mi_heap_destroy", "frees all blocks of a heap at once: the profile still shows them as in use")],
        ..BASE
    },
    Allocator {
        name: "snmalloc",
        markers: &["sn_malloc", "sn_rust_alloc"],
        prefixes: &["", "sn_"],
        functions: &[STANDARD, OPERATORS, SNMALLOC],
        ..BASE
    },
    Allocator {
        name: "mozjemalloc",
        markers: &["moz_arena_malloc"],
        functions: &[STANDARD, OPERATORS, MOZJEMALLOC],
        ..BASE
    },
    Allocator {
        // Replaces all names of the C library's functions. Its operators call none of them.
        name: "sanitizer",
        markers: &["__asan_init", "__hwasan_init", "__lsan_init", "__msan_init", "__tsan_init"],
        realloc_zero_frees: true,
        functions: &[STANDARD, OPERATORS],
        limits: &[("strdup", "the sanitizer's own strdup and the like allocate without a call that can be seen")],
        ..BASE
    },
    Allocator {
        name: "musl",
        // Functions of the loader's stages in the shared library; the allocator's own functions in a static executable.
        markers: &["__dls2b", "__libc_malloc_impl", "__simple_malloc"],
        version: musl_version,
        functions: &[STANDARD],
        ..BASE
    },
    Allocator {
        // Also replaces glibc's functions under their inner names, as Chromium's does (PartitionAlloc behind its shim),
        // so it cannot call them.
        name: "malloc of its own",
        markers: &["__libc_malloc"],
        unless: &[
            "gnu_get_libc_version",
            "_int_malloc",
            "__dls2b",
            "__libc_malloc_impl",
            "__simple_malloc",
            "mallocx",
            "tc_malloc",
            "TCMallocInternalMalloc",
            "mi_malloc",
            "sn_malloc",
        ],
        functions: &[STANDARD, OPERATORS],
        ..BASE
    },
    Allocator {
        name: "glibc",
        markers: &["gnu_get_libc_version", "_int_malloc"],
        version: glibc_version,
        realloc_zero_frees: true,
        functions: &[STANDARD],
        ..BASE
    },
    Allocator {
        name: "Python objects",
        markers: &[crate::object_table::MARKER],
        functions: &[PYTHON],
        limits: &[(
            "free lists",
            "the interpreter keeps freed floats, tuples, frames and others for reuse: objects taken from there are \
             not counted again, and objects put there stay in use",
        )],
        is_of_objects: true,
        ..BASE
    },
    Allocator {
        name: "Rust global allocator",
        markers: &["__rg_alloc", "__rust_alloc"],
        // Only the default allocator has this symbol. It calls the C library's malloc, which is hooked.
        unless: &["__rdl_alloc"],
        last_resort: true,
        functions: &[RUST],
        limits: &[("__rust_alloc", "calls that the compiler inlined (optimized builds) are not seen")],
        ..BASE
    },
    Allocator {
        name: "unknown malloc",
        markers: &["malloc"],
        last_resort: true,
        functions: &[STANDARD, OPERATORS],
        ..BASE
    },
    Allocator {
        // Only operators that take no blocks from malloc, which is hooked.
        name: OWN_OPERATORS,
        markers: &["_Znwm"],
        last_resort: true,
        functions: &[OPERATORS],
        ..BASE
    },
];

/// Name of the allocator of programs that define `operator new` without another allocator.
pub const OWN_OPERATORS: &str = "operator new of its own";

/// Name prefixes of dynamic loaders, which define `malloc` for their own start only.
pub const LOADERS: &[&str] = &["ld-linux", "ld-2.", "ld.so.1", "ld64.so"];

/// `2.36`, from glibc's banner, or else from the newest symbol version that it defines.
fn glibc_version(image: &FileImage) -> Option<String> {
    let from_banner = image.text_after(b" release version ", 32).and_then(leading_version);
    from_banner.or_else(|| {
        let newest = image.versions.iter().filter_map(|v| v.strip_prefix("GLIBC_")).filter_map(|v| {
            let mut parts = v.split('.').map(str::parse::<u32>);
            Some((parts.next()?.ok()?, parts.next()?.ok()?))
        });
        newest.max().map(|(major, minor)| format!("{major}.{minor}"))
    })
}

/// The digits and dots at the beginning of a text.
fn leading_version(text: &str) -> Option<String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let version = text[..end].trim_end_matches('.');
    (!version.is_empty()).then(|| version.to_owned())
}

/// `5.3.0`, from `5.3.0-0-g54eaed1…`.
fn jemalloc_version(image: &FileImage) -> Option<String> {
    let text = image.text_where(|text| {
        let mut parts = text.split('-');
        let version = parts.next().is_some_and(is_version);
        version
            && parts.next().is_some_and(|n| n.parse::<u32>().is_ok())
            && parts.next().is_some_and(|g| g.starts_with('g'))
    })?;
    leading_version(text)
}

/// `2.10`, from `gperftools 2.10`.
fn tcmalloc_version(image: &FileImage) -> Option<String> {
    image.text_after(b"gperftools ", 16).and_then(leading_version)
}

/// `2.0`, from the library's name: the file itself has no text with its version.
fn mimalloc_version(image: &FileImage) -> Option<String> {
    let names = [Some(image.path.as_str()), image.soname.as_deref()];
    names.into_iter().flatten().find_map(|name| leading_version(name.split_once(".so.")?.1))
}

/// `1.2.3`, a separate text in the shared library.
fn musl_version(image: &FileImage) -> Option<String> {
    image.text_after(b"musl libc", 1)?;
    image.text_where(is_version).map(str::to_owned)
}

/// Whether the text is three numbers with dots between them.
fn is_version(text: &str) -> bool {
    text.split('.').count() == 3 && text.split('.').all(|n| n.len() < 4 && n.parse::<u32>().is_ok())
}
