//! Tests on well-formed files.

use std::io::Write as _;

use super::build::{Load, Part, file, note, with_notes};
use crate::debug_link::{self, DebugLink};
use crate::{Dynamic, Elf, ElfError, ElfFile, Pieces, Relocation, Symbols, build_id};

const ID: [u8; 20] = [7; 20];

#[test]
fn addresses_and_file_offsets() {
    let loads = [
        Load { kind: 1, flags: 4, offset: 0, address: 0x40_0000, bytes: 0x2000 },
        Load { kind: 1, flags: 5, offset: 0x1000, address: 0x50_1000, bytes: 0x800 },
        Load { kind: 0x6474_e550, flags: 4, offset: 0x10, address: 0x40_0010, bytes: 0x20 },
    ];
    let elf = Elf::read(&file(&loads, &[])).unwrap();
    assert_eq!((elf.entry, elf.machine), (0x1000, 62));
    assert_eq!(elf.tables[..2], [(0, 64), (64, 3 * 56)]);
    // Two segments contain the byte; the executable one is preferred.
    assert_eq!(elf.address_of_offset(0x1010), Some(0x50_1010));
    assert_eq!(elf.address_of_offset(0x1900), Some(0x40_1900));
    assert_eq!((elf.address_of_offset(0x2000), elf.offset_of_address(0x50_1800)), (None, None));
    assert_eq!(elf.offset_of_address(0x50_1010), Some(0x1010));
    assert_eq!(elf.segment_end(0x50_1010), Some(0x50_1800));
    assert_eq!(elf.address_in_code(0x1000, 0x10, 4096), Some(0x50_1010));
    assert_eq!(elf.address_in_code(0x1000, 0x1000, 4096), None);
    // Mapped whole, and from the middle on; an offset past its end belongs to another segment.
    let bias = |start, offset| elf.segments[1].bias(start, offset, 4096);
    assert_eq!([bias(0x7f50_1000, 0x1000), bias(0x7f50_1400, 0x1400)], [Some(0x7f00_0000); 2]);
    assert_eq!([bias(0x7f50_1800, 0x1800), bias(0x7f50_0000, 0)], [None; 2]);
    assert!(elf.segments.iter().any(|segment| segment.kind == crate::PT_GNU_EH_FRAME));
}

#[test]
fn sections_by_name() {
    let parts = [
        Part { name: ".text", kind: 1, flags: 6, address: 0x1000, bytes: vec![0x90; 16], ..Part::default() },
        Part { name: ".bss", kind: 8, address: 0x2000, ..Part::default() },
    ];
    let image = file(&[], &parts);
    let elf = Elf::read(&image).unwrap();
    let text = elf.section(".text").unwrap();
    assert_eq!((text.address, text.is_code(), text.is_compressed()), (0x1000, true, false));
    assert_eq!((text.read(&image, 16).unwrap(), text.plain_bytes(&image).unwrap()), (vec![0x90; 16], 16));
    assert!(matches!(text.read(&image, 15), Err(ElfError::TooLarge { bytes: 16, limit: 15, .. })));
    // It has no bytes in the file.
    assert!(elf.section(".bss").is_none() && !elf.is_debug_only() && !elf.sections_are_damaged);
    assert_eq!(elf.section_headers_at, Some(image.len() as u64 - 4 * 64));
}

#[test]
fn a_build_id_of_every_class_and_byte_order() {
    for (is_wide, is_big) in [(false, false), (false, true), (true, false), (true, true)] {
        let other = note(b"GNU\0", 5, &[1; 16], is_big);
        let image = with_notes(is_wide, is_big, &[other, note(b"GNU\0", 3, &ID, is_big)].concat());
        assert_eq!(build_id::of(&image).as_deref(), Some(&ID[..]), "wide {is_wide}, big {is_big}");
        assert_eq!(matches!(Elf::read(&image), Err(ElfError::NotSixtyFourBit)), !is_wide || is_big);
    }
}

#[test]
fn a_build_id_in_a_section_only() {
    let notes = Part { name: ".note", kind: 7, bytes: note(b"GNU\0", 3, &ID, false), ..Part::default() };
    assert_eq!(build_id::of(&file(&[], &[notes])).as_deref(), Some(&ID[..]));
    assert_eq!(build_id::of(&file(&[], &[])), None);
}

#[test]
fn compressed_sections() {
    let plain = b"the same again, ".repeat(100);
    let packed = |kind: u32, bytes: u64| {
        let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(&plain).unwrap();
        let header = [kind.to_le_bytes().to_vec(), vec![0; 4], bytes.to_le_bytes().to_vec(), vec![0; 8]].concat();
        let bytes = [header, encoder.finish().unwrap()].concat();
        file(&[], &[Part { name: ".debug_info", kind: 1, flags: 0x800, bytes, ..Part::default() }])
    };
    let read = |image: &Vec<u8>, limit| {
        let elf = Elf::read(image).unwrap();
        elf.section(".debug_info").unwrap().read(image, limit)
    };
    let image = packed(1, plain.len() as u64);
    let elf = Elf::read(&image).unwrap();
    let section = elf.section(".debug_info").unwrap();
    assert_eq!((section.is_compressed(), section.flags_when_plain()), (true, 0));
    assert_eq!(section.plain_bytes(&image).unwrap(), plain.len() as u64);
    assert_eq!(read(&image, 1 << 20).unwrap(), plain);
    assert!(matches!(read(&image, plain.len() as u64 - 1), Err(ElfError::TooLarge { .. })));
    // Never more bytes than the header states, whatever the packed data holds.
    assert_eq!(read(&packed(1, 10), 1 << 20).unwrap(), plain[..10]);
    assert!(matches!(read(&packed(9, 10), 1 << 20), Err(ElfError::Malformed(_))));
    assert!(read(&packed(2, 10), 1 << 20).is_err(), "no zstd frame");
}

