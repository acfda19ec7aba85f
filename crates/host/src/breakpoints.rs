//! Finds breakpoints that a debugger has put into a process. x86-64 only.
//!
//! A uprobe on the same instruction would hide such a breakpoint: the kernel takes the trap for its own.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;

use heapbpf_remote::Status;
use heapbpf_unwind::mapping::Mapping;

/// The breakpoint instruction, which uprobes use as well.
const BREAKPOINT: u8 = 0xcc;

/// Returns the instructions at `offsets` of a mapped file that are breakpoints in the memory of a traced process, but
/// not in the file. Empty if the process is not traced or its memory cannot be read. A tracer's breakpoint looks the
/// same there as a uprobe of another program.
#[must_use]
pub fn among(pid: u32, mappings: &[Mapping], file: &File, offsets: impl IntoIterator<Item = u64>) -> BTreeSet<u64> {
    let is_traced = || Status::read(&format!("/proc/{pid}/status")).is_ok_and(|status| status.tracer != 0);
    if cfg!(not(target_arch = "x86_64")) || !is_traced() {
        return BTreeSet::new();
    }
    let Ok(memory) = File::open(format!("/proc/{pid}/mem")) else { return BTreeSet::new() };
    let byte_at = |source: &File, position: u64| {
        let mut byte = [0];
        source.read_exact_at(&mut byte, position).ok().map(|()| byte[0])
    };
    let is_breakpoint = |offset: &u64| {
        let mapping = mappings.iter().find(|mapping| {
            offset.checked_sub(mapping.file_offset).is_some_and(|distance| distance < mapping.end - mapping.start)
        });
        let address = mapping.map(|mapping| mapping.start + (offset - mapping.file_offset));
        address.and_then(|address| byte_at(&memory, address)) == Some(BREAKPOINT)
            && byte_at(file, *offset).is_some_and(|byte| byte != BREAKPOINT)
    };
    offsets.into_iter().filter(is_breakpoint).collect()
}
