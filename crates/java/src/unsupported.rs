//! Why a JVM is not supported.

use crate::memory::ReadError;

/// Why the Java frames of a JVM cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// It does not describe itself; OpenJ9, for example, does not.
    #[error("it is not HotSpot, or a HotSpot without its description (gHotSpotVMStructs)")]
    NotHotSpot,
    /// The frames of this version are not known.
    #[error("the frames of Java {0} are not known (those of 17 to 22 and 25 are)")]
    Version(u32),
    /// Its description lacks something.
    #[error("its description lacks {0}")]
    Lacks(&'static str),
    /// Its description is inconsistent.
    #[error("its description of {0} is not understood")]
    Malformed(&'static str),
    /// Its memory cannot be read.
    #[error("its memory cannot be read")]
    Unreadable,
    /// Reading its memory took too long.
    #[error("reading its memory took too long")]
    NoAnswer,
    /// It has not created its code heaps yet.
    #[error("it has not begun")]
    NotReady,
    /// The instruction set is not x86-64.
    #[error("Java frames are read on x86-64 only")]
    Machine,
}

impl From<ReadError> for Unsupported {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Unreadable => Self::Unreadable,
            ReadError::Malformed => Self::Malformed("code heaps"),
        }
    }
}
