//! Remembers programs that died of inline hooks, with their allocators. They are probed from then on.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use heapbpf_host::open::UnservedFiles;
use heapbpf_inline::fault::{Layout, Place, SIGBUS, SIGILL, SIGSEGV, SIGTRAP};
use sampler_ebpf::abi::CrashRecord;

use super::may_be_hooked::Refused;
use crate::files::FileKey;

/// Maximum number of programs to remember. The oldest are dropped.
const MOST: usize = 64;
/// Maximum number of bytes to read of the file, and maximum length of one program's text.
const MOST_BYTES: u64 = 64 << 10;
const MOST_TEXT: usize = 512;
/// The directory of the file, unless systemd says where a service keeps its state.
const DIR: &str = "/var/lib/heapbpf";
const DIR_VARIABLE: &str = "STATE_DIRECTORY";
const NAME: &str = "never-inline";

/// Identifies a program and its allocator by the build IDs of their files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Builds {
    exe: String,
    allocator: String,
}

impl Builds {
    /// The build IDs of a process's executable and of its allocator's `file`. `None` if either has none, or if the
    /// process has ended.
    ///
    /// # Errors
    /// The executable cannot be read, for example because a process serves its file system. Nobody knows then whether
    /// it died of inline hooks.
    pub fn of(pid: u32, file: &File) -> Result<Option<Self>, Refused> {
        let exe = match UnservedFiles::of(pid).open(format!("/proc/{pid}/exe").as_ref()) {
            Ok(exe) => exe,
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => return Ok(None),
            Err(source) => return Err(Refused::Read { what: "the program's file", source }),
        };
        let [exe, allocator] = [&exe, file].map(|file| {
            let id = heapbpf_elf::build_id::of(file)?;
            Some(id.iter().map(|byte| format!("{byte:02x}")).collect())
        });
        Ok(exe.zip(allocator).map(|(exe, allocator)| Self { exe, allocator }))
    }
}

/// A program that died of inline hooks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crash {
    /// Identifies the program and its allocator.
    pub builds: Builds,
    /// What happened, in one line.
    pub what: String,
}

impl Crash {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(3, ' ');
        let mut id = || fields.next().filter(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let builds = Builds { exe: id()?.to_owned(), allocator: id()?.to_owned() };
        Some(Self { builds, what: one_line(fields.next()?) })
    }
}

/// Removes control characters, and limits the length.
fn one_line(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MOST_TEXT).collect()
}

/// Path of the file with the programs.
#[must_use]
pub fn path() -> PathBuf {
    let dirs = std::env::var(DIR_VARIABLE).unwrap_or_default();
    // There may be several directories, separated by colons.
    let first = dirs.split(':').next().filter(|dir| dir.starts_with('/'));
    Path::new(first.unwrap_or(DIR)).join(NAME)
}

/// Reads the remembered programs. Malformed lines are skipped.
#[must_use]
pub fn read(path: &Path) -> Vec<Crash> {
    let mut text = Vec::new();
    if File::open(path).and_then(|file| file.take(MOST_BYTES).read_to_end(&mut text)).is_err() {
        return Vec::new();
    }
    let mut crashes: Vec<Crash> = String::from_utf8_lossy(&text).lines().filter_map(Crash::parse).collect();
    crashes.drain(..crashes.len().saturating_sub(MOST));
    crashes
}

/// Remembers a program.
///
/// # Errors
/// The file cannot be written, for example on a read-only root.
pub fn remember(path: &Path, crash: &Crash) -> io::Result<()> {
    let mut crashes = read(path);
    crashes.retain(|known| known.builds != crash.builds);
    crashes.drain(..(crashes.len() + 1).saturating_sub(MOST));
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let fresh = path.with_extension(format!("{}.new", std::process::id()));
    let mut file = File::create(&fresh)?;
    for Crash { builds, what } in crashes.iter().chain([crash]) {
        writeln!(file, "{} {} {}", builds.exe, builds.allocator, one_line(what))?;
    }
    std::fs::rename(&fresh, path)
}

/// Forgets all programs. Returns how many there were.
///
/// # Errors
/// The file cannot be removed.
pub fn forget(path: &Path) -> io::Result<usize> {
    let known = read(path).len();
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(known),
    }
}

/// Checks whether a program may be hooked inline with its allocator. The file is read once.
///
/// # Errors
/// The program died of inline hooks before.
pub fn check(builds: Option<&Builds>) -> Result<(), Refused> {
    static CRASHES: OnceLock<Vec<Crash>> = OnceLock::new();
    let crashes = CRASHES.get_or_init(|| read(&path()));
    let known = crashes.iter().find(|crash| Some(&crash.builds) == builds);
    known.map_or(Ok(()), |crash| Err(Refused::Crashed(crash.what.clone())))
}

