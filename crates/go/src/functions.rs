//! Function names, files and lines from the function table (`.gopclntab`), which every Go program has, even without
//! symbols.

use std::ops::Range;

use heapbpf_elf::{Elf, Image, Section, Segment, escaped, read_range};

use crate::memory::{FileBytes, Window};
use crate::version::Layout;

/// Maximum length of a name, bytes. A longer one is truncated.
const LONGEST_NAME: usize = 4096;
/// Maximum number of steps through the table of one function.
const MOST_STEPS: usize = 1 << 20;
/// Maximum number of functions in a program.
const MOST_FUNCTIONS: u64 = 1 << 22;
/// Maximum number of bytes of names that are searched.
const MOST_NAME_BYTES: u64 = 128 << 20;
/// Index of inlined call numbers among the tables of a function (`PCDATA_InlTreeIndex`).
const INLINED_INDEX: u32 = 2;
/// Index of the inlined call list among the data of a function (`FUNCDATA_InlTree`).
const INLINED_CALLS: u32 = 3;
/// Maximum number of inlined calls in a function.
const MOST_INLINED: u64 = 1 << 20;
/// Size of the table's header, bytes.
const HEADER_BYTES: u64 = 72;

/// Addresses in a process that the table refers to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Places {
    /// Difference between addresses in the process and those that the file states.
    pub bias: u64,
    /// Start address of the code.
    pub text: u64,
    /// Start address of the function data.
    pub gofunc: u64,
}

/// A function at an address in the code.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Function {
    /// Its name, including the path of its package.
    pub name: String,
    /// The source file; empty if unknown.
    pub file: String,
    /// The line; 0 if unknown.
    pub line: u32,
    /// Whether it is inlined at that address.
    pub inlined: bool,
}

/// The function table of a file.
#[derive(Clone, Debug)]
pub struct Functions {
    layout: Layout,
    /// Virtual address of the table in the file.
    pub(crate) address: u64,
    /// File offset and size of the table, bytes.
    offset: u64,
    bytes: u64,
    count: u64,
    /// Smallest distance between instructions, bytes.
    quantum: u32,
    /// Start address of the code, if the table states it.
    pub(crate) text: Option<u64>,
    /// Offsets in the table: of names, units, files, address tables, and functions.
    pub(crate) names: u64,
    units: u64,
    files: u64,
    tables: u64,
    functions: u64,
    segments: Vec<Segment>,
}

/// A function in the table.
#[derive(Clone, Copy)]
struct Entry {
    /// Its offset in the table.
    at: u64,
    /// Its start address, relative to that of the code.
    start: u32,
    name: u32,
}

type File<'a> = Window<'a, FileBytes<'a>>;

impl Functions {
    /// Parses the table in a section; `None` if it is not understood.
    pub(crate) fn parse(image: &dyn Image, elf: &Elf, section: &Section, layout: Layout) -> Option<Self> {
        let header = read_range(image, "table of functions", section.offset, HEADER_BYTES, HEADER_BYTES).ok()?;
        let word = |at: usize| header.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        let magic = u32::from_le_bytes(header.get(..4)?.try_into().ok()?);
        let &[quantum, pointer_bytes] = header.get(6..8)? else { return None };
        let table = Self {
            layout,
            address: section.address,
            offset: section.offset,
            bytes: section.bytes,
            count: word(8)?,
            quantum: u32::from(quantum),
            text: word(24).filter(|text| *text != 0),
            names: word(32)?,
            units: word(40)?,
            files: word(48)?,
            tables: word(56)?,
            functions: word(64)?,
            segments: elf.segments.iter().filter(|segment| segment.is_loaded()).copied().collect(),
        };
        let in_order =
            [HEADER_BYTES, table.names, table.units, table.files, table.tables, table.functions, table.bytes];
        let is_sound = magic == layout.magic
            && pointer_bytes == 8
            && matches!(quantum, 1 | 2 | 4)
            && (1..=MOST_FUNCTIONS).contains(&table.count)
            && in_order.is_sorted()
            && !section.is_compressed();
        is_sound.then_some(table)
    }

    /// Returns the function at a return address of a stack; `None` if there is none. `image`: the file.
    #[must_use]
    pub fn at(&self, image: &dyn Image, places: &Places, return_address: u64) -> Option<Function> {
        let file = FileBytes(image);
        let mut file = File::new(&file);
        let offset = u32::try_from(return_address.checked_sub(places.text)?).ok()?;
        let entry = self.entry_at(&mut file, offset)?;
        // Look up the call, not the instruction after it.
        let call = if offset > entry.start { offset - 1 } else { offset };
        let inlined = self.inlined_name(&mut file, places, &entry, call);
        let name = self.name(&mut file, inlined.unwrap_or(entry.name))?;
        let (path, line) = self.line(&mut file, &entry, call).unwrap_or_default();
        Some(Function { name: without_type_arguments(name), file: path, line, inlined: inlined.is_some() })
    }

