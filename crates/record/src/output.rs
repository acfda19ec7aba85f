//! Profile output. Paths are checked early. Files are written under a temporary name and renamed when complete;
//! devices, FIFOs and sockets are written to directly.

mod place;
#[cfg(test)]
mod place_tests;

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

use heapbpf_host::invoking_user::invoking_user;
use heapbpf_profile::formats::{self, Format, FormatError, WriteOptions};
use heapbpf_profile::model::Profile;
use tempfile::NamedTempFile;
use thiserror::Error;

use self::place::{Destination, Naming};
pub use self::place::{Place, same_file};

/// Why an output cannot be written.
#[derive(Debug, Error)]
pub enum OutputError {
    /// The directory does not exist.
    #[error("cannot write {0}: the directory {1} does not exist; create it, or choose another")]
    NoDir(PathBuf, PathBuf),
    /// No file can be created in the directory.
    #[error("cannot write into {0}: {1}; choose another directory")]
    DirNotWritable(PathBuf, #[source] io::Error),
    /// The file exists already.
    #[error("{0} exists; use --force to replace it, or choose another name")]
    Exists(PathBuf),
    /// The path is a directory.
    #[error("{0} is a directory; name a file in it")]
    IsDir(PathBuf),
    /// A symbolic link of the user's own, which is followed only on request.
    #[error("{0} is a symbolic link to {1}; use --force to write to where it leads, or choose another name")]
    Link(PathBuf, PathBuf),
    /// A symbolic link of another user, which is never followed.
    #[error(
        "{path} is a symbolic link of another user (uid {owner}) to {target}; name the file itself, or choose another"
    )]
    LinkOfAnother {
        /// The link.
        path: PathBuf,
        /// Its target.
        target: PathBuf,
        /// User id of its owner.
        owner: u32,
    },
    /// A link to an open file that has no path.
    #[error("{0} is a link to an open file ({1}), not to a path; use - for standard output, or name a file")]
    LinkToOpenFile(PathBuf, PathBuf),
    /// A path that heapbpf derived is not a regular file.
    #[error("{path} is {place}, but a file is to be written there; remove it, or choose another name for the output")]
    NotAFile {
        /// The file to be written.
        path: PathBuf,
        /// What is there.
        place: Place,
    },
    /// The path now names something of another type.
    #[error("{path} was {was} and is now {now}; nothing was written to it: choose another name")]
    Changed {
        /// The output.
        path: PathBuf,
        /// What was there when it was checked.
        was: Place,
        /// What was there when it was written.
        now: Place,
    },
    /// A FIFO without a reader, or a socket whose listener does not accept.
    #[error("nobody has read {path} ({place}) for {waited_s} s: start its reader before heapbpf ends, or name a file")]
    NoReader {
        /// The output.
        path: PathBuf,
        /// What it is.
        place: Place,
        /// How long heapbpf waited, seconds.
        waited_s: u64,
    },
    /// A socket without a listener.
    #[error("nobody listens on the socket {0}: start its listener before heapbpf ends, or name a file")]
    NoListener(PathBuf),
    /// Writing failed.
    #[error("cannot write {path}: {source}")]
    Io {
        /// File to be written.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The profile cannot be encoded.
    #[error("cannot write {0}: {1}")]
    Format(PathBuf, #[source] FormatError),
}

/// One output, which is checked before the recording starts.
#[derive(Clone, Debug)]
pub struct Output {
    path: PathBuf,
    /// The format.
    pub format: &'static Format,
    force: bool,
    naming: Naming,
}

/// The name that stands for standard output.
pub const STANDARD_OUTPUT: &str = "-";

impl Output {
    /// An output in `format` to a `path` given by the user (`-`: standard output). `force` replaces an existing file,
    /// and follows a symbolic link of the user's own.
    pub fn new(path: impl Into<PathBuf>, format: &'static Format, force: bool) -> Self {
        Self { path: path.into(), format, force, naming: Naming::ByUser }
    }

    /// The numbered snapshot of this output. It is always a regular file, and replaces only regular files.
    pub fn numbered(&self, number: u32) -> Self {
        let path = with_suffix(&self.path, self.format, &format!("{number:04}"));
        Self { path, format: self.format, force: true, naming: Naming::Derived }
    }

    /// The file's path, `-` for standard output.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether this is standard output.
    pub fn is_standard_output(&self) -> bool {
        self.path.as_os_str() == STANDARD_OUTPUT
    }

    /// The kind of output, if it is a device, FIFO or socket: those are written to, never replaced. Opens nothing.
    pub fn special(&self) -> Option<Place> {
        let found = || place::find(&self.path, self.force, self.naming).ok();
        let place = if self.is_standard_output() { None } else { found().map(|found| found.place) };
        place.filter(|place| place.is_special())
    }

    /// Whether numbered snapshots can be written beside it.
    pub fn takes_snapshots(&self) -> bool {
        !self.is_standard_output() && self.special().is_none()
    }

    /// Checks whether the output can be written, without leaving a trace. Must be called before anything is attached.
    pub fn check(&self) -> Result<(), OutputError> {
        if self.is_standard_output() {
            return Ok(());
        }
        check_new_file(&self.path, self.force)
    }

    /// Writes the profile. Returns the paths of the written files, none for standard output, devices, FIFOs and
    /// sockets.
    ///
    /// If the format holds one process per file and there are several processes, each gets its own file,
    /// `name.PID.heap`; to a device, FIFO or socket they are written one after the other.
    pub fn write(&self, profile: &Profile, options: &WriteOptions) -> Result<Vec<PathBuf>, OutputError> {
        if self.is_standard_output() {
            let mut out = BufWriter::new(io::stdout().lock());
            let path = Path::new("standard output");
            self.format.write(profile, options, &mut out).map_err(|source| failed(path, source))?;
            return out.flush().map(|()| Vec::new()).map_err(|source| failed(path, source.into()));
        }
        let several = self.format.one_process_per_file && profile.processes.len() > 1;
        let is_special = self.special().is_some();
        if several && !is_special {
            return self.write_each_process(profile, options);
        }
        write_to(&self.path, self.force, self.naming, |out| {
            let written = if several {
                let mut parts = (0..profile.processes.len()).map(|index| profile.only_process(index));
                parts.try_for_each(|part| self.format.write(&part, options, out))
            } else {
                self.format.write(profile, options, out)
            };
            written.map_err(|source| failed(&self.path, source))
        })?;
        Ok(if is_special { Vec::new() } else { vec![self.path.clone()] })
    }

    fn write_each_process(&self, profile: &Profile, options: &WriteOptions) -> Result<Vec<PathBuf>, OutputError> {
        let mut written: Vec<PathBuf> = Vec::new();
        for (index, process) in profile.processes.iter().enumerate() {
            let mut path = with_suffix(&self.path, self.format, &process.pid.to_string());
            // Two processes had the same id, one after the other.
            if written.contains(&path) {
                path = with_suffix(&self.path, self.format, &format!("{}.{index}", process.pid));
            }
            let part = profile.only_process(index);
            write_to(&path, self.force, Naming::Derived, |out| {
                self.format.write(&part, options, out).map_err(|source| failed(&path, source))
            })?;
            written.push(path);
        }
        Ok(written)
    }
}

fn failed(path: &Path, source: FormatError) -> OutputError {
    match source {
        FormatError::Io(source) => OutputError::Io { path: path.into(), source },
        source => OutputError::Format(path.into(), source),
    }
}

/// Permissions of files: a profile shows what programs do, including those of other users.
const PRIVATE_MODE: u32 = 0o600;

/// Gives a file to the user who invoked sudo, who could not read it otherwise.
fn give(file: &File, path: &Path) {
    let Some(user) = invoking_user() else { return };
    if let Err(error) = fchown(file, Some(user.uid), Some(user.gid)) {
        log::warn!("{} still belongs to root: cannot give it to user {}: {error}", path.display(), user.uid);
    }
}

/// Size of the write buffer. Large writes halve the kernel's time for a file of hundreds of megabytes.
const BUFFER_BYTES: usize = 4 << 20;

/// Writes to a `path` given by the user. A file is written under a temporary name beside it and renamed when complete;
/// a device, FIFO or socket is written to directly. `force` replaces an existing file, and follows a symbolic link of
/// the user's own.
///
/// # Errors
/// The path may not or cannot be written, or `write` failed.
pub fn write_whole<E: From<OutputError>>(
    path: &Path,
    force: bool,
    write: impl FnOnce(&mut dyn Write) -> Result<(), E>,
) -> Result<(), E> {
    write_to(path, force, Naming::ByUser, write)
}

fn write_to<E: From<OutputError>>(
    path: &Path,
    force: bool,
    naming: Naming,
    write: impl FnOnce(&mut dyn Write) -> Result<(), E>,
) -> Result<(), E> {
    let destination = place::find(path, force, naming)?;
    if destination.place.is_special() {
        return write_special(&destination, write);
    }
    let path = &*destination.path;
    let io_error = |source| OutputError::Io { path: path.into(), source };
    let dir = dir_of(path);
    let temporary = tempfile::Builder::new()
        .prefix(".heapbpf-")
        .permissions(fs::Permissions::from_mode(PRIVATE_MODE))
        .tempfile_in(dir)
        .map_err(|error| io_error(without_temporary_name(error)))?;
    // Through the plain file, as errors of `NamedTempFile` mention the temporary name.
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, temporary.as_file());
    write(&mut out)?;
    out.into_inner().map_err(|error| io_error(error.into_error()))?;
    give(temporary.as_file(), path);
    keep(temporary, &destination, force)?;
    Ok(())
}

