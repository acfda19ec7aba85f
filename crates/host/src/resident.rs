//! Where the resident memory of a process is: `/proc/PID/smaps` by what each mapping is for.
//!
//! Targets control names and layout of their mappings, so the text is read line by line, with bounds.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

use heapbpf_profile::model::Resident;

use super::process::Stat;
use super::processes::starts_agree;

/// Most bytes read of one process's list: about 100,000 mappings.
const MOST_TEXT_BYTES: u64 = 128 << 20;
/// Longest line that is looked at as a whole: a path of the longest length and what stands before it.
const LONGEST_LINE: u64 = 8 << 10;
/// Most threads whose stack pointers are read.
const MOST_THREADS: usize = 4096;
/// Size and alignment of glibc's arenas on 64-bit machines (`HEAP_MAX_SIZE` in malloc/arena.c).
const ARENA_BYTES: u64 = 64 << 20;

/// Private anonymous memory of a process that is resident, bytes; `None` if it cannot be read.
pub fn anonymous_bytes(pid: u32) -> Option<u64> {
    let status = std::fs::read(format!("/proc/{pid}/status")).ok()?;
    // The kernel escapes newlines in the name, so a line is the kernel's own.
    let status = String::from_utf8_lossy(&status);
    kib(status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?)
}

/// Resident memory of the process that started at `start_ns` (CLOCK_BOOTTIME). `blocks`: addresses of blocks that allocators gave
/// out. `None` if the process is gone, or if its mappings cannot be read.
pub fn of(pid: u32, start_ns: u64, mut blocks: Vec<u64>, at_attach_bytes: Option<u64>) -> Option<Resident> {
    blocks.sort_unstable();
    let mut places = stack_pointers(pid);
    places.sort_unstable();
    let text = BufReader::with_capacity(64 << 10, File::open(format!("/proc/{pid}/smaps")).ok()?.take(MOST_TEXT_BYTES));
    let mappings = parse(text).ok()?;
    // The id may have been given to another process while its files were read.
    Stat::read(pid).ok().filter(|stat| starts_agree(stat.start_ns, start_ns))?;
    let resident = sum(&mappings, &blocks, &places);
    Some(Resident { at_attach_bytes, ..resident }).filter(|resident| resident.total_bytes() > 0)
}

/// Stack pointers of threads that wait in the kernel.
fn stack_pointers(pid: u32) -> Vec<u64> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let pointer = |thread: std::fs::DirEntry| {
        // `running`, or the call, its arguments, and at last the stack pointer and the program counter (proc(5)).
        let text = std::fs::read_to_string(thread.path().join("syscall")).ok()?;
        let pointer = text.split_ascii_whitespace().rev().nth(1)?;
        u64::from_str_radix(pointer.strip_prefix("0x")?, 16).ok()
    };
    threads.flatten().take(MOST_THREADS).filter_map(pointer).collect()
}

/// What a mapping is, as far as its own line tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The main heap, or a mapping that an allocator has named.
    Heap,
    File,
    Stack,
    Shared,
    JitCode,
    /// Heapbpf's inline hooks.
    Own,
    /// Readable and writable, without a name of its own.
    Anonymous,
    /// Reserved: it cannot be accessed.
    Reserved,
    Other,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    start: u64,
    end: u64,
    kind: Kind,
    resident_bytes: u64,
}

/// Reads mappings and what is resident of each. Malformed lines are skipped.
fn parse(mut text: impl BufRead) -> io::Result<Vec<Mapping>> {
    let mut mappings: Vec<Mapping> = Vec::new();
    let mut line = Vec::new();
    loop {
        line.clear();
        if text.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)? == 0 {
            return Ok(mappings);
        }
        let line = String::from_utf8_lossy(&line);
        if let Some(rest) = line.strip_prefix("Rss:") {
            if let (Some(mapping), Some(bytes)) = (mappings.last_mut(), kib(rest)) {
                mapping.resident_bytes = bytes;
            }
        } else if let Some(mapping) = mapping_of(&line) {
            mappings.push(mapping);
        }
    }
}

/// `  12 kB` in bytes.
fn kib(text: &str) -> Option<u64> {
    let kib: u64 = text.split_ascii_whitespace().next()?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// `start-end perms offset device inode path`.
fn mapping_of(line: &str) -> Option<Mapping> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).ok());
    let permissions = fields.next().filter(|text| text.len() == 4)?;
    let inode = fields.nth(2)?;
    let name = fields.next().unwrap_or_default().trim();
    Some(Mapping {
        start: start?,
        end: end?,
        kind: kind(permissions.as_bytes(), inode != "0", name),
        resident_bytes: 0,
    })
}

fn kind(permissions: &[u8], has_inode: bool, name: &str) -> Kind {
    let is_memory_file = ["/memfd:", "/dev/shm/", "/SYSV", "/dev/zero"].iter().any(|start| name.starts_with(start));
    let is_file = has_inode && !is_memory_file;
    let (is_executable, is_shared) = (permissions[2] == b'x', permissions[3] == b's');
    match name {
        _ if is_file => Kind::File,
        _ if name.starts_with("/memfd:heapbpf-") => Kind::Own,
        "[heap]" => Kind::Heap,
        _ if name.starts_with("[stack") => Kind::Stack,
        // The kernel's own pages, such as [vdso].
        _ if name.starts_with('[') && !name.starts_with("[anon") => Kind::Other,
        _ if is_executable => Kind::JitCode,
        _ if is_shared || is_memory_file => Kind::Shared,
        // Names that allocators give, with prctl(PR_SET_VMA_ANON_NAME).
        _ if ["malloc", "scudo", "tcmalloc"].iter().any(|word| name.contains(word)) => Kind::Heap,
        _ if permissions.starts_with(b"---") => Kind::Reserved,
        _ if permissions.starts_with(b"rw") => Kind::Anonymous,
        _ => Kind::Other,
    }
}