/// The bytes of a symbol in a symbol table.
fn symbol(name: u32, kind: u8, section: u16, address: u64) -> Vec<u8> {
    let [low, high] = section.to_le_bytes();
    [&name.to_le_bytes()[..], &[kind, 0, low, high], &address.to_le_bytes(), &8_u64.to_le_bytes()].concat()
}

#[test]
fn functions_and_relocations() {
    let strings = b"\0malloc\0free\0memcpy\0".to_vec();
    let symbols = [symbol(0, 0, 0, 0), symbol(1, 0x12, 0, 0), symbol(8, 0x12, 1, 0x40), symbol(13, 0x1a, 1, 0x80)];
    let relocation = |address: u64, info: u64, addend: i64| {
        [address.to_le_bytes(), info.to_le_bytes(), addend.to_le_bytes()].concat()
    };
    let relocations = [relocation(0x3000, (1 << 32) | 7, 0), relocation(0x3008, 37, 0x80)];
    let image = file(
        &[],
        &[
            Part { name: ".dynsym", kind: 11, link: 2, bytes: symbols.concat(), ..Part::default() },
            Part { name: ".dynstr", kind: 3, bytes: strings, ..Part::default() },
            Part { name: ".rela.plt", kind: 4, link: 1, bytes: relocations.concat(), ..Part::default() },
        ],
    );
    let pieces = Pieces::of(&image);
    let file = ElfFile::parse(&pieces).unwrap();
    let mut symbols = Symbols::default();
    assert!(symbols.add_dynamic(&image, &file) && symbols.add_full(&image, &file));
    let found: Vec<_> = symbols.iter().map(|(name, s)| (name, s.address, s.exported, s.indirect)).collect();
    assert_eq!(found, [("free", 0x40, true, false), ("memcpy", 0x80, true, true)], "defined ones");
    let relocations: Vec<_> = file.relocations().collect();
    assert_eq!(
        relocations,
        [
            Relocation { kind: 7, address: 0x3000, addend: 0, symbol: Some(1) },
            Relocation { kind: 37, address: 0x3008, addend: 0x80, symbol: None },
        ]
    );
    assert_eq!((file.dynamic_names().get(1), file.dynamic_names().get(4)), (Some("malloc"), None));
}

#[test]
fn what_the_dynamic_section_says() {
    let strings = b"\0libone.so\0libtwo.so.2\0/lib/loader.so\0".to_vec();
    let entries = [(14, 1_u64), (1, 11), (5, 0x70_0000), (10, strings.len() as u64), (0, 0)];
    let entries = entries.iter().flat_map(|(tag, value)| [*tag, *value]).flat_map(u64::to_le_bytes).collect();
    let parts = [
        Part { name: ".dynstr", kind: 3, bytes: strings.clone(), ..Part::default() },
        Part { name: ".dynamic", kind: 6, bytes: entries, ..Part::default() },
    ];
    let start = 64 + 3 * 56;
    let length = strings.len() as u64;
    let loads = [
        Load { kind: 1, flags: 4, offset: start, address: 0x70_0000, bytes: 0x100 },
        Load { kind: 2, flags: 4, offset: start + length, address: 0x70_0000, bytes: 5 * 16 },
        Load { kind: 3, flags: 4, offset: start + 23, address: 0x70_0000, bytes: 15 },
    ];
    let image = file(&loads, &parts);
    let file = ElfFile::parse(image.as_slice()).unwrap();
    let said = Dynamic { soname: Some("libone.so".into()), needed: vec!["libtwo.so.2".into()] };
    assert_eq!((file.dynamic().unwrap(), file.interpreter()), (said, Some("/lib/loader.so")));
}

#[test]
fn links_to_debug_files() {
    let link = |bytes: &[u8]| {
        let part = Part { name: ".gnu_debuglink", kind: 1, bytes: bytes.to_vec(), ..Part::default() };
        let image = file(&[], &[part]);
        debug_link::of(&image, &Elf::read(&image).unwrap())
    };
    let plain = DebugLink { name: "a.debug".into(), checksum: 0x0403_0201 };
    assert_eq!(link(b"a.debug\0\x01\x02\x03\x04"), Some(plain));
    for bad in [&b"../a.dbg\0\0\0\0\x01\x02\x03\x04"[..], b"..\0\0\x01\x02\x03\x04", b"a.debug", b"a.debug\0\x01", b""]
    {
        assert_eq!(link(bad), None, "{bad:?}");
    }
}

#[test]
fn our_own_program() {
    let program = std::fs::File::open("/proc/self/exe").unwrap();
    let elf = Elf::read(&program).unwrap();
    assert!(crate::is_elf(&program) && !crate::is_elf(&vec![0; 64]));
    assert!(elf.section(".text").is_some_and(crate::Section::is_code));
    let in_memory = std::fs::read("/proc/self/exe").unwrap();
    assert_eq!(build_id::of(&program), build_id::of(&in_memory));
    let pieces = Pieces::of(&program);
    let file = ElfFile::parse(&pieces).unwrap();
    let mut symbols = Symbols::default();
    assert!(symbols.add_full(&program, &file));
    assert!(symbols.iter().any(|(name, symbol)| name == "main" && elf.offset_of_address(symbol.address).is_some()));
}
