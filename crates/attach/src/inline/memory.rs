//! Reads the memory of a hooked process, which contains its counts.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use heapbpf_inline::abi::STATE;
use heapbpf_inline::read::{COUNTS_BYTES, Counts};

/// Opens the memory of a process.
pub fn open(pid: u32) -> io::Result<File> {
    File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))
}

thread_local! {
    /// What was read last. Hundreds of processes are read one after the other, some 132 KiB each.
    static STATE_BYTES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The sums of everything that the hooks of an allocator count.
///
/// # Errors
/// The memory cannot be read.
pub fn counts(memory: &File, base: u64) -> io::Result<Counts> {
    STATE_BYTES.with_borrow_mut(|state| {
        state.resize(COUNTS_BYTES, 0);
        memory.read_exact_at(state, base + STATE)?;
        Counts::of(state).map_err(io::Error::other)
    })
}
