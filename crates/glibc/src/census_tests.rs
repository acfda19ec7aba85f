//! Censuses of heaps with known types, with false type information, and with pools.

use crate::pages::Pages;
use crate::testing::{DATA, HEAP, KEY, LARGE, PAGE, Process, process};
use crate::types::Types;
use crate::{Census, Files, Language, Memory, Space, What, census};

/// Mappings of files: classes, names, and Python types.
const CLASSES: u64 = 0x7c00_0000_0000;
const NAMES: u64 = CLASSES + 0x4000;
const END: u64 = CLASSES + 0x8000;
const POOLS: u64 = 0x7b00_0000_0000;
const ROOT: u64 = CLASSES + 0x3000;

fn files(has_python: bool) -> Files {
    Files { data: vec![CLASSES..NAMES, NAMES..END], has_python }
}

fn found(process: &mut Process, space: &Space, has_python: bool) -> Census {
    census(process, space, 36, &files(has_python)).expect("a heap")
}

fn text(process: &mut Process, at: u64, text: &str) {
    let bytes = [text.as_bytes(), &[0; 8]].concat();
    bytes
        .as_chunks::<8>()
        .0
        .iter()
        .zip((at..).step_by(8))
        .for_each(|(word, at)| process.put(at, u64::from_le_bytes(*word)));
}

/// Adds a class: its table is 16 bytes after `at`, its type information 0x40 bytes after `at`, and its name elsewhere.
fn class(process: &mut Process, at: u64, of: u64, name: &str) -> u64 {
    let name_at = NAMES + (at - CLASSES);
    for (field, word) in [(0, 0), (8, at + 0x40), (0x40, of), (0x48, name_at)] {
        process.put(at + field, word);
    }
    text(process, name_at, name);
    at + 16
}

/// Adds a Python type. Its first words are its reference count and its type.
fn python_type(process: &mut Process, at: u64, of: u64, name: &str) {
    for (field, word) in [(0, 3), (8, of), (24, NAMES + (at - CLASSES))] {
        process.put(at + field, word);
    }
    text(process, NAMES + (at - CLASSES), name);
}

/// The tests' process with two classes. The blocks of 0x20 and 0x500 in the main heap and the first large one are
/// objects of `Session`; one of 0x40 is a `Basket`.
fn typed() -> (Process, Space, [u64; 2]) {
    let (mut process, space) = process();
    let library = class(&mut process, CLASSES, CLASSES + 16, "N10__cxxabiv117__class_type_infoE");
    let session = class(&mut process, CLASSES + 0x100, library, "N4shop7SessionE");
    let basket = class(&mut process, CLASSES + 0x200, library, "*6Basket");
    let [first, second] = [HEAP + 0x290, HEAP + 0x290 + 0x20 + 0x60];
    for (block, table) in [(first, session), (second + 0x40, session), (LARGE, session), (second, basket)] {
        process.put(block + 16, table);
    }
    (process, space, [first, second])
}

fn row(census: &Census, language: Language, name: &str) -> Option<(u64, u64)> {
    let wanted = What::Type(language, name.to_owned());
    census.rows.iter().find(|row| row.what == wanted).map(|row| (row.blocks, row.bytes))
}

/// The rows add up to the sums.
fn check_sums(census: &Census) {
    let sum = |field: fn(&crate::Row) -> u64| census.rows.iter().map(field).sum::<u64>();
    assert_eq!(sum(|row| row.blocks), census.heap.inuse_blocks + census.python.inuse_blocks, "{census:?}");
    assert_eq!(sum(|row| row.bytes), census.heap.inuse_bytes + census.python.inuse_bytes, "{census:?}");
}

