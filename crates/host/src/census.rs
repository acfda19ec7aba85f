//! Takes a census of a process's heap by type and size (`crates/glibc`), without stopping it.
//!
//! Its memory is read as described in [`arenas`]. Names that are not in its memory are read from the files that it has
//! mapped.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use heapbpf_glibc::{Census, Files, Memory, NotRead, Space};

use super::arenas::{self, GRACE, MOST_TEXT_BYTES, Target};
use super::open::open_mapped;
use super::pages::Pages;
use super::proc_maps;
use super::process::{ProcessInfo, Stat};
use super::processes::starts_agree;
use super::reader_thread::ReaderThread;
use super::record::MapEvent;
use super::resident;

/// Maximum number of bytes of a file to search for glibc's version, and how many to read at once.
const MOST_FILE_BYTES: u64 = 64 << 20;
const STEP: usize = 1 << 20;
/// The text before the version, and the space for its digits.
const BANNER: &[u8] = b" release version 2.";
const VERSION_BYTES: usize = 4;
/// Offset of the byte that says that an ELF file has 64-bit addresses, and its value.
const ELF_CLASS: u64 = 4;
const ELF_64: u8 = 2;

/// A census.
#[derive(Clone, Debug)]
pub struct Taken {
    /// What was counted.
    pub census: Census,
    /// Its glibc is 2.`version`.
    pub version: u32,
    /// Private anonymous memory that was resident, in bytes.
    pub anonymous_bytes: u64,
    /// How long the census took.
    pub took: Duration,
    /// Whether time ran out before everything was read.
    pub is_late: bool,
}

/// Why no census was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    /// The process has exited.
    #[error("it has ended")]
    Ended,
    /// Its memory may not be read.
    #[error("no permission to read its memory; run as its user, as root, or with CAP_SYS_PTRACE")]
    Denied,
    /// It has no glibc, or a static one whose file does not contain its version.
    #[error("it has no glibc of a known version (other allocators and static programs are not supported)")]
    NoGlibc,
    /// It is a 32-bit program.
    #[error("it is a 32-bit program")]
    Not64,
    /// The structures of this glibc version are not known.
    #[error("glibc 2.{0} is not supported ({known} are)", known = KnownVersions)]
    Version(u32),
    /// glibc's allocator was not found in its variables.
    #[error("no heap of glibc 2.{0} was found: nothing has called its malloc, or another allocator has replaced it")]
    NoArena(u32),
    /// The heap's data contradict each other.
    #[error("its arenas are inconsistent")]
    Inconsistent,
    /// Time ran out.
    #[error("reading its heap took too long")]
    Late,
}

/// Displays the known versions.
struct KnownVersions;

impl std::fmt::Display for KnownVersions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "2.{} to 2.{}", heapbpf_glibc::KNOWN.start(), heapbpf_glibc::KNOWN.end())
    }
}

/// Takes a census of a process. What has not been read after `longest` is reported as such.
///
/// # Errors
/// [`NotTaken`].
pub fn take(process: &ProcessInfo, longest: Duration) -> Result<Taken, NotTaken> {
    let (pid, start_ns) = (process.pid, process.start_ns);
    // A page that disappears while it is read can block the thread, which is then abandoned.
    let taken = ReaderThread::default().ask("census", longest + GRACE, move || read(pid, start_ns, longest));
    taken.unwrap_or(Err(NotTaken::Late))
}

