//! Where profiles go: refused early, written under a temporary name, renamed when whole; what is no file is written to.

mod place;
#[cfg(test)]
mod place_tests;

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;
use thiserror::Error;

use super::formats::{self, Format, FormatError, WriteOptions};
use super::model::Profile;
pub use place::Place;
use place::{Destination, Naming};

/// Why there is, or would be, no output file.
#[derive(Debug, Error)]
pub enum OutputError {
    /// The folder is not there.
    #[error("cannot write {path}: the folder {folder} does not exist; create it, or choose another")]
    NoFolder {
        /// File to be written.
        path: PathBuf,
        /// Its folder.
        folder: PathBuf,
    },
    /// The folder takes no files.
    #[error("cannot write into {folder}: {source}; choose another folder")]
    FolderNotWritable {
        /// The folder.
        folder: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is there already.
    #[error("{0} exists; use --force to replace it, or choose another name")]
    Exists(PathBuf),
    /// The name belongs to something that is not a file.
    #[error("{0} is a folder; name a file in it")]
    IsFolder(PathBuf),
    /// The user's own link, which is followed only when that is asked for.
    #[error("{path} is a symbolic link to {target}; use --force to write to where it leads, or choose another name")]
    Link {
        /// The link.
        path: PathBuf,
        /// What it says.
        target: PathBuf,
    },
    /// A link of somebody else, which is never followed.
    #[error(
        "{path} is a symbolic link of another user (uid {owner}) to {target}; name the file itself, or choose another"
    )]
    LinkOfAnother {
        /// The link.
        path: PathBuf,
        /// What it says.
        target: PathBuf,
        /// Whose it is.
        owner: u32,
    },
    /// A link to what has no path.
    #[error("{path} is a link to an open file ({target}), not to a path; use - for standard output, or name a file")]
    LinkToOpenFile {
        /// The link.
        path: PathBuf,
        /// What it says.
        target: PathBuf,
    },
    /// heapbpf made the name itself, and it belongs to something that is not a regular file.
    #[error("{path} is {place}, where a file is to be written; remove it, or choose another name for the output")]
    NotAFile {
        /// The file to be written.
        path: PathBuf,
        /// What is there.
        place: Place,
    },
    /// Something else has taken its place.
    #[error("{path} was {was} and is {now} now; nothing was written to it: choose another name")]
    Changed {
        /// The output.
        path: PathBuf,
        /// What was found there.
        was: Place,
        /// What was there when it was to be written.
        now: Place,
    },
    /// A FIFO without a reader, or a socket whose listener takes nobody.
    #[error("nobody has read {path} ({place}) for {waited_s} s: start its reader before heapbpf ends, or name a file")]
    NoReader {
        /// The output.
        path: PathBuf,
        /// What it is.
        place: Place,
        /// How long it was waited for, s.
        waited_s: u64,
    },
    /// A socket that nobody listens at.
    #[error("nobody listens at the socket {0}: start its listener before heapbpf ends, or name a file")]
    NoListener(PathBuf),
    /// Writing failed.
    #[error("cannot write {path}: {source}")]
    Io {
        /// File to be written.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The format failed.
    #[error("cannot write {path}: {source}")]
    Format {
        /// File to be written.
        path: PathBuf,
        /// What the format said.
        source: FormatError,
    },
}

/// A place for one output, checked before the recording starts.
#[derive(Clone, Debug)]
pub struct Output {
    path: PathBuf,
    format: &'static dyn Format,
    force: bool,
    naming: Naming,
}

/// The name that stands for standard output.
pub const STANDARD_OUTPUT: &str = "-";

impl Output {
    /// Will write `format` to `path` (`-`: standard output), as the user named it; `force` replaces a file that exists,
    /// and follows the user's own symbolic link.
    pub fn new(path: impl Into<PathBuf>, format: &'static dyn Format, force: bool) -> Self {
        Self { path: path.into(), format, force, naming: Naming::ByUser }
    }

    /// The numbered snapshot of this output: a file, which replaces another one of its name and nothing else.
    pub fn numbered(&self, number: u32) -> Self {
        let path = with_suffix(&self.path, self.format, &format!("{number:04}"));
        Self { path, format: self.format, force: true, naming: Naming::Derived }
    }

