//! The kernel's side of the house: the only place that talks `bpf(2)`.

pub mod btf;
mod filter;
pub mod live_map;
pub mod loader;
pub mod log;
pub mod mappings;
pub mod object;
pub mod programs;
pub mod rings;
pub mod stack_traces;
pub mod steering;
pub mod sys;
pub mod totals;

use std::io;

/// What can go wrong between heapbpf and the kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// No type information.
    #[error(
        "this kernel gives no type information ({path}: {source}); heapbpf needs one built with CONFIG_DEBUG_INFO_BTF"
    )]
    NoBtf {
        /// Where it was looked for.
        path: &'static str,
        /// Why it could not be read.
        source: io::Error,
    },
    /// Type information in an unknown form.
    #[error("the kernel's type information has a form that heapbpf does not know; it needs kernel 5.11 or later")]
    UnknownBtf,
    /// A structure lacks a member.
    #[error("the kernel's {structure} has no member {path}; heapbpf does not know this kernel")]
    NoMember {
        /// Structure.
        structure: &'static str,
        /// Member.
        path: &'static str,
    },
    /// The binary was built without its BPF object.
    #[error("this binary was built without its BPF programs; build it with `cargo xtask build`")]
    NoObject,
    /// The BPF object cannot be used.
    #[error("the built-in BPF object cannot be used: {0}")]
    Object(String),
    /// Permission.
    #[error("the kernel does not permit BPF: {missing}; run heapbpf as root or give it these capabilities")]
    Permission {
        /// What is missing.
        missing: String,
    },
    /// A map was refused.
    #[error("the kernel refused the map {name}: {source}")]
    Map {
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// Type information of the programs was refused.
    #[error("the kernel refused the programs' type information: {source}\n{log}")]
    BtfRefused {
        /// Why.
        source: io::Error,
        /// The kernel's words.
        log: String,
    },
    /// A program was refused.
    #[error("the kernel refused the program {name}: {source}\n{log}")]
    Program {
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
        /// The end of the verifier's log.
        log: String,
    },
    /// A link was refused.
    #[error("cannot attach to {what}: {source}")]
    Link {
        /// File or tracepoint.
        what: String,
        /// Why.
        source: io::Error,
    },
    /// A link was refused with EINVAL, where the same kind of link works elsewhere.
    #[error(
        "the kernel refuses probes there (EINVAL): another tool has registered one of the same instructions with a \
         reference counter, as bcc's tools do; end it, and try again some seconds later"
    )]
    Conflict,
    /// A read or write failed.
    #[error("cannot read {what} from the kernel: {source}")]
    Read {
        /// What.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// Whether a link was refused because the kernel takes no probe on an instruction: it cannot decode it, or cannot run it
/// elsewhere.
#[must_use]
pub fn is_of_an_instruction(error: &io::Error) -> bool {
    /// The kernel's own number for "not supported", which no header for programs has.
    const ENOTSUPP: i32 = 524;
    matches!(error.raw_os_error(), Some(ENOTSUPP | libc::ENOEXEC | libc::EIO))
}