#[test]
fn objects_are_counted_by_type_and_what_else_is_in_use_by_size() {
    let (mut process, space, [_, second]) = typed();
    let census = found(&mut process, &space, false);
    assert!(census.heap.is_exact(), "{census:?}");
    check_sums(&census);
    assert_eq!(row(&census, Language::Cpp, "N4shop7SessionE"), Some((3, 0x20 + 0x500 + 0x2000)));
    assert_eq!(row(&census, Language::Cpp, "6Basket"), Some((1, 0x40)));
    let sizes = |from: u64| census.rows.iter().find(|row| matches!(&row.what, What::Sizes(it) if it.from == from));
    // One in a cache and one in a fast bin are not in use. One in the other arena has the same size as the basket.
    assert_eq!((sizes(0), sizes(25)), (None, None), "{census:?}");
    assert_eq!(sizes(0x40 - 23).map(|row| row.blocks), Some(1));
    // The heap is the same with and without a census.
    assert_eq!(crate::read(&mut process, &space, 36), Ok(census.heap));
    // A block in a cache does not count as the type that its words still name.
    process.put(second + 24, KEY);
    process.put(second + 16, (second + 16) >> 12);
    let census = found(&mut process, &space, false);
    check_sums(&census);
    assert_eq!(row(&census, Language::Cpp, "6Basket"), None);
}

#[test]
fn tables_that_lie_are_no_types() {
    let session = CLASSES + 0x100;
    for (at, word) in [
        // Offset of the object, its type information, that one's class, its name, and the class's name.
        (session, 8),
        (session + 8, 0),
        (session + 8, DATA),
        (session + 8, session + 0x41),
        (session + 8, session),
        (session + 0x40, 0),
        (session + 0x40, session + 16),
        (session + 0x40, u64::MAX),
        (session + 0x48, 0),
        (session + 0x48, END - 1),
        (session + 0x48, u64::MAX),
        (NAMES + 0x100, 0),
        (NAMES + 0x100, u64::from_le_bytes(*b"N4 \x1b[31m")),
        (NAMES, u64::from_le_bytes(*b"7Library")),
    ] {
        let (mut process, space, _) = typed();
        process.put(at, word);
        // The last page of names has no terminator.
        (END - PAGE..END).step_by(8).for_each(|at| process.put(at, u64::from_le_bytes([b'x'; 8])));
        let census = found(&mut process, &space, false);
        check_sums(&census);
        assert_eq!(row(&census, Language::Cpp, "N4shop7SessionE"), None, "{at:#x} {word:#x}");
    }
}

/// Memory in which the pages of names are absent, and are read from their file.
struct Filed(Process, bool);

impl Memory for Filed {
    fn page_bytes(&self) -> u64 {
        PAGE
    }

    fn present(&mut self, first: u64, pages: &mut [bool]) {
        self.0.present(first, pages);
        let is_name = |page: u64| (NAMES / PAGE..END / PAGE).contains(&page);
        pages.iter_mut().zip(first..).for_each(|(there, page)| *there &= !is_name(page));
    }

    fn read(&mut self, address: u64, buffer: &mut [u8]) -> bool {
        assert!(!(NAMES..END).contains(&address), "a page that is not there is read");
        self.0.read(address, buffer)
    }

    fn read_mapped_file(&mut self, address: u64, buffer: &mut [u8]) -> bool {
        self.1 && self.0.read(address, buffer)
    }
}

#[test]
fn names_that_are_not_in_memory_are_read_from_their_files() {
    let (process, space, _) = typed();
    for has_file in [true, false] {
        let mut memory = Filed(process.clone(), has_file);
        let census = census(&mut memory, &space, 36, &files(false)).expect("a heap");
        check_sums(&census);
        assert_eq!(row(&census, Language::Cpp, "N4shop7SessionE").is_some(), has_file);
    }
}

