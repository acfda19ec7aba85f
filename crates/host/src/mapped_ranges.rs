//! Reads all address ranges that a process has mapped, of every kind, from `/proc/PID/maps`.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

/// Maximum number of bytes to read of one process's list: several times what 65,530 mappings (the kernel's default
/// limit) take.
const MOST_BYTES: u64 = 64 << 20;

/// Reads the ranges of process `pid`, in order.
///
/// # Errors
/// The file cannot be read completely, or the process no longer has memory.
pub fn read(pid: u32) -> io::Result<Vec<(u64, u64)>> {
    parse(BufReader::new(File::open(format!("/proc/{pid}/maps"))?), MOST_BYTES)
}

fn parse(text: impl BufRead, most_bytes: u64) -> io::Result<Vec<(u64, u64)>> {
    let mut text = text.take(most_bytes);
    let (mut ranges, mut line) = (Vec::new(), Vec::new());
    while text.read_until(b'\n', &mut line)? > 0 {
        // If part of the list were missing, that memory would look unmapped.
        let whole = line.last() == Some(&b'\n');
        let range = std::str::from_utf8(line.split(|byte| *byte == b' ').next().unwrap_or_default()).ok();
        let range = range.filter(|_| whole).and_then(|range| range.split_once('-'));
        let ends = range.and_then(|(start, end)| Some((hex(start)?, hex(end)?)));
        ranges.push(ends.ok_or(io::ErrorKind::InvalidData)?);
        line.clear();
    }
    if text.limit() == 0 || ranges.is_empty() { Err(io::ErrorKind::InvalidData.into()) } else { Ok(ranges) }
}

fn hex(digits: &str) -> Option<u64> {
    u64::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_a_range_and_a_part_of_the_list_is_an_error() {
        let text =
            b"1000-3000 r--p 00000000 fe:00 99    /usr/bin/x\n7f00-8f00 rw-p 00000000 00:00 0 \nff00-ff10 r-xp 0\n";
        let ranges = parse(&text[..], 1000).unwrap();
        assert_eq!(ranges, [(0x1000, 0x3000), (0x7f00, 0x8f00), (0xff00, 0xff10)]);
        for most in 0..=text.len() as u64 {
            assert!(parse(&text[..], most).is_err(), "{most} bytes of it");
        }
        for wrong in [&b""[..], b"\n", b"1000 r--p\n", b"1000-x r--p\n", b"1000-2000 r--p"] {
            assert!(parse(wrong, 1000).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn our_own_memory_is_mapped() {
        let ranges = read(std::process::id()).unwrap();
        let here = &raw const ranges as u64;
        assert!(ranges.iter().any(|(start, end)| (*start..*end).contains(&here)));
        assert!(ranges.is_sorted());
    }
}
