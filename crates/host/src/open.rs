//! Opens the file behind a mapping, and verifies that it is the mapped file.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, fstatfs, statx};

use super::in_root::{self, Links};
use super::record::{Device, MapEvent};

/// Why a mapped file cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// There is no file: JIT code, or a special mapping of the kernel.
    #[error("no file behind this mapping")]
    NoFile,
    /// Not an ELF file.
    #[error("not an ELF file")]
    NotElf,
    /// Not permitted.
    #[error(
        "permission denied (files of other users' processes need CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH and CAP_CHECKPOINT_RESTORE)"
    )]
    Permission,
    /// The process has exited or unloaded it, and there is no file at this path.
    #[error("the file was deleted, and the process no longer maps it")]
    Gone,
    /// The file at this path is not the one that was mapped.
    #[error("the file was replaced by another")]
    Replaced,
    /// It is the file that was mapped, but its contents have changed.
    #[error("the file was overwritten since it was mapped")]
    Overwritten,
    /// It is on a file system that a process serves (FUSE), so reading could block forever.
    #[error("on a FUSE file system, which could block the reader")]
    Blocking,
    /// A process holds a write lease on it, so opening would wait until the process gives it up.
    #[error("a process holds a lease on the file")]
    Leased,
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

impl Unreadable {
    fn from_io(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => Self::Permission,
            Some(libc::ENOENT | libc::ESRCH | libc::ENOTDIR | libc::ESTALE) => Self::Gone,
            Some(libc::EWOULDBLOCK) => Self::Leased,
            _ => Self::Other(error.to_string()),
        }
    }

    /// How informative the reason is. If several attempts fail, the most informative reason is reported.
    fn rank(&self) -> u8 {
        match self {
            Self::Gone => 0,
            Self::Replaced => 1,
            Self::Other(_) => 2,
            Self::Permission => 3,
            Self::NoFile | Self::NotElf | Self::Overwritten | Self::Blocking | Self::Leased => 4,
        }
    }
}

/// Attributes that must be unchanged when a file is opened again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    /// Change time. For a file on an overlay it also shows whether the file was copied up.
    pub changed: ChangeTime,
}

impl Stamp {
    /// Whether nothing but the change time differs. That changes with a file's owner, rights and names, but also with
    /// a copy in place that keeps size and modification time.
    pub(crate) fn differs_in_change_time_only(self, other: Self) -> bool {
        Self { changed: other.changed, ..self } == other
    }
}

/// Identifies the lower file of an overlay. Two overlay mounts (containers) show one lower file under different device
/// numbers, but with handles that name the same file system and inode. (Two file systems without a UUID cannot be told
/// apart.)
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RealFile {
    handle: Box<[u8]>,
    stamp: Stamp,
}

/// `st_ctime`: seconds and nanoseconds.
pub type ChangeTime = (i64, i64);

/// A mapped file, opened and verified.
#[derive(Debug)]
pub struct Opened {
    /// Open for reading.
    pub file: File,
    /// Used to recognise the file when it is opened again.
    pub stamp: Stamp,
    /// The lower file, if the file is seen through an overlay mount and the kernel reports it, which it does from 6.6
    /// on. Earlier kernels name the lower file in the mapping itself.
    pub real: Option<RealFile>,
    /// Generation of the inode that the mapping names, if the file system supports it.
    pub generation: Option<u64>,
}

