//! Separate debug files: by build ID and by `.gnu_debuglink`, in the directories where debuggers look.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};

use crate::host::in_root;
use crate::unwind::elf::Elf;
use crate::unwind::image::Image;

/// Where distributions put debug files.
pub const DEFAULT_DIRECTORY: &str = "/usr/lib/debug";
/// Largest debug file whose checksum is computed, bytes.
const MAX_CHECKED_BYTES: u64 = 4 << 30;
/// Largest `.gnu_debuglink`, bytes: a file name and a checksum.
const MAX_LINK_BYTES: u64 = 4096;

/// A debug file that was found to belong to a module.
pub struct DebugFile {
    /// Where it is.
    pub path: PathBuf,
    /// Open for reading.
    pub file: File,
    /// Its headers.
    pub elf: Elf,
    /// Whether it lies in one of the administrator's directories, so that nobody truncates it while it is read.
    pub is_trusted: bool,
}

/// The debug file of a module, if there is one. `directories` are searched in order, then the same ones below `root`,
/// which is that of a process that has the module, if it is not ours; `path` is the module's own, as that process sees
/// it.
pub fn find(
    directories: &[PathBuf],
    path: &Path,
    build_id: Option<&[u8]>,
    image: &dyn Image,
    elf: &Elf,
    root: Option<&Path>,
) -> Option<DebugFile> {
    let roots = || std::iter::once(None).chain(root.map(Some));
    if let Some(build_id) = build_id {
        let names = directories.iter().flat_map(|directory| names_in(directory, path, build_id));
        let names: Vec<PathBuf> = names.collect();
        for found in roots().flat_map(|root| names.iter().filter_map(move |name| open_at(root, name.clone(), true))) {
            // Trust is good; a directory that a build left behind is not.
            if found.elf.build_id(&found.file).as_deref() == Some(build_id) && has_symbols(&found.elf) {
                return Some(found);
            }
        }
    }
    let (name, checksum) = debug_link(image, elf)?;
    let folder = path.parent()?;
    let beside = [folder.join(&name), folder.join(".debug").join(&name)].map(|path| (path, false));
    let inside = folder.strip_prefix("/").ok()?;
    let global = directories.iter().map(|directory| (directory.join(inside).join(&name), true));
    let candidates: Vec<(PathBuf, bool)> = beside.into_iter().chain(global).filter(|(name, _)| name != path).collect();
    roots().flat_map(|root| candidates.iter().map(move |candidate| (root, candidate))).find_map(
        |(root, (candidate, is_trusted))| {
            let found = open_at(root, candidate.clone(), *is_trusted)?;
            let belongs = match (build_id, found.elf.build_id(&found.file)) {
                (Some(wanted), Some(has)) => wanted == has,
                _ => file_checksum(&found.file) == Some(checksum),
            };
            belongs.then_some(found)
        },
    )
}

/// Opens a candidate, below another root if there is one: what lies there is a target's.
fn open_at(root: Option<&Path>, path: PathBuf, is_trusted: bool) -> Option<DebugFile> {
    let Some(root) = root else { return open(path, is_trusted) };
    let file = in_root::open(root, &path).ok()?;
    check(path, file, false)
}

/// Names under which `directory` may hold a file with this build ID, or its debug information: by build ID as
/// debuggers have it, as in a copy of the file system, and lying there plainly.
pub fn names_in(directory: &Path, path: &Path, build_id: &[u8]) -> Vec<PathBuf> {
    let mut names = Vec::new();
    if let Some((first, rest)) = build_id.split_first().filter(|(_, rest)| !rest.is_empty()) {
        let rest: String = rest.iter().map(|byte| format!("{byte:02x}")).collect();
        let folder = directory.join(".build-id").join(format!("{first:02x}"));
        names.extend([folder.join(format!("{rest}.debug")), folder.join(rest)]);
    }
    // The path may be anybody's: nothing in it leads out of the directory.
    let inside: PathBuf = path.components().filter(|part| matches!(part, Component::Normal(_))).collect();
    if let Some(name) = path.file_name() {
        let debug = |path: &Path| {
            let mut path = path.as_os_str().to_owned();
            path.push(".debug");
            PathBuf::from(path)
        };
        let name = Path::new(name);
        names.extend([debug(name), name.into(), debug(&inside), inside].map(|name| directory.join(name)));
    }
    names
}

/// Whether there is anything in the file that gives names.
fn has_symbols(elf: &Elf) -> bool {
    [".symtab", ".debug_info", ".debug_line"].iter().any(|name| elf.section(name).is_some())
}

/// File name and checksum in `.gnu_debuglink`. The module is a target's: a name with folders in it is refused.
fn debug_link(image: &dyn Image, elf: &Elf) -> Option<(PathBuf, u32)> {
    let link = elf.section(".gnu_debuglink")?.read(image, MAX_LINK_BYTES).ok()?;
    let end = link.iter().position(|byte| *byte == 0)?;
    let name = PathBuf::from(std::ffi::OsStr::from_bytes(&link[..end]));
    let mut parts = name.components();
    let is_plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    let checksum = link.get((end + 1).next_multiple_of(4)..)?.first_chunk()?;
    is_plain.then(|| (name, u32::from_le_bytes(*checksum)))
}

/// Opens an ELF file, without ever waiting for one.
pub fn open(path: PathBuf, is_trusted: bool) -> Option<DebugFile> {
    // A name that a target chose must not make us wait on a pipe.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(&path).ok()?;
    check(path, file, is_trusted)
}

fn check(path: PathBuf, file: File, is_trusted: bool) -> Option<DebugFile> {
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let elf = Elf::read(&file).ok()?;
    Some(DebugFile { path, file, elf, is_trusted })
}

/// CRC-32 (IEEE) of a whole file.
fn file_checksum(file: &File) -> Option<u32> {
    if file.length_bytes().ok()? > MAX_CHECKED_BYTES {
        return None;
    }
    let mut checksum = flate2::Crc::new();
    let mut reader = file;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match reader.read(&mut buffer).ok()? {
            0 => return Some(checksum.sum()),
            length => checksum.update(&buffer[..length]),
        }
    }
}
