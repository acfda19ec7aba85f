//! Breaks down the resident memory of a process. `/proc/PID/status` has the kernel's own sums, which are quick to read;
//! `/proc/PID/smaps` shows what each mapping is for.
//!
//! The kernel merges neighbouring mappings that are alike. So one mapping may be a thread's stack and whatever was
//! mapped above it, or a glibc arena and whatever was mapped below it. These are divided at the end of the stack or
//! arena, by the pages that are present (`/proc/PID/pagemap`), and so are ranges that are known to belong to a heap.
//! Other mappings are classified as a whole by their name, their permissions and the sampled blocks in them, and files
//! by their file system: those on a tmpfs are shared memory, as in the kernel's sums.
//!
//! Targets control names and layout of their mappings, so the text is read line by line, with bounds.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::ops::Range;

use heapbpf_profile::model::Resident;

use super::pages::Pages;
use super::process::Stat;
use super::processes::starts_agree;

/// Maximum number of bytes to read of one process's list: about 100,000 mappings.
const MOST_TEXT_BYTES: u64 = 128 << 20;
/// Maximum number of bytes to read of the list of a process's mounts: about 10,000 of them.
const MOST_MOUNTS_BYTES: u64 = 2 << 20;
/// Maximum length of a line that is read as a whole: a path of maximum length and what precedes it.
const LONGEST_LINE: u64 = 8 << 10;
/// Maximum number of threads whose stack pointers are read.
const MOST_THREADS: usize = 4096;
/// Size and alignment of glibc's arenas on 64-bit machines (`HEAP_MAX_SIZE` in malloc/arena.c).
const ARENA_BYTES: u64 = 64 << 20;

/// Size of a thread's stack with its guard pages, unless the program asks for another size: the usual limit (`ulimit
/// -s`).
const STACK_BYTES: u64 = 8 << 20;
/// How names begin that runtimes give their own memory with prctl(PR_SET_VMA_ANON_NAME): Blink, Dart, Go, OCaml,
/// PartitionAlloc, PHP, Ruby, SpiderMonkey, V8.
const OF_RUNTIMES: [&str; 9] =
    ["blink_gc", "dart-", "Go: ", "OCaml: ", "partition_alloc", "zend_alloc", "Ruby:", "js-gc-heap", "v8"];
/// How names begin of memory files through which code is written that runs in another mapping: .NET, QEMU, Erlang.
const OF_JITS: [&str; 3] = ["/memfd:doublemapper", "/memfd:tcg-jit", "/memfd:vmem ("];

/// Maximum number of times that mappings are divided.
const MOST_DIVIDED: usize = 1024;

/// Resident private anonymous memory of a process, in bytes. `None` if it cannot be read.
pub fn anonymous_bytes(pid: u32) -> Option<u64> {
    rough(pid).map(|resident| resident.undivided_bytes)
}

/// The kernel's own sums of the memory of a process. `None` if it has no memory, like a kernel thread, or if they
/// cannot be read.
pub fn rough(pid: u32) -> Option<Resident> {
    sums_in(&std::fs::read(format!("/proc/{pid}/status")).ok()?)
}

/// The sums that are quickest to read: `size resident shared …`, in pages (proc_pid_statm(5)). While this text stays the
/// same, so does what [`rough`] returns. `None` if it cannot be read.
pub fn sizes(pid: u32) -> Option<String> {
    // Seven numbers, in one read: a host has thousands of processes.
    let mut text = [0; 256];
    let length = File::open(format!("/proc/{pid}/statm")).ok()?.read(&mut text).ok()?;
    Some(String::from_utf8_lossy(text.get(..length)?).into_owned())
}

fn sums_in(status: &[u8]) -> Option<Resident> {
    let mut sums = Resident::default();
    let mut has_memory = false;
    // The kernel escapes newlines in the name, so every line was written by the kernel.
    for line in String::from_utf8_lossy(status).lines() {
        let Some((name, text)) = line.split_once(':') else { continue };
        let part = match name {
            "RssAnon" => {
                has_memory = true;
                &mut sums.undivided_bytes
            }
            "RssFile" => &mut sums.files_bytes,
            "RssShmem" => &mut sums.shared_bytes,
            "VmSwap" => &mut sums.swapped_bytes,
            "HugetlbPages" => &mut sums.hugetlb_bytes,
            _ => continue,
        };
        *part = kib(text)?;
    }
    has_memory.then_some(sums)
}

