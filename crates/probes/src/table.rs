//! The table of functions to look for in files: those of known allocators, and those of custom ones.

use std::collections::{BTreeSet, HashMap};

use heapbpf_audit::FileKind;
use sampler_ebpf::abi::{SITE_CALLS_OUT, SITE_THROWS, SITE_ZERO_FREES, Site};

use crate::allocators::{ALLOCATORS, Allocator, OWN_OPERATORS, Shape};
use crate::custom::CustomAllocator;
use crate::elf::{FileImage, Symbol};
use crate::object_table::FUNCTIONS;

/// The number for `mmap` calls that the program itself makes. It is no row of a [`Table`], which has far fewer rows.
pub const MMAP: u16 = u16::MAX - 1;
/// The same for `mremap`; see [`MMAP`].
pub const MREMAP: u16 = u16::MAX - 2;
/// The same for `brk`; see [`MMAP`].
pub const BRK: u16 = u16::MAX - 3;
/// The number for all samples that programs announce themselves ([`announced`](crate::announced)); see [`MMAP`].
pub const ANNOUNCED: u16 = u16::MAX - 4;
/// The number for mappings that programs announce themselves; see [`MMAP`].
pub const ANNOUNCED_MMAP: u16 = u16::MAX - 5;

/// One function of one allocator.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// Index into [`Table::origins`].
    origin: usize,
    /// Its name in the audit.
    pub(super) name: String,
    pub(super) shape: Shape,
    /// `SITE_*` flags from the allocator's semantics.
    pub(super) flags: u8,
    /// Whether it is unknown what the allocator calls: the user described it, or it is a last resort.
    pub(super) unread: bool,
    /// Whether the user described it.
    pub(super) is_custom: bool,
}

impl Row {
    /// The meaning of the arguments at the function's entry, for calls that are counted inside the process.
    pub(super) fn site_at_entry(&self, number: u16) -> Site {
        Site { function: number, flags: self.flags, ..self.shape.arguments.site() }
    }
}

/// The allocator of a row.
#[derive(Clone, Debug)]
enum Origin {
    Known(Allocator),
    Custom(CustomAllocator),
}

impl Origin {
    fn name(&self) -> &str {
        match self {
            Self::Known(allocator) => allocator.name,
            Self::Custom(_) => "custom",
        }
    }
}

/// The functions to look for: those of every known allocator, and those of custom ones.
///
/// The number of a row is [`Site::function`](sampler_ebpf::abi::Site::function).
#[derive(Clone, Debug)]
pub struct Table {
    origins: Vec<Origin>,
    rows: Vec<Row>,
    by_symbol: HashMap<String, Vec<u16>>,
    markers: BTreeSet<&'static str>,
    /// Whether to look for object allocators of interpreters.
    has_objects: bool,
}

impl Default for Table {
    fn default() -> Self {
        Self::new(&[])
    }
}

/// The functions of a table that one file defines.
#[derive(Debug, Default)]
pub(super) struct Defined {
    /// Row number and symbol, in the order of the table.
    pub(super) functions: Vec<(u16, Symbol)>,
    /// Names and versions of the allocators that the functions belong to.
    pub(super) allocators: Vec<String>,
    /// Functions of theirs that probes cannot follow, and the consequence.
    pub(super) limits: Vec<(&'static str, &'static str)>,
    /// Symbols that custom allocators for this file name, but that it does not define.
    pub(super) absent: Vec<String>,
    /// Whether the allocator is a last resort, so that it is unknown what it calls.
    pub(super) is_last_resort: bool,
    /// Whether it is the file's own `operator new`, which may well take its blocks from malloc.
    pub(super) are_own_operators: bool,
}

impl Table {
    /// Makes a table of the `custom` allocators, which come first, and of the known ones.
    #[must_use]
    pub fn new(custom: &[CustomAllocator]) -> Self {
        let mut table = Self {
            origins: Vec::new(),
            rows: Vec::new(),
            by_symbol: HashMap::new(),
            markers: BTreeSet::new(),
            has_objects: false,
        };
        for allocator in custom {
            table.origins.push(Origin::Custom(allocator.clone()));
            for function in &allocator.functions {
                table.add(function.symbol.clone(), function.shape, 0, true, [function.symbol.clone()]);
            }
        }
        for allocator in ALLOCATORS {
            table.origins.push(Origin::Known(*allocator));
            table.markers.extend(allocator.markers.iter().chain(allocator.unless));
            for function in allocator.functions.iter().copied().flatten() {
                let zero = allocator.realloc_zero_frees && function.shape.is_realloc();
                let names = || std::iter::once(&function.name).chain(function.aliases);
                let symbols = allocator.prefixes.iter().flat_map(|p| names().map(move |name| format!("{p}{name}")));
                let zero = if zero { SITE_ZERO_FREES } else { 0 };
                let mut flags = if function.throws { SITE_THROWS | zero } else { zero };
                // It gets large blocks from malloc, through pointers. Those calls are part of its own calls.
                flags |= if allocator.is_of_objects && !function.shape.is_free() { SITE_CALLS_OUT } else { 0 };
                table.add(function.name.to_owned(), function.shape, flags, allocator.last_resort, symbols);
            }
        }
        table
    }

