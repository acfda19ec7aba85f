//! Finds separate debug files, by build ID and by `.gnu_debuglink`, in the directories that debuggers search.

use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use heapbpf_elf::Elf;
use heapbpf_elf::debug_link::{self, DebugLink};
use heapbpf_host::in_root;
use heapbpf_host::roots::Roots;
use heapbpf_unwind::image::Image;

/// The directory in which distributions install debug files.
pub const DEFAULT_DIRECTORY: &str = "/usr/lib/debug";
/// Maximum size of a debug file whose checksum is computed, bytes.
const MAX_CHECKED_BYTES: u64 = 4 << 30;

/// An ELF file with debug information for a module.
pub struct DebugFile {
    /// Its path.
    pub path: PathBuf,
    /// Open for reading.
    pub file: File,
    /// Its headers.
    pub elf: Elf,
    /// Whether it is in one of the administrator's directories, where no target can truncate it while it is mapped.
    pub is_trusted: bool,
}

/// The root directory of a process that maps the module, and what opens files there.
pub type Root<'a> = (&'a Path, &'a Roots);

/// Finds the debug file of a module. `directories` are searched in order, then again below `root`: the root directory
/// of a process that maps the module, if it differs from heapbpf's. `path` is the module's own path as that process
/// sees it.
pub fn find(
    directories: &[PathBuf],
    path: &Path,
    build_id: Option<&[u8]>,
    image: &dyn Image,
    elf: &Elf,
    root: Option<Root<'_>>,
) -> Option<DebugFile> {
    let roots = || std::iter::once(None).chain(root.map(Some));
    if let Some(build_id) = build_id {
        let names = directories.iter().flat_map(|directory| names_in(directory, path, build_id));
        let names: Vec<PathBuf> = names.collect();
        for found in roots().flat_map(|root| names.iter().filter_map(move |name| open_at(root, name.clone(), true))) {
            // Verify the build ID even here: a directory may hold outdated files of an earlier build.
            if heapbpf_elf::build_id::of(&found.file).as_deref() == Some(build_id) && has_symbols(&found.elf) {
                return Some(found);
            }
        }
    }
    let DebugLink { name, checksum } = debug_link::of(image, elf)?;
    let dir = path.parent()?;
    let beside = [dir.join(&name), dir.join(".debug").join(&name)].map(|path| (path, false));
    let inside = dir.strip_prefix("/").ok()?;
    let global = directories.iter().map(|directory| (directory.join(inside).join(&name), true));
    let candidates: Vec<(PathBuf, bool)> = beside.into_iter().chain(global).filter(|(name, _)| name != path).collect();
    roots().flat_map(|root| candidates.iter().map(move |candidate| (root, candidate))).find_map(
        |(root, (candidate, is_trusted))| {
            let found = open_at(root, candidate.clone(), *is_trusted)?;
            let belongs = match (build_id, heapbpf_elf::build_id::of(&found.file)) {
                (Some(wanted), Some(has)) => wanted == has,
                _ => file_checksum(&found.file) == Some(checksum),
            };
            belongs.then_some(found)
        },
    )
}

/// Opens a candidate, below another root if one is given. A file below another root belongs to a target, which may have
/// mounted a file system there whose server never answers.
pub fn open_at(root: Option<Root<'_>>, path: PathBuf, is_trusted: bool) -> Option<DebugFile> {
    let Some((root, roots)) = root else { return open(path, is_trusted) };
    let file = roots.open(root, &path).ok()?;
    check(path, file, false)
}

/// Returns the paths of a file with this build ID in the debuggers' `.build-id` layout.
pub fn by_build_id(directory: &Path, build_id: &[u8]) -> Vec<PathBuf> {
    let Some((first, rest)) = build_id.split_first().filter(|(_, rest)| !rest.is_empty()) else { return Vec::new() };
    let rest: String = rest.iter().map(|byte| format!("{byte:02x}")).collect();
    let dir = directory.join(".build-id").join(format!("{first:02x}"));
    vec![dir.join(format!("{rest}.debug")), dir.join(rest)]
}

/// Returns the paths at which `directory` may hold a file with this build ID, or its debug file: in the debuggers'
/// `.build-id` layout, by file name alone, and by full path as in a copy of the file system.
pub fn names_in(directory: &Path, path: &Path, build_id: &[u8]) -> Vec<PathBuf> {
    let mut names = Vec::new();
    names.extend(by_build_id(directory, build_id));
    // The path may be hostile. Only its normal components are used, so it cannot lead out of the directory.
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

/// Whether the file has symbols or debug information.
fn has_symbols(elf: &Elf) -> bool {
    [".symtab", ".debug_info", ".debug_line"].iter().any(|name| elf.section(name).is_some())
}

/// Opens an ELF file.
pub fn open(path: PathBuf, is_trusted: bool) -> Option<DebugFile> {
    // A target may have chosen the name. It must not make heapbpf block on a FIFO or open a device.
    let file = in_root::open_own(&path).ok()?;
    check(path, file, is_trusted)
}

/// Turns an open file into a debug file. Returns `None` if it is not an ELF file.
pub fn check(path: PathBuf, file: File, is_trusted: bool) -> Option<DebugFile> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn names(path: &str, build_id: &[u8]) -> Vec<String> {
        let names = names_in(Path::new("/d"), Path::new(path), build_id);
        names.iter().map(|name| name.display().to_string()).collect()
    }

    #[test]
    fn candidates_by_build_id_by_name_and_by_path() {
        let expected = [
            "/d/.build-id/ab/cdef.debug",
            "/d/.build-id/ab/cdef",
            "/d/libx.so.debug",
            "/d/libx.so",
            "/d/usr/lib/libx.so.debug",
            "/d/usr/lib/libx.so",
        ];
        assert_eq!(names("/usr/lib/libx.so", &[0xab, 0xcd, 0xef]), expected);
    }

    #[test]
    fn hostile_paths_stay_in_the_directory() {
        for path in ["/../../etc/passwd", "../x", "/a/../../b", "//etc/shadow"] {
            for name in names_in(Path::new("/d"), Path::new(path), &[1, 2]) {
                assert!(
                    name.starts_with("/d") && !name.components().any(|part| part == Component::ParentDir),
                    "{name:?}"
                );
            }
        }
        assert_eq!(names("", &[1]), [] as [&str; 0], "neither a name nor a usable build ID");
    }

    #[test]
    fn what_is_not_an_elf_file_is_no_debug_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("x.debug");
        std::fs::write(&path, "text").expect("writes");
        assert!(open(path, true).is_none());
        assert!(open(dir.path().to_path_buf(), true).is_none(), "a directory");
        let own = open("/proc/self/exe".into(), false).expect("this program");
        assert!(!own.is_trusted && has_symbols(&own.elf));
    }

    #[test]
    fn the_checksum_of_debug_links() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("x");
        std::fs::write(&path, "123456789").expect("writes");
        // The check value of CRC-32/ISO-HDLC.
        assert_eq!(file_checksum(&File::open(path).expect("opens")), Some(0xcbf4_3926));
    }
}
