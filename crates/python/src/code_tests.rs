use sampler_ebpf::abi::ProcessKey;

use super::*;
use crate::layout::{CodeLayout, LineFormat};
use crate::version::Version;

/// Memory that starts at one address.
struct Bytes(Vec<u8>);

const BASE: u64 = 0x7f00_0000_0000;
const CODE: u64 = BASE + 0x100;
const NAME: u64 = BASE + 0x400;
const FILE: u64 = BASE + 0x500;
const LINES: u64 = BASE + 0x600;

impl Memory for Bytes {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let from = address.checked_sub(BASE).and_then(|at| usize::try_from(at).ok());
        let found = from.and_then(|from| self.0.get(from..)?.get(..buffer.len()));
        found.map(|found| buffer.copy_from_slice(found)).is_some()
    }
}

impl Bytes {
    fn put(&mut self, address: u64, bytes: &[u8]) {
        let at = (address - BASE) as usize;
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn long(&mut self, address: u64, value: u64) {
        self.put(address, &value.to_le_bytes());
    }

    /// Writes a string with characters of `width` bytes.
    fn text(&mut self, address: u64, text: &str, width: u32, head: u64) {
        let ascii = if text.is_ascii() { IS_ASCII } else { 0 };
        self.long(address + 16, text.chars().count() as u64);
        self.long(address + 32, u64::from(width << KIND_SHIFT | IS_COMPACT | ascii));
        let data: Vec<u8> = text.chars().flat_map(|c| (c as u32).to_le_bytes()[..width as usize].to_vec()).collect();
        self.put(address + head, &data);
    }
}

fn layout() -> Layout {
    Layout::of_version(Version::three(11)).expect("known")
}

/// Returns memory with a code object of 3.11, and that object's address.
pub(crate) fn sound() -> (Vec<(u64, Vec<u8>)>, u64) {
    let (memory, _) = code();
    let parts = [(CODE, 0x100), (NAME, 0x80), (FILE, 0x80), (LINES, 0x40)];
    let part = |(address, bytes): (u64, usize)| {
        let at = (address - BASE) as usize;
        (address, memory.0[at..at + bytes].to_vec())
    };
    (parts.map(part).to_vec(), CODE)
}

/// Returns a code object of 3.11, and its checksum.
fn code() -> (Bytes, u64) {
    let mut memory = Bytes(vec![0; 0x2000]);
    let at = layout();
    memory.long(CODE, 2);
    memory.put(CODE + u64::from(at.process.code_first_line), &7u32.to_le_bytes());
    memory.put(CODE + 168, &3u32.to_le_bytes());
    for (place, value) in [(at.code.file, FILE), (at.code.name, NAME), (at.code.lines, LINES)] {
        memory.long(CODE + u64::from(place), value);
    }
    memory.text(NAME, "Class.method", 1, 48);
    memory.text(FILE, "/srv/caf\u{e9}.py", 1, 72);
    memory.long(LINES + 16, 3);
    memory.put(LINES + 32, &[0x80 | 11 << 3, 0, 0]);
    (memory, check([FILE, 0, NAME, LINES], 7))
}

#[test]
fn a_code_object_gives_its_names_and_lines() {
    let (memory, check) = code();
    let code = Code::read(&memory, &layout(), CODE, check).expect("it is whole");
    assert_eq!((&*code.name, &*code.file), ("Class.method", "/srv/caf\u{e9}.py"));
    assert_eq!((code.first_line, code.first_traceable), (7, 3));
    assert_eq!((code.line(&layout(), 0), code.line(&layout(), 2)), (Some(8), None));
}

#[test]
fn without_its_line_table_no_line_is_known() {
    let (memory, check) = code();
    let mut code = Code::read(&memory, &layout(), CODE, check).expect("it is whole");
    let with_lines = code.held_bytes();
    code.forget_lines();
    assert_eq!((with_lines - code.held_bytes(), code.first_line), (3, 0));
    for format in [LineFormat::Increments, LineFormat::Ranges, LineFormat::Locations] {
        let layout = Layout { code: CodeLayout { format, ..layout().code }, ..layout() };
        assert_eq!(code.line(&layout, 0), None, "{format:?}");
    }
}

#[test]
fn wide_characters_are_read_and_surrogates_replaced() {
    let (mut memory, check) = code();
    memory.text(NAME, "\u{0434}\u{0430}", 2, 72);
    memory.put(NAME + 74, &0xd800u16.to_le_bytes());
    memory.text(FILE, "\u{1f40d}.py", 4, 72);
    let code = Code::read(&memory, &layout(), CODE, check).expect("it is whole");
    assert_eq!((&*code.name, &*code.file), ("\u{0434}\u{fffd}", "\u{1f40d}.py"));
}

#[test]
fn another_object_at_the_address_is_seen() {
    let (memory, check) = code();
    assert_eq!(Code::read(&memory, &layout(), CODE, check + 1), Err(CodeError::Replaced));
}

#[test]
fn a_freed_object_is_not_read() {
    // Its last reference has gone, and then the allocator has stored a pointer there.
    for word in [0, 0x7f12_3456_7890, 0x5555_5555_0000, 0x7_f123_4567] {
        let (mut memory, check) = code();
        memory.long(CODE, word);
        assert_eq!(Code::read(&memory, &layout(), CODE, check), Err(CodeError::Replaced), "{word:#x}");
    }
    // Objects that are never freed.
    for word in [1, 0xffff_ffff, 0x3fff_ffff] {
        let (mut memory, check) = code();
        memory.long(CODE, word);
        assert!(Code::read(&memory, &layout(), CODE, check).is_ok());
    }
}

#[test]
fn what_is_no_code_object_is_refused() {
    let (_, check) = code();
    let read = |memory: &Bytes| Code::read(memory, &layout(), CODE, check).unwrap_err();
    let broken = |address: u64, value: u64| {
        let (mut memory, _) = code();
        memory.long(address, value);
        read(&memory)
    };
    // A string in a form that has not been used since 3.3, one of unknown width, and one that is longer than the
    // memory.
    assert_eq!(broken(NAME + 32, 1 << KIND_SHIFT), CodeError::Malformed);
    assert_eq!(broken(NAME + 32, u64::from(3 << KIND_SHIFT | IS_COMPACT)), CodeError::Malformed);
    assert_eq!(broken(NAME + 16, u64::MAX), CodeError::Malformed);
    assert_eq!(broken(LINES + 16, u64::MAX), CodeError::Malformed);
    assert_eq!(broken(LINES + 16, MOST_LINE_BYTES), CodeError::Unreadable);
    // One with a different type from the other string, and one with a zero, which no name contains.
    assert_eq!(broken(NAME + 8, 0x1234), CodeError::Malformed);
    assert_eq!(broken(NAME + 48, 0x61), CodeError::Malformed);
    let (mut memory, _) = code();
    memory.0.truncate(0x520);
    assert_eq!(read(&memory), CodeError::Unreadable);
    memory.0.clear();
    assert_eq!(read(&memory), CodeError::Unreadable);
}

#[test]
fn long_names_are_cut() {
    let (mut memory, _) = code();
    // After everything else.
    let name = BASE + 0x2000;
    memory.0.resize(0x4000, b'x');
    memory.text(name, "x", 1, 48);
    memory.long(name + 8, 0);
    memory.long(name + 16, 0x1800);
    memory.long(CODE + u64::from(layout().code.name), name);
    let check = check([FILE, 0, name, LINES], 7);
    let code = Code::read(&memory, &layout(), CODE, check).expect("it is whole");
    assert_eq!(code.name.chars().count(), MOST_CHARACTERS);
}

/// Returns a copy of a part of memory.
fn copy<const BYTES: usize>(memory: &Bytes, address: u64, bytes: usize) -> PythonCopy<BYTES> {
    let mut copy = PythonCopy { address, asked: bytes as u32, status: 0, bytes: [0; BYTES] };
    assert!(memory.read(address, &mut copy.bytes[..bytes]));
    copy
}

/// Returns what the kernel side would copy, with this many bytes of the name and of the line table.
fn copied(memory: &Bytes, check: u64, name: usize, lines: usize) -> PythonCodeRecord {
    PythonCodeRecord {
        mark: PythonCodeRecord::MARK,
        space: ProcessKey::default(),
        check,
        head: copy(memory, CODE, layout().head_bytes()),
        name: copy(memory, NAME, name),
        file: copy(memory, FILE, 96),
        lines: copy(memory, LINES, lines),
    }
}

#[test]
fn a_copy_says_the_same_as_the_memory() {
    let (memory, check) = code();
    let copied = copied(&memory, check, 60, 35);
    let of_copy = Code::read(&copied, &layout(), CODE, check).expect("all is there");
    assert_eq!(Ok(of_copy.clone()), Code::read(&memory, &layout(), CODE, check));
    assert!(!of_copy.is_cut);
    assert_eq!(Code::read(&copied, &layout(), CODE, check + 1), Err(CodeError::Replaced));
}

#[test]
fn a_copy_that_is_not_whole_says_so() {
    let (memory, check) = code();
    let read = |name, lines| Code::read(&copied(&memory, check, name, lines), &layout(), CODE, check);
    let cut = read(48 + 5, 34).expect("a part is there");
    assert_eq!((&*cut.name, &*cut.lines, cut.is_cut), ("Class", &[0x80 | 11 << 3, 0][..], true));
    // Only the heads, or even less.
    assert_eq!(read(48, 35), Err(CodeError::Unreadable));
    assert_eq!(read(60, 32), Err(CodeError::Unreadable));
    assert_eq!(read(0, 0), Err(CodeError::Unreadable));
    let mut lies = copied(&memory, check, 60, 35);
    lies.name.asked = u32::MAX;
    assert_eq!(Code::read(&lies, &layout(), CODE, check).expect("bounded").name, "Class.method");
    lies.name.status = -14;
    assert_eq!(Code::read(&lies, &layout(), CODE, check), Err(CodeError::Unreadable));
}