/// Adds up mappings. `blocks` and `stacks` (stack pointers) are sorted.
fn sum(mappings: &[Mapping], blocks: &[u64], stacks: &[u64]) -> Resident {
    let mut sum = Resident::default();
    for (k, mapping) in mappings.iter().enumerate() {
        let holds = |addresses: &[u64]| {
            addresses
                .get(addresses.partition_point(|&address| address < mapping.start))
                .is_some_and(|&it| it < mapping.end)
        };
        let part = match mapping.kind {
            Kind::Heap => &mut sum.heap_bytes,
            Kind::Anonymous if holds(blocks) || is_arena(mapping, mappings.get(k + 1)) => &mut sum.heap_bytes,
            Kind::Anonymous if holds(stacks) => &mut sum.stacks_bytes,
            Kind::File => &mut sum.files_bytes,
            Kind::Stack => &mut sum.stacks_bytes,
            Kind::Shared => &mut sum.shared_bytes,
            Kind::JitCode => &mut sum.jit_code_bytes,
            Kind::Own => &mut sum.own_bytes,
            Kind::Anonymous | Kind::Reserved | Kind::Other => &mut sum.other_bytes,
        };
        *part = part.saturating_add(mapping.resident_bytes);
    }
    sum
}

/// Whether a mapping is the used part of one of glibc's arenas: it is aligned to their size, and the reserved rest, if there is
/// one, fills that size.
fn is_arena(mapping: &Mapping, next: Option<&Mapping>) -> bool {
    let reserved = next.filter(|next| next.kind == Kind::Reserved && next.start == mapping.end);
    let end = reserved.map_or(mapping.end, |next| next.end);
    mapping.start.is_multiple_of(ARENA_BYTES) && end.checked_sub(mapping.start) == Some(ARENA_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

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
7f0010610000-7f0010616000 r-xp 00000000 00:01 8                          /memfd:heapbpf-inline-7f0010610000-6000 (deleted)
Rss:                  24 kB
7f0010700000-7f0010800000 rw-p 00000000 00:00 0                          [anon: glibc: malloc]
Rss:                   4 kB
7ffd00000000-7ffd00100000 rw-p 00000000 00:00 0                          [stack]
Rss:                  20 kB
7ffd00200000-7ffd00202000 r-xp 00000000 00:00 0                          [vdso]
Rss:                   4 kB
";

    #[test]
    fn mappings_are_added_up_by_what_they_are_for() {
        let mappings = parse(SMAPS.as_bytes()).expect("memory can be read");
        let found = sum(&mappings, &[0x7f00_1020_0010], &[0x7f00_1000_ff00]);
        let kib = |kib: u64| kib * 1024;
        let expected = Resident {
            heap_bytes: kib(1000 + 100 + 200 + 4),
            files_bytes: kib(8),
            stacks_bytes: kib(16 + 20),
            shared_bytes: kib(60),
            jit_code_bytes: kib(12),
            own_bytes: kib(24),
            other_bytes: kib(40 + 4),
            at_attach_bytes: None,
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn hostile_text_is_skipped() {
        let long = format!("1000-2000 rw-p 0 00:00 0 {}\nRss: 4 kB\n", "x".repeat(100_000));
        assert_eq!(sum(&parse(long.as_bytes()).expect("read"), &[], &[]).total_bytes(), 4096);
        for text in ["Rss: 4 kB\n", "zz-1 rw-p 0 0:0 0\nRss: 8 kB\n", "1-2 rw 0\n", "1-2\n", "\n\n", "Rss: -1 kB"] {
            assert_eq!(sum(&parse(text.as_bytes()).expect("read"), &[], &[]).total_bytes(), 0, "{text}");
        }
        let large = format!("0-{:x} rw-p 0 0:0 0\nRss: {} kB\n0-1 rw-p 0 0:0 0\nRss: 9 kB\n", u64::MAX, u64::MAX);
        assert_eq!(sum(&parse(large.as_bytes()).expect("read"), &[0], &[]).total_bytes(), u64::MAX);
        assert!(!parse(&b"1-2 rw-p 0 0:0 0 \xff\xfe\nRss: 4 kB"[..]).expect("read").is_empty());
    }

    /// Our own memory adds up to what the kernel counts. 256 KiB were just written to.
    #[test]
    fn our_own_memory() {
        let pid = std::process::id();
        let start_ns = Stat::read(pid).expect("our own state can be read").start_ns;
        let block = vec![1_u8; 256 << 10];
        let found =
            of(pid, start_ns, vec![block.as_ptr() as u64], anonymous_bytes(pid)).expect("our own mappings can be read");
        assert!(found.heap_bytes >= block.len() as u64 && found.files_bytes > 0 && found.stacks_bytes > 0, "{found:?}");
        assert!(found.at_attach_bytes.is_some_and(|bytes| bytes >= block.len() as u64), "{found:?}");
        assert_eq!(of(pid, start_ns + 10_000_000_000, Vec::new(), None), None, "another process");
    }
}
