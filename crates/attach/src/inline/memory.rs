//! Reads the memory of a hooked process, which contains its counts.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use heapbpf_inline::abi::STATE;
use heapbpf_inline::read::{COUNTS_BYTES, Counts};

/// Opens the memory of a process.
pub fn open(pid: u32) -> io::Result<File> {
    File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))
}

/// Everything that the hooks of an allocator count.
pub(super) fn state(memory: &File, base: u64) -> io::Result<Vec<u8>> {
    let mut state = vec![0; COUNTS_BYTES];
    memory.read_exact_at(&mut state, base + STATE)?;
    Ok(state)
}

/// The sums of these counts.
pub fn counts(memory: &File, base: u64) -> io::Result<Counts> {
    Counts::of(&state(memory, base)?).map_err(io::Error::other)
}
