//! Access to a process's memory: the trait [`Memory`].

/// The memory of a process.
pub trait Memory {
    /// Fills `buffer` from `address`. Returns `false` if not all of it can be read.
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool;
}