fn read(pid: u32, start_ns: u64, longest: Duration) -> Result<Taken, NotTaken> {
    let begun = Instant::now();
    let open = |name: &str| File::open(format!("/proc/{pid}/{name}")).map_err(|error| not_opened(&error));
    let (content, mut text) = (open("mem")?, Vec::new());
    let is_read = open("maps")?.take(MOST_TEXT_BYTES).read_to_end(&mut text);
    is_read.map_err(|error| not_opened(&error))?;
    let threads = living(pid, start_ns).ok_or(NotTaken::Ended)?.threads;
    let maps: Vec<MapEvent> = proc_maps::parse_all(&text).map(|map| MapEvent { pid, tid: pid, ..map }).collect();
    let version = version(&maps)?;
    let space = Space { threads: threads.into(), ..arenas::space(&String::from_utf8_lossy(&text)) };
    let target = Target { content, pages: Pages::of(pid).ok_or(NotTaken::Denied)?, deadline: begun + longest };
    let maps: Vec<MapEvent> = maps.into_iter().filter(is_data).collect();
    let is_python = |map: &MapEvent| arenas::is_python(&String::from_utf8_lossy(file_name(map)));
    let files = Files { data: maps.iter().map(range).collect(), has_python: maps.iter().any(is_python) };
    let mut memory = Mapped { target, is_late: false, files: maps.into_iter().map(|map| (map, None)).collect() };
    let census = heapbpf_glibc::census(&mut memory, &space, version, &files);
    // If the process has exited by now, some of its memory was gone before it was read.
    let anonymous_bytes = living(pid, start_ns).and_then(|_| resident::anonymous_bytes(pid)).ok_or(NotTaken::Ended)?;
    let is_late = memory.is_late;
    let census = census.map_err(|why| match why {
        NotRead::Version => NotTaken::Version(version),
        _ if is_late => NotTaken::Late,
        NotRead::NoArena => NotTaken::NoArena(version),
        NotRead::Inconsistent => NotTaken::Inconsistent,
    })?;
    Ok(Taken { census, version, anonymous_bytes, took: begun.elapsed(), is_late })
}

/// The process, if it is still the same one and has memory.
fn living(pid: u32, start_ns: u64) -> Option<Stat> {
    Stat::read(pid).ok().filter(|stat| !stat.without_memory && starts_agree(stat.start_ns, start_ns))
}

fn not_opened(error: &io::Error) -> NotTaken {
    match error.kind() {
        io::ErrorKind::PermissionDenied => NotTaken::Denied,
        _ => NotTaken::Ended,
    }
}

fn range(map: &MapEvent) -> std::ops::Range<u64> {
    map.address..map.address.saturating_add(map.length)
}

