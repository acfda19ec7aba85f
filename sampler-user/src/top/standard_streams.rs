//! Standard streams while a screen is shown: what is said goes to memory, and is shown when the screen is left. A command that
//! is profiled does not write on the screen, nor does it take its keys.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// The most that is kept of what was said, in bytes: its end.
const MOST_SAID: u64 = 64 << 10;

/// Standard streams that lead elsewhere, until it is dropped.
pub struct Redirected {
    /// Each stream that was replaced, and where it led before.
    before: Vec<(libc::c_int, OwnedFd)>,
    said: Option<File>,
}

impl Redirected {
    /// Standard error to memory.
    ///
    /// # Errors
    /// The system provides no memory or no descriptor.
    pub fn said_to_memory() -> io::Result<Self> {
        // SAFETY: the name ends with a zero, and the flags are plain.
        let fd = unsafe { libc::memfd_create(c"heapbpf-said".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, and nobody else owns it.
        let memory = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        let mut redirected = Self { before: Vec::new(), said: None };
        redirected.replace(libc::STDERR_FILENO, &memory)?;
        redirected.said = Some(memory);
        Ok(redirected)
    }

    /// All three to nowhere.
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
        // SAFETY: standard streams are open as long as the process runs.
        let before = unsafe { std::os::fd::BorrowedFd::borrow_raw(stream) }.try_clone_to_owned()?;
        led_to(stream, by.as_fd().as_raw_fd())?;
        self.before.push((stream, before));
        Ok(())
    }
}

/// Makes a standard stream lead to where a descriptor leads.
fn led_to(stream: libc::c_int, fd: libc::c_int) -> io::Result<()> {
    // SAFETY: `dup2` takes plain integers; the standard stream belongs to nobody in particular.
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
