//! The cache of debuginfod clients, in the layout of elfutils, gdb and perf: `BUILDID/debuginfo`, empty if no server
//! has it.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Seek as _};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tempfile::NamedTempFile;

/// How long a negative answer is valid, unless the cache has a file of this name with another number of seconds.
const MISS: (&str, Duration) = ("cache_miss_s", Duration::from_secs(600));
/// How often the cache is cleaned.
const CLEAN: (&str, Duration) = ("cache_clean_interval_s", Duration::from_secs(86_400));
/// How long a file may stay unused.
const UNUSED: (&str, Duration) = ("max_unused_age_s", Duration::from_secs(604_800));
/// Maximum number of directories that one cleaning visits.
const MOST_CLEANED: usize = 100_000;

/// What the cache has for a build ID.
#[derive(Debug)]
pub enum Cached {
    /// A file. It may be anything: its build ID must be verified.
    File(File),
    /// No server had the file when asked a short time ago.
    Absent,
    /// Nothing.
    Nothing,
}

/// A cache.
#[derive(Clone, Debug)]
pub struct Cache(PathBuf);

impl Cache {
    /// The cache in this directory, which need not exist.
    pub fn new(dir: PathBuf) -> Self {
        Self(dir)
    }

    /// Path of the debug file with this build ID (hexadecimal).
    fn path(&self, id: &str) -> PathBuf {
        self.0.join(id).join("debuginfo")
    }

    /// Looks up a build ID (hexadecimal).
    pub fn get(&self, id: &str) -> Cached {
        let path = self.path(id);
        let Ok(metadata) = fs::symlink_metadata(&path) else { return Cached::Nothing };
        if !metadata.is_file() || !is_trusted(&metadata) {
            return Cached::Nothing;
        }
        if metadata.len() == 0 {
            let age = metadata.modified().ok().and_then(|time| SystemTime::now().duration_since(time).ok());
            return if age.is_some_and(|age| age < self.seconds(MISS)) { Cached::Absent } else { Cached::Nothing };
        }
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        OpenOptions::new().read(true).custom_flags(flags).open(path).map_or(Cached::Nothing, Cached::File)
    }

    /// Creates an empty temporary file in the directory of a debug file.
    ///
    /// # Errors
    /// The operating system's, or the directory belongs to another user.
    pub fn begin(&self, id: &str) -> io::Result<NamedTempFile> {
        let dir = self.dir(id)?;
        tempfile::Builder::new().prefix("debuginfo.").tempfile_in(dir)
    }

    /// Moves a complete file into its place and rewinds it.
    ///
    /// # Errors
    /// The operating system's.
    pub fn put(&self, id: &str, file: NamedTempFile) -> io::Result<File> {
        file.as_file().set_permissions(Permissions::from_mode(0o400))?;
        let mut file = file.persist(self.path(id)).map_err(|error| error.error)?;
        file.rewind()?;
        Ok(file)
    }

    /// Records that no server has a file.
    ///
    /// # Errors
    /// The operating system's, or the directory belongs to another user.
    pub fn put_absent(&self, id: &str) -> io::Result<()> {
        self.dir(id)?;
        let path = self.path(id);
        let _ = fs::remove_file(&path);
        OpenOptions::new().write(true).create_new(true).mode(0o400).open(path).map(drop)
    }

    /// Removes what the cache has for a build ID.
    pub fn remove(&self, id: &str) {
        let _ = fs::remove_file(self.path(id));
    }

    /// Creates the directory of a build ID.
    fn dir(&self, id: &str) -> io::Result<PathBuf> {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(&self.0)?;
        if !is_trusted(&fs::metadata(&self.0)?) {
            let what = format!("{} belongs to another user", self.0.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        let dir = self.0.join(id);
        match builder.recursive(false).create(&dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ if fs::symlink_metadata(&dir)?.is_dir() => Ok(dir),
            _ => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    /// Reads a number of seconds from a file in the cache, so that all clients use the same one.
    fn seconds(&self, (name, usual): (&str, Duration)) -> Duration {
        let text = read_short(&self.0.join(name));
        text.and_then(|text| text.trim().parse().ok()).map_or(usual, Duration::from_secs)
    }

    /// Once a day, removes files that were not used for a week. Anything that fails is left to the next time.
    pub fn clean(&self) {
        let mark = self.0.join(CLEAN.0);
        match fs::metadata(&mark).and_then(|metadata| metadata.modified()) {
            Ok(last) => {
                let since = SystemTime::now().duration_since(last).unwrap_or_default();
                let text = read_short(&mark).unwrap_or_default();
                if since < self.seconds(CLEAN) || fs::write(&mark, text).is_err() {
                    return;
                }
            }
            Err(_) => {
                if self.0.is_dir() {
                    let _ = fs::write(&mark, CLEAN.1.as_secs().to_string());
                }
                return;
            }
        }
        let most = self.seconds(UNUSED);
        let Ok(dirs) = fs::read_dir(&self.0) else { return };
        for dir in dirs.flatten().take(MOST_CLEANED) {
            let is_id = dir.file_name().to_str().is_some_and(|name| name.bytes().all(|it| it.is_ascii_hexdigit()));
            if is_id && dir.file_type().is_ok_and(|kind| kind.is_dir()) {
                clean_dir(&dir.path(), most);
            }
        }
    }
}

fn clean_dir(dir: &Path, most: Duration) {
    let Ok(files) = fs::read_dir(dir) else { return };
    for file in files.flatten().take(100) {
        let Ok(metadata) = file.metadata().map(|it| (it.is_file(), it.accessed(), it.modified())) else { continue };
        let (true, Ok(read), Ok(written)) = metadata else { continue };
        if SystemTime::now().duration_since(read.max(written)).is_ok_and(|age| age > most) {
            let _ = fs::remove_file(file.path());
        }
    }
    // Fails unless it is empty.
    let _ = fs::remove_dir(dir);
}

/// Whether a file or directory belongs to us or to root. Another owner could change it while it is read.
fn is_trusted(metadata: &fs::Metadata) -> bool {
    [0, rustix::process::geteuid().as_raw()].contains(&metadata.uid())
}

fn read_short(path: &Path) -> Option<String> {
    use io::Read as _;
    let mut text = String::new();
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    file.take(32).read_to_string(&mut text).ok()?;
    Some(text)
}
