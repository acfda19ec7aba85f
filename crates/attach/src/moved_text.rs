//! Detects programs that move their own code, or a library's, to anonymous memory, as some do to get huge pages. Hooks
//! that are placed through a file do not reach the moved code, and breakpoints that are copied with it end the process.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use heapbpf_elf::Elf;
use heapbpf_remote::{Mapping, Maps};
use memchr::memmem;

/// Names or options in the files of programs that can do so: ClickHouse, HHVM, and all that use Intel's iodlr, such as
/// Node.
const SIGNS: [&str; 4] = ["remapExecutable", "hugifyText", "MapStaticCodeToLargePages", "MapDSOToLargePages"];
/// Sections that contain names.
const SECTIONS: [&str; 4] = [".dynstr", ".strtab", ".rodata", ".lrodata"];
/// Maximum number of bytes to search, and bytes to search at a time.
const MOST_BYTES: u64 = 512 << 20;
const PIECE: usize = 1 << 20;

/// Which of the signs above a program's file contains.
pub fn sign_in(file: &File) -> Option<&'static str> {
    let elf = Elf::read(file).ok()?;
    let mut left = MOST_BYTES;
    let mut piece = vec![0; PIECE];
    for section in SECTIONS.iter().filter_map(|name| elf.section(name)) {
        let mut at = 0;
        while at < section.bytes && left > 0 {
            let bytes = (section.bytes - at).min(PIECE as u64) as usize;
            if file.read_exact_at(&mut piece[..bytes], section.offset.saturating_add(at)).is_err() {
                break;
            }
            let is_there = |sign: &&&str| memmem::find(&piece[..bytes], sign.as_bytes()).is_some();
            if let Some(sign) = SIGNS.iter().find(is_there) {
                return Some(sign);
            }
            let further = bytes.saturating_sub(64).max(1) as u64;
            (at, left) = (at + further, left.saturating_sub(further));
        }
    }
    None
}

/// The message about a process whose code, or whose C library's code, is in anonymous memory.
pub fn of_process(pid: u32) -> Option<String> {
    let maps = Maps::read(File::open(format!("/proc/{pid}/maps")).ok()?, 0).ok()?;
    let path = moved(maps.as_slice())?;
    let name = path.rsplit('/').next().unwrap_or_default();
    let is_library = name.starts_with("libc.") || name.starts_with("libc-") || name.starts_with("ld-musl");
    let whose = if is_library { "its C library's code".to_owned() } else { format!("the code of {path}") };
    Some(format!(
        "it has moved {whose} to anonymous memory (as some programs do to use huge pages), where heapbpf cannot see \
         its allocations"
    ))
}

/// The file whose code was moved. What is left of it is mapped on both sides of code that belongs to no file.
fn moved(mappings: &[Mapping]) -> Option<&str> {
    let is_code_of_nobody = |mapping: &Mapping| mapping.is_executable && mapping.inode == 0 && mapping.name.is_empty();
    let has_code = |file: &Mapping| mappings.iter().any(|other| other.is_executable && is_of(other, file));
    let pieces = mappings.chunk_by(|one, next| is_code_of_nobody(one) == is_code_of_nobody(next));
    let pieces: Vec<&[Mapping]> = pieces.collect();
    pieces.windows(3).find_map(|around| {
        let (before, code, after) = (around[0].last()?, around[1], around[2].first()?);
        let is_within = is_code_of_nobody(&code[0])
            && before.range.end == code[0].range.start
            && code.last().is_some_and(|last| last.range.end == after.range.start);
        (is_within && before.inode != 0 && is_of(before, after) && !has_code(before)).then_some(before.name.as_str())
    })
}

/// Whether two mappings are of the same file.
fn is_of(one: &Mapping, other: &Mapping) -> bool {
    (one.inode, &one.device) == (other.inode, &other.device)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn of(maps: &str) -> Option<String> {
        moved(Maps::parse(maps, 0).as_slice()).map(str::to_owned)
    }

    #[test]
    fn code_between_what_is_left_of_its_file_was_moved() {
        let libc = |code: &str| {
            format!(
                "7f0000000000-7f0000026000 r--p 00000000 fe:00 9 /lib/libc.so.6\n{code}\
                 7f0000180000-7f00001d0000 r--p 00180000 fe:00 9 /lib/libc.so.6\n\
                 7f00001d0000-7f00001d2000 rw-p 001d0000 fe:00 9 /lib/libc.so.6\n"
            )
        };
        let anonymous = "7f0000026000-7f0000180000 r-xp 00000000 00:00 0\n";
        assert_eq!(of(&libc(anonymous)).as_deref(), Some("/lib/libc.so.6"));
        let pieces =
            "7f0000026000-7f0000100000 r-xp 00000000 00:00 0\n7f0000100000-7f0000180000 rwxp 00000000 00:00 0\n";
        assert_eq!(of(&libc(pieces)).as_deref(), Some("/lib/libc.so.6"));
        // Mapped from the file; next to a JIT compiler's code; only partly moved.
        assert_eq!(of(&libc("7f0000026000-7f0000180000 r-xp 00026000 fe:00 9 /lib/libc.so.6\n")), None);
        assert_eq!(of(&libc("7f0000030000-7f0000180000 r-xp 00000000 00:00 0\n")), None);
        let part = "7f0000026000-7f0000100000 r-xp 00000000 00:00 0\n7f0000100000-7f0000180000 r-xp 00100000 fe:00 9 /lib/libc.so.6\n";
        assert_eq!(of(&libc(part)), None);
        assert_eq!(of("7f0000026000-7f0000180000 r-xp 00000000 00:00 0\n"), None);
        assert_eq!(of(""), None);
    }

    #[test]
    fn what_can_move_its_code_has_signs_of_it() {
        let own = File::open("/proc/self/exe").expect("it runs");
        assert!(sign_in(&own).is_some(), "the signs are strings of this test");
        let mut other = tempfile::tempfile().expect("a temporary file can be made");
        other.write_all(b"MapStaticCodeToLargePages").expect("there is space");
        assert_eq!(sign_in(&other), None, "it is no program");
    }
}
