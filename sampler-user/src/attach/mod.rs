//! From an ELF file to a plan of probes: which allocator it holds, which instruction of each function to probe, which
//! calls are the allocator's own. Pure: nothing here talks to the kernel.

pub mod allocators;
pub mod arch;
pub mod audit;
mod debugdata;
pub mod elf;
pub mod hooks;
pub mod libraries;
pub mod placement;
mod plan;
pub mod ranges;
mod versions;

pub use allocators::{ALLOCATORS, Allocator, Shape};
pub use elf::{FileImage, FileKind};
pub use placement::{KernelRules, Kind};
pub use plan::{AllocatorFile, Missing, PlannedSite, Table, analyse, defines_any};

/// Why a file cannot be attached to.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Not an ELF file, or cut off before its header ends.
    #[error("not an ELF file")]
    NotElf,
    /// A 32-bit or a big-endian program.
    #[error("not a 64-bit little-endian program: heapbpf profiles 64-bit programs only")]
    NotSixtyFourBit,
    /// Built for an instruction set that heapbpf does not know.
    #[error("built for an instruction set that heapbpf does not know (ELF machine {0}); x86-64 and aarch64 are known")]
    UnknownMachine(u16),
    /// Built for another instruction set than the rules are for.
    #[error("built for another instruction set than this kernel runs")]
    ForeignMachine,
    /// A part of the file that is needed is damaged.
    #[error("the file's {0} are damaged or cut off")]
    Damaged(&'static str),
    /// The executable's heap is the Go runtime's.
    #[error(
        "a Go program: its heap belongs to the Go runtime, use its own profiler (net/http/pprof); C code in it is profiled through libc"
    )]
    Go,
    /// No allocator in the file.
    #[error(
        "defines no allocator that heapbpf knows (looked for {looked_for}); name a custom one with \
         --alloc 'FILE:my_alloc(size=arg0)->ret,free=my_free(arg0)'{}",
        if *.stripped { "; the file has no symbol table (stripped)" } else { "" }
    )]
    NoAllocator {
        /// Names of the allocators in the table.
        looked_for: String,
        /// The file has no `.symtab`.
        stripped: bool,
    },
}
