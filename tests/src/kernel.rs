//! The kernel's BPF objects, to check that heapbpf leaves none behind.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use procfs::sys::kernel::Version;

use crate::target::{PATIENCE, processes};

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_PROG_GET_FD_BY_ID: libc::c_int = 13;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_LINK_GET_NEXT_ID: libc::c_int = 31;
/// The kernel's `struct bpf_prog_info`, of which little is used.
const PROGRAM_INFO_WORDS: usize = 32;
type ProgramInfo = [u64; PROGRAM_INFO_WORDS];
/// Its word with the program's type in the lower half. At probes, the type is `PROBE`.
const TYPE_WORD: usize = 0;
const PROBE: u32 = 2;
/// Its words with the length of the machine code (lower half), with the address to write the code to, and with the
/// name.
const CODE_BYTES_WORD: usize = 2;
const CODE_WORD: usize = 3;
const PROGRAM_NAME_WORD: usize = 8;
const MAP_TYPE_ARRAY: u32 = 2;

/// The first words of the kernel's `union bpf_attr`, as many as are needed here.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    words: [u32; 32],
}

fn bpf(command: libc::c_int, attributes: &mut Attributes) -> libc::c_long {
    // SAFETY: the kernel reads and writes at most the size that is passed, which is that of `attr`, all of it
    // initialised.
    unsafe { libc::syscall(libc::SYS_bpf, command, attributes as *mut Attributes, size_of::<Attributes>()) }
}

/// Major and minor version of Linux.
pub fn linux() -> (u8, u8) {
    Version::current().map(|version| (version.major, version.minor)).unwrap_or_default()
}

/// Whether bpf(2) lets this process create a map.
pub fn maps_can_be_created() -> bool {
    let mut attributes = Attributes::default();
    attributes.words[..4].copy_from_slice(&[MAP_TYPE_ARRAY, 4, 8, 1]);
    let fd = bpf(BPF_MAP_CREATE, &mut attributes);
    if fd >= 0 {
        // SAFETY: bpf(2) just returned this descriptor, so nothing else owns it.
        unsafe { libc::close(fd as libc::c_int) };
    }
    fd >= 0
}

/// Ids of all BPF links on the host.
pub fn links() -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    let mut attributes = Attributes::default();
    while bpf(BPF_LINK_GET_NEXT_ID, &mut attributes) == 0 {
        let next = attributes.words[1];
        found.insert(next);
        attributes = Attributes::default();
        attributes.words[0] = next;
    }
    found
}

/// Ids of the BPF links that a process holds descriptors of.
pub fn links_of(pid: u32) -> BTreeSet<u32> {
    infos(pid)
        .filter_map(|text| text.lines().find_map(|line| line.strip_prefix("link_id:")?.trim().parse().ok()))
        .collect()
}

/// Whether the kernel reports which files the links of a process are attached to (since Linux 6.17).
pub fn reports_files_of_links(pid: u32) -> bool {
    infos(pid).any(|text| text.contains("link_type:\tuprobe_multi") && text.contains("\npath:"))
}

/// Number of links to a file that a process holds.
pub fn links_to(pid: u32, file: &Path) -> usize {
    let is_to = |text: &String| {
        text.lines().any(|line| line.strip_prefix("path:").is_some_and(|path| Path::new(path.trim()) == file))
    };
    infos(pid).filter(is_to).count()
}

/// Processes that hold links to a file, as far as the kernel reports them.
pub fn holders_of_links_to(file: &Path) -> Vec<u32> {
    processes().filter(|pid| links_to(*pid, file) > 0).collect()
}

fn infos(pid: u32) -> impl Iterator<Item = String> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten();
    entries.filter_map(|entry| std::fs::read_to_string(entry.path()).ok())
}

/// Names of the BPF programs that a process holds, as the kernel truncates them, and how many instructions the verifier
/// followed for each.
pub fn verified_instructions(pid: u32) -> Vec<(String, u32)> {
    let programs = infos(pid).filter_map(|text| Some((field(&text, "prog_id")?, field(&text, "verified_insns")?)));
    programs.filter_map(|(id, count)| Some((name(&program_info(id, &mut [])?)?, count))).collect()
}

/// BPF programs that a process holds and of which the kernel skipped runs: their names, as the kernel truncates them,
/// and the number of skipped runs. A preempted program does not run a second time on the same CPU (Linux 7.0).
pub fn runs_skipped(pid: u32) -> Vec<(String, u32)> {
    let programs = infos(pid).filter_map(|text| Some((field(&text, "prog_id")?, field(&text, "recursion_misses")?)));
    let skipped = programs.filter(|(_, count)| *count > 0);
    skipped.filter_map(|(id, count)| Some((name(&program_info(id, &mut [])?)?, count))).collect()
}

/// Names of the BPF programs at probes that a process holds, as the kernel truncates them, and the machine code of
/// each. The code is empty if the kernel does not show it.
pub fn machine_code_at_probes(pid: u32) -> Vec<(String, Vec<u8>)> {
    let ids = infos(pid).filter_map(|text| field(&text, "prog_id"));
    let code = ids.filter_map(|id| {
        let info = program_info(id, &mut []).filter(|info| info[TYPE_WORD] as u32 == PROBE)?;
        let mut code = vec![0; info[CODE_BYTES_WORD] as u32 as usize];
        let info = program_info(id, &mut code)?;
        if info[CODE_WORD] == 0 {
            code.clear();
        }
        Some((name(&info)?, code))
    });
    code.collect()
}

