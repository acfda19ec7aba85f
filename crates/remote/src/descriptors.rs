//! Descriptors of our memfds that a process has open.

use std::fs;

use crate::found::parse_name;

/// Most descriptors of a process that are examined.
const MAX_DESCRIPTORS: usize = 1 << 16;

/// Descriptors of our memfds that a process opened to map them, and their link targets: an injector that died left them
/// open. A process that watches a hooked one also has its memfd open, but read-only.
pub fn left_open(pid: u32) -> impl Iterator<Item = (u64, String)> {
    let list = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().map_while(Result::ok);
    list.take(MAX_DESCRIPTORS).filter_map(move |entry| {
        let fd = entry.file_name().to_str()?.parse().ok()?;
        Some((fd, link_left_open(pid, fd)?))
    })
}

/// The link target of one such descriptor; `None` if it is anything else.
pub(crate) fn link_left_open(pid: u32, fd: u64) -> Option<String> {
    let link = fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?.into_os_string().into_string().ok()?;
    parse_name(&link)?;
    let says = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).ok()?;
    is_writable(&says).then_some(link)
}

/// Whether a file of `/proc/PID/fdinfo` describes a descriptor that is open for reading and writing.
fn is_writable(says: &str) -> bool {
    let flags = says.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|octal| i32::from_str_radix(octal.trim(), 8).ok());
    flags.is_some_and(|flags| flags & libc::O_ACCMODE == libc::O_RDWR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsRawFd as _, FromRawFd as _};

    #[test]
    fn a_memfd_is_left_open_where_it_was_made_and_not_where_it_is_read() {
        let name = c"heapbpf-inline-7f0000000000-1000";
        // SAFETY: the name is a string that ends with NUL, and the flags are valid.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: the descriptor was just made, and nobody else has it.
        let made = unsafe { File::from_raw_fd(fd) };
        let own = || left_open(std::process::id()).map(|(fd, _)| fd).collect::<Vec<_>>();
        let number = u64::try_from(fd).expect("positive");
        assert_eq!(own(), [number]);
        let link = "/memfd:heapbpf-inline-7f0000000000-1000 (deleted)";
        assert_eq!(link_left_open(std::process::id(), number).as_deref(), Some(link));
        let read = File::open(format!("/proc/self/fd/{}", made.as_raw_fd())).expect("our own file");
        drop(made);
        assert_eq!(own(), [0_u64; 0]);
        assert_eq!(link_left_open(std::process::id(), number), None, "the number may be another file's by now");
        drop(read);
    }

    #[test]
    fn the_access_mode_is_in_octal() {
        assert!(is_writable("pos:\t0\nflags:\t0100002\nmnt_id:\t1\n"));
        assert!(!is_writable("pos:\t0\nflags:\t02100000\n") && !is_writable("flags:\tx\n") && !is_writable(""));
    }
}