/// Our code in a process. Kept as long as the code is there and for a while afterwards, because a process that dies can
/// no longer be examined.
#[derive(Debug)]
pub(super) struct Ours {
    /// Where the code is.
    pub(super) layout: Layout,
    /// Address of the allocator's code minus its offset in the file.
    pub(super) from_file: u64,
    /// Identifies the program and its allocator.
    pub(super) builds: Option<Builds>,
}

/// A process that died of its inline hooks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blamed {
    /// The allocator's file.
    pub key: FileKey,
    /// Where it died.
    pub place: Place,
    /// Identifies the program and its allocator. `None` if one of them has no build ID.
    pub builds: Option<Builds>,
}

impl Ours {
    /// Whether our code made a process die. `file` is the allocator's file.
    pub(super) fn blamed(&self, key: FileKey, crash: &CrashRecord, file: Option<&File>) -> Option<Blamed> {
        let offset = |address: u64| address.wrapping_sub(self.from_file);
        // At the end of the file there may be fewer bytes than the longest instruction has.
        let read = |address, bytes: &mut [u8]| file.is_some_and(|file| file.read_at(bytes, offset(address)).is_ok());
        let place = match self.layout.blamed(crash.signal, crash.ip, &read)? {
            Place::Page(address) => Place::Page(offset(address)),
            place @ Place::Code(_) => place,
        };
        Some(Blamed { key, place, builds: self.builds.clone() })
    }
}

/// The name of a signal.
#[must_use]
pub fn signal_name(signal: u32) -> &'static str {
    match signal {
        SIGILL => "SIGILL",
        SIGTRAP => "SIGTRAP",
        SIGBUS => "SIGBUS",
        SIGSEGV => "SIGSEGV",
        _ => "a signal",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crash(exe: &str) -> Crash {
        Crash { builds: Builds { exe: exe.into(), allocator: "cd".into() }, what: format!("{exe} ended by SIGILL") }
    }

    #[test]
    fn programs_are_remembered_once_and_the_oldest_go() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("state").join(NAME);
        assert_eq!((read(&path), forget(&path).ok()), (Vec::new(), Some(0)));
        for number in 0..MOST + 3 {
            remember(&path, &crash(&format!("{number:02x}"))).expect("it can be written");
        }
        let again = Crash { what: "again\nand\x1b again".into(), ..crash("10") };
        remember(&path, &again).expect("it can be written");
        let known = read(&path);
        assert_eq!((known.len(), &known[0], &known[MOST - 1].builds), (MOST, &crash("03"), &again.builds));
        assert_eq!(known[MOST - 1].what, "againand again");
        assert_eq!(std::fs::read_dir(path.parent().expect("a directory")).expect("it is there").count(), 1);
        assert_eq!((forget(&path).ok(), read(&path)), (Some(MOST), Vec::new()));
    }

    #[test]
    fn what_is_no_line_of_ours_is_left_out() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(NAME);
        let lines = b"\n \nab\nab cd\nxy cd what\nab  what\n\xff\xfe\nab cd ab ended by SIGILL\nab cd";
        std::fs::write(&path, lines).expect("our own");
        assert_eq!(read(&path), [crash("ab")]);
        std::fs::write(&path, vec![b'a'; 1 << 20]).expect("our own");
        assert_eq!(read(&path), []);
        remember(&path, &crash("ab")).expect("it can be written");
        assert_eq!(read(&path), [crash("ab")], "nothing else stays");
    }

    #[test]
    fn where_nothing_can_be_written_nothing_is_remembered() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("file"), "").expect("our own");
        let path = dir.path().join("file").join(NAME);
        assert!(remember(&path, &crash("ab")).is_err());
        assert!(remember(Path::new("/proc/nothing/never-inline"), &crash("ab")).is_err());
        assert_eq!(read(&path), []);
    }

    #[test]
    fn this_program_is_known_by_its_build_id() {
        let own = File::open("/proc/self/exe").expect("it runs");
        let of = |pid, file| Builds::of(pid, file).expect("nobody serves it");
        let builds = of(std::process::id(), &own);
        assert!(builds.as_ref().is_none_or(|builds| builds.exe == builds.allocator && builds.exe.len() > 8));
        let none = tempfile::tempfile().expect("a file");
        assert_eq!([std::process::id(), u32::MAX].map(|pid| of(pid, &none)), [None, None]);
        assert!(check(builds.as_ref()).is_ok() && check(None).is_ok());
    }
}
