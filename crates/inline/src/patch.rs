//! A change of a target's code.

/// Bytes to be replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patch {
    /// Where they are.
    pub address: u64,
    /// The bytes of the file.
    pub before: Vec<u8>,
    /// The new bytes, of the same length.
    pub after: Vec<u8>,
}
