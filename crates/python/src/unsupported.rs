//! Why an interpreter is not supported.

use crate::version::Version;

/// Why an interpreter's Python frames cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// The version is not known.
    #[error("the frames of CPython {0} are not known")]
    Version(Version),
    /// Neither the file nor its name states the version.
    #[error("its version of CPython is not known")]
    NoVersion,
    /// A build without the global interpreter lock.
    #[error("CPython {0} without the global interpreter lock is not supported")]
    FreeThreaded(Version),
    /// The table of offsets is inconsistent.
    #[error("its table of offsets is not understood")]
    Malformed,
    /// The function that runs Python functions was not found.
    #[error("its symbols do not name _PyEval_EvalFrameDefault")]
    NoLoop,
    /// The instruction set is not x86-64.
    #[error("Python frames are read on x86-64 only")]
    Machine,
}
