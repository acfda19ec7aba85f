//! What an output's path names, and how that is written: files are replaced; devices, FIFOs and sockets are opened.

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{ffi, fmt};

use super::{OutputError, folder_of};

/// How long an output waits for somebody who reads it.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Time between looks for a reader.
const PAUSE: Duration = Duration::from_millis(20);
/// Most symbolic links that lead to one output, as in the kernel.
const MOST_LINKS: usize = 40;

/// What a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nothing yet.
    Free,
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link.
    Link,
    /// A character device: a terminal, `/dev/null`.
    CharacterDevice,
    /// A block device: a disk.
    BlockDevice,
    /// A FIFO (named pipe).
    Fifo,
    /// A Unix socket.
    Socket,
}

impl Place {
    fn of(kind: FileType) -> Self {
        match kind {
            kind if kind.is_dir() => Self::Folder,
            kind if kind.is_symlink() => Self::Link,
            kind if kind.is_char_device() => Self::CharacterDevice,
            kind if kind.is_block_device() => Self::BlockDevice,
            kind if kind.is_fifo() => Self::Fifo,
            kind if kind.is_socket() => Self::Socket,
            _ => Self::File,
        }
    }

    /// Whether it is opened and written to, and never replaced.
    pub const fn is_special(self) -> bool {
        matches!(self, Self::CharacterDevice | Self::BlockDevice | Self::Fifo | Self::Socket)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Free => "missing",
            Self::File => "a file",
            Self::Folder => "a folder",
            Self::Link => "a symbolic link",
            Self::CharacterDevice | Self::BlockDevice => "a device",
            Self::Fifo => "a FIFO",
            Self::Socket => "a socket",
        })
    }
}

/// Where an output's name comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    /// The user wrote it: what it names is what is meant.
    ByUser,
    /// It was made from one that the user wrote (numbered snapshots, a file per process): it names files only.
    Derived,
}

/// Where an output goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Destination {
    /// The path; where symbolic links are followed, the one at their end.
    pub(super) path: PathBuf,
    /// What is there: nothing, a regular file, or something special.
    pub(super) place: Place,
}

/// What becomes of a symbolic link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkRule {
    Follow,
    NeedsForce,
    OfAnother,
}

/// A link is followed if it is the user's own, under sudo the invoking user's as well, and only if that was asked for:
/// in a folder that others write to, links lead where others want.
pub(super) const fn link_rule(owner: u32, effective: u32, sudo: Option<u32>, force: bool) -> LinkRule {
    let is_invoking_users = match sudo {
        // Only root can have been made so by sudo to act for somebody else.
        Some(sudo) => effective == 0 && sudo == owner,
        None => false,
    };
    match (owner == effective || is_invoking_users, force) {
        (true, true) => LinkRule::Follow,
        (true, false) => LinkRule::NeedsForce,
        (false, _) => LinkRule::OfAnother,
    }
}

/// What is at the path itself; for a link, its owner.
pub(super) fn look(path: &Path) -> io::Result<(Place, u32)> {
    match fs::symlink_metadata(path) {
        Ok(metadata) => Ok((Place::of(metadata.file_type()), metadata.uid())),
        // A folder that is missing or closed is told of when it is written to.
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::PermissionDenied => {
                Ok((Place::Free, 0))
            }
            _ => Err(error),
        },
    }
}

/// Finds out where an output goes, without opening anything.
///
/// # Errors
/// It must not go there: a folder, a file that exists and is not to be replaced, a link that is not to be followed.
pub(super) fn find(path: &Path, force: bool, naming: Naming) -> Result<Destination, OutputError> {
    let failed = |source| OutputError::Io { path: path.into(), source };
    let mut at = path.to_path_buf();
    for _ in 0..MOST_LINKS {
        if at.is_dir() || at.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(OutputError::IsFolder(path.into()));
        }
        let (place, owner) = look(&at).map_err(failed)?;
        match place {
            Place::File if !force => return Err(OutputError::Exists(path.into())),
            Place::Free | Place::File => return Ok(Destination { path: at, place }),
            _ if naming == Naming::Derived => return Err(OutputError::NotAFile { path: at, place }),
            Place::Link => at = follow(&at, owner, force)?,
            _ => return Ok(Destination { path: at, place }),
        }
    }
    Err(failed(io::Error::from_raw_os_error(libc::ELOOP)))
}