/// A pool of blocks of 48 bytes: one free, two in use (an object without attributes and one with), and the rest never
/// used. The second pool is in the state in which all of its blocks are free again.
pub(crate) fn pooled() -> (Process, Space) {
    let (mut process, mut space, [first, second]) = typed();
    python_type(&mut process, ROOT, ROOT, "type");
    python_type(&mut process, ROOT + 0x100, ROOT, "shop.Meta");
    python_type(&mut process, ROOT + 0x200, ROOT + 0x100, "Session");
    python_type(&mut process, ROOT + 0x300, ROOT, "str");
    for (pool, used) in [(POOLS, 2), (POOLS + 0x4000, 0)] {
        process.put(pool, used);
        process.put(pool + 8, pool + 48 + 48);
        process.put(pool + 32, 2 << 32);
        process.put(pool + 40, (48 + 3 * 48) | (0x4000 - 48) << 32);
    }
    process.put(POOLS + 48, 1);
    process.put(POOLS + 56, ROOT + 0x300);
    process.put(POOLS + 48 + 2 * 48 + 32, 2);
    process.put(POOLS + 48 + 2 * 48 + 40, ROOT + 0x200);
    // The last pages of both pools were never used.
    process.put(POOLS + PAGE, 0);
    // Large objects come from glibc.
    process.put(first + 16, 1);
    process.put(first + 24, ROOT + 0x300);
    process.put(second + 0x40 + 32, u64::from(u32::MAX));
    process.put(second + 0x40 + 40, ROOT + 0x200);
    // The collector's list leads to a variable of the interpreter.
    process.put(second + 0x40 + 16, CLASSES + 0x2000);
    space.anonymous.push(POOLS..POOLS + 0x8000);
    (process, space)
}

#[test]
fn python_s_objects_are_counted_in_pools_and_in_glibc_s_heap() {
    let (mut process, space) = pooled();
    let census = found(&mut process, &space, true);
    check_sums(&census);
    assert_eq!((census.python.pools, census.python.inuse_blocks, census.python.inconsistent_bytes), (1, 2, 0));
    assert_eq!(row(&census, Language::Python, "str"), Some((2, 48 + 0x20)));
    assert_eq!(row(&census, Language::Python, "Session"), Some((2, 48 + 0x500)));
    assert_eq!(row(&census, Language::Cpp, "N4shop7SessionE"), Some((1, 0x2000)));
    // A type whose type is not a type.
    process.put(ROOT + 0x100 + 8, ROOT + 0x108);
    let census = found(&mut process, &space, true);
    check_sums(&census);
    assert_eq!(row(&census, Language::Python, "Session"), None);
    assert!(row(&census, Language::Python, "str").is_some());
}

/// Python's arenas have the same blocks in use, and also pools without any.
#[test]
fn python_s_arenas_are_found_without_types() {
    let (mut process, space) = pooled();
    let census = found(&mut process, &space, true);
    let heap = crate::read(&mut process, &Space { has_python: true, ..space }, 36).expect("a heap");
    let python = heap.python.clone().expect("they were looked for");
    assert_eq!((python.pools, heap.inuse_bytes), (census.python, census.heap.inuse_bytes));
    assert_eq!(python.ranges.as_slice(), std::slice::from_ref(&(POOLS..POOLS + 0x8000)));
    // Their other pages were never used.
    let pages = process.pages.keys().filter(|page| (POOLS..POOLS + 0x8000).contains(&(*page * PAGE))).count();
    assert_eq!(python.resident_bytes, pages as u64 * PAGE);
    // Large blocks of glibc and these arenas, without their overlaps.
    assert_eq!(heap.ranges().len(), heap.mapped.len() + 1, "{heap:?}");
    let mapped = vec![POOLS - 0x2000..POOLS - 0x1000, POOLS + 0x1000..POOLS + 0x9000, POOLS + 0xa000..POOLS + 0xb000];
    let ranges = crate::Heap { mapped, ..heap }.ranges();
    assert_eq!(ranges, [POOLS - 0x2000..POOLS - 0x1000, POOLS..POOLS + 0x9000, POOLS + 0xa000..POOLS + 0xb000]);
}

/// Memory without any present page.
struct Empty;

impl Memory for Empty {
    fn page_bytes(&self) -> u64 {
        PAGE
    }

    fn present(&mut self, _first: u64, _pages: &mut [bool]) {}

    fn read(&mut self, _address: u64, _buffer: &mut [u8]) -> bool {
        false
    }
}