/// Resident memory of the process that started at `start_ns` (CLOCK_BOOTTIME). `blocks` are addresses of blocks that
/// allocators returned. `heaps` are ranges that are known to belong to heaps, such as large blocks of glibc, in order.
/// `None` if the process has exited, or if its mappings cannot be read.
pub fn of(pid: u32, start_ns: u64, mut blocks: Vec<u64>, heaps: &[Range<u64>]) -> Option<Resident> {
    // A block in such a range says nothing about other memory that the kernel has merged with it.
    blocks.retain(|address| overlapping(heaps, &(*address..address.saturating_add(1))).is_empty());
    blocks.sort_unstable();
    let mut places = stack_pointers(pid);
    places.sort_unstable();
    let text = BufReader::with_capacity(64 << 10, File::open(format!("/proc/{pid}/smaps")).ok()?.take(MOST_TEXT_BYTES));
    let mut tmpfs: Option<HashSet<String>> = None;
    let mut is_tmpfs = |device: &str| tmpfs.get_or_insert_with(|| tmpfs_of(pid)).contains(device);
    let (mappings, pages) = (parse(text, &mut is_tmpfs).ok()?, Pages::of(pid));
    // The PID may have been reused while the files were read.
    Stat::read(pid).ok().filter(|stat| starts_agree(stat.start_ns, start_ns))?;
    let resident = sum(&mappings, &KnownMemory { blocks: &blocks, heaps, stacks: &places }, pages.as_ref());
    Some(resident).filter(|resident| resident.total_bytes() > 0)
}

/// Devices of the tmpfs file systems that a process has mounted, as its mappings name them (`00:1a`).
fn tmpfs_of(pid: u32) -> HashSet<String> {
    let mut text = Vec::new();
    let file = File::open(format!("/proc/{pid}/mountinfo"));
    // After an error, what was read before it counts.
    let _ = file.and_then(|file| file.take(MOST_MOUNTS_BYTES).read_to_end(&mut text));
    tmpfs_in(&String::from_utf8_lossy(&text))
}

/// Parses lines like `36 35 0:26 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw` (proc_pid_mountinfo(5)). Blanks in
/// paths are escaped.
fn tmpfs_in(mounts: &str) -> HashSet<String> {
    let device = |line: &str| {
        let (before, after) = line.split_once(" - ")?;
        let (major, minor) = before.split(' ').nth(2).filter(|_| after.starts_with("tmpfs "))?.split_once(':')?;
        Some(format!("{:02x}:{:02x}", major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    };
    mounts.lines().filter_map(device).collect()
}

/// Stack pointers of threads that are waiting in the kernel.
fn stack_pointers(pid: u32) -> Vec<u64> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let pointer = |thread: std::fs::DirEntry| {
        // `running`, or the call, its arguments, and at the end the stack pointer and the program counter (proc(5)).
        let text = std::fs::read_to_string(thread.path().join("syscall")).ok()?;
        let pointer = text.split_ascii_whitespace().rev().nth(1)?;
        u64::from_str_radix(pointer.strip_prefix("0x")?, 16).ok()
    };
    threads.flatten().take(MOST_THREADS).filter_map(pointer).collect()
}

/// What a mapping is for, as far as its own line shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The main heap, or a mapping that an allocator has named.
    Heap,
    File,
    Stack,
    Shared,
    JitCode,
    /// Named by a runtime as its own.
    Runtime,
    /// Heapbpf's inline hooks.
    Own,
    /// Readable and writable, without a name of its own.
    Anonymous,
    /// Reserved: not accessible.
    Reserved,
    Other,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    start: u64,
    end: u64,
    kind: Kind,
    resident_bytes: u64,
    pss_bytes: u64,
    swapped_bytes: u64,
    hugetlb_bytes: u64,
}

