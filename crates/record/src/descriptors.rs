//! File descriptors that wake the loop of a recording.

use std::os::fd::{BorrowedFd, OwnedFd};

use tokio::io::unix::AsyncFd;

/// Registers a copy of a descriptor with the reactor. Dropping the result closes the copy, but not the descriptor
/// itself.
///
/// # Errors
/// No descriptor is available, or this one cannot be waited for.
pub fn watch(fd: BorrowedFd<'_>) -> std::io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the result owns the copy, and closes it only after it has left the reactor.
    unsafe { AsyncFd::register(fd.try_clone_to_owned()?) }.map_err(Into::into)
}
