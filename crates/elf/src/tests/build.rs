//! Small ELF files, built field by field so that any field can be wrong.

/// A section to write; the contents follow each other.
#[derive(Clone, Default)]
pub struct Part {
    pub name: &'static str,
    pub kind: u32,
    pub flags: u64,
    pub address: u64,
    pub link: u32,
    pub bytes: Vec<u8>,
}

/// A program header to write.
#[derive(Clone, Copy, Default)]
pub struct Load {
    pub kind: u32,
    pub flags: u32,
    pub offset: u64,
    pub address: u64,
    pub bytes: u64,
}

pub const SECTION_HEADER_BYTES: usize = 64;
pub const PROGRAM_HEADER_BYTES: usize = 56;

/// A 64-bit little-endian file. Section 0 is empty, the parts are sections 1 and up, the last section holds the names.
pub fn file(loads: &[Load], parts: &[Part]) -> Vec<u8> {
    let mut names = vec![0];
    let mut bytes = vec![0; 64];
    for load in loads {
        bytes.extend(load.kind.to_le_bytes());
        bytes.extend(load.flags.to_le_bytes());
        for field in [load.offset, load.address, load.address, load.bytes, load.bytes, 4] {
            bytes.extend(field.to_le_bytes());
        }
    }
    let mut headers = vec![0; SECTION_HEADER_BYTES];
    let strings = Part { name: ".shstrtab", kind: 3, ..Part::default() };
    for part in parts.iter().chain([&strings]) {
        let name = names.len() as u32;
        names.extend(part.name.as_bytes());
        names.push(0);
        let contents = if part.name == strings.name { &names } else { &part.bytes };
        headers.extend([name.to_le_bytes(), part.kind.to_le_bytes()].concat());
        for field in [part.flags, part.address, bytes.len() as u64, contents.len() as u64] {
            headers.extend(field.to_le_bytes());
        }
        headers.extend([part.link.to_le_bytes(), [0; 4]].concat());
        headers.extend([4_u64.to_le_bytes(), [0; 8]].concat());
        bytes.extend(contents);
    }
    let at = bytes.len() as u64;
    bytes.extend(headers);
    bytes[..20].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x3e\0");
    put(&mut bytes, 20, &1_u32.to_le_bytes());
    put(&mut bytes, 24, &0x1000_u64.to_le_bytes());
    put(&mut bytes, 32, &64_u64.to_le_bytes());
    put(&mut bytes, 40, &at.to_le_bytes());
    let counts = [64, PROGRAM_HEADER_BYTES, loads.len(), SECTION_HEADER_BYTES, parts.len() + 2, parts.len() + 1];
    for (index, count) in counts.into_iter().enumerate() {
        put(&mut bytes, 52 + 2 * index, &(count as u16).to_le_bytes());
    }
    bytes
}

pub fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// File offset of a section's header.
pub fn header_at(bytes: &[u8], section: usize) -> usize {
    u64::from_le_bytes(bytes[40..48].try_into().unwrap()) as usize + section * SECTION_HEADER_BYTES
}

/// The bytes of a note, with 4-byte alignment.
pub fn note(name: &[u8], kind: u32, contents: &[u8], is_big: bool) -> Vec<u8> {
    let number = |value: u32| if is_big { value.to_be_bytes() } else { value.to_le_bytes() };
    let mut bytes = [number(name.len() as u32), number(contents.len() as u32), number(kind)].concat();
    for part in [name, contents] {
        bytes.extend(part);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

/// A file of any class and byte order with one segment of notes and nothing else.
pub fn with_notes(is_wide: bool, is_big: bool, notes: &[u8]) -> Vec<u8> {
    let number = |value: u64, size: usize| {
        let bytes = if is_big { value.to_be_bytes() } else { value.to_le_bytes() };
        if is_big { bytes[8 - size..].to_vec() } else { bytes[..size].to_vec() }
    };
    let word = if is_wide { 8 } else { 4 };
    let (header, program) = if is_wide { (64, 56) } else { (52, 32) };
    let mut bytes = vec![0x7f, b'E', b'L', b'F', 1 + u8::from(is_wide), 1 + u8::from(is_big), 1, 0];
    bytes.resize(16, 0);
    let fields = [(3, 2), (62, 2), (1, 4), (0, word), (header, word), (0, word), (0, 4)];
    let counts = [header, program, 1, 0, 0, 0].map(|count| (count, 2));
    let (at, length) = (header + program, notes.len() as u64);
    let segment: &[(u64, usize)] = if is_wide {
        &[(4, 4), (4, 4), (at, 8), (at, 8), (at, 8), (length, 8), (length, 8), (4, 8)]
    } else {
        &[(4, 4), (at, 4), (at, 4), (at, 4), (length, 4), (length, 4), (4, 4), (4, 4)]
    };
    for (value, size) in fields.iter().chain(&counts).chain(segment) {
        bytes.extend(number(*value, *size));
    }
    bytes.extend(notes);
    bytes
}