    /// The file's path, `-` for standard output.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The format.
    pub fn format(&self) -> &'static dyn Format {
        self.format
    }

    /// Whether this is standard output.
    pub fn is_standard_output(&self) -> bool {
        self.path.as_os_str() == STANDARD_OUTPUT
    }

    /// What the output is if it is written to and never replaced: a device, a FIFO, a socket. Nothing is opened.
    pub fn special(&self) -> Option<Place> {
        let found = || place::find(&self.path, self.force, self.naming).ok();
        let place = if self.is_standard_output() { None } else { found().map(|found| found.place) };
        place.filter(|place| place.is_special())
    }

    /// Whether there can be numbered snapshots beside it.
    pub fn takes_snapshots(&self) -> bool {
        !self.is_standard_output() && self.special().is_none()
    }

    /// Finds out whether the file could be written now, without leaving a trace: call it before anything is attached.
    pub fn check(&self) -> Result<(), OutputError> {
        if self.is_standard_output() {
            return Ok(());
        }
        check_new_file(&self.path, self.force)
    }

    /// Writes the profile; returns the files that were written (none for standard output, devices, FIFOs and sockets).
    ///
    /// A format that holds one process per file writes one for each, `name.PID.heap`, if there are several; to a device,
    /// FIFO or socket it writes one after the other.
    pub fn write(&self, profile: &Profile, options: &WriteOptions) -> Result<Vec<PathBuf>, OutputError> {
        if self.is_standard_output() {
            let mut out = BufWriter::new(io::stdout().lock());
            let path = Path::new("standard output");
            self.format.write(profile, options, &mut out).map_err(|source| failed(path, source))?;
            return out.flush().map(|()| Vec::new()).map_err(|source| failed(path, source.into()));
        }
        let several = self.format.one_process_per_file() && profile.processes.len() > 1;
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
            // A pid that was used twice.
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
        source => OutputError::Format { path: path.into(), source },
    }
}

/// Large pieces halve the kernel's time for a file of hundreds of megabytes.
const BUFFER_BYTES: usize = 4 << 20;

/// Writes what the user named with `path`: a file under a temporary name beside it, which gets its name when it is whole;
/// a device, FIFO or socket as it comes. `force` replaces a file that exists, and follows the user's own symbolic link.
///
/// # Errors
/// It must not be written there, or cannot be; or `write` failed.
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
    let folder = folder_of(path);
    let temporary = tempfile::Builder::new()
        .prefix(".heapbpf-")
        .permissions(fs::Permissions::from_mode(0o666))
        .tempfile_in(folder)
        .map_err(|error| io_error(without_temporary_name(error)))?;
    // The file alone: its errors do not tell of the temporary name.
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, temporary.as_file());
    write(&mut out)?;
    out.into_inner().map_err(|error| io_error(error.into_error()))?;
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
    // Of a write that failed, what is left in the buffer is not tried again.
    drop(out.into_parts());
    written
}

/// What is wrong, of an error that names a file nobody has asked for.
fn without_temporary_name(error: io::Error) -> io::Error {
    if error.raw_os_error().is_some() { error } else { error.kind().into() }
}