    /// Makes it also look for object allocators of interpreters, if `are_wanted`.
    #[must_use]
    pub const fn with_objects(mut self, are_wanted: bool) -> Self {
        self.has_objects = are_wanted;
        self
    }

    /// Whether it looks for object allocators of interpreters.
    #[must_use]
    pub const fn has_objects(&self) -> bool {
        self.has_objects
    }

    fn add(&mut self, name: String, shape: Shape, flags: u8, unread: bool, symbols: impl IntoIterator<Item = String>) {
        // The known allocators and the bounded custom ones have far fewer than 65,536 functions.
        let Ok(number) = u16::try_from(self.rows.len()) else { return };
        for symbol in symbols {
            self.by_symbol.entry(symbol).or_default().push(number);
        }
        let is_custom = matches!(self.origins.last(), Some(Origin::Custom(_)));
        let origin = self.origins.len() - 1;
        self.rows.push(Row { origin, name, shape, flags: shape.flags | flags, unread, is_custom });
    }

    /// The name of function number `number`; `None` if there is no such row.
    #[must_use]
    pub fn function_name(&self, number: u16) -> Option<&str> {
        match number {
            MMAP => Some("mmap"),
            MREMAP => Some("mremap"),
            BRK => Some("brk"),
            ANNOUNCED => Some("otel_memory:alloc"),
            ANNOUNCED_MMAP => Some("otel_memory:mmap"),
            row => self.row(row).map(|row| row.name.as_str()),
        }
    }

    pub(super) fn row(&self, number: u16) -> Option<&Row> {
        self.rows.get(usize::from(number))
    }

    /// The shape of the function with this symbol, in any file.
    pub(super) fn shape_of(&self, symbol: &str) -> Option<Shape> {
        let number = self.by_symbol.get(canonical(symbol))?.first()?;
        self.row(*number).map(|row| row.shape)
    }

    /// The names of all allocators in the table, for messages.
    pub fn names(&self) -> String {
        self.origins.iter().map(Origin::name).collect::<Vec<_>>().join(", ")
    }

    /// Whether `image` defines a function of an allocator that applies to it. Names alone are not enough: a library may
    /// have its own `operator new` that calls another file's malloc. An object allocator can only be found in the code.
    pub(super) fn is_in(&self, image: &FileImage) -> bool {
        self.has_objects && image.has_objects() || !self.defined_in(image).functions.is_empty()
    }

    /// The functions of `image`'s object allocator: row number and place.
    fn objects_in(&self, image: &FileImage) -> Vec<(u16, Symbol)> {
        let Some(Ok(objects)) = image.objects.as_ref().filter(|_| self.has_objects) else { return Vec::new() };
        let first = self.first_of_objects();
        let size = |start: u64| image.bounds.iter().find(|(from, _)| *from == start).map_or(0, |(from, to)| to - from);
        (first..).zip(objects.functions).map(|(row, start)| (row as u16, Symbol::unnamed(start, size(start)))).collect()
    }

    fn first_of_objects(&self) -> usize {
        let is_of_objects = |row: &Row| matches!(&self.origins[row.origin], Origin::Known(it) if it.is_of_objects);
        self.rows.iter().position(is_of_objects).unwrap_or(self.rows.len())
    }

    /// The functions of an interpreter's object allocator, in the order of
    /// [`ObjectTable::functions`](crate::ObjectTable): names, and the meaning of their arguments at entry.
    pub fn object_functions(&self) -> impl Iterator<Item = (&str, Site)> {
        let rows = (0..).zip(&self.rows).skip(self.first_of_objects()).take(FUNCTIONS);
        rows.map(|(number, row)| (row.name.as_str(), row.site_at_entry(number)))
    }

    /// Whether a file with this symbol may have an allocator.
    fn knows(&self, symbol: &str) -> bool {
        let symbol = canonical(symbol);
        self.markers.contains(symbol) || self.by_symbol.contains_key(symbol)
    }

    /// Functions of `image` that allocate by their name, but are not among `claimed` ones: the name in the table, and
    /// the symbol, by address. Of a library, only those that it exports.
    pub(super) fn unclaimed(&self, image: &FileImage, claimed: &[(u16, Symbol)]) -> Vec<(&str, Symbol)> {
        let claimed: BTreeSet<u64> = claimed.iter().map(|(_, symbol)| symbol.address).collect();
        let row_of = |name: &str| self.row(*self.by_symbol.get(canonical(name))?.first()?);
        let allocates = |row: &&Row| !row.is_custom && !row.shape.is_free();
        let mut found: Vec<(&str, Symbol)> = Vec::new();
        for (name, symbol) in image.functions() {
            let is_visible = symbol.exported || image.kind != FileKind::Library;
            if is_visible
                && !symbol.indirect
                && !claimed.contains(&symbol.address)
                && let Some(row) = row_of(name).filter(allocates)
            {
                found.push((row.name.as_str(), *symbol));
            }
        }
        found.sort_by_key(|(_, symbol)| symbol.address);
        found.dedup_by_key(|(_, symbol)| symbol.address);
        found
    }