    /// Returns the function that contains an offset of the code.
    fn entry_at(&self, file: &mut File<'_>, offset: u32) -> Option<Entry> {
        let start = |file: &mut File<'_>, index| self.u32(file, self.functions.checked_add(8 * index)?);
        let (mut low, mut high) = (0, self.count);
        if offset < start(file, low)? || offset >= start(file, high)? {
            return None;
        }
        while high - low > 1 {
            let middle = low.midpoint(high);
            if start(file, middle)? <= offset { low = middle } else { high = middle }
        }
        self.entry(file, low)
    }

    fn entry(&self, file: &mut File<'_>, index: u64) -> Option<Entry> {
        let slot = self.functions.checked_add(8 * index)?;
        let (start, at) = (self.u32(file, slot)?, self.u32(file, slot + 4)?);
        let at = self.functions.checked_add(at.into())?;
        // The function must state the same start.
        (self.u32(file, at)? == start).then_some(())?;
        Some(Entry { at, start, name: self.u32(file, at + 4)? })
    }

    /// Returns the name of the innermost function that is inlined at an offset of the code.
    fn inlined_name(&self, file: &mut File<'_>, places: &Places, entry: &Entry, offset: u32) -> Option<u32> {
        let tables = self.u32(file, entry.at + 28)?;
        let data = *self.slice(file, entry.at + self.layout.function_bytes - 1, 1)?.first()?;
        if tables <= INLINED_INDEX || u32::from(data) <= INLINED_CALLS {
            return None;
        }
        let lists = entry.at + self.layout.function_bytes;
        let indices = self.u32(file, lists + 4 * u64::from(INLINED_INDEX))?;
        let calls = self.u32(file, lists + 4 * (u64::from(tables) + u64::from(INLINED_CALLS)))?;
        let index = u64::try_from(self.value(file, indices, entry, offset)?).ok().filter(|it| *it < MOST_INLINED)?;
        if calls == u32::MAX {
            return None;
        }
        let call = places.gofunc.wrapping_sub(places.bias).checked_add(u64::from(calls))?;
        let call = call.checked_add(index * self.layout.inlined_bytes + self.layout.inlined_name)?;
        let at = self.segments.iter().find_map(|segment| segment.offset_of_address(call))?;
        file.u32(at)
    }

    /// Returns the file and line of an offset of the code.
    fn line(&self, file: &mut File<'_>, entry: &Entry, offset: u32) -> Option<(String, u32)> {
        let [files, lines] = [20, 24].map(|field| self.u32(file, entry.at + field));
        let unit = self.u32(file, entry.at + 32)?;
        let number = self.value(file, files?, entry, offset)?;
        let line = self.value(file, lines?, entry, offset)?;
        let slot = u64::from(unit).checked_add(u64::try_from(number).ok()?)?;
        let path = self.u32(file, self.units.checked_add(4 * slot)?)?;
        if path == u32::MAX {
            return None;
        }
        let path = self.text(file, self.files.checked_add(path.into())?)?;
        Some((path, u32::try_from(line).unwrap_or(0)))
    }

    /// Returns the value of an address table at an offset of the code. The table consists of pairs of differences: of
    /// the value and of the address.
    fn value(&self, file: &mut File<'_>, table: u32, entry: &Entry, offset: u32) -> Option<i32> {
        if table == 0 {
            return None;
        }
        let mut at = self.tables.checked_add(table.into())?;
        let (mut value, mut address) = (-1i32, entry.start);
        for step in 0..MOST_STEPS {
            let difference = self.variable(file, &mut at)?;
            if difference == 0 && step > 0 {
                return None;
            }
            value = value.wrapping_add((difference >> 1) as i32 ^ -((difference & 1) as i32));
            address = address.checked_add(self.variable(file, &mut at)?.checked_mul(self.quantum)?)?;
            if offset < address {
                return Some(value);
            }
        }
        None
    }