fn file_name(map: &MapEvent) -> &[u8] {
    map.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

fn has(map: &MapEvent, prot: i32) -> bool {
    map.prot & prot as u32 != 0
}

/// Whether a mapping may contain tables of classes and names.
fn is_data(map: &MapEvent) -> bool {
    let is_private = map.flags & libc::MAP_PRIVATE as u32 != 0;
    map.inode != 0 && is_private && has(map, libc::PROT_READ) && !has(map, libc::PROT_EXEC)
}

/// Version of a process's glibc, from the banner in the library, or in the program if no library is mapped.
fn version(maps: &[MapEvent]) -> Result<u32, NotTaken> {
    let code = || maps.iter().filter(|map| map.inode != 0 && has(map, libc::PROT_EXEC));
    let library =
        code().find(|map| arenas::is_libc(&String::from_utf8_lossy(file_name(map)).replace(" (deleted)", "")));
    let map = library.or_else(|| code().next()).ok_or(NotTaken::NoGlibc)?;
    let file = open_mapped(map, &map.path).map_err(|_| NotTaken::NoGlibc)?.file;
    let mut class = [0];
    file.read_exact_at(&mut class, ELF_CLASS).map_err(|_| NotTaken::NoGlibc)?;
    if class != [ELF_64] {
        return Err(NotTaken::Not64);
    }
    version_of(&file).ok_or(NotTaken::NoGlibc)
}

fn version_of(file: &File) -> Option<u32> {
    let (mut buffer, mut at) = (vec![0; STEP], 0);
    while at < MOST_FILE_BYTES {
        let length = file.read_at(&mut buffer, at).ok().filter(|length| *length > BANNER.len() + VERSION_BYTES)?;
        let bytes = &buffer[..length];
        let whole = length - BANNER.len() - VERSION_BYTES;
        let mut places = (0..=whole).filter(|at| bytes[*at..].starts_with(BANNER)).map(|at| at + BANNER.len());
        let version = places.find_map(|at| {
            let digits = bytes[at..].iter().take(VERSION_BYTES).take_while(|byte| byte.is_ascii_digit());
            Some(digits.fold(0, |sum, digit| 10 * sum + u32::from(digit - b'0'))).filter(|version| *version > 0)
        });
        if version.is_some() {
            return version;
        }
        // What is cut off at the end of this piece is complete in the next one.
        at += whole as u64;
    }
    None
}

/// The memory of a process, and the files that it has mapped.
struct Mapped {
    target: Target,
    is_late: bool,
    /// Mappings in order, with their files once they have been needed. The inner `None` means that the file cannot be
    /// read.
    files: Vec<(MapEvent, Option<Option<File>>)>,
}

impl Mapped {
    /// Whether there is time left.
    fn has_time(&mut self) -> bool {
        self.is_late |= Instant::now() >= self.target.deadline;
        !self.is_late
    }
}

impl Memory for Mapped {
    fn page_bytes(&self) -> u64 {
        self.target.page_bytes()
    }

    fn present(&mut self, first: u64, pages: &mut [bool]) {
        match self.has_time() {
            true => self.target.present(first, pages),
            false => pages.fill(false),
        }
    }

    fn read(&mut self, address: u64, buffer: &mut [u8]) -> bool {
        self.has_time() && self.target.read(address, buffer)
    }

    fn read_mapped_file(&mut self, address: u64, buffer: &mut [u8]) -> bool {
        let after = self.files.partition_point(|(map, _)| map.address <= address);
        let has_time = self.has_time();
        let Some((map, file)) = self.files[..after].last_mut().filter(|_| has_time) else { return false };
        let offset = address - map.address;
        let is_whole = offset.checked_add(buffer.len() as u64).is_some_and(|end| end <= map.length);
        let file = file.get_or_insert_with(|| open_mapped(map, &map.path).ok().map(|opened| opened.file));
        let Some((file, at)) = file.as_ref().zip(map.file_offset.checked_add(offset)) else { return false };
        is_whole && file.read_exact_at(buffer, at).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn the_version_is_found_wherever_it_is() {
        for (before, text, version) in [
            (0, "stable release version 2.36.\n", Some(36)),
            (STEP - 12, "stable release version 2.5 of", Some(5)),
            (STEP - 26, "stable release version 2.36.\n", Some(36)),
            (2 * STEP - 40, " release version 2.x, release version 2.41", Some(41)),
            (100, " release version 2.", None),
            (100, "", None),
        ] {
            let mut file = tempfile::tempfile().expect("a file");
            file.write_all(&[vec![0; before], text.as_bytes().to_vec(), vec![0; 100]].concat())
                .expect("there is space");
            assert_eq!(version_of(&file), version, "{before} {text:?}");
        }
    }

    #[test]
    fn what_is_mapped_is_read_from_its_file_and_not_beyond() {
        let pid = std::process::id();
        let text = std::fs::read("/proc/self/maps").expect("our own");
        let maps = proc_maps::parse_all(&text).map(|map| MapEvent { pid, tid: pid, ..map });
        let data: Vec<MapEvent> = maps.filter(is_data).filter(|map| !has(map, libc::PROT_WRITE)).collect();
        let file =
            data.iter().find(|map| map.path.ends_with(b"libc.so.6")).map(range).expect("the C library's constants");
        let content = File::open("/proc/self/mem").expect("our own");
        let (pages, deadline) = (Pages::of(pid).expect("our own"), Instant::now() + Duration::from_secs(60));
        let target = Target { content, pages, deadline };
        let mut memory = Mapped { target, is_late: false, files: data.into_iter().map(|map| (map, None)).collect() };
        let (mut of_file, mut of_memory) = ([0; 256], [1; 256]);
        let at = file.start + 0x1000;
        assert!(memory.read_mapped_file(at, &mut of_file) && memory.read(at, &mut of_memory));
        assert_eq!(of_file, of_memory);
        for at in [0, file.end - 255, u64::MAX] {
            assert!(!memory.read_mapped_file(at, &mut of_file), "{at:#x}");
        }
        memory.target.deadline = Instant::now();
        assert!(!memory.read_mapped_file(at, &mut of_file) && !memory.read(at, &mut of_memory) && memory.is_late);
    }

    #[test]
    fn a_process_that_has_ended_is_said_so() {
        let gone = ProcessInfo { pid: i32::MAX as u32, ..ProcessInfo::default() };
        assert_eq!(take(&gone, Duration::from_secs(1)).map(|_| ()), Err(NotTaken::Ended));
        let other = ProcessInfo { start_ns: 1 << 50, ..ProcessInfo::read(std::process::id()).expect("our own") };
        assert_eq!(take(&other, Duration::from_secs(1)).map(|_| ()), Err(NotTaken::Ended));
        // A zombie until we take its exit status.
        let mut child = std::process::Command::new("true").spawn().expect("it starts");
        let zombie = loop {
            let process = ProcessInfo::read(child.id()).expect("nobody has waited for it");
            if process.without_memory {
                break process;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        assert_eq!(take(&zombie, Duration::from_secs(1)).map(|_| ()), Err(NotTaken::Ended));
        child.wait().expect("our own child");
    }
}
