//! What is read of a file and what is not: never more than a bound, whatever its headers claim. (`fuzzed` and the tests
//! of `heapbpf-elf` cut and change files anywhere.)

use super::*;
use heapbpf_testing::skipped;

const LIBC: &str = "/lib/x86_64-linux-gnu/libc.so.6";

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

#[test]
fn what_is_no_program_is_said_to_be_none() {
    let error = |bytes: &[u8]| FileImage::read_if(&bytes, "", |_| true).unwrap_err().to_string();
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
    let image = FileImage::read_if(&file, "", |_| true).unwrap();
    assert_eq!((image.machine, image.kind), (Machine::X86_64, FileKind::Library));
    assert_eq!(image.soname.as_deref(), Some("libc.so.6"));
    assert_eq!(image.build_id.len(), 20);
    assert!(image.needed.iter().any(|n| n.starts_with("ld-linux")), "{:?}", image.needed);
    assert!(image.versions.iter().any(|v| v == "GLIBC_2.2.5") && image.runtime_by_section.is_none());
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
    // More sections of code. Each covers the whole file, most of which is a hole.
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
    let image = FileImage::read_if(&file, "", |_| true).unwrap();
    assert!(image.code.iter().all(|code| code.bytes.is_none()) && image.damaged.contains(&"code"));
    let read: usize = image.into_code().iter().map(|code| code.bytes.len()).sum();
    assert!(read > 0 && read as u64 <= CODE_READ_MAX_BYTES, "{read} bytes");
}