/// Opens the file behind `map`. Tries four ways: the mapping itself, `path` below the process's root, the process's
/// executable, and `path` below heapbpf's root. Verifies each time that it is the mapped file.
///
/// # Errors
/// The most informative reason of the failed attempts.
pub fn open_mapped(map: &MapEvent, path: &[u8]) -> Result<Opened, Unreadable> {
    if may_block(map.pid, map.device) {
        return Err(Unreadable::Blocking);
    }
    let pid = map.pid;
    let mut reason = Unreadable::Gone;
    let path = Path::new(OsStr::from_bytes(path));
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let attempts: [(Trust, &dyn Fn() -> io::Result<File>); 4] = [
        (Trust::Mapping, &|| in_root::find_own(&map_file(map))),
        // The process may have turned its root into a tree of links.
        (Trust::Path, &|| in_root::find(&root, path, Links::Inside)),
        (Trust::Guess, &|| in_root::find_own(&PathBuf::from(format!("/proc/{pid}/exe")))),
        (Trust::Path, &|| in_root::find_own(path)),
    ];
    for (index, (trust, find)) in attempts.into_iter().enumerate() {
        if index % 2 == 1 && !path.is_absolute() {
            continue;
        }
        match find().map_err(|error| Unreadable::from_io(&error)).and_then(|handle| verified(&handle, map, path, trust))
        {
            Ok(opened) => return Ok(opened),
            // Another file may be mapped there by now, and most files are not the executable.
            Err(Unreadable::Replaced) if trust != Trust::Path => {}
            Err(error) if error.rank() > reason.rank() => reason = error,
            Err(_) => {}
        }
    }
    Err(reason)
}

/// Opens files of a process, unless a process serves their file systems (FUSE). Mount tables may be long, so they are
/// read once for each file system.
#[derive(Debug)]
pub struct UnservedFiles {
    pid: u32,
    served: HashMap<Device, bool>,
}

impl UnservedFiles {
    /// Those of a process.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        Self { pid, served: HashMap::new() }
    }

    /// Opens the regular file that a link in the process's directory in `/proc` leads to.
    ///
    /// # Errors
    /// Errors of open(2) and statx(2); [`Unreadable::Blocking`].
    pub fn open(&mut self, link: &Path) -> io::Result<File> {
        let handle = in_root::find_own(link)?;
        let found = statx(&handle, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS)?;
        let device = Device { major: found.stx_dev_major, minor: found.stx_dev_minor };
        if *self.served.entry(device).or_insert_with(|| may_block(self.pid, device)) {
            return Err(io::Error::other(Unreadable::Blocking));
        }
        in_root::open_regular(&handle)
    }
}

/// The kernel's link to the file of exactly this mapping.
fn map_file(map: &MapEvent) -> PathBuf {
    let (address, length) = map.file_mapping();
    let end = address.saturating_add(length);
    PathBuf::from(format!("/proc/{}/map_files/{address:x}-{end:x}", map.pid))
}

/// Current attributes of an open file, as far as they are known locally. No file server is asked, because it might not
/// answer.
#[must_use]
pub fn stamp_now(file: &File) -> Option<Stamp> {
    stamp_at(file, Path::new(""), AtFlags::EMPTY_PATH)
}

/// Current attributes of the file behind a mapping. `None` if the process no longer maps it.
#[must_use]
pub fn stamp_of_mapped(map: &MapEvent) -> Option<Stamp> {
    stamp_at(CWD, &map_file(map), AtFlags::empty())
}

/// Space that an open file takes up, bytes, if it was deleted. As [`stamp_now`], this asks no file server.
#[must_use]
pub fn space_if_deleted(file: &File) -> Option<u64> {
    const BYTES_OF_BLOCK: u64 = 512;
    let (flags, mask) = (AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::NLINK | StatxFlags::BLOCKS);
    let found = statx(file, "", flags, mask).ok()?;
    (found.stx_nlink == 0).then(|| found.stx_blocks * BYTES_OF_BLOCK)
}

fn stamp_at(at: impl AsFd, path: &Path, flags: AtFlags) -> Option<Stamp> {
    let found = statx(at, path, flags | AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS).ok()?;
    let modified = (found.stx_mtime.tv_sec, found.stx_mtime.tv_nsec.into());
    let changed = (found.stx_ctime.tv_sec, found.stx_ctime.tv_nsec.into());
    Some(Stamp { inode: found.stx_ino, bytes: found.stx_size, modified, changed })
}

/// How an attempt found the file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trust {
    /// By the exact address range of the mapping. If the process has unmapped the file, another file may be mapped
    /// there by now.
    Mapping,
    /// By a path that may lead to another file by now.
    Path,
    /// By a path that may belong to another file. If it does, that says nothing about the wanted file.
    Guess,
}

