//! Finds the Debian package that a file belongs to, from dpkg's lists, to say which package has its debug symbols.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// Where dpkg keeps a list of files for each package.
pub const DPKG_LISTS: &str = "/var/lib/dpkg/info";
/// Where apt keeps the indices of its sources. Their names are made of their addresses.
pub const APT_LISTS: &str = "/var/lib/apt/lists";
/// Maximum number of lists read.
const MOST_LISTS: usize = 20_000;
/// Maximum number of bytes read from a list.
const MOST_BYTES: u64 = 16 << 20;

/// Maximum number of files whose packages are remembered.
const MOST_KNOWN: usize = 10_000;

/// Packages of files. Each file is looked up once, because reading all lists takes milliseconds.
#[derive(Debug, Default)]
pub struct KnownOwners(HashMap<String, Option<String>>);

impl KnownOwners {
    /// Looks up the packages of those `paths` that are not known yet, in the lists in `dir`.
    pub fn learn<'a>(&mut self, dir: &Path, paths: impl Iterator<Item = &'a str>) {
        if self.0.len() > MOST_KNOWN {
            self.0.clear();
        }
        let new: Vec<&str> = paths.filter(|path| !self.0.contains_key(*path)).collect();
        let mut found = owners(dir, new.iter().copied());
        self.0.extend(new.into_iter().map(|path| (path.to_owned(), found.remove(path))));
    }

    /// Returns the package of a file, if it was looked up and found.
    pub fn get(&self, path: &str) -> Option<&str> {
        self.0.get(path)?.as_deref()
    }
}

/// Returns the package of each of `paths` that is in one of the lists in `dir`. All lists are read once, if there are
/// any paths.
fn owners<'a>(dir: &Path, paths: impl Iterator<Item = &'a str>) -> HashMap<&'a str, String> {
    let wanted: HashMap<&[u8], &str> = paths.map(|path| (merged(path.as_bytes()), path)).collect();
    let mut owners = HashMap::new();
    if wanted.is_empty() {
        return owners;
    }
    let Ok(lists) = fs::read_dir(dir) else { return owners };
    for list in lists.flatten().take(MOST_LISTS) {
        let name = list.file_name();
        let Some(package) = name.to_str().and_then(|name| name.strip_suffix(".list")) else { continue };
        let Ok(file) = File::open(list.path()) else { continue };
        let mut reader = BufReader::with_capacity(64 << 10, file.take(MOST_BYTES));
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            if let Some(path) = wanted.get(merged(line.strip_suffix(b"\n").unwrap_or(&line))) {
                // Without the architecture, as in `libc6:amd64`.
                owners.insert(*path, package.split(':').next().unwrap_or(package).to_owned());
            }
            line.clear();
        }
        if owners.len() == wanted.len() {
            break;
        }
    }
    owners
}

/// Returns whether one of apt's sources, whose indices are in `dir`, has packages of debug symbols. These are in
/// archives of their own (`debian-debug`, `ddebs.ubuntu.com`).
pub fn has_debug_archive(dir: &Path) -> bool {
    let Ok(lists) = fs::read_dir(dir) else { return false };
    let is_of_debug =
        |name: &str| name.contains("_Packages") && (name.contains("-debug_") || name.starts_with("ddebs."));
    lists.flatten().take(MOST_LISTS).any(|list| list.file_name().to_str().is_some_and(is_of_debug))
}

/// Returns the package with the debug symbols of another one; `None` if apt has no source of it. `has_archive`: see
/// [`has_debug_archive`].
pub fn debug_package(package: &str, has_archive: bool) -> Option<String> {
    match package {
        // The C library's package has a special name and is in the main archive, because debuggers need it.
        "libc6" => Some("libc6-dbg".to_owned()),
        _ => has_archive.then(|| format!("{package}-dbgsym")),
    }
}

/// Returns a path without `/usr`. Lists name some files as they were before `/lib` became a link to `/usr/lib`.
fn merged(path: &[u8]) -> &[u8] {
    path.strip_prefix(b"/usr").filter(|rest| rest.starts_with(b"/")).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_found_by_their_lists_whatever_usr_is() {
        let dir = tempfile::tempdir().expect("a directory");
        let list = |name: &str, text: &str| fs::write(dir.path().join(name), text).expect("writes");
        list("git.list", "/.\n/usr/bin\n/usr/bin/git\n");
        list("libc6:amd64.list", "/lib/x86_64-linux-gnu/libc.so.6");
        list("git.md5sums", "/usr/bin/other\n");
        list("odd.list", "\u{0}\n\n//\n/usr");
        let paths = ["/usr/bin/git", "/usr/lib/x86_64-linux-gnu/libc.so.6", "/usr/bin/other", "/usr", ""];
        let found = owners(dir.path(), paths.into_iter());
        let package = |path: &str, has_archive| debug_package(found.get(path)?, has_archive);
        for (has_archive, expected) in [(true, Some("git-dbgsym")), (false, None)] {
            assert_eq!(package("/usr/bin/git", has_archive).as_deref(), expected);
            let libc = package("/usr/lib/x86_64-linux-gnu/libc.so.6", has_archive);
            assert_eq!(libc.as_deref(), Some("libc6-dbg"));
        }
        assert_eq!(package("/usr/bin/other", true), None);
        assert!(owners(Path::new("/nonexistent"), paths.into_iter()).is_empty());
    }

    #[test]
    fn packages_of_debug_symbols_are_in_archives_of_their_own() {
        let has_one = |names: &[&str]| {
            let dir = tempfile::tempdir().expect("a directory");
            names.iter().for_each(|name| fs::write(dir.path().join(name), "").expect("writes"));
            has_debug_archive(dir.path())
        };
        let main = "deb.debian.org_debian_dists_bookworm_main_binary-amd64_Packages";
        assert!(!has_one(&[]) && !has_one(&[main, "lock"]) && !has_debug_archive(Path::new("/nonexistent")));
        assert!(has_one(&[main, "deb.debian.org_debian-debug_dists_bookworm-debug_main_binary-amd64_Packages.lz4"]));
        assert!(has_one(&["ddebs.ubuntu.com_dists_noble_main_binary-amd64_Packages"]));
        assert!(!has_one(&["deb.debian.org_debian-debug_dists_bookworm-debug_InRelease"]));
    }

    #[test]
    fn a_file_is_looked_for_once() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut known = KnownOwners::default();
        known.learn(dir.path(), ["/usr/bin/git"].into_iter());
        fs::write(dir.path().join("git.list"), "/usr/bin/git\n/usr/bin/git-shell\n").expect("writes");
        known.learn(dir.path(), ["/usr/bin/git", "/usr/bin/git-shell"].into_iter());
        assert_eq!(["/usr/bin/git", "/usr/bin/git-shell"].map(|path| known.get(path)), [None, Some("git")]);
    }
}
