//! A file system (FUSE) whose server never answers: whoever looks into it waits.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr::null;

/// Mounts such a file system at a directory. Only the calling thread, and threads that it starts, see it. Who waits for
/// it gets an error once the returned file is dropped.
///
/// # Errors
/// It cannot be mounted: without root, for example.
pub fn mount_silent(at: &Path) -> io::Result<File> {
    let done = |result: libc::c_int| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    let at = CString::new(at.as_os_str().as_bytes())?;
    let server = File::options().read(true).write(true).open("/dev/fuse")?;
    let options = CString::new(format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd()))?;
    // SAFETY: no pointers.
    done(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    // SAFETY: the path is a C string; the kernel ignores the null pointers here.
    done(unsafe { libc::mount(null(), c"/".as_ptr(), null(), libc::MS_REC | libc::MS_PRIVATE, null()) })?;
    // SAFETY: all pointers are C strings that outlive the call.
    done(unsafe { libc::mount(c"silent".as_ptr(), at.as_ptr(), c"fuse".as_ptr(), 0, options.as_ptr().cast()) })?;
    Ok(server)
}
