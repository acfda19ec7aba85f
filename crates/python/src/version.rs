//! Versions of CPython, and why an interpreter is not supported.

use std::fmt;

/// A version of CPython.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The first number, 3.
    pub major: u8,
    /// The second number: 12 for 3.12.1.
    pub minor: u8,
}

impl Version {
    /// Version 3.`minor`.
    #[must_use]
    pub const fn three(minor: u8) -> Self {
        Self { major: 3, minor }
    }

    /// Converts a `PY_VERSION_HEX`.
    #[must_use]
    pub const fn of_hex(hex: u64) -> Self {
        Self { major: (hex >> 24) as u8, minor: (hex >> 16) as u8 }
    }

    /// Parses the version in the name of a program or library: `libpython3.9.so.1.0`, `python3.9`.
    #[must_use]
    pub fn of_file_name(name: &str) -> Option<Self> {
        let rest = &name[name.find("python3.")? + "python3.".len()..];
        let digits = &rest[..rest.bytes().take_while(u8::is_ascii_digit).count()];
        digits.parse().ok().map(Self::three)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_in_numbers_and_names() {
        assert_eq!(Version::of_hex(0x030b_02f0), Version::three(11));
        assert_eq!(Version::of_file_name("libpython3.10.so.1.0"), Some(Version::three(10)));
        assert_eq!(Version::of_file_name("python3.8"), Some(Version::three(8)));
        for other in ["python3", "python", "libpython3.so", "python3.999", "gdb", ""] {
            assert_eq!(Version::of_file_name(other), None, "{other}");
        }
        assert_eq!(Version::three(9).to_string(), "3.9");
    }
}