/// Opens what a handle (`O_PATH`) refers to, if it is the mapped file. The inspection must not open a device or wait
/// for a FIFO.
fn verified(handle: &File, map: &MapEvent, path: &Path, trust: Trust) -> Result<Opened, Unreadable> {
    let metadata = handle.metadata().map_err(|error| Unreadable::from_io(&error))?;
    if !metadata.is_file() {
        return Err(Unreadable::NoFile);
    }
    let file_system = file_system(handle);
    let stacked = matches!(file_system, libc::OVERLAYFS_SUPER_MAGIC | libc::BTRFS_SUPER_MAGIC);
    let same_inode = metadata.ino() == map.inode;
    let same = same_inode && (device(&metadata) == map.device || stacked)
        // Kernels differ in which of an overlay's two inodes they report.
        || trust == Trust::Mapping && stacked && has_name_of(handle, path);
    if !same {
        return Err(Unreadable::Replaced);
    }
    let file = in_root::open_regular(handle).map_err(|error| Unreadable::from_io(&error))?;
    let stamp = stamp_now(&file).ok_or(Unreadable::Gone)?;
    let overlay = file_system == libc::OVERLAYFS_SUPER_MAGIC;
    let handle = if overlay { name_to_handle(&file) } else { None };
    let real = handle.map(|(_, handle)| RealFile { handle, stamp });
    let generation = if device(&metadata) == map.device { generation(&file) } else { None };
    // The number of a deleted file's inode is given to new files.
    if generation.is_some_and(|now| map.inode_generation != 0 && now != map.inode_generation) {
        return Err(Unreadable::Replaced);
    }
    Ok(Opened { file, stamp, real, generation })
}

/// Whether the last name of an open file is that of `path`.
fn has_name_of(file: &File, path: &Path) -> bool {
    let now = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default();
    let now = now.as_os_str().as_bytes();
    let now = Path::new(OsStr::from_bytes(now.strip_suffix(b" (deleted)").unwrap_or(now)));
    now.file_name().is_some_and(|name| Some(name) == path.file_name())
}

fn device(metadata: &Metadata) -> Device {
    Device { major: libc::major(metadata.dev()), minor: libc::minor(metadata.dev()) }
}

/// The file system's magic number, or 0 if it is unknown.
fn file_system(file: &File) -> libc::c_long {
    fstatfs(file).map_or(0, |found| found.f_type)
}

/// Whether a process serves the file's file system (FUSE). May wait for that process.
pub(crate) fn is_served(file: &File) -> io::Result<bool> {
    Ok(fstatfs(file)?.f_type == libc::FUSE_SUPER_MAGIC)
}

/// Attributes that are the same whether a file is seen directly or through an overlay mount.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Beneath {
    /// Type and bytes of the handle that the file's own file system gives it.
    kind: u8,
    handle: Box<[u8]>,
    bytes: u64,
    modified: (i64, i64),
}

/// Returns a file's [`Beneath`], and whether it is seen through an overlay. `None` if the kernel or the file system
/// does not report it.
#[must_use]
pub fn beneath(file: &File) -> Option<(Beneath, bool)> {
    let overlay = file_system(file) == libc::OVERLAYFS_SUPER_MAGIC;
    let (kind, handle) = name_to_handle(file)?;
    let (kind, handle) = if overlay { handle_beneath(&handle)? } else { (u8::try_from(kind).ok()?, &*handle) };
    let metadata = file.metadata().ok()?;
    let modified = (metadata.mtime(), metadata.mtime_nsec());
    Some((Beneath { kind, handle: handle.into(), bytes: metadata.len(), modified }, overlay))
}

/// Returns the lower file's handle within an overlay's handle (the kernel's `struct ovl_fh`: three bytes of padding,
/// version, magic number, length, flags, type, UUID of the file system, handle).
fn handle_beneath(handle: &[u8]) -> Option<(u8, &[u8])> {
    const MAGIC: u8 = 0xfb;
    (*handle.get(4)? == MAGIC).then_some((*handle.get(7)?, handle.get(24..)?))
}

