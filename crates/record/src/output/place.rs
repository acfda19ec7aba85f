//! What an output's path names, and how it is written: files are replaced; devices, FIFOs and sockets are opened.

use std::fmt;
use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use heapbpf_host::invoking_user::invoking_user;
use rustix::fs::{Access, AtFlags, CWD, OFlags, accessat, fcntl_getfl, fcntl_setfl};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;

use super::{OutputError, dir_of};

/// How long to wait for a FIFO's reader or a socket's listener.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Time between two attempts to open a FIFO or socket.
const PAUSE: Duration = Duration::from_millis(20);
/// Maximum number of symbolic links followed for one path, as in the kernel.
const MOST_LINKS: usize = 40;

/// What a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nothing yet.
    Free,
    /// A regular file.
    File,
    /// A directory.
    Dir,
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
            kind if kind.is_dir() => Self::Dir,
            kind if kind.is_symlink() => Self::Link,
            kind if kind.is_char_device() => Self::CharacterDevice,
            kind if kind.is_block_device() => Self::BlockDevice,
            kind if kind.is_fifo() => Self::Fifo,
            kind if kind.is_socket() => Self::Socket,
            _ => Self::File,
        }
    }

    /// Whether it is a device, FIFO or socket: written to, and never replaced.
    pub const fn is_special(self) -> bool {
        matches!(self, Self::CharacterDevice | Self::BlockDevice | Self::Fifo | Self::Socket)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Free => "missing",
            Self::File => "a file",
            Self::Dir => "a directory",
            Self::Link => "a symbolic link",
            Self::CharacterDevice | Self::BlockDevice => "a device",
            Self::Fifo => "a FIFO",
            Self::Socket => "a socket",
        })
    }
}

/// Where an output's path comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    /// The user gave it, so it may name anything that can be written.
    ByUser,
    /// heapbpf derived it from the user's path (numbered snapshots, a file per process), so it must name a regular
    /// file.
    Derived,
}

/// Where an output goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Destination {
    /// The path, after following symbolic links.
    pub(super) path: PathBuf,
    /// What is there: nothing, a regular file, or something special.
    pub(super) place: Place,
}

/// How a symbolic link is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkRule {
    Follow,
    NeedsForce,
    OfAnother,
}

/// Decides how to treat a link. It is followed only on request (`force`), and only if it belongs to the user or, under
/// sudo, to the invoking user: in a shared directory, another user could make a link to any file.
pub(super) fn link_rule(owner: u32, effective: u32, invoking: Option<u32>, force: bool) -> LinkRule {
    // Only root acts for another user.
    let is_invoking_users = effective == 0 && invoking == Some(owner);
    match (owner == effective || is_invoking_users, force) {
        (true, true) => LinkRule::Follow,
        (true, false) => LinkRule::NeedsForce,
        (false, _) => LinkRule::OfAnother,
    }
}

/// What is at the path, without following a link, and the owner's user id.
pub(super) fn look(path: &Path) -> io::Result<(Place, u32)> {
    match fs::symlink_metadata(path) {
        Ok(metadata) => Ok((Place::of(metadata.file_type()), metadata.uid())),
        // A missing or inaccessible directory is reported when it is written to.
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::PermissionDenied => {
                Ok((Place::Free, 0))
            }
            _ => Err(error),
        },
    }
}