/// Reads the mappings and how much of each is resident. Malformed lines are skipped. `is_tmpfs`: whether a device is a
/// tmpfs.
fn parse(mut text: impl BufRead, is_tmpfs: &mut dyn FnMut(&str) -> bool) -> io::Result<Vec<Mapping>> {
    let mut mappings: Vec<Mapping> = Vec::new();
    let mut own: Option<Range<u64>> = None;
    let mut line = Vec::new();
    loop {
        line.clear();
        if text.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)? == 0 {
            return Ok(mappings);
        }
        let line = String::from_utf8_lossy(&line);
        if line.starts_with(|first: char| first.is_ascii_uppercase()) {
            mappings.iter_mut().next_back().and_then(|mapping| mapping.note(&line));
        } else if let Some((mut mapping, name)) = mapping_of(&line, is_tmpfs) {
            own = heapbpf_remote::blob_range(&name).or(own);
            // The data of inline hooks has no name.
            if own.as_ref().is_some_and(|own| own.start <= mapping.start && mapping.end <= own.end) {
                mapping.kind = Kind::Own;
            }
            mappings.push(mapping);
        }
    }
}

impl Mapping {
    /// Adds the value of a line that follows the mapping's own line.
    fn note(&mut self, line: &str) -> Option<()> {
        let (name, text) = line.split_once(':')?;
        let part = match name {
            "Rss" => &mut self.resident_bytes,
            "Pss" => &mut self.pss_bytes,
            "Swap" => &mut self.swapped_bytes,
            "Private_Hugetlb" | "Shared_Hugetlb" => &mut self.hugetlb_bytes,
            _ => return None,
        };
        *part = part.saturating_add(kib(text)?);
        Some(())
    }

    const fn range(&self) -> Range<u64> {
        self.start..self.end
    }
}

/// The memory that a line of `/proc/PID/status` or `/proc/meminfo` states, in bytes.
pub fn bytes_of(text: &str, name: &str) -> Option<u64> {
    kib(text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?)
}

/// Converts `  12 kB` to bytes.
fn kib(text: &str) -> Option<u64> {
    let kib: u64 = text.split_ascii_whitespace().next()?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// Parses a mapping's own line, and returns its name as well.
fn mapping_of(line: &str, is_tmpfs: &mut dyn FnMut(&str) -> bool) -> Option<(Mapping, String)> {
    let found = heapbpf_remote::Mapping::parse(line.trim_end())?;
    let (Range { start, end }, kind) = (found.range.clone(), kind(&found, is_tmpfs));
    let mapping = Mapping { start, end, kind, resident_bytes: 0, pss_bytes: 0, swapped_bytes: 0, hugetlb_bytes: 0 };
    Some((mapping, found.name))
}

fn kind(mapping: &heapbpf_remote::Mapping, is_tmpfs: &mut dyn FnMut(&str) -> bool) -> Kind {
    let name = mapping.name.as_str();
    // Their file system is the kernel's own, and mounted nowhere.
    let is_memory_file = ["/memfd:", "/SYSV", "/dev/zero"].iter().any(|start| name.starts_with(start));
    let is_file = mapping.inode != 0 && !is_memory_file;
    // File systems that are on no device of their own have such numbers. A sandboxed process may not see its mounts.
    let may_be_tmpfs = is_file && mapping.device.starts_with("00:");
    let is_on_tmpfs = may_be_tmpfs && (name.starts_with("/dev/shm/") || is_tmpfs(&mapping.device));
    match name {
        _ if is_on_tmpfs => Kind::Shared,
        _ if is_file => Kind::File,
        _ if name.starts_with("/memfd:heapbpf-") => Kind::Own,
        "[heap]" => Kind::Heap,
        _ if name.starts_with("[stack") => Kind::Stack,
        // The kernel's own pages, such as [vdso].
        _ if name.starts_with('[') && !name.starts_with("[anon") => Kind::Other,
        _ if mapping.is_executable || OF_JITS.iter().any(|start| name.starts_with(start)) => Kind::JitCode,
        _ if mapping.is_shared || is_memory_file => Kind::Shared,
        // Names that allocators set with prctl(PR_SET_VMA_ANON_NAME).
        _ if ["malloc", "scudo", "tcmalloc"].iter().any(|word| name.contains(word)) => Kind::Heap,
        _ if (mapping.is_readable || mapping.is_writable) && is_of_runtime(name) => Kind::Runtime,
        _ if mapping.is_readable && mapping.is_writable => Kind::Anonymous,
        _ if mapping.is_readable || mapping.is_writable => Kind::Other,
        _ => Kind::Reserved,
    }
}

/// Whether a runtime has named a mapping as its own.
fn is_of_runtime(name: &str) -> bool {
    let name = name.strip_prefix("[anon:").map_or("", str::trim_start);
    OF_RUNTIMES.iter().any(|start| name.starts_with(start))
}

/// Whether a range contains one of the sorted addresses.
fn holds(addresses: &[u64], range: &Range<u64>) -> bool {
    addresses.get(addresses.partition_point(|&address| address < range.start)).is_some_and(|&it| it < range.end)
}

/// The sorted ranges that overlap a range.
fn overlapping<'r>(ranges: &'r [Range<u64>], range: &Range<u64>) -> &'r [Range<u64>] {
    let first = ranges.partition_point(|it| it.end <= range.start);
    let rest = &ranges[first..];
    &rest[..rest.partition_point(|it| it.start < range.end)]
}

