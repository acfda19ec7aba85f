//! Redirects standard streams while a screen is shown. Messages go to memory, and are shown when the screen is left. A
//! profiled command neither writes on the screen nor reads its keys.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// Maximum size of the messages kept, in bytes. The end is kept.
const MOST_SAID: u64 = 64 << 10;

/// Redirected standard streams, until this is dropped.
pub struct Redirected {
    /// Each stream that was replaced, and a copy of its original descriptor.
    before: Vec<(libc::c_int, OwnedFd)>,
    said: Option<File>,
}

impl Redirected {
    /// Redirects standard error to memory.
    ///
    /// # Errors
    /// The system provides no memory or no descriptor.
    pub fn said_to_memory() -> io::Result<Self> {
        // SAFETY: the name is a NUL-terminated literal, and the flags are plain integers.
        let fd = unsafe { libc::memfd_create(c"heapbpf-said".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, and nothing else owns it.
        let memory = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        let mut redirected = Self { before: Vec::new(), said: None };
        redirected.replace(libc::STDERR_FILENO, &memory)?;
        redirected.said = Some(memory);
        Ok(redirected)
    }

    /// Redirects all three to /dev/null.
    ///
    /// # Errors
    /// The system provides no descriptor.
    pub fn nowhere() -> io::Result<Self> {
        let nowhere = File::options().read(true).write(true).open("/dev/null")?;
        let mut redirected = Self { before: Vec::new(), said: None };
        for stream in [libc::STDIN_FILENO, libc::STDOUT_FILENO, libc::STDERR_FILENO] {
            redirected.replace(stream, &nowhere)?;
        }
        Ok(redirected)
    }

    fn replace(&mut self, stream: libc::c_int, by: &File) -> io::Result<()> {
        // SAFETY: standard streams stay open as long as the process runs.
        let before = unsafe { std::os::fd::BorrowedFd::borrow_raw(stream) }.try_clone_to_owned()?;
        led_to(stream, by.as_fd().as_raw_fd())?;
        self.before.push((stream, before));
        Ok(())
    }
}

/// Makes a standard stream refer to the same file as a descriptor.
fn led_to(stream: libc::c_int, fd: libc::c_int) -> io::Result<()> {
    // SAFETY: `dup2` takes plain integers, and no object owns the standard stream's descriptor.
    if unsafe { libc::dup2(fd, stream) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl Drop for Redirected {
    fn drop(&mut self) {
        for (stream, before) in &self.before {
            let _ = led_to(*stream, before.as_raw_fd());
        }
        let Some(mut said) = self.said.take() else { return };
        let length = said.seek(SeekFrom::End(0)).unwrap_or(0);
        let mut text = Vec::new();
        let read = said.seek(SeekFrom::Start(length.saturating_sub(MOST_SAID)));
        if read.and_then(|_| said.read_to_end(&mut text)).is_ok() {
            let _ = io::stderr().write_all(&text);
        }
    }
}
