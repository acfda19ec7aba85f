//! Files with false numbers. They must give an error or part of the file: no panic, and no read or loop of the claimed
//! size.

use super::Watched;
use super::build::{Load, PROGRAM_HEADER_BYTES, Part, file, header_at, note, put, with_notes};
use crate::{
    Elf, ElfError, ElfFile, MAX_NAME_BYTES, MAX_NAMES, MAX_SECTIONS, MAX_SEGMENTS, Pieces, Symbols, build_id,
    unpack_debugdata,
};

/// Reads everything that the crate can read.
fn all_of(image: &[u8]) -> bool {
    let _ = build_id::of(&image);
    let Ok(elf) = Elf::read(&image) else { return false };
    for section in &elf.sections {
        let _ = (section.plain_bytes(&image), section.read(&image, 1 << 20).map(|bytes| unpack_debugdata(&bytes)));
    }
    let pieces = Pieces::of(&image);
    let file = ElfFile::parse(&pieces).expect("it was parsed once");
    let mut symbols = Symbols::default();
    let _ = (
        symbols.add_dynamic(&image, &file),
        symbols.add_full(&image, &file),
        file.dynamic(),
        file.interpreter(),
        file.versions(),
    );
    let names = file.dynamic_names();
    let named = file.relocations().filter_map(|relocation| names.get(relocation.symbol?)).count();
    named + symbols.iter().count() <= image.len()
}

/// A file with one of everything.
fn sample() -> Vec<u8> {
    let strings = b"\0malloc\0libc.so.6\0".to_vec();
    let symbol = [&1_u32.to_le_bytes()[..], &[0x12, 0, 1, 0], &[0; 16]].concat();
    let start = 64 + 3 * PROGRAM_HEADER_BYTES as u64;
    let id = note(b"GNU\0", 3, &[7; 20], false);
    let loads = [
        Load { kind: 1, flags: 5, offset: 0, address: 0, bytes: 0x1000 },
        Load { kind: 4, flags: 4, offset: start, address: start, bytes: id.len() as u64 },
        Load { kind: 3, flags: 4, offset: start, address: start, bytes: 16 },
    ];
    let parts = [
        Part { name: ".note.gnu.build-id", kind: 7, bytes: id, ..Part::default() },
        Part { name: ".dynstr", kind: 3, bytes: strings, ..Part::default() },
        Part { name: ".dynsym", kind: 11, link: 2, bytes: symbol.repeat(3), ..Part::default() },
        Part { name: ".rela.dyn", kind: 4, link: 3, bytes: vec![1; 48], ..Part::default() },
        Part { name: ".gnu.version_d", kind: 0x6fff_fffd, link: 2, bytes: vec![1; 40], ..Part::default() },
        Part { name: ".debug_info", kind: 1, flags: 0x800, bytes: vec![1; 40], ..Part::default() },
    ];
    file(&loads, &parts)
}

#[test]
fn a_file_cut_anywhere() {
    let whole = sample();
    assert!(all_of(&whole));
    for length in 0..whole.len() {
        all_of(&whole[..length]);
    }
    assert!(matches!(Elf::read(&&whole[..63]), Err(ElfError::Io(_))));
    assert!(matches!(Elf::read(&&whole[..100]), Err(ElfError::Table { what: "program headers", .. })));
    let cut = Elf::read(&&whole[..whole.len() - 1]).unwrap();
    assert!(cut.sections.is_empty() && cut.sections_are_damaged && cut.section_headers_at.is_none());
    assert_eq!((cut.segments.len(), cut.tables.len()), (3, 2));
}

#[test]
fn every_byte_changed() {
    let whole = sample();
    for at in 0..whole.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            all_of(&bytes);
            assert!(build_id::of(&bytes).is_none_or(|id| id.len() <= build_id::MAX_BYTES));
        }
    }
}

#[test]
fn counts_beyond_the_limits() {
    let whole = sample();
    let with = |at: usize, value: &[u8]| {
        let mut bytes = whole.clone();
        put(&mut bytes, at, value);
        // As long as the tables claim, so that the limit rejects them and not the length.
        Watched::new(bytes, 1 << 40)
    };
    let many = with(56, &(MAX_SEGMENTS as u16 + 1).to_le_bytes());
    assert!(matches!(Elf::read(&many), Err(ElfError::Malformed("program headers"))));
    let most = with(56, &(MAX_SEGMENTS as u16).to_le_bytes());
    assert_eq!(Elf::read(&most).unwrap().segments.len(), MAX_SEGMENTS);
    // The real count is in section 0.
    let mut extended = with(56, &0xffff_u16.to_le_bytes());
    put(&mut extended.bytes, header_at(&whole, 0) + 44, &u32::MAX.to_le_bytes());
    assert!(matches!(Elf::read(&extended), Err(ElfError::Malformed("program headers"))));

    let mut sections = with(60, &0_u16.to_le_bytes());
    let place = header_at(&whole, 0) + 32;
    for (count, is_read) in [(MAX_SECTIONS as u64, true), (MAX_SECTIONS as u64 + 1, false), (u64::MAX, false)] {
        put(&mut sections.bytes, place, &count.to_le_bytes());
        let elf = Elf::read(&sections).unwrap();
        assert_eq!((elf.sections.len() == MAX_SECTIONS, elf.sections_are_damaged), (is_read, !is_read), "{count}");
    }
    assert!(sections.read_bytes() < 16 << 20, "{}", sections.read_bytes());
}