/// Where a link leads, if it may be followed.
fn follow(link: &Path, owner: u32, force: bool) -> Result<PathBuf, OutputError> {
    let target = fs::read_link(link).map_err(|source| OutputError::Io { path: link.into(), source })?;
    // SAFETY: no argument.
    let effective = unsafe { libc::geteuid() };
    let sudo = std::env::var("SUDO_UID").ok().and_then(|uid| uid.parse().ok());
    match link_rule(owner, effective, sudo, force) {
        LinkRule::NeedsForce => Err(OutputError::Link { path: link.into(), target }),
        LinkRule::OfAnother => Err(OutputError::LinkOfAnother { path: link.into(), target, owner }),
        LinkRule::Follow => {
            let next = folder_of(link).join(&target);
            // Links of /proc lead to what has no path: `pipe:[4711]`.
            let leads_nowhere = fs::symlink_metadata(&next).is_err() && fs::metadata(link).is_ok();
            if leads_nowhere { Err(OutputError::LinkToOpenFile { path: link.into(), target }) } else { Ok(next) }
        }
    }
}

impl Destination {
    fn io_error(&self, source: io::Error) -> OutputError {
        OutputError::Io { path: self.path.clone(), source }
    }

    /// Whether this user may write to what is special, without opening it: opening one may wait, or have effects.
    ///
    /// # Errors
    /// It may not be written.
    pub(super) fn check_access(&self) -> Result<(), OutputError> {
        let path = ffi::CString::new(self.path.as_os_str().as_bytes()).map_err(|error| self.io_error(error.into()))?;
        // SAFETY: the string ends with a zero and outlives the call.
        let status = unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::W_OK, libc::AT_EACCESS) };
        if status == 0 { Ok(()) } else { Err(self.io_error(io::Error::last_os_error())) }
    }

    /// Opens what is special for writing. Waits as long as told for a FIFO's reader, and for a socket's listener if
    /// others wait for it as well.
    ///
    /// # Errors
    /// Nobody reads it, it may not be written, or it is something else by now.
    pub(super) fn open(&self, patience: Duration) -> Result<Stream, OutputError> {
        let deadline = Instant::now() + patience;
        loop {
            let opened = if self.place == Place::Socket { self.connect() } else { self.open_node() };
            let error = match opened {
                Ok(file) => {
                    self.check_kind(&file)?;
                    wait_from_now_on(&file).map_err(|source| self.io_error(source))?;
                    return Ok(Stream(file));
                }
                Err(error) => error,
            };
            match (self.place, error.raw_os_error()) {
                (Place::Fifo, Some(libc::ENXIO)) | (Place::Socket, Some(libc::EAGAIN)) => {}
                (Place::Socket, Some(libc::ECONNREFUSED)) => return Err(OutputError::NoListener(self.path.clone())),
                _ => return Err(self.io_error(error)),
            }
            if Instant::now() >= deadline {
                let waited_s = patience.as_secs();
                return Err(OutputError::NoReader { path: self.path.clone(), place: self.place, waited_s });
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn check_kind(&self, file: &File) -> Result<(), OutputError> {
        let metadata = file.metadata().map_err(|source| self.io_error(source))?;
        let now = Place::of(metadata.file_type());
        if now == self.place {
            return Ok(());
        }
        Err(OutputError::Changed { path: self.path.clone(), was: self.place, now })
    }

    /// A device or a FIFO. No file is created, nothing is cut off.
    fn open_node(&self) -> io::Result<File> {
        let mut flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NOCTTY | libc::O_NONBLOCK;
        if self.place == Place::BlockDevice {
            // Not one that is mounted.
            flags |= libc::O_EXCL;
        }
        OpenOptions::new().write(true).custom_flags(flags).open(&self.path)
    }

    /// A Unix socket, as a stream.
    fn connect(&self) -> io::Result<File> {
        // By a handle: what is connected to is what was looked at, and the path may be longer than an address.
        let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        let handle = OpenOptions::new().read(true).custom_flags(flags).open(&self.path)?;
        if !handle.metadata()?.file_type().is_socket() {
            return Ok(handle);
        }
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no memory.
        let socket = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that was made just now and is nobody else's.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        // SAFETY: plain integers, all zeros is a value.
        let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        let name = format!("/proc/self/fd/{}", handle.as_raw_fd());
        // The name is far shorter than the field, so a zero is left at its end.
        for (to, from) in address.sun_path.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        // SAFETY: the address is as long as told and outlives the call.
        let status = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) };
        if status == 0 { Ok(socket.into()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Writes to this descriptor wait until there is room.
fn wait_from_now_on(file: &File) -> io::Result<()> {
    // SAFETY: an open descriptor, no memory.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    // SAFETY: as above.
    if flags < 0 || unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A device, FIFO or socket that is written to.
#[derive(Debug)]
pub(super) struct Stream(File);

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(|error| match error.kind() {
            kind @ (io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                io::Error::new(kind, "its reader went away before everything was written")
            }
            _ => error,
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
