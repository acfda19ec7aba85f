//! Why an interpreter is not supported.

use crate::version::Version;

/// Why Python frames of an interpreter are not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// A version that is not known.
    #[error("the frames of CPython {0} are not known")]
    Version(Version),
    /// Neither the file nor its name tells the version.
    #[error("its version of CPython is not known")]
    NoVersion,
    /// A build without the global interpreter lock.
    #[error("CPython {0} without the global interpreter lock is not supported")]
    FreeThreaded(Version),
    /// The table of offsets contradicts itself.
    #[error("its table of offsets is not understood")]
    Malformed,
    /// The function that runs Python functions was not found.
    #[error("its symbols do not name _PyEval_EvalFrameDefault")]
    NoLoop,
    /// Another instruction set than x86-64.
    #[error("Python frames are read on x86-64 only")]
    Machine,
}
