//! Why no probes can be placed in a file.

use heapbpf_elf::ElfError;

/// Why no probes can be placed in a file.
///
/// Most files of a process have no allocator, which is not a failure: [`Self::misses_nothing`] distinguishes these
/// cases.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The file is not an ELF file, or ends within its header.
    #[error("not an ELF file")]
    NotElf,
    /// The file is a 32-bit or a big-endian program.
    #[error("not a 64-bit little-endian program: heapbpf profiles 64-bit programs only")]
    NotSixtyFourBit,
    /// The file is for an unknown instruction set, with this ELF machine number.
    #[error("built for an unsupported instruction set (ELF machine {0}); heapbpf supports x86-64 and aarch64")]
    UnknownMachine(u16),
    /// The file is for another instruction set than the [`KernelRules`](crate::KernelRules).
    #[error("built for another instruction set than this kernel's")]
    ForeignMachine,
    /// A required part of the file is damaged, or lies beyond its end.
    #[error("the file's {0} are damaged or cut off")]
    Damaged(&'static str),
    /// The executable is a Go program, which has its own heap.
    #[error(
        "a Go program: its heap belongs to the Go runtime, use its own profiler (net/http/pprof); C code in it is profiled through libc"
    )]
    Go,
    /// The file is the dynamic loader, which uses its own `malloc` only while it starts.
    #[error("the dynamic loader: it uses its malloc only while it starts")]
    Loader,
    /// The allocator takes its blocks from another file's allocator, which should be probed instead.
    #[error("its allocator gets its blocks from {to} in another file, where its calls are counted")]
    PassesOn {
        /// The function of the other file that it calls.
        to: String,
    },
    /// The file has no known allocator, but a function with the name of one that allocates, and uses none of another
    /// file.
    #[error(
        "its {function} is of no allocator that heapbpf knows, and the file uses no other file's allocator: what it \
         allocates is not counted; describe it with --alloc"
    )]
    Alone {
        /// The function.
        function: String,
    },
    /// A [`CustomAllocator`](crate::CustomAllocator) for the file names a function that the file does not define.
    #[error("no function {symbol:?} in the file{}", suggestion(.nearest))]
    NoSymbol {
        /// The name of the function.
        symbol: String,
        /// Similar names that the file defines, best first.
        nearest: Vec<String>,
    },
    /// The file has an allocator, but none of its functions can be probed.
    #[error("its {what} cannot be hooked: {why}")]
    Unhookable {
        /// One of the functions.
        what: String,
        /// Why it cannot be probed.
        why: String,
    },
    /// The executable is statically linked and has no symbols, so its allocator cannot be found.
    #[error(
        "a static program without symbols (stripped): its allocator cannot be found, so its allocations are not \
         counted; keep its symbols, or link it dynamically"
    )]
    StaticStripped,
    /// The file has no allocator of the [`Table`](crate::Table).
    #[error(
        "defines no allocator that heapbpf knows (looked for {looked_for}){}; name a custom one with \
         --alloc 'FILE:my_alloc(size=arg0)->ret,free=my_free(arg0)'",
        if *.stripped { ": it has no symbols (stripped)" } else { "" }
    )]
    NoAllocator {
        /// Names of the allocators that were looked for.
        looked_for: String,
        /// Whether the file has no symbols at all.
        stripped: bool,
    },
    /// No program in the file announces its samples by USDT probes.
    #[error("has no USDT probes of the provider otel_memory")]
    NoAnnouncements,
}

impl AttachError {
    /// Whether no allocation goes unseen because of this error: the file has no allocator, or one whose calls are seen
    /// in another file.
    #[must_use]
    pub const fn misses_nothing(&self) -> bool {
        matches!(
            self,
            Self::NoAllocator { .. } | Self::NotElf | Self::Loader | Self::PassesOn { .. } | Self::NoAnnouncements
        )
    }
}

fn suggestion(nearest: &[String]) -> String {
    if nearest.is_empty() { String::new() } else { format!("; similar names there: {}", nearest.join(", ")) }
}

impl From<ElfError> for AttachError {
    fn from(error: ElfError) -> Self {
        match error {
            ElfError::NotSixtyFourBit => Self::NotSixtyFourBit,
            ElfError::Table { what, .. } | ElfError::Malformed(what) => Self::Damaged(what),
            ElfError::NotElf | ElfError::Io(_) | ElfError::TooLarge { .. } => Self::NotElf,
        }
    }
}