/// What is known about a process's memory, sorted.
#[derive(Clone, Copy, Default)]
struct KnownMemory<'k> {
    /// Addresses of blocks.
    blocks: &'k [u64],
    /// Ranges of heaps.
    heaps: &'k [Range<u64>],
    /// Stack pointers.
    stacks: &'k [u64],
}

/// Adds up the mappings. Without `pages`, no mapping is divided.
fn sum(mappings: &[Mapping], known: &KnownMemory, pages: Option<&Pages>) -> Resident {
    let KnownMemory { blocks, heaps, stacks } = *known;
    let mut sum = Resident { pss_bytes: Some(0), ..Resident::default() };
    let mut divided = 0;
    for (k, mapping) in mappings.iter().enumerate() {
        let before = k.checked_sub(1).and_then(|before| mappings.get(before));
        let (mut rest, mut left) = (mapping.range(), mapping.resident_bytes);
        if let (Kind::Anonymous, Some(pages)) = (mapping.kind, pages.filter(|_| divided < MOST_DIVIDED)) {
            let mut take = |part: Range<u64>, into: &mut u64| {
                let bytes = pages.present_bytes(&part).unwrap_or(0).min(left);
                *into = into.saturating_add(bytes);
                left -= bytes;
                divided += 1;
            };
            if let Some(arena) = arena_at_end(mapping, mappings.get(k + 1)) {
                rest.end = arena.start;
                take(arena, &mut sum.heap_bytes);
            }
            if let Some(stack) = stack_at_start(&rest, before, stacks) {
                rest.start = stack.end;
                take(stack, &mut sum.stacks_bytes);
            }
            for heap in overlapping(heaps, &rest) {
                take(heap.start.max(rest.start)..heap.end.min(rest.end), &mut sum.heap_bytes);
            }
        }
        let part = match mapping.kind {
            Kind::Heap => &mut sum.heap_bytes,
            Kind::Anonymous if holds(blocks, &rest) || is_arena(mapping, mappings.get(k + 1)) => &mut sum.heap_bytes,
            // A known allocator may be what the runtime calls its own.
            Kind::Runtime if holds(blocks, &rest) => &mut sum.heap_bytes,
            Kind::Anonymous if holds(stacks, &rest) => &mut sum.stacks_bytes,
            Kind::File => &mut sum.files_bytes,
            Kind::Stack => &mut sum.stacks_bytes,
            Kind::Shared => &mut sum.shared_bytes,
            Kind::JitCode => &mut sum.jit_code_bytes,
            Kind::Runtime => &mut sum.runtime_bytes,
            Kind::Own => &mut sum.own_bytes,
            Kind::Anonymous | Kind::Reserved | Kind::Other => &mut sum.other_bytes,
        };
        *part = part.saturating_add(left);
        sum.pss_bytes = sum.pss_bytes.map(|bytes| bytes.saturating_add(mapping.pss_bytes));
        sum.swapped_bytes = sum.swapped_bytes.saturating_add(mapping.swapped_bytes);
        sum.hugetlb_bytes = sum.hugetlb_bytes.saturating_add(mapping.hugetlb_bytes);
    }
    sum
}

/// The reserved mapping right after a mapping, if there is one.
fn reserved_after<'a>(mapping: &Mapping, next: Option<&'a Mapping>) -> Option<&'a Mapping> {
    next.filter(|next| next.kind == Kind::Reserved && next.start == mapping.end)
}

/// Whether a mapping is the used part of a glibc arena: it is aligned to the arena size, and fills that size together
/// with the reserved rest, if there is one.
fn is_arena(mapping: &Mapping, next: Option<&Mapping>) -> bool {
    let end = reserved_after(mapping, next).map_or(mapping.end, |next| next.end);
    mapping.start.is_multiple_of(ARENA_BYTES) && end.checked_sub(mapping.start) == Some(ARENA_BYTES)
}

