//! Opens files the way a process with another root (a container, a chroot) would.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};

/// The root directory of a process, if it differs from heapbpf's.
#[must_use]
pub fn other_root(pid: u32) -> Option<PathBuf> {
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let (theirs, ours) = (root.metadata().ok()?, Path::new("/").metadata().ok()?);
    ((theirs.dev(), theirs.ino()) != (ours.dev(), ours.ino())).then_some(root)
}

/// How symbolic links in a path are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// They are followed, but cannot lead outside the root.
    Inside,
    /// A path that contains one is refused.
    Refused,
    /// They are followed; a path that leads out of the root by one, by `..` or by a leading `/` is refused (`EXDEV`).
    Beneath,
}

/// Returns a handle (`O_PATH`) to what is at `path` below `root`, without opening it.
///
/// # Errors
/// Errors of open(2) and openat2(2).
pub fn find(root: &Path, path: &Path, links: Links) -> io::Result<File> {
    let directory = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_PATH).open(root)?;
    let resolve = match links {
        Links::Inside => ResolveFlags::IN_ROOT,
        Links::Refused => ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS,
        Links::Beneath => ResolveFlags::BENEATH,
    };
    let resolve = resolve | ResolveFlags::NO_MAGICLINKS;
    Ok(openat2(directory, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve)?.into())
}

/// Returns a handle (`O_PATH`) to what is at `path` below our own root.
///
/// # Errors
/// Errors of open(2).
pub fn find_own(path: &Path) -> io::Result<File> {
    std::fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_CLOEXEC).open(path)
}

/// Opens the file at `path` below our own root for reading, as [`open_regular`] does.
///
/// # Errors
/// As for [`find_own`] and [`open_regular`].
pub fn open_own(path: &Path) -> io::Result<File> {
    open_regular(&find_own(path)?)
}

/// Opens what a handle refers to for reading, if it is a regular file. Opening anything else can block (a FIFO) or have
/// side effects (a watchdog device resets the machine if it is opened and then left alone). Never waits for the holder
/// of a lease, who has 45 s by default (fcntl(2), `F_SETLEASE`).
///
/// # Errors
/// Errors of open(2): [`io::ErrorKind::WouldBlock`] if somebody holds a write lease;
/// [`io::ErrorKind::InvalidInput`] if it is not a regular file.
pub fn open_regular(handle: &File) -> io::Result<File> {
    if !handle.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let path = format!("/proc/self/fd/{}", handle.as_raw_fd());
    std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, FileType, mknodat};

    use super::*;

    #[test]
    fn a_tree_of_links_stays_inside_and_only_regular_files_are_opened() {
        if heapbpf_testing::is_emulated("no openat2(2)") {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("etc")).expect("our own directory");
        std::fs::write(dir.path().join("secret"), "outside").expect("our own directory");
        std::fs::write(root.join("etc/passwd"), "inside").expect("our own directory");
        for (link, target) in [
            ("out", "../../../../../../etc"),
            ("absolute", "/etc"),
            ("up", "../secret"),
            ("round", "round"),
            ("magic", "/proc/self/root/etc"),
        ] {
            symlink(target, root.join(link)).expect("our own directory");
        }
        let open = |path: &str| find(&root, Path::new(path), Links::Inside).and_then(|handle| open_regular(&handle));
        let read = |path: &str| open(path).and_then(io::read_to_string).ok();
        assert_eq!(read("out/passwd").as_deref(), Some("inside"));
        assert_eq!(read("/absolute/passwd").as_deref(), Some("inside"));
        for path in ["up", "round", "magic/passwd", "../secret", "etc"] {
            assert_eq!(read(path), None, "{path}");
        }
        let found = |path: &str| find(&root, Path::new(path), Links::Refused).map_err(|error| error.raw_os_error());
        assert!(found("etc/passwd").is_ok());
        assert_eq!(found("absolute/passwd").err(), Some(Some(libc::ELOOP)));
        symlink("etc/../etc", root.join("near")).expect("our own directory");
        let beneath = |path: &str| {
            find(&root, Path::new(path), Links::Beneath)
                .and_then(|handle| open_regular(&handle))
                .and_then(io::read_to_string)
        };
        assert_eq!(beneath("near/passwd").ok().as_deref(), Some("inside"));
        for path in ["out/passwd", "absolute/passwd", "/etc/passwd", "up", "../secret", "etc/../../secret"] {
            assert_eq!(beneath(path).map_err(|error| error.raw_os_error()), Err(Some(libc::EXDEV)), "{path}");
        }
        assert!(beneath("magic/passwd").is_err() && beneath("round").is_err());
        let fifo = root.join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR, 0).expect("our own directory");
        assert_eq!(open("fifo").map_err(|error| error.kind()).err(), Some(io::ErrorKind::InvalidInput));
        let null = find_own(Path::new("/dev/zero")).and_then(|handle| open_regular(&handle));
        assert_eq!(null.err().map(|error| error.kind()), Some(io::ErrorKind::InvalidInput));
    }

    #[test]
    fn nobody_waits_for_the_holder_of_a_lease() {
        if heapbpf_testing::is_emulated("leases") {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("leased");
        let held = File::create(&path).expect("our own directory");
        // The kernel asks the holder for its lease by SIGIO, which would end this process.
        // SAFETY: both calls only read their arguments.
        let leased = unsafe {
            libc::signal(libc::SIGIO, libc::SIG_IGN);
            libc::fcntl(held.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK)
        };
        if leased != 0 {
            heapbpf_testing::skipped("this file system has no leases");
            return;
        }
        let opened = open_own(&path);
        assert_eq!(opened.err().map(|error| error.kind()), Some(io::ErrorKind::WouldBlock));
    }
}
