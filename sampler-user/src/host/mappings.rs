//! Executable mappings of address spaces over time, and the files (modules) behind them.

/// A mapped file, by identity; index into the module table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModuleId(pub u32);

/// An executable mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// End (exclusive).
    pub end: u64,
    /// File offset of `start`.
    pub file_offset: u64,
    /// What is mapped.
    pub module: ModuleId,
    /// CLOCK_MONOTONIC when it appeared; 0 if it was there before the recording.
    pub since_ns: u64,
}