fn write_special<E: From<OutputError>>(
    destination: &Destination,
    write: impl FnOnce(&mut dyn Write) -> Result<(), E>,
) -> Result<(), E> {
    let io_error = |source| OutputError::Io { path: destination.path.clone(), source };
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, destination.open(place::PATIENCE)?);
    let written = write(&mut out).and_then(|()| out.flush().map_err(|error| io_error(error).into()));
    // Without flushing: after a failed write, the rest of the buffer is not tried again.
    drop(out.into_parts());
    written
}

/// Removes the name of the temporary file, which the user never asked for, from an error.
fn without_temporary_name(error: io::Error) -> io::Error {
    if error.raw_os_error().is_some() { error } else { error.kind().into() }
}

fn keep(temporary: NamedTempFile, destination: &Destination, force: bool) -> Result<File, OutputError> {
    let path = &*destination.path;
    let io_error = |source| OutputError::Io { path: path.into(), source };
    // Something else may have been created in the meantime, and renaming would replace it.
    let (now, _) = place::look(path).map_err(io_error)?;
    if force && !matches!(now, Place::Free | Place::File) {
        return Err(OutputError::Changed { path: path.into(), was: destination.place, now });
    }
    let kept = if force { temporary.persist(path) } else { temporary.persist_noclobber(path) };
    kept.map_err(|error| match error.error.kind() {
        io::ErrorKind::AlreadyExists => OutputError::Exists(path.into()),
        _ => io_error(error.error),
    })
}