/// The file's handle and its type, usable only for comparison (`AT_HANDLE_FID`).
fn name_to_handle(file: &File) -> Option<(libc::c_int, Box<[u8]>)> {
    const AT_HANDLE_FID: libc::c_int = 0x200;
    const CAPACITY: usize = 128;
    #[repr(C)]
    struct Handle {
        bytes: libc::c_uint,
        kind: libc::c_int,
        handle: [u8; CAPACITY],
    }
    let mut handle = Handle { bytes: CAPACITY as u32, kind: 0, handle: [0; CAPACITY] };
    let mut mount: libc::c_int = 0;
    // SAFETY: `file` keeps the descriptor open, the path is a C string literal, and `handle` has `CAPACITY` bytes after
    // its header, as its field `bytes` says; all outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_raw_fd(),
            c"".as_ptr(),
            &raw mut handle,
            &raw mut mount,
            libc::AT_EMPTY_PATH | AT_HANDLE_FID,
        )
    };
    let used = handle.handle.get(..handle.bytes as usize)?;
    (result == 0 && !used.is_empty()).then(|| (handle.kind, used.into()))
}

/// The inode's generation, as process events report it (`FS_IOC_GETVERSION`).
fn generation(file: &File) -> Option<u64> {
    const FS_IOC_GETVERSION: libc::c_ulong = 0x8008_7601;
    let mut version: libc::c_long = 0;
    // SAFETY: the request writes an `int` or a `long`, depending on the file system, and `version` is large enough for
    // either.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_GETVERSION as _, &raw mut version) };
    (result == 0).then_some(u64::from(version as u32))
}

/// Whether a file of a process is on a file system that a process serves (FUSE). These have a device number with major
/// 0; their type is in the process's mount table.
fn may_block(pid: u32, device: Device) -> bool {
    if device.major != 0 {
        return false;
    }
    let tables = [format!("/proc/{pid}/mountinfo"), "/proc/self/mountinfo".to_owned()];
    tables
        .iter()
        .filter_map(|table| std::fs::read(table).ok())
        .find_map(|table| is_fuse(&table, device))
        .unwrap_or(false)
}