    /// The functions of this table that `image` defines.
    pub(super) fn defined_in(&self, image: &FileImage) -> Defined {
        let mut symbols: HashMap<&str, Vec<Symbol>> = HashMap::new();
        for (name, symbol) in image.functions() {
            if self.knows(name) {
                symbols.entry(canonical(name)).or_default().push(*symbol);
            }
        }
        let applies = |allocator: &Allocator| {
            allocator.markers.iter().any(|m| symbols.contains_key(m))
                && !allocator.unless.iter().any(|m| symbols.contains_key(m))
        };
        // The operators of libraries, which call malloc, are not read: there are many such libraries, some of them
        // large.
        let is_library = image.kind == FileKind::Library;
        let objects = self.objects_in(image);
        let mut chosen: Vec<usize> = Vec::new();
        let mut is_last_resort = false;
        for (index, origin) in self.origins.iter().enumerate() {
            let take = match origin {
                Origin::Custom(custom) => {
                    custom.is_for(&image.path) || image.soname.as_deref().is_some_and(|s| custom.is_for(s))
                }
                Origin::Known(allocator) if allocator.is_of_objects => !objects.is_empty(),
                Origin::Known(allocator) if allocator.name == OWN_OPERATORS && is_library => false,
                Origin::Known(allocator) if allocator.last_resort => chosen.is_empty() && applies(allocator),
                Origin::Known(allocator) => applies(allocator),
            };
            if take {
                chosen.push(index);
                is_last_resort |= matches!(origin, Origin::Known(allocator) if allocator.last_resort);
            }
        }
        let mut functions: Vec<(u16, Symbol)> = Vec::new();
        for (symbol, found) in &symbols {
            let rows = self.by_symbol.get(*symbol).into_iter().flatten();
            let row = rows.copied().find(|n| self.row(*n).is_some_and(|r| chosen.contains(&r.origin)));
            if let Some(row) = row {
                functions.extend(found.iter().map(|symbol| (row, *symbol)));
            }
        }
        functions.extend(objects);
        functions.sort_by_key(|(row, symbol)| (*row, symbol.address));
        let has = |index: usize| functions.iter().any(|(n, _)| self.row(*n).is_some_and(|r| r.origin == index));
        let mut defined = Defined {
            is_last_resort,
            are_own_operators: chosen.iter().any(|index| self.origins[*index].name() == OWN_OPERATORS),
            ..Defined::default()
        };
        for index in chosen {
            match &self.origins[index] {
                Origin::Known(allocator) if has(index) => {
                    let version = (allocator.version)(image).map(|v| format!(" {v}")).unwrap_or_default();
                    defined.allocators.push(format!("{}{version}", allocator.name));
                    defined.limits.extend(allocator.limits);
                }
                Origin::Known(_) => {}
                Origin::Custom(custom) => {
                    if has(index) {
                        defined.allocators.push("custom".to_owned());
                    }
                    let wanted = custom.functions.iter().map(|f| &f.symbol);
                    defined.absent.extend(wanted.filter(|s| !symbols.contains_key(s.as_str())).cloned());
                }
            }
        }
        defined.functions = functions;
        defined
    }
}

/// The plain name of a symbol, without the version that some symbol tables append (`malloc@@GLIBC_2.2.5`), and without
/// the mangling of Rust's allocator functions (`_RNvCs…_7___rustc12___rust_alloc`).
fn canonical(symbol: &str) -> &str {
    let symbol = symbol.split('@').next().unwrap_or(symbol);
    let Some((_, rest)) = symbol.strip_prefix("_RNvC").and_then(|s| s.split_once("7___rustc")) else { return symbol };
    rest.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix('_').unwrap_or(symbol)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_named_by_number() {
        let table = Table::new(&["lib.so:take(size=arg0)->ret".parse().unwrap()]);
        assert_eq!(table.function_name(0), Some("take"), "custom functions come first");
        let named = |number| table.function_name(number);
        assert_eq!((named(MMAP), named(MREMAP), named(BRK)), (Some("mmap"), Some("mremap"), Some("brk")));
        assert_eq!((named(ANNOUNCED), named(ANNOUNCED_MMAP)), (Some("otel_memory:alloc"), Some("otel_memory:mmap")));
        assert_eq!(named(ANNOUNCED_MMAP - 1), None);
        assert!(table.names().starts_with("custom, jemalloc, "), "{}", table.names());
    }

    #[test]
    fn names_behind_symbols() {
        assert_eq!(canonical("_RNvCsfLfy6EI15iL_7___rustc12___rust_alloc"), "__rust_alloc");
        assert_eq!(canonical("_RNvCsfLfy6EI15iL_7___rustc18___rdl_alloc_zeroed"), "__rdl_alloc_zeroed");
        assert_eq!(canonical("malloc@@GLIBC_2.2.5"), "malloc");
        assert_eq!(canonical("_RNvCs_3foo3bar"), "_RNvCs_3foo3bar");
        assert_eq!(canonical(""), "");
    }
}
