//! `/tmp/perf-PID.map`: names of JIT code, as written by node (`--perf-basic-prof`), python3 (`-X perf`), java and
//! others. Each line has a start address, a size (both hexadecimal) and a name.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use heapbpf_host::in_root::{self, Links};

/// Bounds on what is read from a perf map.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of bytes read. The rest is ignored.
    pub file_bytes: u64,
    /// Maximum number of entries kept.
    pub entries: usize,
    /// Maximum length of a name, bytes. Longer names are truncated.
    pub name_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { file_bytes: 256 << 20, entries: 1 << 20, name_bytes: 512 }
    }
}

/// Why a perf map cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PerfMapError {
    /// It cannot be opened or read.
    #[error("{path}: {source}")]
    Io {
        /// Path as the process sees it.
        path: String,
        /// The operating system's reason.
        source: io::Error,
    },
    /// It is not a regular file, or belongs to another user.
    #[error("{path}: {what}")]
    Refused {
        /// Path as the process sees it.
        path: String,
        /// Why.
        what: &'static str,
    },
}

impl PerfMapError {
    /// Neither its content nor an error came in time.
    #[must_use]
    pub fn unanswered(namespace_pid: u32) -> Self {
        Self::Refused { path: path_of(namespace_pid), what: "its file system does not answer" }
    }
}

/// A parsed perf map.
#[derive(Clone, Debug, Default)]
pub struct PerfMap {
    /// End and name by start, without overlaps.
    code: BTreeMap<u64, (u64, Arc<str>)>,
    /// Number of malformed lines.
    pub bad_lines: u64,
    /// Whether a limit was reached, so that entries are missing.
    pub truncated: bool,
}

impl PerfMap {
    /// Opens the map of a process below `root` (`/proc/PID/root`, or a descriptor of it). `namespace_pid` is the
    /// process's PID in its own PID namespace, `owner` its user ID. Anybody may write to /tmp, and the map's content
    /// becomes part of the profile. So symbolic links are not followed, not even in the directory's path. The map must
    /// be a regular file of exactly this user, without other hard links.
    ///
    /// # Errors
    /// [`PerfMapError`], most often because there is no map.
    pub fn open(root: &Path, namespace_pid: u32, owner: u32) -> Result<File, PerfMapError> {
        let path = path_of(namespace_pid);
        let failed = |source: io::Error| match source.raw_os_error() {
            Some(libc::ELOOP) => PerfMapError::Refused { path: path.clone(), what: "there is a symbolic link" },
            _ => PerfMapError::Io { path: path.clone(), source },
        };
        let handle = in_root::find(root, Path::new(&path), Links::Refused).map_err(failed)?;
        let metadata = handle.metadata().map_err(failed)?;
        let refused = |what| Err(PerfMapError::Refused { path: path.clone(), what });
        if !metadata.is_file() {
            return refused("not a regular file");
        }
        if metadata.uid() != owner {
            return refused("belongs to another user than the process");
        }
        if metadata.nlink() > 1 {
            return refused("has another name as well (a hard link)");
        }
        in_root::open_regular(&handle).map_err(failed)
    }

    /// Reads an open map from its beginning.
    ///
    /// # Errors
    /// [`PerfMapError::Io`].
    pub fn read(mut file: &File, namespace_pid: u32, limits: Limits) -> Result<Self, PerfMapError> {
        let read = file.rewind().and_then(|()| Self::parse(file, limits));
        read.map_err(|source| PerfMapError::Io { path: path_of(namespace_pid), source })
    }

    /// Parses a map. Where entries overlap, the later one wins: JIT compilers move and replace code.
    ///
    /// # Errors
    /// If reading fails.
    pub fn parse(input: impl Read, limits: Limits) -> io::Result<Self> {
        let mut map = Self::default();
        let mut names = std::collections::HashSet::<Arc<str>>::new();
        let mut lines = BufReader::new(input.take(limits.file_bytes));
        let mut line = Vec::new();
        // Enough for start, size and the longest name that is kept.
        let line_bytes = limits.name_bytes as u64 + 64;
        loop {
            line.clear();
            if (&mut lines).take(line_bytes).read_until(b'\n', &mut line)? == 0 {
                break;
            }
            if line.last() != Some(&b'\n') {
                // The line is too long, or it is the last one and still being written.
                lines.skip_until(b'\n')?;
            }
            let text = String::from_utf8_lossy(line.trim_ascii_end());
            let Some((start, end, name)) = parse_line(&text, limits.name_bytes) else {
                map.bad_lines += 1;
                continue;
            };
            if map.code.len() >= limits.entries {
                map.truncated = true;
                break;
            }
            let name = match names.get(name) {
                Some(known) => known.clone(),
                None => {
                    let name: Arc<str> = name.into();
                    names.insert(name.clone());
                    name
                }
            };
            map.insert(start, end, name);
        }
        map.truncated |= lines.into_inner().limit() == 0;
        Ok(map)
    }