#[test]
fn headers_of_the_wrong_size() {
    for (at, is_fatal) in [(54, true), (58, false)] {
        let mut bytes = sample();
        put(&mut bytes, at, &[1, 0]);
        assert_eq!(Elf::read(&bytes).is_err(), is_fatal);
        assert!(is_fatal || Elf::read(&bytes).unwrap().sections_are_damaged);
    }
}

#[test]
fn sections_past_the_end_and_larger_than_allowed() {
    for (field, value) in [(24, u64::MAX - 3), (24, 1 << 40), (32, u64::MAX), (32, 1 << 40)] {
        let mut bytes = sample();
        let at = header_at(&bytes, 2);
        put(&mut bytes, at + field, &value.to_le_bytes());
        all_of(&bytes);
        let elf = Elf::read(&bytes).unwrap();
        let read = elf.section(".dynstr").unwrap().read(&bytes, 1 << 20);
        assert!(matches!(read, Err(ElfError::Io(_) | ElfError::TooLarge { .. })), "{read:?}");
        let pieces = Pieces::of(&bytes);
        let file = ElfFile::parse(&pieces).unwrap();
        assert!(file.section_bytes(elf.section(".dynstr").unwrap()).is_err());
        assert!(!Symbols::default().add_dynamic(&bytes, &file), "its strings are damaged");
    }
}

#[test]
fn sections_that_claim_the_same_bytes() {
    const CLAIMED_BYTES: u64 = 1 << 20;
    let part = |index: u64| Part { name: ".rela", kind: 4, flags: index, ..Part::default() };
    let mut bytes = file(&[], &(0..100).map(part).collect::<Vec<_>>());
    for section in 1..=100 {
        let at = header_at(&bytes, section);
        // Each begins at another offset, so that none of them has been read before.
        put(&mut bytes, at + 24, &(24 * section as u64).to_le_bytes());
        put(&mut bytes, at + 32, &(CLAIMED_BYTES / 24 * 24).to_le_bytes());
    }
    let image = Watched::new(bytes, 4 * CLAIMED_BYTES);
    let limit = 10 * CLAIMED_BYTES;
    let pieces = Pieces::within(&image, 2 * CLAIMED_BYTES, limit);
    let file = ElfFile::parse(&pieces).unwrap();
    let entries = file.relocations().count() as u64;
    assert!((5 * CLAIMED_BYTES..limit).contains(&(entries * 24)), "{entries} relocations");
    assert!(image.read_bytes() <= limit, "{} bytes", image.read_bytes());
    // No single piece exceeds its limit.
    let small = Pieces::within(&image, 1 << 16, limit);
    assert_eq!(ElfFile::parse(&small).unwrap().relocations().count(), 0);
}

#[test]
fn most_of_a_large_file_is_not_read() {
    let image = Watched::new(sample(), 150 << 20);
    let elf = Elf::read(&image).unwrap();
    assert!(build_id::of(&image).is_some() && !elf.sections.is_empty());
    let pieces = Pieces::of(&image);
    let mut symbols = Symbols::default();
    assert!(symbols.add_dynamic(&image, &ElfFile::parse(&pieces).unwrap()));
    assert!(image.read_bytes() < 16 << 10, "{}", image.read_bytes());
}

#[test]
fn notes_that_lead_nowhere() {
    let id = note(b"GNU\0", 3, &[7; 20], false);
    let of = |notes: &[u8]| build_id::of(&with_notes(true, false, notes));
    // Empty notes up to the maximum size; the note after them is found.
    assert_eq!(of(&[vec![0; 12 * 5000], id.clone()].concat()).as_deref(), Some(&[7; 20][..]));
    assert_eq!(of(&[vec![0; 12 * 6000], id.clone()].concat()), None, "more notes than are looked into");
    for (at, bytes) in [(0, u32::MAX), (4, u32::MAX), (0, u32::MAX - 15), (4, u32::MAX - 15), (0, 1 << 31)] {
        let mut first = note(b"GNU\0", 1, &[1; 4], false);
        put(&mut first, at, &bytes.to_le_bytes());
        assert_eq!(of(&[first, id.clone()].concat()), None);
    }
    for length in [0, 65, 4096] {
        assert_eq!(of(&note(b"GNU\0", 3, &vec![1; length], false)), None, "{length} bytes are no build ID");
    }
    // More note segments than are read.
    let start = 64 + 1000 * PROGRAM_HEADER_BYTES as u64;
    let load = Load { kind: 4, flags: 4, offset: start, address: start, bytes: 64 << 10 };
    let image = Watched::new(file(&vec![load; 1000], &[]), 1 << 30);
    assert_eq!(build_id::of(&image), None);
    assert!(image.read_bytes() < 2 << 20, "{}", image.read_bytes());
}

