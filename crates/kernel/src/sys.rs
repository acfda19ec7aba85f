//! The `bpf(2)` and `perf_event_open(2)` calls, each behind a safe function.
//!
//! aya cannot load programs for uprobe sessions yet, so heapbpf makes these calls itself.

mod links;
mod maps;
mod programs;

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use aya_obj::generated::{bpf_attr, bpf_cmd};
pub use links::*;
pub use maps::*;
pub use programs::*;

fn zeroed() -> bpf_attr {
    // SAFETY: every variant of the union consists of integers, for which all zeros is a valid value. The kernel also
    // requires zeros in the parts that a command does not use.
    unsafe { std::mem::zeroed() }
}

/// Calls `bpf(2)`.
///
/// # Safety
/// Every pointer that `command` takes from `attr` must be null, or point to as many bytes as the command reads or
/// writes there. No reference may exist to the bytes that it writes.
unsafe fn call(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i64> {
    // SAFETY: the kernel reads and writes at most `size_of::<bpf_attr>()` bytes of `attr`, all of which are
    // initialised (`zeroed`). The caller guarantees that the pointers inside it are valid.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command as libc::c_uint, std::ptr::from_mut(attr), size_of::<bpf_attr>())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Calls `bpf(2)` with a command that returns a new descriptor.
///
/// # Safety
/// As for [`call`]. In addition, `command` must return a new descriptor.
unsafe fn call_fd(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<OwnedFd> {
    // SAFETY: the caller guarantees what `call` requires.
    let fd = unsafe { call(command, attr) }?;
    let fd = RawFd::try_from(fd).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    // SAFETY: the command succeeded and returns a new descriptor (guaranteed by the caller), which nothing else owns
    // yet.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Asks the kernel for the properties of an object.
///
/// # Safety
/// All zeros, and what the kernel writes for any kind of object, must be valid values of `T`.
unsafe fn object_info<T>(object: BorrowedFd<'_>) -> io::Result<T> {
    // SAFETY: the caller guarantees that all zeros is a valid value.
    let mut info: T = unsafe { std::mem::zeroed() };
    let mut attr = zeroed();
    attr.info.bpf_fd = object.as_raw_fd() as u32;
    attr.info.info = &raw mut info as u64;
    attr.info.info_len = size_of_val(&info) as u32;
    // SAFETY: the kernel writes at most `info_len` bytes to `info`, which has that many.
    unsafe { call(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr) }?;
    Ok(info)
}

fn copy_name(target: &mut [std::ffi::c_char], name: &str) {
    let capacity = target.len() - 1;
    for (to, from) in target[..capacity].iter_mut().zip(name.bytes()) {
        // The kernel accepts only letters, digits, `_` and `.`.
        let kept = if from.is_ascii_alphanumeric() || from == b'_' || from == b'.' { from } else { b'_' };
        // `c_char` is signed on some machines and unsigned on others.
        *to = std::ffi::c_char::from_ne_bytes([kept]);
    }
}

fn log_text(log: &[u8]) -> String {
    CStr::from_bytes_until_nul(log).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_hold_what_the_kernel_takes_and_end_with_a_zero() {
        let mut name = [0; 8];
        copy_name(&mut name, "a-b.c_deäfgh");
        let bytes = name.map(|letter| letter.to_ne_bytes()[0]);
        assert_eq!(&bytes, b"a_b.c_d\0");
    }
}
