//! Types of blocks. A C++ object with virtual functions begins with the address of its class's virtual table. The word
//! before the table is the address of the class's type information, which includes the name, even in stripped files. A
//! Python object has the address of its type after its reference count. Each address is looked up once, when it first
//! occurs in a block.

use std::collections::HashMap;
use std::ops::Range;

use crate::pages::Pages;

/// Number of words of a block that are examined: a Python object's type may be the sixth one.
pub(crate) const TYPE_WORDS: usize = 6;
/// Positions of a Python object's type: after the reference count, which comes first, after the collector's two words,
/// or after these and two more words of an object with attributes.
const TYPE_PLACES: [usize; 3] = [1, 3, 5];
/// Maximum number of distinct types, and maximum number of addresses whose type is remembered.
const MOST_TYPES: usize = 1 << 14;
const MOST_ADDRESSES: usize = 1 << 16;
const RECENT: usize = 256;
/// Maximum length of a name, and number of bytes per read.
const MOST_NAME_BYTES: usize = 1 << 10;
const NAME_STEP: u64 = 128;
/// Prefix of the class names of type information in every C++ library that follows the Itanium ABI.
const TYPE_INFORMATION: &str = "N10__cxxabiv1";
/// Offset of a Python type's name, and the name of the root type.
const PYTHON_NAME: u64 = 24;
const PYTHON_ROOT: &str = "type";
/// Maximum number of steps from a type to the root type, through metaclasses.
const MOST_METACLASSES: usize = 4;

/// The language of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Language {
    /// C++. The name is mangled and has no prefix: `N4shop7SessionE`.
    Cpp,
    /// Python. The type's name, often without its module.
    Python,
}

/// File mappings, and what to expect in them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files {
    /// Private file mappings that are readable and not executable, in order.
    pub data: Vec<Range<u64>>,
    /// Whether a Python interpreter is among them.
    pub has_python: bool,
}

/// Addresses that were looked up, with the number of the type that each of them stands for.
#[derive(Debug)]
struct TypeCache {
    numbers: HashMap<u64, Option<u32>>,
    /// A cache of recent lookups, indexed by some bits of the address.
    recent: [(u64, Option<u32>); RECENT],
}

impl Default for TypeCache {
    fn default() -> Self {
        Self { numbers: HashMap::new(), recent: [(0, None); RECENT] }
    }
}

impl TypeCache {
    /// Returns the type number of an address. The first time, `find` looks it up if it may stand for a type. `None` if
    /// there is no space for another address.
    #[inline]
    fn of(
        &mut self,
        address: u64,
        may_be_one: impl FnOnce() -> bool,
        find: impl FnOnce() -> Option<u32>,
    ) -> Option<Option<u32>> {
        let recent = &mut self.recent[(address >> 4 ^ address >> 12) as usize % RECENT];
        if recent.0 != address {
            let number = match self.numbers.get(&address) {
                Some(known) => *known,
                None if !may_be_one() => None,
                None if self.numbers.len() >= MOST_ADDRESSES => return None,
                None => *self.numbers.entry(address).or_insert_with(find),
            };
            *recent = (address, number);
        }
        Some(recent.1)
    }
}

/// Type names, by number.
#[derive(Debug, Default)]
struct Names {
    numbers: HashMap<(Language, String), u32>,
    names: Vec<(Language, String)>,
    /// Whether some names did not fit.
    is_full: bool,
}

impl Names {
    /// Returns the number of a name. Types with the same name count together.
    fn number(&mut self, language: Language, name: String) -> Option<u32> {
        let (next, named) = (self.names.len(), (language, name));
        if let Some(known) = self.numbers.get(&named) {
            return Some(*known);
        }
        if next >= MOST_TYPES {
            self.is_full = true;
            return None;
        }
        self.names.push(named.clone());
        self.numbers.insert(named, next as u32);
        Some(next as u32)
    }
}

/// The types found so far.
#[derive(Debug)]
pub(crate) struct Types<'f> {
    files: &'f Files,
    /// From the start of the first mapping to the end of the last one.
    bounds: Range<u64>,
    cpp: TypeCache,
    python: TypeCache,
    /// The root type, `type`.
    root: Option<u64>,
    names: Names,
}

impl<'f> Types<'f> {
    pub(crate) fn new(files: &'f Files) -> Self {
        let bounds = files.data.first().map_or(0, |first| first.start)..files.data.last().map_or(0, |last| last.end);
        Self {
            files,
            bounds,
            cpp: TypeCache::default(),
            python: TypeCache::default(),
            root: None,
            names: Names::default(),
        }
    }

    /// Returns the names of all types, by number, and whether some types or addresses did not fit.
    pub(crate) fn into_names(self) -> (Vec<(Language, String)>, bool) {
        (self.names.names, self.names.is_full)
    }

    /// Returns the type number of a block that begins with these words.
    #[inline]
    pub(crate) fn of(&mut self, pages: &mut Pages, words: &[u64; TYPE_WORDS]) -> Option<u32> {
        let table = words[0];
        if self.bounds.contains(&table) {
            let (files, names) = (self.files, &mut self.names);
            let find = || class_name(pages, files, table).and_then(|name| names.number(Language::Cpp, name));
            // Most addresses between the first mapping and the last one belong to blocks.
            let known = self.cpp.of(table, || mapping(files, table).is_some(), find);
            let found = self.or_full(known);
            if found.is_some() {
                return found;
            }
        }
        if self.files.has_python { self.python(pages, words) } else { None }
    }