fn field(text: &str, name: &str) -> Option<u32> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.trim().parse().ok())
}

/// The name of a BPF program.
fn name(info: &ProgramInfo) -> Option<String> {
    let bytes: Vec<u8> = info[PROGRAM_NAME_WORD..][..2].iter().flat_map(|word| word.to_ne_bytes()).collect();
    String::from_utf8(bytes.into_iter().take_while(|byte| *byte != 0).collect()).ok()
}

/// The kernel's information about a BPF program. Writes as much of its machine code as fits into `code`.
fn program_info(id: u32, code: &mut [u8]) -> Option<ProgramInfo> {
    let mut attributes = Attributes::default();
    attributes.words[0] = id;
    let fd = libc::c_int::try_from(bpf(BPF_PROG_GET_FD_BY_ID, &mut attributes)).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: bpf(2) just returned this descriptor, so nothing else owns it.
    let program = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut info = [0_u64; PROGRAM_INFO_WORDS];
    if !code.is_empty() {
        info[CODE_BYTES_WORD] = code.len() as u64;
        info[CODE_WORD] = code.as_mut_ptr() as u64;
    }
    object_info(program.as_fd(), &mut info).ok().map(|()| info)
}

/// Makes the kernel write its information about a BPF object.
fn object_info(object: BorrowedFd<'_>, info: &mut [u64]) -> std::io::Result<()> {
    let address = info.as_mut_ptr() as u64;
    let mut attributes = Attributes::default();
    attributes.words[0] = object.as_raw_fd().cast_unsigned();
    attributes.words[1] = size_of_val(info) as u32;
    attributes.words[2] = address as u32;
    attributes.words[3] = (address >> 32) as u32;
    match bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attributes) {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// The name of a BPF map, as the kernel truncates it.
///
/// # Errors
/// It is not a map, or the kernel refuses.
pub fn map_name(map: BorrowedFd<'_>) -> std::io::Result<String> {
    // `struct bpf_map_info`: six words, then the name.
    let mut info = [0_u64; 16];
    object_info(map, &mut info)?;
    let bytes = info[3..5].iter().flat_map(|word| word.to_ne_bytes());
    Ok(bytes.take_while(|byte| *byte != 0).map(char::from).collect())
}

/// Links that no process holds: pinned or leaked ones.
pub fn orphaned_links() -> BTreeSet<u32> {
    // First, because a process that makes a link during the scan may already have been passed.
    let all = links();
    let held: BTreeSet<u32> = processes().flat_map(links_of).collect();
    all.difference(&held).copied().collect()
}

/// Waits until none of these links exists, because the kernel frees links late. Returns those that remain.
pub fn links_that_stay(ids: &BTreeSet<u32>) -> BTreeSet<u32> {
    that_stay(ids.clone(), links)
}

/// Waits until there are no links without a holder except those in `before`. Returns those that remain. A link that
/// another recording passes from one process to another has no holder for a moment.
pub fn new_orphaned_links(before: &BTreeSet<u32>) -> BTreeSet<u32> {
    that_stay(orphaned_links().difference(before).copied().collect(), orphaned_links)
}

fn that_stay(mut left: BTreeSet<u32>, there: fn() -> BTreeSet<u32>) -> BTreeSet<u32> {
    let start = Instant::now();
    while !left.is_empty() && start.elapsed() < *PATIENCE {
        left = left.intersection(&there()).copied().collect();
        if !left.is_empty() {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    left
}

/// A uprobe, registered as by perf and other tracers. Removed when dropped.
pub struct UprobeEvent(OwnedFd);

impl UprobeEvent {
    /// Registers the uprobe at a file offset, for one process. The reference counter is at another offset, or 0 if
    /// there is none.
    ///
    /// # Errors
    /// The kernel refuses, or does not support such events.
    pub fn open(path: &Path, offset: u64, pid: u32, counter_offset: u64) -> std::io::Result<Self> {
        let kind = std::fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")?;
        let kind: u64 = kind.trim().parse().map_err(std::io::Error::other)?;
        let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
        // `struct perf_event_attr`, version 2, 72 bytes: type and size, config (with the counter's offset in its upper
        // half), …, uprobe_path, probe_offset.
        let mut attributes = [0_u64; 9];
        attributes[0] = kind | (size_of_val(&attributes) as u64) << 32;
        attributes[1] = counter_offset << 32;
        attributes[7] = path.as_ptr() as u64;
        attributes[8] = offset;
        let (any_cpu, no_group, close_on_exec) = (-1, -1, 8);
        // SAFETY: the attributes have the size that they state, and the path they point to outlives the call.
        let fd = unsafe {
            libc::syscall(libc::SYS_perf_event_open, attributes.as_ptr(), pid, any_cpu, no_group, close_on_exec)
        };
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: `perf_event_open` just returned this descriptor, so nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) }))
    }

    /// How often the uprobe was hit in its thread.
    ///
    /// # Panics
    /// If the kernel does not report it.
    pub fn hits(&self) -> u64 {
        let mut count = [0; 8];
        let mut event = std::fs::File::from(self.0.try_clone().expect("a descriptor"));
        event.read_exact(&mut count).expect("it counts");
        u64::from_ne_bytes(count)
    }
}

impl AsFd for UprobeEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