#[test]
fn version_definitions_without_end() {
    // Each claims that its name is at its own beginning, where the version number 1 doubles as an offset into the
    // strings. `next` is the distance to the next definition.
    let definitions = |next: u32| {
        let mut one = vec![0; 20];
        put(&mut one, 0, &1_u16.to_le_bytes());
        put(&mut one, 6, &1_u16.to_le_bytes());
        put(&mut one, 16, &next.to_le_bytes());
        let definitions =
            Part { name: ".defs", kind: 0x6fff_fffd, link: 2, bytes: one.repeat(20_000), ..Part::default() };
        let strings = Part { name: ".strings", kind: 3, bytes: b"\0A_1.0\0".to_vec(), ..Part::default() };
        ElfFile::parse(file(&[], &[definitions, strings]).as_slice()).unwrap().versions()
    };
    let many = definitions(20);
    assert_eq!((many.len(), &*many[0]), (MAX_NAMES, "A_1.0"));
    assert_eq!(definitions(0), ["A_1.0"], "the last one");
    assert_eq!(definitions(u32::MAX), Vec::<String>::new());
    // Reading overlapping definitions terminates.
    assert!(definitions(1).len() <= MAX_NAMES && definitions(4).len() <= MAX_NAMES);
}

#[test]
fn names_that_do_not_end() {
    let symbol = |name: u32| [&name.to_le_bytes()[..], &[0x12, 0, 1, 0], &[0; 16]].concat();
    let mut strings = vec![b'a'; 1 << 20];
    put(&mut strings, (1 << 20) - 6, b"\0free\0");
    let symbols = [symbol(0), symbol((1 << 20) - 5), symbol(u32::MAX), symbol((1 << 20) - 7 - MAX_NAME_BYTES as u32)];
    let parts = [
        Part { name: ".symtab", kind: 2, link: 2, bytes: symbols.concat(), ..Part::default() },
        Part { name: ".strtab", kind: 3, bytes: strings, ..Part::default() },
    ];
    let image = file(&[], &parts);
    let mut symbols = Symbols::default();
    assert!(symbols.add_full(&image, &ElfFile::parse(image.as_slice()).unwrap()));
    let names: Vec<&str> = symbols.iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["", "free", "", ""]);
}

#[test]
fn what_the_system_says_is_told() {
    let refusing = |refused_from| Watched { refused_from, ..Watched::new(sample(), 1 << 20) };
    let error = |refused_from| Elf::read(&refusing(refused_from)).unwrap_err().to_string();
    assert_eq!([error(0), error(64)], ["the disk is on fire"; 2]);
    let elf = Elf::read(&refusing(64 + 3 * PROGRAM_HEADER_BYTES as u64)).unwrap();
    assert!(elf.sections_are_damaged && elf.sections.is_empty());
    assert_eq!(Elf::read(&vec![1; 64]).unwrap_err().to_string(), "not a 64-bit little-endian ELF file");
}

#[test]
fn a_file_that_shrinks_gives_an_error() {
    let shrinking = tempfile::tempfile().unwrap();
    std::os::unix::fs::FileExt::write_all_at(&shrinking, &sample(), 0).unwrap();
    let elf = Elf::read(&shrinking).unwrap();
    shrinking.set_len(100).unwrap();
    let section = elf.section(".dynstr").unwrap();
    assert!(matches!(section.read(&shrinking, 1 << 20), Err(ElfError::Io(_))));
    assert!(Elf::read(&shrinking).is_err());
}

/// A symbol table can be as long as the file claims, and most of its entries may not be functions.
#[test]
fn symbol_tables_are_read_in_pieces_and_names_once() {
    const SYMBOLS: usize = 300_000;
    let function = [&1_u32.to_le_bytes()[..], &[0x12, 0, 1, 0], &[0; 16]].concat();
    let data = [&0_u32.to_le_bytes()[..], &[0x11, 0, 1, 0], &[0; 16]].concat();
    let mut table = data.repeat(SYMBOLS - 1);
    table.extend(&function);
    let parts = [
        Part { name: ".symtab", kind: 2, link: 2, bytes: table, ..Part::default() },
        Part { name: ".strtab", kind: 3, bytes: b"\0last\0".to_vec(), ..Part::default() },
    ];
    let bytes = file(&[], &parts);
    let length = bytes.len() as u64;
    let image = Watched::new(bytes, length);
    let pieces = Pieces::of(&image);
    let mut symbols = Symbols::default();
    assert!(symbols.add_full(&image, &ElfFile::parse(&pieces).unwrap()));
    assert_eq!(symbols.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["last"]);
    let largest = image.reads.lock().unwrap().iter().map(|(_, bytes)| *bytes).max();
    assert!(largest.is_some_and(|bytes| bytes <= 2 << 20) && image.read_bytes() <= length, "{largest:?}");
}
