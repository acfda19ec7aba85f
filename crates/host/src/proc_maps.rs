//! Reads `/proc/PID/maps`: the executable mappings of a process that predates the recording, or whose events were lost.
//!
//! Targets control this text, so it is parsed here. The `procfs` crate, which elsewhere reads heapbpf's own mappings,
//! returns no mappings at all if one path is not UTF-8 or one line is malformed, can panic on a file called `/SYSV`,
//! does not unescape newlines in paths, and has no bounds.

use std::io::{self, Read};

use super::record::{Device, MapEvent};
use super::replaced_text;

/// Maximum number of bytes to read of one process's list: enough for 65,530 mappings (the kernel's default limit) with
/// ordinary paths.
const MAX_BYTES: u64 = 16 << 20;

/// Reads the executable mappings of process `pid`.
///
/// # Errors
/// Errors of opening and reading the file: `NotFound` (or ESRCH) if the process has exited.
pub fn read(pid: u32) -> io::Result<Vec<MapEvent>> {
    let mut text = Vec::with_capacity(16 << 10);
    std::fs::File::open(format!("/proc/{pid}/maps"))?.take(MAX_BYTES).read_to_end(&mut text)?;
    let mut maps = parse(&text);
    maps.iter_mut().for_each(|map| (map.pid, map.tid) = (pid, pid));
    replaced_text::restore(&mut maps);
    Ok(maps)
}

/// Parses the text of a maps file, skipping malformed lines. `pid`, `tid` and times are zero in the result.
#[must_use]
pub fn parse(text: &[u8]) -> Vec<MapEvent> {
    parse_all(text).filter(|map| map.prot & libc::PROT_EXEC as u32 != 0).collect()
}

/// Does the same, but also returns mappings that are not executable.
pub fn parse_all(text: &[u8]) -> impl Iterator<Item = MapEvent> {
    text.split(|byte| *byte == b'\n').filter_map(parse_line)
}

/// Parses `start-end perms offset major:minor inode path`. The path is padded with spaces in front.
fn parse_line(line: &[u8]) -> Option<MapEvent> {
    let mut rest = line;
    let range = field(&mut rest)?;
    let perms = field(&mut rest)?;
    if perms.len() < 4 {
        return None;
    }
    let file_offset = hex(field(&mut rest)?)?;
    let (major, minor) = split(field(&mut rest)?, b':')?;
    let inode = std::str::from_utf8(field(&mut rest)?).ok()?.parse().ok()?;
    let (start, end) = split(range, b'-')?;
    let length = end.checked_sub(start).filter(|length| *length > 0)?;
    let bit = |index: usize, letter: u8, flag: i32| if perms[index] == letter { flag as u32 } else { 0 };
    Some(MapEvent {
        address: start,
        length,
        file_offset,
        device: Device { major: u32::try_from(major).ok()?, minor: u32::try_from(minor).ok()? },
        inode,
        prot: bit(0, b'r', libc::PROT_READ) | bit(1, b'w', libc::PROT_WRITE) | bit(2, b'x', libc::PROT_EXEC),
        flags: if perms.get(3) == Some(&b's') { libc::MAP_SHARED as u32 } else { libc::MAP_PRIVATE as u32 },
        path: unescape(rest.trim_ascii_start()),
        ..MapEvent::default()
    })
}

/// Takes the next word, up to one space.
fn field<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let end = rest.iter().position(|byte| *byte == b' ').unwrap_or(rest.len());
    let word = &rest[..end];
    *rest = rest.get(end + 1..).unwrap_or_default();
    (!word.is_empty()).then_some(word)
}

fn split(text: &[u8], at: u8) -> Option<(u64, u64)> {
    let middle = text.iter().position(|byte| *byte == at)?;
    Some((hex(&text[..middle])?, hex(&text[middle + 1..])?))
}

fn hex(text: &[u8]) -> Option<u64> {
    // `from_str_radix` alone would accept a sign.
    let digits = std::str::from_utf8(text).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
    u64::from_str_radix(digits, 16).ok()
}

/// Undoes the kernel's escape of a newline in a path, `\012`. It escapes nothing else.
fn unescape(path: &[u8]) -> Box<[u8]> {
    const NEWLINE: &[u8] = b"\\012";
    let mut plain = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some(byte) = rest.first() {
        if rest.starts_with(NEWLINE) {
            plain.push(b'\n');
            rest = &rest[NEWLINE.len()..];
        } else {
            plain.push(*byte);
            rest = &rest[1..];
        }
    }
    plain.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_all_kinds() {
        let text = b"\
55f0c0000000-55f0c0002000 r--p 00000000 fe:00 99                         /usr/bin/x
55f0c0002000-55f0c0007000 r-xp 00002000 fe:00 99                         /opt/with  two spaces/x (deleted)
7f0000000000-7f0000001000 rwxp 00000000 00:00 0 
7f0000001000-7f0000002000 r-xs 00001000 00:1a 7                          /a\\012b
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";
        let maps = parse(text);
        assert_eq!(maps.len(), 4);
        let first = &maps[0];
        assert_eq!((first.address, first.length, first.file_offset), (0x55f0_c000_2000, 0x5000, 0x2000));
        assert_eq!((first.device, first.inode), (Device { major: 0xfe, minor: 0 }, 99));
        assert_eq!(&*first.path, b"/opt/with  two spaces/x (deleted)");
        assert_eq!((first.prot, first.flags), (5, 2));
        assert_eq!((&*maps[1].path, maps[1].prot), (&b""[..], 7));
        assert_eq!((&*maps[2].path, maps[2].flags), (&b"/a\nb"[..], 1));
        assert_eq!((&*maps[3].path, maps[3].address), (&b"[vsyscall]"[..], 0xffff_ffff_ff60_0000));
    }

    #[test]
    fn malformed_lines_are_skipped() {
        for line in
            ["", "x", "1-2", "2-1 r-xp 0 0:0 0", "1-1 r-xp 0 0:0 0", "+1-2 r-xp 0 0:0 0", "1-2 r-xp 0 0 0", "1-2 r-x"]
        {
            assert_eq!(parse(line.as_bytes()), [], "{line}");
        }
        assert_eq!(parse(b"fffffffffffffffff-2 r-xp 0 0:0 0"), []);
        assert_eq!(parse(b"\xff\xfe-2 r-xp \n\n\n 1-2 r-xp 0 0:0 0"), []);
        assert_eq!(parse(b"1-2 r-xp 0 0:0 0").len(), 1);
    }
}
