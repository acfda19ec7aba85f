//! Predicts which files a command will allocate with, before it runs.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use heapbpf_probes::FileImage;
use procfs::process::{MMPermissions, MMapPath, Process};

/// Maximum number of files to examine for one command.
const MOST_FILES: usize = 256;
/// Maximum length of a script's first line, in bytes.
const LONGEST_SHEBANG: u64 = 4096;

/// Returns the command's program (for a script, its interpreter), the libraries that it is linked with, those that the
/// environment preloads, and the libraries of heapbpf itself, which include the host's C library.
pub fn expected(command: &[OsString]) -> Vec<PathBuf> {
    let mut found = BTreeSet::new();
    let mut queue: VecDeque<PathBuf> = VecDeque::new();
    queue.extend(command.first().and_then(|program| find_program(program)));
    for preloaded in environment_list("LD_PRELOAD", b": ") {
        queue.extend(find_library(preloaded.as_os_str()));
    }
    queue.extend(own_libraries());
    while let Some(path) = queue.pop_front() {
        if found.len() >= MOST_FILES || !found.insert(path.clone()) {
            continue;
        }
        if let Some(interpreter) = shebang(&path) {
            queue.extend(interpreter);
            continue;
        }
        let Ok(file) = File::open(&path) else { continue };
        let Ok(image) = FileImage::read_if(&file, "", |_| false) else { continue };
        // musl's loader is its C library.
        queue.extend(image.interpreter.iter().filter_map(|loader| Path::new(loader).canonicalize().ok()));
        queue.extend(image.needed.iter().filter_map(|name| find_library(OsStr::new(name))));
    }
    found.into_iter().collect()
}

/// Finds a program the way a shell does.
pub fn find_program(program: &OsStr) -> Option<PathBuf> {
    find(program, || environment_list("PATH", b":"))
}

/// Finds a library, approximately as the dynamic linker does.
fn find_library(name: &OsStr) -> Option<PathBuf> {
    let machine = format!("{}-linux-gnu", std::env::consts::ARCH);
    let standard = ["/usr/local/lib", "/lib", "/usr/lib", "/lib64", "/usr/lib64"];
    let mut dirs = environment_list("LD_LIBRARY_PATH", b":");
    dirs.extend(standard.iter().flat_map(|dir| [Path::new(dir).join(&machine), PathBuf::from(dir)]));
    find(name, || dirs)
}

/// The file with this path, or else the first with this name in the directories.
fn find(name: &OsStr, dirs: impl FnOnce() -> Vec<PathBuf>) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Path::new(name).canonicalize().ok();
    }
    let candidates = dirs().into_iter().map(|dir| dir.join(name));
    candidates.filter(|candidate| candidate.is_file()).find_map(|candidate| candidate.canonicalize().ok())
}

fn environment_list(name: &str, separators: &[u8]) -> Vec<PathBuf> {
    let Some(value) = std::env::var_os(name) else { return Vec::new() };
    value
        .as_bytes()
        .split(|byte| separators.contains(byte))
        .filter(|part| !part.is_empty())
        .map(|part| PathBuf::from(OsStr::from_bytes(part)))
        .collect()
}

/// The interpreter of a script and, if that is `env`, the program that `env` starts. `None` if the file is not a
/// script.
fn shebang(path: &Path) -> Option<Vec<PathBuf>> {
    let mut line = Vec::new();
    BufReader::new(File::open(path).ok()?.take(LONGEST_SHEBANG)).read_until(b'\n', &mut line).ok()?;
    let words = line.strip_prefix(b"#!")?;
    let mut words = words.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).map(OsStr::from_bytes);
    let interpreter = Path::new(words.next()?);
    let mut found = vec![interpreter.canonicalize().ok()?];
    if interpreter.file_name() == Some(OsStr::new("env")) {
        found.extend(words.find(|word| !word.as_bytes().starts_with(b"-")).and_then(find_program));
    }
    Some(found)
}

/// Libraries mapped into heapbpf itself.
fn own_libraries() -> Vec<PathBuf> {
    let maps = Process::myself().and_then(|process| process.maps()).map_or_else(|_| Vec::new(), |maps| maps.0);
    let paths = maps.into_iter().filter_map(|map| match map.pathname {
        MMapPath::Path(path) if map.perms.contains(MMPermissions::EXECUTE) => Some(path),
        _ => None,
    });
    paths.filter(|path| path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"lib"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(command: &[&str]) -> Vec<String> {
        let command: Vec<OsString> = command.iter().map(OsString::from).collect();
        expected(&command)
            .iter()
            .map(|path| path.file_name().unwrap_or_default().to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn a_program_comes_with_its_libraries() {
        let found = names(&["sh", "-c", "true"]);
        assert!(found.iter().any(|name| name.starts_with("libc.so") || name.starts_with("libc-")), "{found:?}");
    }

    #[test]
    fn a_script_comes_with_its_interpreter() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("script");
        std::fs::write(&script, "#!/usr/bin/env -S sh\nexit\n").unwrap();
        let found = names(&[script.to_str().unwrap()]);
        let shell = find_program(OsStr::new("sh")).unwrap();
        assert!(found.contains(&shell.file_name().unwrap().to_string_lossy().into_owned()), "{found:?}");
    }

    #[test]
    fn what_does_not_exist_is_left_out() {
        assert!(!names(&["/no/such/program"]).contains(&"program".to_owned()));
    }
}
