//! The file that is mapped into a target: header, shared code, tables and stubs, inside an ELF file with symbols, so
//! that tools can name its addresses.

use sampler_ebpf::abi::inline::{SYMBOL_FREEING, SYMBOL_REALLOCATING, SYMBOL_RESULT, SYMBOL_UNSEEN};
use sampler_ebpf::geometric::{LOGARITHMS, RECIPROCALS};
use zerocopy::IntoBytes;

use crate::abi::{
    BUCKET_BYTES, CODE, Code, DESCRIPTION, Entries, FRAME_BYTES, Function, HEADER, HEADER_RDRAND, Header, Lead, MAGIC,
    MAX_SET_LOG2, MIN_SET_LOG2, STUB_BYTES, STUBS, TABLES, TEXT_BYTES, VERSION,
};
use crate::error::BuildError;
use crate::frame_rows::FrameRow;
use crate::stub::Stub;

/// Settings that may differ between blobs for the same functions.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// One of [`CRITERION_BYTES`](crate::abi::CRITERION_BYTES),
    /// [`CRITERION_ALLOCATIONS`](crate::abi::CRITERION_ALLOCATIONS).
    pub criterion: u32,
    /// The set has capacity for 2^`set_log2` sampled blocks; half as many always find a place.
    pub set_log2: u32,
    /// Whether the machine has `rdrand`.
    pub has_rdrand: bool,
    /// See [`Header::file`].
    pub file: [u64; 3],
}

/// FNV-1a, 64 bits. It only serves to tell builds apart.
pub(crate) fn code_hash(code: &Code<'_>) -> u64 {
    code.bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Puts `bytes` at offset `at`.
fn put(image: &mut [u8], at: u64, bytes: &[u8]) {
    image[at as usize..][..bytes.len()].copy_from_slice(bytes);
}

/// Builds the whole file.
pub(crate) fn file(
    code: &Code<'_>,
    settings: &Settings,
    functions: &[Function],
    names: &[&str],
    (stubs, leads): (&[Stub], &[Lead]),
) -> Result<Vec<u8>, BuildError> {
    if code.bytes.len() as u64 > TABLES - CODE {
        return Err(BuildError::CodeTooLong(code.bytes.len()));
    }
    if !(MIN_SET_LOG2..=MAX_SET_LOG2).contains(&settings.set_log2) {
        return Err(BuildError::SetSize(settings.set_log2));
    }
    let mut image = vec![0; TEXT_BYTES as usize];
    let header = Header {
        magic: MAGIC,
        version: VERSION,
        criterion: settings.criterion,
        code_hash: code_hash(code),
        set_log2: settings.set_log2,
        functions: functions.len() as u32,
        set_mask: (8 << settings.set_log2) - BUCKET_BYTES,
        flags: if settings.has_rdrand { HEADER_RDRAND } else { 0 },
        file: settings.file,
        leads: std::array::from_fn(|at| leads.get(at).copied().unwrap_or_default()),
    };
    put(&mut image, HEADER, header.as_bytes());
    let mut functions = functions.to_vec();
    let original = |index: usize| (STUBS + index as u64 * STUB_BYTES) as u32 + stubs[index].original;
    for (index, function) in functions.iter_mut().enumerate() {
        function.original = original(index);
        function.twin = function.twin.checked_sub(1).map_or(0, |twin| original(twin as usize));
    }
    put(&mut image, HEADER + size_of::<Header>() as u64, functions.as_bytes());
    put(&mut image, CODE, code.bytes);
    put(&mut image, TABLES, LOGARITHMS.as_bytes());
    put(&mut image, TABLES + size_of_val(&LOGARITHMS) as u64, RECIPROCALS.as_bytes());
    let mut symbols = site_symbols(code);
    let mut frames = Vec::new();
    for (index, stub) in stubs.iter().enumerate() {
        let address = STUBS + index as u64 * STUB_BYTES;
        image[address as usize..][..STUB_BYTES as usize].fill(0xcc);
        put(&mut image, address, &stub.bytes);
        frames.extend(stub.frame.iter().map(|row| FrameRow { at: address as u32 + row.at, rules: row.rules.clone() }));
        let name = names.get(index).map_or_else(String::new, |name| format!("heapbpf_inline:{name}"));
        symbols.push(Symbol { name, address, bytes: STUB_BYTES });
    }
    Ok(wrap(&image, &symbols, (&code.entries, &frames)))
}

fn site_symbols(code: &Code<'_>) -> Vec<Symbol> {
    let shared = Symbol { name: "heapbpf_inline".to_owned(), address: CODE, bytes: code.bytes.len() as u64 };
    let sites = [SYMBOL_RESULT, SYMBOL_FREEING, SYMBOL_REALLOCATING, SYMBOL_UNSEEN].into_iter().zip(site_offsets(code));
    let site = |(name, address): (&str, u64)| Symbol { name: name.to_owned(), address, bytes: 5 };
    [shared].into_iter().chain(sites.map(site)).collect()
}

/// Offsets of the sites in the file, as uprobes take them: result, freeing, reallocating, unseen.
#[must_use]
pub fn site_offsets(code: &Code<'_>) -> [u64; 4] {
    let entries = &code.entries;
    [entries.site_result, entries.site_freeing, entries.site_reallocating, entries.site_unseen]
        .map(|offset| CODE + u64::from(offset))
}

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