/// Whether a mount table lists `device` with a FUSE type. `None` if it is not listed.
fn is_fuse(table: &[u8], device: Device) -> Option<bool> {
    let number = format!("{}:{}", device.major, device.minor);
    table.split(|byte| *byte == b'\n').find_map(|line| {
        let mut words = line.split(|byte| *byte == b' ');
        (words.nth(2)? == number.as_bytes()).then_some(())?;
        let kind = words.skip_while(|word| *word != b"-").nth(1)?;
        Some(kind.starts_with(b"fuse") && kind != b"fusectl")
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use heapbpf_testing::silent::mount_silent;
    use heapbpf_testing::skipped;

    use super::*;
    use crate::proc_maps;
    use crate::reader_thread::ReaderThread;

    #[test]
    fn mount_tables() {
        let table = b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext4 /dev/root rw\n\
            40 35 0:52 / /mnt/s rw - fuse.sshfs host: rw\n41 35 0:53 / /sys/fs/fuse rw - fusectl none rw\n";
        assert_eq!(is_fuse(table, Device { major: 98, minor: 0 }), Some(false));
        assert_eq!(is_fuse(table, Device { major: 0, minor: 52 }), Some(true));
        assert_eq!(is_fuse(table, Device { major: 0, minor: 53 }), Some(false));
        assert_eq!(is_fuse(table, Device { major: 0, minor: 54 }), None);
    }

    #[test]
    fn a_file_whose_server_never_answers_is_not_opened() {
        let own = std::process::id();
        assert!(UnservedFiles::of(own).open(Path::new("/proc/self/exe")).is_ok());
        let dir = tempfile::tempdir().expect("a directory");
        let _server = match mount_silent(dir.path()) {
            Ok(server) => server,
            Err(error) => return skipped(format_args!("no FUSE file system can be mounted: {error}")),
        };
        let (thread, path) = (rustix::thread::gettid(), dir.path().to_owned());
        let open = move || UnservedFiles::of(thread.as_raw_nonzero().get().unsigned_abs()).open(&path);
        let opened = ReaderThread::default().ask("open", Duration::from_secs(60), open);
        let error = opened.expect("nobody waits for the server").expect_err("it is not opened");
        assert!(error.to_string().contains("FUSE"), "{error}");
    }

    fn mapping_of(path: &Path) -> MapEvent {
        let metadata = path.metadata().expect("stat");
        // With a PID that cannot exist, the file can only be found by its path.
        MapEvent {
            pid: u32::MAX,
            device: device(&metadata),
            inode: metadata.ino(),
            length: 4096,
            ..MapEvent::default()
        }
    }

    #[test]
    fn found_by_path_but_only_if_it_is_the_same_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("x");
        std::fs::write(&path, "one").expect("writes");
        let map = mapping_of(&path);
        let bytes = path.as_os_str().as_bytes();
        assert!(open_mapped(&map, bytes).is_ok());

        let other = dir.path().join("y");
        std::fs::write(&other, "two").expect("writes");
        std::fs::rename(&other, &path).expect("renames");
        assert_eq!(open_mapped(&map, bytes).map(|_| ()), Err(Unreadable::Replaced));
        std::fs::remove_file(&path).expect("removes");
        assert_eq!(open_mapped(&map, bytes).map(|_| ()), Err(Unreadable::Gone));
        // The same for a process that runs another program.
        let map = MapEvent { pid: std::process::id(), ..map };
        assert_eq!(open_mapped(&map, bytes).map(|_| ()), Err(Unreadable::Gone));
    }

    /// A plugin is unloaded and deleted, and the next one is mapped at its addresses.
    #[test]
    fn a_deleted_file_is_not_replaced_by_what_is_mapped_at_its_addresses() {
        // SAFETY: `geteuid` takes no arguments and cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            skipped("only root may open what is mapped");
            return;
        }
        let own = proc_maps::read(std::process::id()).expect("it runs");
        let next = own.into_iter().find(|map| map.inode != 0).expect("a program is a file");
        assert!(open_mapped(&next, &next.path).is_ok());
        let gone = MapEvent { inode: next.inode + 1, ..next };
        assert_eq!(open_mapped(&gone, b"/nowhere/plugin.so").map(|_| ()), Err(Unreadable::Gone));
    }

    /// A new file often gets the inode number of the last one that was deleted.
    #[test]
    fn a_file_with_another_generation_of_the_inode_is_another_file() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let Some(generation) = generation(file.as_file()) else {
            skipped("this file system has no generations of inodes");
            return;
        };
        let (map, path) = (mapping_of(file.path()), file.path().as_os_str().as_bytes());
        let opened = |inode_generation| open_mapped(&MapEvent { inode_generation, ..map.clone() }, path).map(|_| ());
        assert_eq!([0, generation].map(opened), [Ok(()), Ok(())]);
        assert_eq!(opened(generation.wrapping_add(1).max(1)), Err(Unreadable::Replaced));
    }

    #[test]
    fn a_file_that_may_not_be_read_names_what_is_missing() {
        // SAFETY: `geteuid` takes no arguments and cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            skipped("only root can become somebody else");
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("x");
        std::fs::write(&path, "one").expect("writes");
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, private).expect("our own file");
        let map = mapping_of(&path);
        let opened = std::thread::spawn(move || {
            // SAFETY: a raw system call with a plain integer. It changes the file system user id of this thread only.
            // The thread then has none of root's capabilities over files, and ends right after.
            unsafe { libc::syscall(libc::SYS_setfsuid, 65534) };
            open_mapped(&map, path.as_os_str().as_bytes()).map(|_| ())
        });
        let reason = opened.join().expect("no panic").expect_err("it is root's alone");
        assert_eq!(reason, Unreadable::Permission);
        assert!(reason.to_string().contains("CAP_DAC_READ_SEARCH"), "{reason}");
    }
}
