//! Versions of Go, how they differ in memory, and why a heap profile was not read.

use std::fmt;

/// A version of Go 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The second number: 22 for Go 1.22.
    pub minor: u16,
}

impl Version {
    /// Go 1.`minor`.
    #[must_use]
    pub const fn one(minor: u16) -> Self {
        Self { minor }
    }

    /// Parses the version in a string such as `go1.22.10` or `go1.23rc1 X:nocoverageredesign`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let rest = text.strip_prefix("go1.")?;
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        Some(Self::one(rest[..digits].parse().ok()?))
    }

    /// Parses the version in the section `.go.buildinfo`, in the form used since Go 1.18.
    #[must_use]
    pub fn of_build_info(section: &[u8]) -> Option<Self> {
        /// Flag bit: strings follow the header.
        const TEXTS_FOLLOW: u8 = 2;
        let rest = section.strip_prefix(b"\xff Go buildinf:")?;
        if *rest.get(1)? & TEXTS_FOLLOW == 0 {
            return None;
        }
        let (&length, text) = section.get(32..)?.split_first()?;
        // A version string of 128 characters or more is not accepted.
        let text = text.get(..usize::from(length).min(127))?;
        Self::parse(std::str::from_utf8(text).ok()?)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1.{}", self.minor)
    }
}

/// The differences between versions in memory.
///
/// The header of a bucket (`next`, `allnext`, `typ`, `hash`, `size`, `nstk`), the hash of stacks, and `mProfCycle` are
/// the same from Go 1.19 to 1.27.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Words in a `memRecordCycle`: allocations and frees, and until Go 1.26 also the bytes of both.
    pub cycle_words: usize,
    /// Magic number of the function table.
    pub magic: u32,
    /// Size of a `_func` without the lists that follow it, bytes.
    pub function_bytes: u64,
    /// Size of an `inlinedCall`, bytes.
    pub inlined_bytes: u64,
    /// Offset of the name in an `inlinedCall`.
    pub inlined_name: u64,
    /// Offset of `gofunc` in `moduledata`.
    pub gofunc: u64,
}

impl Layout {
    /// Returns the layout of a version; `None` if it is not known.
    #[must_use]
    pub fn of(version: Version) -> Option<Self> {
        let recent = Self {
            cycle_words: 4,
            magic: 0xffff_fff1,
            function_bytes: 44,
            inlined_bytes: 16,
            inlined_name: 4,
            gofunc: 320,
        };
        match version.minor {
            19 => Some(Self {
                magic: 0xffff_fff0,
                function_bytes: 40,
                inlined_bytes: 20,
                inlined_name: 12,
                gofunc: 304,
                ..recent
            }),
            20..=26 => Some(recent),
            27 => Some(Self { cycle_words: 2, gofunc: 344, ..recent }),
            _ => None,
        }
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_the_linker_writes() {
        for (text, minor) in
            [("go1.19.8", Some(19)), ("go1.27", Some(27)), ("go1.23rc1 X:x", Some(23)), ("go2.1", None)]
        {
            assert_eq!(Version::parse(text).map(|version| version.minor), minor, "{text}");
        }
        assert_eq!(Version::parse("devel go1.28-abc"), None);
        let mut section = b"\xff Go buildinf:\x08\x02".to_vec();
        section.resize(32, 0);
        section.extend(b"\x08go1.22.1rest");
        assert_eq!(Version::of_build_info(&section), Some(Version::one(22)));
        section[15] = 0;
        assert_eq!(Version::of_build_info(&section), None, "before Go 1.18");
        assert_eq!(Version::of_build_info(&section[..20]), None);
        assert_eq!(Version::one(22).to_string(), "1.22");
    }

    #[test]
    fn versions_that_nobody_has_looked_at_have_no_layout() {
        for (minor, known) in [(18, false), (19, true), (20, true), (26, true), (27, true), (28, false)] {
            assert_eq!(Layout::of(Version::one(minor)).is_some(), known, "1.{minor}");
        }
    }
}