/// A mapping may be as large as the address space. Looking at each of its pages would take minutes.
#[test]
fn memory_that_is_not_there_is_skipped() {
    let (mut process, _) = pooled();
    let mut pages = Pages::new(&mut process);
    for (from, next) in [(POOLS - 5 * PAGE, POOLS), (POOLS + 8, POOLS + 8), (POOLS + 2 * PAGE + 8, POOLS + 0x4000)] {
        assert_eq!(pages.next_present(from, POOLS + 0x8000), next, "{from:#x}");
    }
    assert_eq!(pages.next_present(POOLS + 2 * PAGE, POOLS + 3 * PAGE), POOLS + 3 * PAGE);
    let space = Space { anonymous: std::iter::once(PAGE..1 << 47).collect(), ..Space::default() };
    assert_eq!(crate::pools::arenas(&mut Pages::new(&mut Empty), &space, &[], &[]), None);
}

#[test]
fn pools_that_lie_are_inconsistent_and_what_is_no_pool_is_none() {
    let free = POOLS + 48 + 48;
    for (at, word) in [(POOLS + 8, 0), (POOLS + 8, free + 8), (free, free), (free, POOLS), (POOLS, 3), (POOLS, 1)] {
        let (mut process, space) = pooled();
        process.put(at, word);
        let census = found(&mut process, &space, true);
        check_sums(&census);
        assert_eq!((census.python.pools, census.python.inconsistent_bytes), (0, 0x4000), "{at:#x} {word:#x}");
    }
    for (at, word) in
        [(POOLS + 32, 3 << 32), (POOLS + 32, 40 << 32), (POOLS + 40, 1), (POOLS, 99), (POOLS + 40, u64::MAX)]
    {
        let (mut process, space) = pooled();
        process.put(at, word);
        let census = found(&mut process, &space, true);
        assert_eq!((census.python.pools, census.python.inconsistent_bytes), (0, 0), "{at:#x} {word:#x}");
    }
    // It is consistent on the next read.
    let (mut process, space) = pooled();
    let sound = process.pages[&(POOLS / PAGE)].clone();
    process.later.insert(POOLS / PAGE, sound);
    process.put(free, free);
    assert_eq!(found(&mut process, &space, true).python.pools, 1);
}

#[test]
fn more_types_than_are_told_apart_are_said() {
    let (mut process, _, _) = typed();
    let files = files(true);
    let (mut types, mut pages) = (Types::new(&files), Pages::new(&mut process));
    for address in 0..1 << 16 {
        types.of(&mut pages, &[1, 0x7a00_0000_0000 + 8 * address, 0, 0, 0, 0]);
    }
    // Known addresses are kept.
    types.of(&mut pages, &[1, 0x7a00_0000_0000, 0, 0, 0, 0]);
    types.of(&mut pages, &[1, 0x7a00_0000_0008, 0, 0, 0, 0]);
    types.of(&mut pages, &[1, 0x7900_0000_0008, 0, 0, 0, 0]);
    assert_eq!(types.into_names(), (Vec::new(), true));
}

/// Replaces some words of tables, types and pools at a time with others that may mean something.
#[test]
fn whatever_types_and_pools_are_is_counted_in_bounds() {
    let (sound, space) = pooled();
    let starts = [CLASSES, CLASSES + 0x100, ROOT, ROOT + 0x200, NAMES, POOLS, POOLS + 0x4000, HEAP, LARGE];
    let values = [0, 1, 8, 0x10, 0x20, 0x21, CLASSES, ROOT, POOLS + 48, END - 8, 1 << 32, 1 << 47, u64::MAX];
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..1_000 {
        let mut process = sound.clone();
        for _ in 0..random.usize(1..6) {
            let at = starts[random.usize(..starts.len())] + 8 * random.u64(..32);
            let word = match random.usize(..3) {
                0 => values[random.usize(..values.len())],
                1 => starts[random.usize(..starts.len())] + 8 * random.u64(..32),
                _ => random.u64(..),
            };
            process.put(at, word);
        }
        let Ok(census) = census(&mut process, &space, 36, &files(true)) else { continue };
        let (rows, heap) = (&census.rows, &census.heap);
        let bytes: u64 = rows.iter().map(|row| row.bytes).sum();
        assert!(process.reads < 10_000 && rows.iter().all(|row| row.blocks > 0), "{census:?}");
        assert!(bytes <= heap.inuse_bytes + census.python.inuse_bytes || heap.is_moving, "{census:?}");
    }
}