/// Determines where an output goes, without opening anything.
///
/// # Errors
/// The path is a directory, a file that must not be replaced, or a link that must not be followed.
pub(super) fn find(path: &Path, force: bool, naming: Naming) -> Result<Destination, OutputError> {
    let failed = |source| OutputError::Io { path: path.into(), source };
    let mut at = path.to_path_buf();
    for _ in 0..MOST_LINKS {
        if at.is_dir() || at.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(OutputError::IsDir(path.into()));
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

/// The target of a link, if it may be followed.
fn follow(link: &Path, owner: u32, force: bool) -> Result<PathBuf, OutputError> {
    let target = fs::read_link(link).map_err(|source| OutputError::Io { path: link.into(), source })?;
    match link_rule(owner, geteuid().as_raw(), invoking_user().map(|user| user.uid), force) {
        LinkRule::NeedsForce => Err(OutputError::Link(link.into(), target)),
        LinkRule::OfAnother => Err(OutputError::LinkOfAnother { path: link.into(), target, owner }),
        LinkRule::Follow => {
            let next = dir_of(link).join(&target);
            // Links in /proc may lead to files without a path, such as `pipe:[4711]`.
            let leads_nowhere = fs::symlink_metadata(&next).is_err() && fs::metadata(link).is_ok();
            if leads_nowhere { Err(OutputError::LinkToOpenFile(link.into(), target)) } else { Ok(next) }
        }
    }
}

/// The first two of these paths that lead to the same file, so that one output would replace the other. Devices, FIFOs
/// and sockets can be written to more than once.
pub fn same_file<'a>(paths: impl IntoIterator<Item = &'a Path>, force: bool) -> Option<(&'a Path, &'a Path)> {
    let mut seen: Vec<(PathBuf, &Path)> = Vec::new();
    for path in paths {
        let at = match find(path, force, Naming::ByUser) {
            Ok(found) if found.place.is_special() => continue,
            Ok(found) => found.path,
            // Why it cannot be written is reported for each path separately.
            Err(_) => path.to_path_buf(),
        };
        let dir = dir_of(&at);
        let whole = fs::canonicalize(dir).unwrap_or_else(|_| dir.into()).join(at.file_name().unwrap_or_default());
        if let Some((_, earlier)) = seen.iter().find(|(other, _)| *other == whole) {
            return Some((earlier, path));
        }
        seen.push((whole, path));
    }
    None
}

impl Destination {
    fn io_error(&self, source: io::Error) -> OutputError {
        OutputError::Io { path: self.path.clone(), source }
    }

    /// Checks permission to write to a device, FIFO or socket without opening it, which could block or have side
    /// effects.
    ///
    /// # Errors
    /// Writing is not permitted.
    pub(super) fn check_access(&self) -> Result<(), OutputError> {
        let allowed = accessat(CWD, &*self.path, Access::WRITE_OK, AtFlags::EACCESS);
        allowed.map_err(|error| self.io_error(error.into()))
    }

    /// Opens a device, FIFO or socket for writing. Waits up to `patience` for a FIFO's reader, or for a socket's
    /// listener whose backlog is full.
    ///
    /// # Errors
    /// It has no reader, may not be written, or has been replaced by something else.
    pub(super) fn open(&self, patience: Duration) -> Result<Stream, OutputError> {
        let deadline = Instant::now() + patience;
        loop {
            let opened = if self.place == Place::Socket { self.connect() } else { self.open_node() };
            let error = match opened {
                Ok(file) => {
                    self.check_kind(&file)?;
                    set_blocking(&file).map_err(|source| self.io_error(source))?;
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

    /// Opens a device or FIFO. Neither creates nor truncates a file.
    fn open_node(&self) -> io::Result<File> {
        let mut flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NOCTTY | libc::O_NONBLOCK;
        if self.place == Place::BlockDevice {
            // Fails with EBUSY if it is mounted.
            flags |= libc::O_EXCL;
        }
        OpenOptions::new().write(true).custom_flags(flags).open(&self.path)
    }

    /// Connects to a Unix stream socket.
    fn connect(&self) -> io::Result<File> {
        // Through an O_PATH handle, so that the socket connected to is the one checked, and the path may be longer than
        // a socket address.
        let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        let handle = OpenOptions::new().read(true).custom_flags(flags).open(&self.path)?;
        if !handle.metadata()?.file_type().is_socket() {
            return Ok(handle);
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let name = format!("/proc/self/fd/{}", handle.as_raw_fd());
        connect(&socket, &SocketAddrUnix::new(name)?)?;
        Ok(socket.into())
    }
}

/// Makes writes to this file block until there is space.
fn set_blocking(file: &File) -> io::Result<()> {
    Ok(fcntl_setfl(file, fcntl_getfl(file)? - OFlags::NONBLOCK)?)
}

/// An open device, FIFO or socket.
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