/// The used part of an arena at the end of a mapping that begins below the arena. The reserved rest ends where an arena
/// would end.
fn arena_at_end(mapping: &Mapping, next: Option<&Mapping>) -> Option<Range<u64>> {
    let end = reserved_after(mapping, next)?.end;
    let start = end.checked_sub(ARENA_BYTES).filter(|start| start.is_multiple_of(ARENA_BYTES))?;
    (mapping.start < start && start < mapping.end).then_some(start..mapping.end)
}

/// A thread's stack at the start of a longer mapping. The guard pages come before it, and the thread's stack pointer is
/// in it.
fn stack_at_start(range: &Range<u64>, before: Option<&Mapping>, stacks: &[u64]) -> Option<Range<u64>> {
    let guard = before.filter(|before| before.kind == Kind::Reserved && before.end == range.start)?;
    let stack = range.start..guard.start.checked_add(STACK_BYTES)?;
    (range.start < stack.end && stack.end < range.end && holds(stacks, &stack)).then_some(stack)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;
    use std::path::Path;

    use super::*;

    /// Mappings of a process with one tmpfs.
    fn mappings_in(text: &[u8]) -> Vec<Mapping> {
        parse(text, &mut |device| device == "00:1a").expect("memory can be read")
    }

    const SMAPS: &str = "\
55f0c0000000-55f0c0002000 r--p 00000000 fe:00 99                         /usr/bin/x
Size:                  8 kB
Rss:                   8 kB
Pss:                   1 kB
55f0c0100000-55f0c0200000 rw-p 00000000 00:00 0                          [heap]
Rss:                1000 kB
7f0000000000-7f0000021000 rw-p 00000000 00:00 0 
Rss:                 100 kB
7f0000021000-7f0004000000 ---p 00000000 00:00 0 
Rss:                   0 kB
7f0010000000-7f0010100000 rw-p 00000000 00:00 0 
Rss:                  16 kB
7f0010200000-7f0010300000 rw-p 00000000 00:00 0 
Rss:                 200 kB
7f0010400000-7f0010500000 rw-p 00000000 00:00 0 
Rss:                  40 kB
7f0010500000-7f0010600000 rwxp 00000000 00:00 0 
Rss:                  12 kB
7f0010600000-7f0010700000 rw-s 00000000 00:01 7                          /dev/zero (deleted)
Rss:                  60 kB
7f0010610000-7f0010616000 r-xp 00000000 00:01 8                          /memfd:heapbpf-inline-7f0010610000-10000 (deleted)
Rss:                  24 kB
7f0010616000-7f001061f000 rw-p 00000000 00:00 0 
Rss:                  32 kB
7f0010620000-7f0010630000 rw-p 00000000 00:00 0 
Rss:                   4 kB
7f0010700000-7f0010800000 rw-p 00000000 00:00 0                          [anon: glibc: malloc]
Rss:                   4 kB
Swap:                  3 kB
Private_Hugetlb:    2048 kB
7f0010800000-7f0010880000 r-xp 00000000 00:1a 7                          /run/x.so
Rss:                   7 kB
7f0010880000-7f0010900000 rw-s 00000000 00:1c 7                          /dev/shm/of a sandbox (deleted)
Rss:                   5 kB
7f0010900000-7f0010a00000 r--p 00000000 00:1b 7                          /usr/lib/overlaid.so
Rss:                   9 kB
7f0010a00000-7f0010b00000 rw-s 00000000 00:01 9                          /memfd:doublemapper (deleted)
Rss:                   5 kB
7f0010b00000-7f0010c00000 rw-s 00000000 00:01 10                         /memfd:data (deleted)
Rss:                   6 kB
7f0010c00000-7f0010d00000 r--p 00000000 00:00 0                          [anon:v8]
Rss:                  11 kB
7f0010d00000-7f0010e00000 rw-p 00000000 00:00 0                          [anon: Go: heap]
Rss:                  13 kB
7f0010e00000-7f0010f00000 rw-p 00000000 00:00 0                          [anon:partition_alloc]
Rss:                  15 kB
7f0010f00000-7f0011000000 rw-p 00000000 00:00 0                          [anon:cache of v8]
Rss:                  17 kB
7f0011000000-7f0011100000 rwxp 00000000 00:00 0                          [anon:v8]
Rss:                  19 kB
7ffd00000000-7ffd00100000 rw-p 00000000 00:00 0                          [stack]
Rss:                  20 kB
7ffd00200000-7ffd00202000 r-xp 00000000 00:00 0                          [vdso]
Rss:                   4 kB
";

    #[test]
    fn mappings_are_added_up_by_what_they_are_for() {
        let mappings = mappings_in(SMAPS.as_bytes());
        // A stack pointer in a runtime's memory is that of a stack inside of it.
        let stacks = [0x7f00_1000_ff00, 0x7f00_10d0_0010];
        let known = KnownMemory { blocks: &[0x7f00_1020_0010, 0x7f00_10e0_0010], stacks: &stacks, heaps: &[] };
        let found = sum(&mappings, &known, None);
        let kib = |kib: u64| kib * 1024;
        let expected = Resident {
            heap_bytes: kib(1000 + 100 + 200 + 4 + 15),
            files_bytes: kib(8 + 9),
            stacks_bytes: kib(16 + 20),
            shared_bytes: kib(60 + 7 + 5 + 6),
            jit_code_bytes: kib(12 + 5 + 19),
            runtime_bytes: kib(11 + 13),
            own_bytes: kib(24 + 32),
            other_bytes: kib(40 + 4 + 4 + 17),
            pss_bytes: Some(kib(1)),
            swapped_bytes: kib(3),
            hugetlb_bytes: kib(2048),
            ..Resident::default()
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn hostile_text_is_skipped() {
        let long = format!("1000-2000 rw-p 0 00:00 0 {}\nRss: 4 kB\n", "x".repeat(100_000));
        assert_eq!(sum(&mappings_in(long.as_bytes()), &KnownMemory::default(), None).total_bytes(), 4096);
        for text in ["Rss: 4 kB\n", "zz-1 rw-p 0 0:0 0\nRss: 8 kB\n", "1-2 rw 0\n", "1-2\n", "\n\n", "Rss: -1 kB"] {
            let found = sum(&mappings_in(text.as_bytes()), &KnownMemory::default(), None);
            assert_eq!(found.total_bytes(), 0, "{text}");
        }
        let large = format!("0-{:x} rw-p 0 0:0 0\nRss: {} kB\n0-1 rw-p 0 0:0 0\nRss: 9 kB\n", u64::MAX, u64::MAX);
        let known = KnownMemory { blocks: &[0], ..KnownMemory::default() };
        assert_eq!(sum(&mappings_in(large.as_bytes()), &known, None).total_bytes(), u64::MAX);
        assert!(!mappings_in(b"1-2 rw-p 0 0:0 0 \xff\xfe\nRss: 4 kB").is_empty());
    }

    #[test]
    fn merged_mappings_are_divided_where_a_stack_or_an_arena_ends() {
        let lines = mappings_in(b"7f0000000000-7f0000001000 ---p 0 0:0 0 \n7f0000001000-7f0000a00000 rw-p 0 0:0 0 \n");
        let stack = |pointers: &[u64]| stack_at_start(&lines[1].range(), lines.first(), pointers);
        assert_eq!(stack(&[0x7f00_0070_0000]), Some(0x7f00_0000_1000..0x7f00_0080_0000));
        assert_eq!((stack(&[0x7f00_0090_0000]), stack(&[])), (None, None), "nobody's stack");
        // Other memory below an arena whose rest is reserved.
        let lines = mappings_in(b"7f0003f00000-7f0004100000 rw-p 0 0:0 0 \n7f0004100000-7f0008000000 ---p 0 0:0 0 \n");
        assert_eq!(arena_at_end(&lines[0], lines.get(1)), Some(0x7f00_0400_0000..0x7f00_0410_0000));
        assert!(!is_arena(&lines[0], lines.get(1)) && arena_at_end(&lines[0], None).is_none());
    }

    /// If a large block shares a mapping with other memory, only the block counts as heap.
    #[test]
    fn large_blocks_are_divided_from_what_the_kernel_has_merged_with_them() {
        let block = vec![1_u8; 4 << 20];
        let page = procfs::page_size();
        let start = (block.as_ptr() as u64).next_multiple_of(page);
        let line = format!("{:x}-{:x} rw-p 0 0:0 0 \nRss: {} kB\n", start, start + (3 << 20), 3 << 10);
        let (mappings, pages) = (mappings_in(line.as_bytes()), Pages::of(std::process::id()));
        let large = [start - page..start - 1, start + (1 << 20)..start + (2 << 20)];
        let found = sum(&mappings, &KnownMemory { heaps: &large, ..KnownMemory::default() }, pages.as_ref());
        assert_eq!((found.heap_bytes, found.other_bytes), (1 << 20, 2 << 20));
        assert_eq!(overlapping(&large, &(0..start - page)), &[]);
    }

    #[test]
    fn the_kernels_sums_are_read_and_kernel_threads_have_none() {
        let status =
            b"Name:\tRssAnon\nVmRSS:\t 9 kB\nRssAnon:\t 4 kB\nRssFile:\t 3 kB\nRssShmem:\t 2 kB\nVmSwap:\t 7 kB\n";
        let sums = sums_in(status).expect("sums");
        assert_eq!((sums.total_bytes(), sums.undivided_bytes, sums.swapped_bytes), (9 << 10, 4 << 10, 7 << 10));
        assert_eq!((sums_in(b"Name:\tkthreadd\n"), sums_in(b"RssAnon:\t-1 kB\n"), rough(2)), (None, None, None));
        let whole = |text: String| text.ends_with('\n') && text.split_ascii_whitespace().count() == 7;
        assert!(sizes(std::process::id()).is_some_and(whole) && sizes(u32::MAX).is_none());
    }

    /// The parts of ten processes add up exactly to what the same read of their mappings says.
    #[test]
    fn parts_add_up_to_the_page() {
        let mut processes: Vec<_> =
            (0..10).map(|_| std::process::Command::new("sleep").arg("60").spawn().expect("sleep")).collect();
        for pid in processes.iter().map(std::process::Child::id).chain([std::process::id()]) {
            let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).expect("our own children");
            let rss = text.lines().filter_map(|line| kib(line.strip_prefix("Rss:")?)).sum::<u64>();
            let known = KnownMemory { stacks: &stack_pointers(pid), ..KnownMemory::default() };
            let found = sum(&mappings_in(text.as_bytes()), &known, Pages::of(pid).as_ref());
            assert_eq!(found.total_bytes(), rss, "{pid}: {found:?}");
        }
        processes.iter_mut().for_each(|process| process.kill().expect("our own child"));
        processes.iter_mut().for_each(|process| assert!(process.wait().is_ok()));
    }

    /// The kernel itself says the same of each directory.
    #[test]
    fn a_tmpfs_is_known_by_its_device() {
        let mounts = "36 35 0:26 / /dev/shm rw shared:4 - tmpfs tmpfs rw\n37 35 254:1 / / rw - ext4 /dev/vda1 rw\n\
                      38 35 0:300 / /a\\040-\\040tmpfs rw - overlay x rw\nx - tmpfs x\n1 2 0:x / / rw - tmpfs x\n";
        assert_eq!(tmpfs_in(mounts), HashSet::from(["00:1a".to_owned()]));
        let own = tmpfs_of(std::process::id());
        for path in ["/dev/shm", "/proc", "/run", "/tmp"].into_iter().filter(|path| Path::new(path).is_dir()) {
            let device = std::fs::metadata(path).expect("it is there").dev();
            let device = format!("{:02x}:{:02x}", libc::major(device), libc::minor(device));
            // TMPFS_MAGIC in include/uapi/linux/magic.h.
            let is_tmpfs = rustix::fs::statfs(path).expect("it is there").f_type == 0x0102_1994;
            assert_eq!(own.contains(&device), is_tmpfs, "{path}: {device}, {own:?}");
        }
    }

    /// Our own memory includes the 256 KiB that were just written to.
    #[test]
    fn our_own_memory() {
        let pid = std::process::id();
        let start_ns = Stat::read(pid).expect("our own state can be read").start_ns;
        let block = vec![1_u8; 256 << 10];
        let found = of(pid, start_ns, vec![block.as_ptr() as u64], &[]).expect("our own mappings can be read");
        assert!(found.heap_bytes >= block.len() as u64 && found.files_bytes > 0 && found.stacks_bytes > 0, "{found:?}");
        assert!(anonymous_bytes(pid) >= Some(block.len() as u64));
        assert_eq!(of(pid, start_ns + 10_000_000_000, Vec::new(), &[]), None, "another process");
    }
}
