//! Damaged and hostile files give an error or a partial image; they never cause a panic, nor an allocation of a size
//! they claim.

use super::*;
use crate::{KernelRules, Table, analyse};
use heapbpf_testing::skipped;

const LIBC: &str = "/lib/x86_64-linux-gnu/libc.so.6";

/// xorshift64*, seeded: every run damages the same places.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % end.max(1) as u64) as usize
    }
}

/// The smallest installed library with an allocator, so that a run is quick.
fn library() -> Option<Vec<u8>> {
    let paths =
        ["/usr/lib/x86_64-linux-gnu/libmimalloc.so.2.0", "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", LIBC];
    let bytes = paths.iter().find_map(|path| std::fs::read(path).ok());
    if bytes.is_none() {
        skipped(format_args!("none of {paths:?} is there"));
    }
    bytes
}

fn plan(bytes: &[u8]) {
    let Ok(image) = FileImage::read(&bytes) else { return };
    let rules = KernelRules::of(Machine::X86_64, (6, 18));
    if let Ok(planned) = analyse(&image, &rules, &Table::default()) {
        for site in &planned.sites {
            assert!(site.site.offset < bytes.len() as u64, "{} is placed behind the file's end", site.function);
        }
    }
}

#[test]
fn a_file_cut_anywhere() {
    let Some(bytes) = library() else { return };
    let mut random = Random(1);
    for length in (0..80).chain((0..60).map(|_| random.below(bytes.len()))) {
        plan(&bytes[..length]);
    }
}

#[test]
fn bytes_changed_anywhere() {
    let Some(whole) = library() else { return };
    let mut random = Random(2);
    // Headers and tables are at the beginning and the end.
    let tables = whole.len().min(4096);
    for round in 0..150 {
        let mut bytes = whole.clone();
        for _ in 0..1 + random.below(16) {
            let at = match round % 3 {
                0 => random.below(tables),
                1 => bytes.len() - 1 - random.below(tables),
                _ => random.below(bytes.len()),
            };
            bytes[at] = if random.below(2) == 0 { 0xff } else { random.below(256) as u8 };
        }
        plan(&bytes);
    }
}

#[test]
fn sizes_at_their_limits() {
    let Some(whole) = library() else { return };
    let section_headers = u64::from_le_bytes(whole[0x28..0x30].try_into().unwrap()) as usize;
    let count = usize::from(u16::from_le_bytes(whole[0x3c..0x3e].try_into().unwrap()));
    for section in 0..count {
        // sh_addr, sh_offset, sh_size, sh_link, sh_entsize.
        for (field, bytes) in [(0x10, 8), (0x18, 8), (0x20, 8), (0x28, 4), (0x38, 8)] {
            for value in [u64::MAX, (1 << 40) + 7] {
                let mut file = whole.clone();
                let at = section_headers + section * 64 + field;
                file[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
                plan(&file);
            }
        }
    }
}

#[test]
fn what_is_no_program_is_said_to_be_none() {
    let error = |bytes: &[u8]| FileImage::read(&bytes).unwrap_err().to_string();
    assert_eq!(error(b""), "not an ELF file");
    assert_eq!(error(b"#!/bin/sh\nexec true # a script, longer than a header's identification\n"), "not an ELF file");
    let mut header = vec![0; 64];
    header[..7].copy_from_slice(b"\x7fELF\x01\x01\x01");
    assert!(error(&header).contains("64-bit"));
    header[4] = 2;
    header[0x14] = 1;
    header[0x12] = 243;
    assert!(error(&header).contains("ELF machine 243"), "{}", error(&header));
}

#[test]
fn what_libc_says_of_itself() {
    let Ok(file) = std::fs::File::open(LIBC) else {
        skipped(format_args!("{LIBC} is not there"));
        return;
    };
    let image = FileImage::read(&file).unwrap();
    assert_eq!((image.machine, image.kind), (Machine::X86_64, FileKind::Library));
    assert_eq!(image.soname.as_deref(), Some("libc.so.6"));
    assert_eq!(image.build_id.len(), 20);
    assert!(image.needed.iter().any(|n| n.starts_with("ld-linux")), "{:?}", image.needed);
    assert!(image.versions.iter().any(|v| v == "GLIBC_2.2.5") && !image.is_go);
    let (_, malloc) = image.functions().find(|(name, _)| *name == "malloc").unwrap();
    assert!(image.bounds.binary_search_by_key(&malloc.address, |b| b.0).is_ok(), "the unwind tables know malloc");
    assert!(image.is_executable(malloc.address) && malloc.exported && !malloc.indirect);
    assert!(image.functions().any(|(name, s)| name == "memcpy" && s.indirect));
}

#[test]
fn sections_that_claim_the_same_bytes_many_times() {
    const SECTIONS: u16 = 8;
    const CLAIMED_BYTES: u64 = 100 << 20;
    let Some(mut bytes) = library() else { return };
    let (at, old) = (bytes.len() as u64, u64::from_le_bytes(bytes[0x28..0x30].try_into().unwrap()) as usize);
    let count = u16::from_le_bytes(bytes[0x3c..0x3e].try_into().unwrap());
    bytes.extend_from_within(old..old + usize::from(count) * 64);
    // More sections of code, each of them all of the file, most of which is a hole.
    for _ in 0..SECTIONS {
        let mut header = [0; 64];
        header[4..8].copy_from_slice(&elf::SHT_PROGBITS.0.to_le_bytes());
        header[8..16].copy_from_slice(&6_u64.to_le_bytes());
        header[0x20..0x28].copy_from_slice(&CLAIMED_BYTES.to_le_bytes());
        bytes.extend(header);
    }
    bytes[0x28..0x30].copy_from_slice(&at.to_le_bytes());
    bytes[0x3c..0x3e].copy_from_slice(&(count + SECTIONS).to_le_bytes());
    let mut file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut file, &bytes).unwrap();
    file.set_len(CLAIMED_BYTES).unwrap();
    let image = FileImage::read(&file).unwrap();
    let read: usize = image.code().iter().map(|code| code.bytes.len()).sum();
    assert!(read as u64 <= CODE_READ_MAX_BYTES && image.damaged.contains(&"code"), "{read} bytes, {:?}", image.damaged);
}

/// A file that counts what is read of it.
struct Counted(std::fs::File, std::sync::atomic::AtomicU64);

impl Image for Counted {
    fn length_bytes(&self) -> std::io::Result<u64> {
        self.0.length_bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        self.1.fetch_add(buffer.len() as u64, std::sync::atomic::Ordering::Relaxed);
        self.0.read_at(offset, buffer)
    }
}

#[test]
fn most_of_a_large_file_is_not_read() {
    let Some(bytes) = library() else { return };
    let mut file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut file, &bytes).unwrap();
    file.set_len(150 << 20).unwrap();
    let file = Counted(file, Default::default());
    let image = FileImage::read_if(&file, "", |_| false).unwrap();
    assert!(image.functions().count() > 10 && image.code().is_empty() && image.build_id.is_empty());
    let read = file.1.into_inner();
    assert!(read < bytes.len() as u64, "{read} bytes of a library of {}", bytes.len());
}
