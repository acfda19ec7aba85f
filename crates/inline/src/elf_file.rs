//! A minimal ELF file around the blob's text, so that tools can attach by name, and unwind.

use crate::abi::{CODE, DESCRIPTION, STUBS, TABLES, TEXT_BYTES};
use crate::code::{Entries, FRAME_BYTES};
use crate::frame_rows::FrameRow;

/// A function in the file.
#[derive(Clone, Debug)]
pub(crate) struct Symbol {
    pub(crate) name: String,
    /// Address, which is also the file offset.
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

const HEADER_BYTES: u16 = 64;
const SEGMENT_BYTES: u16 = 56;
const SECTION_BYTES: u16 = 64;

/// Numbers of the sections, in order.
const TEXT_SECTION: u16 = 1;
const STRINGS_SECTION: u32 = 3;
const NAMES_SECTION: u16 = 5;

/// A section to describe.
struct Section {
    name: &'static str,
    kind: u32,
    flags: u64,
    offset: u64,
    bytes: u64,
    link: u32,
    info: u32,
    entry: u64,
}

/// Appends integers in little-endian order.
struct Writer(Vec<u8>);

impl Writer {
    fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }
    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }
    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }
    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }
    fn align(&mut self) -> u64 {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
        self.0.len() as u64
    }
}

/// Unwind information: entries of the shared code, and rows of stubs by offset in the file.
type Framed<'a> = (&'a Entries, &'a [FrameRow]);

/// Makes `text` an ELF file, with a header at its beginning, and symbols and other sections from [`DESCRIPTION`] on.
/// All of that is mapped, so it can be read as long as the code exists. If the symbols do not fit, the last ones are
/// left out.
pub(crate) fn wrap(text: &[u8], symbols: &[Symbol], frames: Framed<'_>) -> Vec<u8> {
    let mut named = symbols.len();
    loop {
        let mut file = describe(text, &symbols[..named], frames);
        if file.len() as u64 <= TEXT_BYTES || named == 0 {
            file.resize(TEXT_BYTES as usize, 0);
            return file;
        }
        named /= 2;
    }
}

fn describe(text: &[u8], symbols: &[Symbol], framed: Framed<'_>) -> Vec<u8> {
    let mut strings = vec![0];
    let mut table = Writer(vec![0; 24]);
    for symbol in symbols {
        // STT_FUNC, STB_GLOBAL
        table.u32(strings.len() as u32).bytes(&[0x12, 0]).u16(TEXT_SECTION).u64(symbol.address).u64(symbol.bytes);
        strings.extend_from_slice(symbol.name.as_bytes());
        strings.push(0);
    }
    let mut file = Writer(text[..DESCRIPTION as usize].to_vec());
    let frames_at = file.align();
    let frames = frames(framed, frames_at);
    file.bytes(&frames);
    let table_at = file.align();
    file.bytes(&table.0);
    let strings_at = file.align();
    file.bytes(&strings);
    let section =
        |name, kind, flags, offset, bytes| Section { name, kind, flags, offset, bytes, link: 0, info: 0, entry: 0 };
    let mut sections = vec![
        // SHF_ALLOC, SHF_EXECINSTR
        section(".text", 1, 6, CODE, DESCRIPTION - CODE),
        Section {
            link: STRINGS_SECTION,
            info: 1,
            entry: 24,
            ..section(".dynsym", 11, 2, table_at, table.0.len() as u64)
        },
        section(".dynstr", 3, 2, strings_at, strings.len() as u64),
        section(".eh_frame", 1, 2, frames_at, frames.len() as u64),
    ];
    let mut names = vec![0];
    let mut name_offsets = vec![];
    for name in sections.iter().map(|s| s.name).chain([".shstrtab"]) {
        name_offsets.push(names.len() as u32);
        names.extend_from_slice(name.as_bytes());
        names.push(0);
    }
    let names_at = file.align();
    file.bytes(&names);
    sections.push(section(".shstrtab", 3, 0, names_at, names.len() as u64));
    let sections_at = file.align();
    file.bytes(&[0; SECTION_BYTES as usize]);
    for (section, name) in sections.iter().zip(name_offsets) {
        let address = if section.flags == 0 { 0 } else { section.offset };
        file.u32(name).u32(section.kind).u64(section.flags).u64(address).u64(section.offset).u64(section.bytes);
        file.u32(section.link).u32(section.info).u64(8).u64(section.entry);
    }
    let header = header(sections_at, sections.len() as u16 + 1);
    file.0[..header.len()].copy_from_slice(&header);
    file.0
}

/// The ELF header and the one segment, which covers the text.
fn header(sections_at: u64, sections: u16) -> Vec<u8> {
    let mut header = Writer(b"\x7fELF\x02\x01\x01".to_vec());
    header.bytes(&[0; 9]);
    // ET_DYN, EM_X86_64
    header.u16(3).u16(62).u32(1).u64(0).u64(u64::from(HEADER_BYTES)).u64(sections_at).u32(0);
    header.u16(HEADER_BYTES).u16(SEGMENT_BYTES).u16(1).u16(SECTION_BYTES).u16(sections).u16(NAMES_SECTION);
    // PT_LOAD, read and execute
    header.u32(1).u32(5).u64(0).u64(0).u64(0).u64(TEXT_BYTES).u64(TEXT_BYTES).u64(4096);
    header.0
}

/// `.eh_frame` at address `at`: where the return address is, in the shared code and in the stubs.
fn frames((entries, stubs): Framed<'_>, at: u64) -> Vec<u8> {
    let mut frames = Writer(Vec::new());
    // Version 1, "zR", code in bytes, data in units of −8, the return address is column 16, addresses are relative and
    // signed (0x1b); DW_CFA_def_cfa rsp + 8, DW_CFA_offset: the return address at −8.
    let common = *b"\x01zR\0\x01\x78\x10\x01\x1b\x0c\x07\x08\x90\x01\0\0";
    frames.u32(4 + common.len() as u32).u32(0).bytes(&common);
    let mut describe = |start: u64, end: u64, rows: &[u8]| {
        let mut rows = rows.to_vec();
        rows.resize((rows.len() + 1).next_multiple_of(4) - 1, 0);
        let begins = frames.0.len() as u64;
        frames.u32(4 + 4 + 4 + 1 + rows.len() as u32).u32(begins as u32 + 4);
        let here = at + frames.0.len() as u64;
        frames.u32(start.wrapping_sub(here) as u32).u32((end - start) as u32).bytes(&[0]).bytes(&rows);
    };
    // DW_CFA_advance_loc2, DW_CFA_def_cfa_offset
    let [low, high] = (entries.framed as u16).to_le_bytes();
    let [length_low, length_high] = ((entries.framed_end - entries.framed) as u16).to_le_bytes();
    let framed = FRAME_BYTES as u8 + 8;
    describe(CODE, TABLES, &[3, low, high, 0x0e, framed, 3, length_low, length_high, 0x0e, 8]);
    // DW_CFA_advance_loc2
    let mut rows = Vec::new();
    let mut last = STUBS as u32;
    for row in stubs {
        rows.push(3);
        rows.extend_from_slice(&((row.at - last) as u16).to_le_bytes());
        rows.extend_from_slice(&row.rules);
        last = row.at;
    }
    describe(STUBS, DESCRIPTION, &rows);
    frames.u32(0);
    frames.0
}
