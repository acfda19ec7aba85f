//! Messages between the daemon and its helper processes: 64-bit words, optionally with descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::cmsg_space;
use rustix::io::retry_on_intr;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use zerocopy::IntoBytes as _;

/// Maximum number of descriptors in a message.
const MOST_DESCRIPTORS: usize = 5;

/// The descriptors of a message.
pub type Descriptors = [Option<OwnedFd>; MOST_DESCRIPTORS];

/// Creates a connection and returns its two ends.
///
/// # Errors
/// There are no more descriptors.
pub fn connection() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Sends a message.
///
/// # Errors
/// There are more descriptors than can be sent, or the other end is gone.
pub fn send(socket: BorrowedFd<'_>, words: &[u64], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let parts = [IoSlice::new(words.as_bytes())];
    retry_on_intr(|| sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Waits for a message. Returns its number of words; 0 means that the connection has ended.
///
/// # Errors
/// `EMFILE` if its descriptors cannot be received, or `InvalidData` if the message does not fit into `words`.
pub fn receive(socket: BorrowedFd<'_>, words: &mut [u64]) -> io::Result<(usize, Descriptors)> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        recvmsg(socket, &mut [IoSliceMut::new(words.as_mut_bytes())], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut descriptors = Descriptors::default();
    let sent = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(sent) => Some(sent),
        _ => None,
    });
    for (to, descriptor) in descriptors.iter_mut().zip(sent.flatten()) {
        *to = Some(descriptor);
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        // The receiver may have reached its limit on open files.
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    if received.flags.contains(ReturnFlags::TRUNC) || received.bytes % size_of::<u64>() != 0 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok((received.bytes / size_of::<u64>(), descriptors))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn descriptors_come_with_their_message_and_the_end_is_empty() {
        let (here, there) = connection().unwrap();
        let file = tempfile::tempfile().unwrap();
        send(here.as_fd(), &[1, 2, 3], &[file.as_fd(), here.as_fd()]).unwrap();
        send(here.as_fd(), &[4], &[]).unwrap();
        drop((here, file));
        let mut words = [0; 4];
        let (count, descriptors) = receive(there.as_fd(), &mut words).unwrap();
        assert_eq!((count, &words[..3], descriptors.iter().flatten().count()), (3, &[1, 2, 3][..], 2));
        drop(descriptors);
        let (count, descriptors) = receive(there.as_fd(), &mut words).unwrap();
        assert_eq!((count, words[0], descriptors.iter().flatten().count()), (1, 4, 0));
        assert_eq!(receive(there.as_fd(), &mut words).unwrap().0, 0, "the end");
    }
}
