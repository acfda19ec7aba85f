//! From an ELF file to a plan of probes: which allocator it holds, which instruction of each function to probe, which
//! calls are the allocator's own. Pure: nothing here talks to the kernel.

pub mod allocators;
pub mod arch;
pub mod audit;
mod bounded;
pub mod candidates;
pub mod custom;
pub mod debugdata;
pub mod elf;
mod exceptions;
pub mod hooks;
pub mod libraries;
pub mod placement;
mod plan;
pub mod ranges;
mod resolver;
pub mod table;
mod versions;

pub use candidates::{Candidate, MappedFile, candidates};
pub use custom::CustomAllocator;
pub use elf::{FileImage, FileKind};
pub use placement::{KernelRules, Kind};
pub use plan::{AllocatorFile, Covered, Missing, PlannedSite, analyse, examine};
pub use table::Table;

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
    /// The dynamic loader.
    #[error("the dynamic loader: what it defines of malloc serves its own start only")]
    Loader,
    /// The program's own allocator is a layer above another file's.
    #[error("its allocator takes its blocks from {to} of another file, where its calls are seen")]
    PassesOn {
        /// The function that it calls there.
        to: String,
    },
    /// A function of a custom allocator is not in its file.
    #[error("no function {symbol:?} in the file{}", suggestion(.nearest))]
    NoSymbol {
        /// What was looked for.
        symbol: String,
        /// Similar names, best first.
        nearest: Vec<String>,
    },
    /// Functions of an allocator that no probe can be put on.
    #[error("its {what} cannot be hooked: {why}")]
    Unhookable {
        /// One of them.
        what: String,
        /// Why.
        why: String,
    },
    /// No allocator in the file.
    #[error(
        "defines no allocator that heapbpf knows (looked for {looked_for}){}; name a custom one with \
         --alloc 'FILE:my_alloc(size=arg0)->ret,free=my_free(arg0)'",
        if *.stripped { ": it has no symbols (stripped)" } else { "" }
    )]
    NoAllocator {
        /// Names of the allocators in the table.
        looked_for: String,
        /// The file has no symbols at all.
        stripped: bool,
    },
}

impl AttachError {
    /// Nothing of the file's is missed: it has no allocator, or one whose calls are seen elsewhere.
    #[must_use]
    pub const fn misses_nothing(&self) -> bool {
        matches!(self, Self::NoAllocator { .. } | Self::NotElf | Self::Loader | Self::PassesOn { .. })
    }
}

fn suggestion(nearest: &[String]) -> String {
    if nearest.is_empty() { String::new() } else { format!("; similar names there: {}", nearest.join(", ")) }
}