    /// Returns the type number of a Python object. Tries each of its possible positions.
    pub(crate) fn python(&mut self, pages: &mut Pages, words: &[u64; TYPE_WORDS]) -> Option<u32> {
        TYPE_PLACES.into_iter().find_map(|place| {
            let address = words[place];
            if !is_count(words[place - 1]) || !is_address(address) {
                return None;
            }
            let (root, names) = (&mut self.root, &mut self.names);
            let find = || {
                let name = is_python_type(pages, root, address).then(|| python_name(pages, address))?;
                names.number(Language::Python, name?)
            };
            let known = self.python.of(address, || true, find);
            self.or_full(known)
        })
    }

    #[inline]
    fn or_full(&mut self, known: Option<Option<u32>>) -> Option<u32> {
        self.names.is_full |= known.is_none();
        known.flatten()
    }
}

fn is_address(word: u64) -> bool {
    word >= 4096 && word >> 47 == 0 && word.is_multiple_of(8)
}

/// Whether a word may be the reference count of a Python object: it has 32 bits, and since 3.14 flags in the upper 16
/// bits.
fn is_count(word: u64) -> bool {
    word as u32 != 0 && word >> 32 & 0xffff == 0
}

/// Returns the mangled name of the class with this virtual table. The type information in front of the table must in
/// turn be an object of a class from the C++ library.
fn class_name(pages: &mut Pages, files: &Files, table: u64) -> Option<String> {
    let information = information_of(pages, files, table)?;
    let [class, name] = pages.fetched_words::<2>(information)?;
    let class_of_class = information_of(pages, files, class)?;
    let [_, library_name] = pages.fetched_words::<2>(class_of_class)?;
    mangled(pages, files, library_name)?.starts_with(TYPE_INFORMATION).then_some(())?;
    mangled(pages, files, name)
}

/// Returns the address of a virtual table's type information. The table must be that of a whole object, which begins
/// where the block does.
fn information_of(pages: &mut Pages, files: &Files, table: u64) -> Option<u64> {
    let start = table.checked_sub(16).filter(|_| table.is_multiple_of(8))?;
    mapping(files, start)?;
    let [offset, information] = pages.fetched_words::<2>(start)?;
    (offset == 0 && information.is_multiple_of(8) && mapping(files, information).is_some()).then_some(information)
}

/// Returns the mapping that contains an address.
fn mapping(files: &Files, address: u64) -> Option<&Range<u64>> {
    let after = files.data.partition_point(|range| range.start <= address);
    files.data[..after].last().filter(|range| range.contains(&address))
}

fn mangled(pages: &mut Pages, files: &Files, address: u64) -> Option<String> {
    // On arm64, a bit says that types with the same name may still be distinct.
    let address = address & !(1 << 63);
    let name = text(pages, address, mapping(files, address)?.end)?;
    // A star precedes names that are local to a file.
    let name = name.strip_prefix('*').unwrap_or(&name);
    let is_one = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'$'));
    (is_one && !name.is_empty()).then(|| name.to_owned())
}

/// Whether a Python type is at this address: its type is a type, and so on up to the root type, which is its own type.
/// `root`: the root type, once it is known.
fn is_python_type(pages: &mut Pages, root: &mut Option<u64>, address: u64) -> bool {
    let mut at = address;
    for _ in 0..MOST_METACLASSES {
        if *root == Some(at) {
            return true;
        }
        let Some([count, of]) = pages.fetched_words::<2>(at) else { return false };
        if !is_count(count) || !is_address(of) {
            return false;
        }
        if of == at {
            if root.is_some() || python_name(pages, at).as_deref() != Some(PYTHON_ROOT) {
                return false;
            }
            *root = Some(at);
            return true;
        }
        at = of;
    }
    false
}

fn python_name(pages: &mut Pages, address: u64) -> Option<String> {
    let [name] = pages.fetched_words::<1>(address.checked_add(PYTHON_NAME)?)?;
    let name = text(pages, name, u64::MAX)?;
    (!name.is_empty() && !name.contains(char::is_control)).then_some(name)
}

/// Reads a string that ends with a zero byte before `end`.
fn text(pages: &mut Pages, address: u64, end: u64) -> Option<String> {
    let mut text = Vec::new();
    let mut at = address;
    while text.len() < MOST_NAME_BYTES && at < end {
        // A read does not extend into a page that may be absent.
        let to_page = pages.page_bytes - at % pages.page_bytes;
        let mut piece = [0; NAME_STEP as usize];
        let piece = &mut piece[..NAME_STEP.min(to_page).min(end - at) as usize];
        pages.fetch(at, piece).then_some(())?;
        if let Some(length) = piece.iter().position(|byte| *byte == 0) {
            text.extend_from_slice(&piece[..length]);
            return String::from_utf8(text).ok();
        }
        text.extend_from_slice(piece);
        at = at.checked_add(piece.len() as u64)?;
    }
    None
}

/// Returns the words at the start of a block; 0 past its end.
#[inline]
pub(crate) fn words_of(block: &[u8]) -> [u64; TYPE_WORDS] {
    let mut words = [0; TYPE_WORDS];
    let (own, _) = block.as_chunks();
    // The compiler does not reduce iterator adapters to this loop; they would take a tenth of the whole time.
    let mut at = 0;
    while at < TYPE_WORDS && at < own.len() {
        words[at] = u64::from_le_bytes(own[at]);
        at += 1;
    }
    words
}
