//! Redirects standard streams while a screen is shown. Messages go to memory, and are shown when the screen is left. A
//! profiled command neither writes on the screen nor reads its keys.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

/// Maximum size of the messages kept, in bytes. The end is kept.
const MOST_SAID: u64 = 64 << 10;

/// Makes a standard stream refer to the same file as a descriptor.
type Replace = fn(OwnedFd) -> rustix::io::Result<()>;

/// Redirected standard streams, until this is dropped.
pub struct Redirected {
    /// How each stream is replaced that was, and a copy of its original descriptor.
    before: Vec<(Replace, OwnedFd)>,
    said: Option<File>,
}

impl Redirected {
    /// Redirects standard error to memory.
    ///
    /// # Errors
    /// The system provides no memory or no descriptor.
    pub fn said_to_memory() -> io::Result<Self> {
        let memory = File::from(memfd_create(c"heapbpf-said", MemfdFlags::CLOEXEC)?);
        let mut redirected = Self { before: Vec::new(), said: None };
        redirected.replace(&io::stderr(), dup2_stderr, &memory)?;
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
        redirected.replace(&io::stdin(), dup2_stdin, &nowhere)?;
        redirected.replace(&io::stdout(), dup2_stdout, &nowhere)?;
        redirected.replace(&io::stderr(), dup2_stderr, &nowhere)?;
        Ok(redirected)
    }

    fn replace(&mut self, stream: &impl AsFd, replace: Replace, by: &File) -> io::Result<()> {
        let before = stream.as_fd().try_clone_to_owned()?;
        replace(by.try_clone()?.into())?;
        self.before.push((replace, before));
        Ok(())
    }
}

impl Drop for Redirected {
    fn drop(&mut self) {
        for (replace, before) in self.before.drain(..) {
            let _ = replace(before);
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
