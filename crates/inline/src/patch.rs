//! A change of a target's code.

/// Bytes to be replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patch {
    /// Where.
    pub address: u64,
    /// The bytes of the file.
    pub before: Vec<u8>,
    /// As many new ones.
    pub after: Vec<u8>,
}