    fn insert(&mut self, start: u64, end: u64, name: Arc<str>) {
        // Parts of older entries that the new one covers are removed; the rest remains.
        if let Some((_, (old_end, old_name))) = self.code.range_mut(..start).next_back()
            && *old_end > start
        {
            let (tail_end, tail_name) = (*old_end, old_name.clone());
            *old_end = start;
            if tail_end > end {
                self.code.insert(end, (tail_end, tail_name));
            }
        }
        while let Some((&old_start, &(old_end, _))) = self.code.range(start..end).next() {
            if let Some((_, old_name)) = self.code.remove(&old_start)
                && old_end > end
            {
                self.code.insert(end, (old_end, old_name));
            }
        }
        self.code.insert(start, (end, name));
    }

    /// Name of the code at `address`.
    pub fn name(&self, address: u64) -> Option<&Arc<str>> {
        let (_, (end, name)) = self.code.range(..=address).next_back()?;
        (address < *end).then_some(name)
    }

    /// Number of code ranges.
    pub fn len(&self) -> usize {
        self.code.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.code.is_empty()
    }
}

/// Path to which a process writes its map, as it sees it.
fn path_of(namespace_pid: u32) -> String {
    format!("/tmp/perf-{namespace_pid}.map")
}

fn parse_line(line: &str, name_bytes: usize) -> Option<(u64, u64, &str)> {
    let mut fields = line.splitn(3, ' ');
    let hex = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let (start, size) = (hex(fields.next()?)?, hex(fields.next()?)?);
    let name = fields.next()?.trim();
    let end = start.checked_add(size)?;
    if size == 0 || name.is_empty() {
        return None;
    }
    Some((start, end, &name[..name.floor_char_boundary(name_bytes)]))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::{Limits, PerfMap, PerfMapError};

    fn parse(text: &str) -> PerfMap {
        PerfMap::parse(text.as_bytes(), Limits::default()).expect("reads memory")
    }

    #[test]
    fn later_code_replaces_earlier() {
        let map = parse("1000 100 JS:*first file.js:1:2\n1040 10 second\n0x2000 0x8 with prefix\n1000 20 third\n");
        let name = |address| map.name(address).map(|name| &**name);
        assert_eq!(name(0xfff), None);
        assert_eq!(name(0x1000), Some("third"));
        assert_eq!(name(0x101f), Some("third"));
        assert_eq!(name(0x1020), Some("JS:*first file.js:1:2"));
        assert_eq!(name(0x1040), Some("second"));
        assert_eq!(name(0x1050), Some("JS:*first file.js:1:2"));
        assert_eq!(name(0x10ff), Some("JS:*first file.js:1:2"));
        assert_eq!(name(0x1100), None);
        assert_eq!(name(0x2007), Some("with prefix"));
        assert_eq!(map.bad_lines, 0);
    }

    /// Compares with a model that stores the name of every address (seeded, 200 maps of 40 entries).
    #[test]
    fn agrees_with_a_model_of_every_address() {
        let mut random = 42u64;
        let mut below = |bound: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % bound
        };
        for _ in 0..200 {
            let (mut text, mut model) = (String::new(), vec![None; 300]);
            for entry in 0..40 {
                let (start, size) = (below(250), 1 + below(50));
                text.push_str(&format!("{start:x} {size:x} f{entry}\n"));
                model[start as usize..(start + size) as usize].fill(Some(format!("f{entry}")));
            }
            let map = parse(&text);
            for (address, expected) in model.iter().enumerate() {
                assert_eq!(map.name(address as u64).map(|name| &**name), expected.as_deref(), "{address} in\n{text}");
            }
        }
    }

    #[test]
    fn malformed_lines_are_counted_and_bounds_hold() {
        let map = parse("\n\nzz 10 a\n10\n10 0 empty\nffffffffffffffff 2 over\n10 10 \n10 10 good\n");
        assert_eq!((map.len(), map.bad_lines), (1, 7));
        let limits = Limits { entries: 10, name_bytes: 4, file_bytes: 100_000 };
        let long = format!("10 1 {}\n20 1 ok\n", "é".repeat(5000));
        let map = PerfMap::parse(long.as_bytes(), limits).expect("reads memory");
        assert_eq!(map.name(0x10).map(|name| &**name), Some("éé"));
        assert_eq!(map.name(0x20).map(|name| &**name), Some("ok"));
        let many: String = (0..100).map(|at| format!("{:x} 1 f\n", at * 16)).collect();
        let map = PerfMap::parse(many.as_bytes(), limits).expect("reads memory");
        assert!(map.truncated && map.len() == 10);
        let map = PerfMap::parse(std::io::repeat(b'1'), limits).expect("ends");
        assert!(map.truncated && map.is_empty());
    }

    #[test]
    fn only_a_plain_file_of_the_process_is_read() {
        if heapbpf_testing::is_emulated("no openat2(2)") {
            return;
        }
        let root = tempfile::tempdir().expect("temporary directory");
        let tmp = root.path().join("tmp");
        std::fs::create_dir(&tmp).expect("directory");
        let map = |pid: u32| tmp.join(format!("perf-{pid}.map"));
        std::fs::write(map(7), "10 10 inside\n").expect("write");
        // SAFETY: `geteuid` takes no arguments and cannot fail.
        let me = unsafe { libc::geteuid() };
        let read = |pid, owner| {
            let file = PerfMap::open(root.path(), pid, owner)?;
            PerfMap::read(&file, pid, Limits::default())
        };
        assert_eq!(read(7, me).expect("own").len(), 1);
        // An open map is read to its end, even after it is deleted.
        let file = PerfMap::open(root.path(), 7, me).expect("own");
        std::fs::write(map(7), "10 10 inside\n20 10 more\n").expect("write");
        std::fs::remove_file(map(7)).expect("our own");
        assert_eq!(PerfMap::read(&file, 7, Limits::default()).expect("open").len(), 2);
        assert_eq!(PerfMap::read(&file, 7, Limits::default()).expect("again").len(), 2);
        std::fs::write(map(7), "10 10 inside\n").expect("write");
        let refused = |pid, owner, why: &str| match read(pid, owner) {
            Err(PerfMapError::Refused { what, .. }) => assert!(what.contains(why), "{what}"),
            other => panic!("{pid}: {other:?}"),
        };
        // Not even if it is root's: somebody else chose its name.
        refused(7, me + 1, "another user");
        let missing = read(8, me).expect_err("there is none");
        assert!(matches!(missing, PerfMapError::Io { .. }));
        assert!(missing.to_string().starts_with("/tmp/perf-8.map: No such file"), "{missing}");
        symlink("/etc/passwd", map(9)).expect("link");
        refused(9, me, "symbolic link");
        symlink("/tmp/perf-7.map", map(10)).expect("link");
        refused(10, me, "symbolic link");
        std::fs::create_dir(map(11)).expect("directory");
        refused(11, me, "not a regular file");
        let fifo = std::ffi::CString::new(map(12).into_os_string().into_encoded_bytes()).expect("no NUL");
        // SAFETY: `fifo` is a NUL-terminated string that outlives the call.
        assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
        refused(12, me, "not a regular file");
        std::fs::hard_link(map(7), map(13)).expect("link");
        refused(13, me, "hard link");
        let elsewhere = root.path().join("elsewhere");
        std::fs::rename(&tmp, &elsewhere).expect("our own");
        symlink("elsewhere", &tmp).expect("link");
        refused(7, me, "symbolic link");
    }

    /// A gigabyte is read up to the bound, and kept up to the bounds on functions and names.
    #[test]
    fn a_huge_map_is_bounded_in_time_and_memory() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(1 << 30).expect("a hole");
        let map = PerfMap::read(&file, 1, Limits::default()).expect("reads");
        assert!(map.truncated && map.is_empty(), "{} lines", map.bad_lines);
        // Every name is different and as long as possible: the text never ends.
        let limits = Limits { file_bytes: 8 << 20, ..Limits::default() };
        let text = (0..u64::MAX).map(|at| format!("{:x} 10 {at:0500}\n", at * 16).into_bytes());
        let map = PerfMap::parse(Endless(text, Vec::new()), limits).expect("reads");
        assert!(map.truncated && map.len() as u64 <= limits.file_bytes / 500, "{}", map.len());
    }

    /// Reads everything that an iterator yields, one item after the other.
    struct Endless<I>(I, Vec<u8>);

    impl<I: Iterator<Item = Vec<u8>>> std::io::Read for Endless<I> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            if self.1.is_empty() {
                self.1 = self.0.next().unwrap_or_default();
            }
            let bytes = buffer.len().min(self.1.len());
            buffer[..bytes].copy_from_slice(&self.1[..bytes]);
            self.1.drain(..bytes);
            Ok(bytes)
        }
    }
}