    /// Reads a number of variable length.
    fn variable(&self, file: &mut File<'_>, at: &mut u64) -> Option<u32> {
        let mut value = 0u32;
        for shift in [0, 7, 14, 21, 28] {
            let byte = *self.slice(file, *at, 1)?.first()?;
            *at += 1;
            value |= u32::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn name(&self, file: &mut File<'_>, name: u32) -> Option<String> {
        self.text(file, self.names.checked_add(name.into())?)
    }

    /// Reads the zero-terminated string at an offset of the table.
    fn text(&self, file: &mut File<'_>, at: u64) -> Option<String> {
        let most = LONGEST_NAME.min(usize::try_from(self.bytes.checked_sub(at)?).ok()?);
        let bytes = self.slice(file, at, most)?;
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        Some(escaped(&bytes[..end]))
    }

    fn u32(&self, file: &mut File<'_>, at: u64) -> Option<u32> {
        self.slice(file, at, 4)?.try_into().ok().map(u32::from_le_bytes)
    }

    /// Reads `count` bytes at an offset of the table.
    fn slice<'f>(&self, file: &'f mut File<'_>, at: u64, count: usize) -> Option<&'f [u8]> {
        at.checked_add(count as u64).filter(|end| *end <= self.bytes)?;
        file.bytes(self.offset.checked_add(at)?, count)
    }

    /// Finds the functions with these names, as ranges relative to the start of the code. Reads the whole table.
    pub(crate) fn named<const N: usize>(&self, image: &dyn Image, names: [&str; N]) -> [Option<(u32, u32)>; N] {
        let mut found = [None; N];
        let offset = self.offset.saturating_add(self.names);
        let Ok(texts) = read_range(image, "names", offset, self.units - self.names, MOST_NAME_BYTES) else {
            return found;
        };
        let wanted = names.map(|name| {
            let text = [b"\0", name.as_bytes(), b"\0"].concat();
            let at = texts.windows(text.len()).position(|window| window == text)?;
            u32::try_from(at + 1).ok()
        });
        drop(texts);
        let file = FileBytes(image);
        // Two windows: one for the list of functions, one for the functions.
        let (mut list, mut file) = (File::new(&file), File::new(&file));
        for index in 0..self.count {
            let slot = self.functions.saturating_add(8 * index);
            let Some(at) = slot.checked_add(4).and_then(|slot| self.u32(&mut list, slot)) else { break };
            let Some(name) = self.u32(&mut file, self.functions.saturating_add(u64::from(at) + 4)) else { continue };
            let Some(which) = wanted.iter().position(|wanted| *wanted == Some(name)) else { continue };
            found[which] = self.u32(&mut list, slot).zip(self.u32(&mut list, slot + 8));
            if found.iter().all(Option::is_some) {
                break;
            }
        }
        found
    }
}

/// Returns which frames of a stack (innermost first) Go's own profiles show. They leave out the runtime's frames at the
/// inner end, unless there are no others, and the `goexit` at the end of every stack.
#[must_use]
pub fn shown<'n>(names: impl Iterator<Item = &'n str>) -> Range<usize> {
    let names: Vec<&str> = names.collect();
    let is_of_runtime = |name: &&&str| name.starts_with("runtime.") || name.starts_with("internal/runtime/");
    let end = names.len() - usize::from(names.len() > 1 && names.ends_with(&["runtime.goexit"]));
    let inner = names[..end].iter().take_while(is_of_runtime).count();
    if inner == end { 0..end } else { inner..end }
}

/// Returns a name as Go prints it, without the type arguments of a generic function.
fn without_type_arguments(name: String) -> String {
    match (name.find('['), name.rfind(']')) {
        (Some(from), Some(to)) if from < to => format!("{}[...]{}", &name[..from], &name[to + 1..]),
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_the_runtime_are_shown_where_it_has_called_nobody() {
        let shown = |names: &[&str]| shown(names.iter().copied());
        let inner = ["internal/runtime/maps.f", "runtime.makeslice", "main.f", "runtime.main", "runtime.goexit"];
        assert_eq!(shown(&inner), 2..4);
        assert_eq!(shown(&["runtime.malg", "runtime.mstart"]), 0..2);
        assert_eq!((shown(&["runtime.goexit"]), shown(&["main.f"]), shown(&[])), (0..1, 0..1, 0..0));
    }

    #[test]
    fn what_is_no_utf_8_is_escaped() {
        assert_eq!(escaped(b"main.\xff\xc3\xa9"), "main.\\xff\u{e9}");
    }

    #[test]
    fn generic_functions_have_one_name() {
        let name = |name: &str| without_type_arguments(name.to_owned());
        assert_eq!(name("main.f[go.shape.int_0]"), "main.f[...]");
        assert_eq!(name("main.(*T[go.shape.[]uint8]).g"), "main.(*T[...]).g");
        assert_eq!((name("main.f"), name("a]b[")), ("main.f".to_owned(), "a]b[".to_owned()));
    }
}
