//! Why the heap profile of a program or process was not read.

use crate::version::Version;

/// Why the heap profile of a program cannot be read in any of its processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// The version is not known.
    #[error("where Go {0} keeps its heap profile is not known (Go 1.19 to 1.27 are)")]
    Version(Version),
    /// The file does not state the version.
    #[error("its version of Go is not known")]
    NoVersion,
    /// The function table is damaged, or has an unknown form.
    #[error("its table of functions (.gopclntab) is not understood")]
    NoFunctions,
    /// Neither symbols nor code reveal where the variables are.
    #[error(
        "it has no symbols, and its code does not tell where the runtime keeps its heap profile (build it without -ldflags=-s)"
    )]
    NoVariables,
}

/// Why the heap profile of a process was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unread {
    /// Sampling is off.
    #[error("its MemProfileRate is 0: the runtime samples nothing")]
    Off,
    /// The linker has removed the profiler.
    #[error(
        "its MemProfileRate is 0, because nothing in the program reads heap profiles, so that the linker left them out; \
         importing net/http/pprof brings them back"
    )]
    LeftOut,
    /// The memory cannot be read, or the process has ended.
    #[error("its memory could not be read")]
    Unreadable,
    /// The data is not a heap profile.
    #[error("what is in the place of its heap profile is none ({0})")]
    Malformed(&'static str),
    /// There are too many stacks.
    #[error("its heap profile has more stacks than are read")]
    TooMany,
    /// Reading took too long.
    #[error("its heap profile was not read in time")]
    Slow,
    /// It changed during each attempt.
    #[error("its heap profile changed each time that it was read")]
    Torn,
}
