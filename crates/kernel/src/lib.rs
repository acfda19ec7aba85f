//! The interface to the kernel: the only crate that calls `bpf(2)`.

// These macros panic if nobody reads the output.
#![warn(clippy::print_stderr, clippy::print_stdout)]

pub mod btf;
pub mod control;
pub mod exec_watch;
pub mod generations;
pub mod guardian;
pub mod inline;
pub mod lifecycle;
pub mod live_map;
pub mod loader;
pub mod mappings;
pub mod no_ops;
pub mod object;
pub mod programs;
mod release;
pub mod ring_maps;
pub mod rings;
pub mod sys;
pub mod totals;
mod trial;

use std::io;

use aya::maps::MapError;
pub use trial::own_location;

/// Errors between heapbpf and the kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The kernel's type information cannot be read.
    #[error(
        "this kernel has no type information ({path}: {0}); heapbpf needs one built with CONFIG_DEBUG_INFO_BTF",
        path = btf::PATH
    )]
    NoBtf(#[source] io::Error),
    /// The type information has an unknown format.
    #[error("the kernel's type information has an unknown format; heapbpf needs Linux 5.17 or later")]
    UnknownBtf,
    /// A structure lacks a member.
    #[error("the kernel's {structure} has no member {path}; heapbpf does not support this kernel")]
    NoMember {
        /// Structure.
        structure: &'static str,
        /// Member.
        path: &'static str,
    },
    /// The binary was built without its BPF object.
    #[error(
        "this binary was built without its BPF programs: it can read profiles, but not record; in heapbpf's sources, \
         run `cargo xtask install`, or `cargo xtask build --bpf` and then `cargo install --locked --path \
         crates/heapbpf`"
    )]
    NoObject,
    /// The kernel refused something, and its release is too old to support everything.
    #[error("Linux {release} is too old: heapbpf needs Linux 5.17 or later, where BPF programs can loop (bpf_loop)")]
    TooOld {
        /// As `uname -r` prints it.
        release: String,
    },
    /// The BPF object is not usable.
    #[error("the built-in BPF object cannot be used: {0}")]
    Object(String),
    /// A permission is missing.
    #[error(
        "the kernel does not permit BPF: CAP_BPF and CAP_PERFMON are needed, before Linux 6.6 CAP_SYS_ADMIN; run \
         heapbpf as root or give it these capabilities"
    )]
    Permission,
    /// The kernel refused a map.
    #[error("the kernel refused the map {name}: {source}")]
    Map {
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// The kernel refused the programs' type information.
    #[error("the kernel refused the programs' type information: {source}\n{log}")]
    BtfRefused {
        /// Why.
        source: io::Error,
        /// The kernel's log.
        log: String,
    },
    /// The kernel refused a program.
    #[error("the kernel refused the program {name}: {source}\n{log}")]
    Program {
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
        /// The end of the verifier's log.
        log: String,
    },
    /// The kernel refused a link.
    #[error("cannot attach to {what}: {source}")]
    Link {
        /// File or tracepoint.
        what: String,
        /// Why.
        source: io::Error,
    },
    /// The kernel refused a link with EINVAL, although the same kind of link works elsewhere.
    #[error(
        "the kernel refuses probes there (EINVAL): another tool, such as bcc's, has a probe with a reference counter \
         on one of the same instructions; stop that tool and try again after a few seconds"
    )]
    Conflict,
    /// A read or a write failed.
    #[error("cannot read {what} from the kernel: {source}")]
    Read {
        /// What was read or written.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

impl From<MapError> for KernelError {
    fn from(error: MapError) -> Self {
        Self::Object(error.to_string())
    }
}

impl KernelError {
    /// Returns this error, or [`Self::TooOld`] if the kernel is too old. The first thing that such a kernel refuses is
    /// not all that it lacks.
    fn or_too_old(self) -> Self {
        let release = release::current();
        let is_refusal = matches!(self, Self::Map { .. } | Self::Program { .. } | Self::BtfRefused { .. });
        if is_refusal && release::is_before_loops(&release) {
            Self::TooOld { release: release.trim().into() }
        } else {
            self
        }
    }

    /// The error for a map that the kernel refused.
    fn of_map(name: &str, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::EPERM) => Self::Permission,
            _ => Self::Map { name: name.into(), source },
        }
    }
}

/// Whether a link was refused because of the instruction itself: the kernel cannot decode it, or cannot run it out of
/// line.
#[must_use]
pub fn is_of_an_instruction(error: &io::Error) -> bool {
    /// The kernel-internal number for "not supported", which no userspace header defines.
    const ENOTSUPP: i32 = 524;
    matches!(error.raw_os_error(), Some(ENOTSUPP | libc::ENOEXEC | libc::EIO))
}