/// Checks whether [`write_whole`] could write to `path`, without leaving a trace and without opening what is there.
///
/// # Errors
/// Why it could not.
pub fn check_new_file(path: &Path, force: bool) -> Result<(), OutputError> {
    let destination = place::find(path, force, Naming::ByUser)?;
    if destination.place.is_special() {
        return destination.check_access();
    }
    let path = &*destination.path;
    let dir = dir_of(path);
    if !dir.is_dir() {
        return Err(OutputError::NoDir(path.into(), dir.into()));
    }
    // Only creating a file shows whether permissions and the file system allow it. It is deleted at once.
    tempfile::Builder::new()
        .prefix(".heapbpf-")
        .tempfile_in(dir)
        .map_err(|error| OutputError::DirNotWritable(dir.into(), without_temporary_name(error)))?;
    Ok(())
}

/// The directory of a file.
pub fn dir_of(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

/// Inserts `suffix` before the extension: `name.pb.gz` becomes `name.0001.pb.gz`.
pub fn with_suffix(path: &Path, format: &Format, suffix: &str) -> PathBuf {
    let (stem, extension) = parts_of(path, format);
    path.with_file_name(format!("{stem}.{suffix}{extension}"))
}

/// A file name without its extension, and the extension.
fn parts_of(path: &Path, format: &Format) -> (String, &'static str) {
    let mut stem = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let extension = formats::extension_of(format, &stem).unwrap_or("");
    stem.truncate(stem.len() - extension.len());
    (stem, extension)
}

/// The number of the snapshot of `path` that has this file name: 1 for `name.0001.pb.gz`. In formats with a file per
/// process, the name must have both a number and a process id, as a single number could be a process id.
pub fn snapshot_number(path: &Path, format: &Format, file_name: &str) -> Option<u32> {
    let (stem, extension) = parts_of(path, format);
    let rest = file_name.strip_prefix(&*stem)?.strip_prefix('.')?.strip_suffix(extension)?;
    let digits = if format.one_process_per_file { rest.split_once('.')?.0 } else { rest };
    (digits.len() >= 4 && digits.bytes().all(|byte| byte.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// An unused default path in `dir`: `heapbpf-<comm>-<pid>.pb.gz` for one process, `heapbpf-all.pb.gz` otherwise,
/// with a number added if that exists. The process's name is made safe by [`safe_name`].
pub fn default_path(dir: &Path, process: Option<(&str, u32)>, format: &Format) -> PathBuf {
    let stem = match process {
        Some((comm, pid)) => format!("heapbpf-{}-{pid}", safe_name(comm)),
        None => "heapbpf-all".into(),
    };
    let extension = format.extensions[0];
    let first = dir.join(format!("{stem}{extension}"));
    let numbered = (2u32..).map(|number| dir.join(format!("{stem}-{number}{extension}")));
    std::iter::once(first.clone())
        .chain(numbered)
        .take(10_000)
        .find(|path| fs::symlink_metadata(path).is_err())
        .unwrap_or(first)
}

/// A process's name as part of a file name: characters other than letters, digits, `.`, `_` and `-` become `_`.
pub fn safe_name(comm: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let name: String = comm.chars().map(safe).take(32).collect();
    let name = name.trim_start_matches('.');
    if name.is_empty() { "process".into() } else { name.into() }
}

#[cfg(test)]
mod tests {
    use heapbpf_profile::formats::by_name;
    use heapbpf_profile::testing;

    use super::*;

    fn output(path: &Path, force: bool) -> Output {
        Output::new(path, formats::by_extension(path).expect("known"), force)
    }

    fn entries(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .expect("readable")
            .map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_profile_appears_whole_and_is_not_replaced_unasked() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("x.folded");
        let options = WriteOptions::default();
        output(&path, false).check().expect("free");
        assert!(entries(dir.path()).is_empty(), "checking leaves no trace");
        let written = output(&path, false).write(&testing::small(), &options).expect("written");
        assert_eq!(written, [path.as_path()]);
        assert!(matches!(output(&path, false).check(), Err(OutputError::Exists(_))));
        assert!(matches!(output(&path, false).write(&testing::small(), &options), Err(OutputError::Exists(_))));
        output(&path, true).check().expect("forced");
        output(&path, true).write(&testing::small(), &options).expect("forced");
        assert_eq!(entries(dir.path()), ["x.folded"]);
    }

    #[test]
    fn a_write_that_fails_leaves_nothing() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("x.json");
        let result = write_whole(&path, false, |out| {
            out.write_all(b"half").expect("written");
            Err(OutputError::IsDir("stop".into()))
        });
        assert!(result.is_err());
        assert!(entries(dir.path()).is_empty());
    }

    #[test]
    fn missing_dirs_and_dirs_are_refused_with_a_hint() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let missing = output(&dir.path().join("no/x.json"), false).check().expect_err("missing").to_string();
        assert!(missing.contains("does not exist") && missing.contains("create it"), "{missing}");
        let is_dir = dir.path().join("d.json");
        fs::create_dir(&is_dir).expect("created");
        assert!(matches!(output(&is_dir, true).check(), Err(OutputError::IsDir(_))));
        assert!(matches!(output(Path::new("/proc/x.json"), false).check(), Err(OutputError::DirNotWritable { .. })));
    }

    #[test]
    fn names_are_made_safe_and_numbered() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let pprof = by_name("pprof").expect("known");
        let path = default_path(dir.path(), Some(("../we ird/ü", 7)), pprof);
        assert_eq!(path, dir.path().join("heapbpf-_we_ird__-7.pb.gz"));
        fs::write(&path, "").expect("written");
        let next = default_path(dir.path(), Some(("../we ird/ü", 7)), pprof);
        assert_eq!(next, dir.path().join("heapbpf-_we_ird__-7-2.pb.gz"));
        assert_eq!(default_path(dir.path(), None, pprof), dir.path().join("heapbpf-all.pb.gz"));
        assert_eq!(safe_name(""), "process");
        assert_eq!(safe_name(".."), "process");
        assert_eq!(with_suffix(Path::new("a/b.pb.gz"), pprof, "0001"), Path::new("a/b.0001.pb.gz"));
        assert_eq!(with_suffix(Path::new("a/b"), pprof, "0001"), Path::new("a/b.0001"));
    }
    #[test]
    fn snapshots_are_known_by_their_names() {
        let number = |path: &str, name: &str| {
            let path = Path::new(path);
            snapshot_number(path, formats::by_extension(path).unwrap(), name)
        };
        assert_eq!(number("a/x.pb.gz", "x.0012.pb.gz"), Some(12));
        assert_eq!(number("x.pb.gz", "x.12345.pb.gz"), Some(12345));
        let others = ["x.pb.gz", "x.12.pb.gz", "x.0001.json", "y.0001.pb.gz", "x.0001.7.pb.gz", "x.-001.pb.gz"];
        for other in others {
            assert_eq!(number("x.pb.gz", other), None, "{other}");
        }
        assert_eq!(number("x.heap", "x.4242.heap"), None, "a process");
        assert_eq!(number("x.heap", "x.0003.4242.heap"), Some(3));
    }
}