fn keep(temporary: NamedTempFile, destination: &Destination, force: bool) -> Result<File, OutputError> {
    let path = &*destination.path;
    let io_error = |source| OutputError::Io { path: path.into(), source };
    // Writing took its time, and renaming replaces whatever is there.
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

/// Finds out whether `path` could be written as by [`write_whole`], without leaving a trace and without opening what
/// is there.
///
/// # Errors
/// It could not.
pub fn check_new_file(path: &Path, force: bool) -> Result<(), OutputError> {
    let destination = place::find(path, force, Naming::ByUser)?;
    if destination.place.is_special() {
        return destination.check_access();
    }
    let path = &*destination.path;
    let folder = folder_of(path);
    if !folder.is_dir() {
        return Err(OutputError::NoFolder { path: path.into(), folder: folder.into() });
    }
    // Only trying tells: permissions, read-only and full file systems. The file is gone at once.
    tempfile::Builder::new().prefix(".heapbpf-").tempfile_in(folder).map_err(|error| {
        OutputError::FolderNotWritable { folder: folder.into(), source: without_temporary_name(error) }
    })?;
    Ok(())
}

/// The folder that a file is in.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// `name.pb.gz` with `suffix` before its extension: `name.0001.pb.gz`.
pub fn with_suffix(path: &Path, format: &dyn Format, suffix: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let extension = formats::extension_of(format, &name).unwrap_or("");
    let stem = &name[..name.len() - extension.len()];
    path.with_file_name(format!("{stem}.{suffix}{extension}"))
}

/// The number of a snapshot of `path` that has this file name: 1 for `name.0001.pb.gz`. Where each process has a file of
/// its own, only a name that has a process as well tells: the number alone could be one.
pub fn snapshot_number(path: &Path, format: &dyn Format, file_name: &str) -> Option<u32> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let extension = formats::extension_of(format, &name).unwrap_or("");
    let stem = &name[..name.len() - extension.len()];
    let rest = file_name.strip_prefix(stem)?.strip_prefix('.')?.strip_suffix(extension)?;
    let digits = if format.one_process_per_file() { rest.split_once('.')?.0 } else { rest };
    (digits.len() >= 4 && digits.bytes().all(|byte| byte.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// A default file name in `folder` that is free: `heapbpf-<comm>-<pid>.pb.gz` for one process (`heapbpf-all.pb.gz` for
/// none in particular), with a number added if that exists. What is not a letter, digit, `.`, `_` or `-` in the
/// process's name becomes `_`.
pub fn default_path(folder: &Path, process: Option<(&str, u32)>, format: &dyn Format) -> PathBuf {
    let stem = match process {
        Some((comm, pid)) => format!("heapbpf-{}-{pid}", safe_name(comm)),
        None => "heapbpf-all".into(),
    };
    let extension = format.extensions()[0];
    let first = folder.join(format!("{stem}{extension}"));
    let numbered = (2u32..).map(|number| folder.join(format!("{stem}-{number}{extension}")));
    std::iter::once(first.clone())
        .chain(numbered)
        .take(10_000)
        .find(|path| fs::symlink_metadata(path).is_err())
        .unwrap_or(first)
}

/// A process's name as part of a file name.
pub fn safe_name(comm: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let name: String = comm.chars().map(safe).take(32).collect();
    let name = name.trim_start_matches('.');
    if name.is_empty() { "process".into() } else { name.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::formats::by_name;
    use crate::profile::testing;

    fn output(path: &Path, force: bool) -> Output {
        Output::new(path, formats::by_extension(path).expect("known"), force)
    }

    fn entries(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .expect("readable")
            .map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_profile_appears_whole_and_is_not_replaced_unasked() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("x.folded");
        let options = WriteOptions::default();
        output(&path, false).check().expect("free");
        assert!(entries(folder.path()).is_empty(), "checking leaves no trace");
        let written = output(&path, false).write(&testing::small(), &options).expect("written");
        assert_eq!(written, [path.as_path()]);
        assert!(matches!(output(&path, false).check(), Err(OutputError::Exists(_))));
        assert!(matches!(output(&path, false).write(&testing::small(), &options), Err(OutputError::Exists(_))));
        output(&path, true).check().expect("forced");
        output(&path, true).write(&testing::small(), &options).expect("forced");
        assert_eq!(entries(folder.path()), ["x.folded"]);
    }

    #[test]
    fn a_write_that_fails_leaves_nothing() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("x.json");
        let result = write_whole(&path, false, |out| {
            out.write_all(b"half").expect("written");
            Err(OutputError::IsFolder("stop".into()))
        });
        assert!(result.is_err());
        assert!(entries(folder.path()).is_empty());
    }

    #[test]
    fn missing_folders_and_folders_are_refused_with_a_hint() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let missing = output(&folder.path().join("no/x.json"), false).check().expect_err("missing").to_string();
        assert!(missing.contains("does not exist") && missing.contains("create it"), "{missing}");
        let is_folder = folder.path().join("d.json");
        fs::create_dir(&is_folder).expect("created");
        assert!(matches!(output(&is_folder, true).check(), Err(OutputError::IsFolder(_))));
        assert!(matches!(output(Path::new("/proc/x.json"), false).check(), Err(OutputError::FolderNotWritable { .. })));
    }

    #[test]
    fn names_are_made_safe_and_numbered() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let pprof = by_name("pprof").expect("known");
        let path = default_path(folder.path(), Some(("../we ird/ü", 7)), pprof);
        assert_eq!(path, folder.path().join("heapbpf-_we_ird__-7.pb.gz"));
        fs::write(&path, "").expect("written");
        let next = default_path(folder.path(), Some(("../we ird/ü", 7)), pprof);
        assert_eq!(next, folder.path().join("heapbpf-_we_ird__-7-2.pb.gz"));
        assert_eq!(default_path(folder.path(), None, pprof), folder.path().join("heapbpf-all.pb.gz"));
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
