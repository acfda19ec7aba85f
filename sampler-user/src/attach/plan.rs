//! The plan for one file: sites, ranges, and what cannot be hooked.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{Read, Seek};

use sampler_ebpf::abi::{FileRanges, SITE_MAY_TAIL_JUMP, Site};
use serde::Serialize;

use super::AttachError;
use super::allocators::{ALLOCATORS, Allocator, Shape};
use super::arch;
use super::elf::{FileImage, FileKind, Symbol};
use super::placement::{KernelRules, Kind, Needs};
use super::ranges::{CallGraph, Extent, inner_code};

/// Code read of a function whose size the symbol table does not tell.
const UNSIZED_FUNCTION_BYTES: u64 = 256;

/// The allocators to look for.
#[derive(Clone, Debug)]
pub struct Table {
    allocators: Vec<Allocator>,
}

impl Default for Table {
    fn default() -> Self {
        Self { allocators: ALLOCATORS.to_vec() }
    }
}

/// A row of the table: one function of one allocator.
#[derive(Clone, Copy, Debug)]
struct Row<'a> {
    number: u16,
    allocator: &'a Allocator,
    name: &'a str,
    shape: Shape,
}

impl Table {
    fn rows(&self) -> impl Iterator<Item = (Row<'_>, &'static [&'static str])> {
        let functions = self.allocators.iter().flat_map(|allocator| {
            allocator.functions.iter().copied().flatten().map(move |function| (allocator, function))
        });
        (0_u16..).zip(functions).map(|(number, (allocator, function))| {
            (Row { number, allocator, name: function.name, shape: function.shape }, function.aliases)
        })
    }

    /// Name of the function that [`Site::function`] stands for.
    #[must_use]
    pub fn function_name(&self, number: u16) -> Option<&str> {
        self.rows().nth(usize::from(number)).map(|(row, _)| row.name)
    }

    fn symbols(&self) -> BTreeSet<&str> {
        self.rows().flat_map(|(row, aliases)| std::iter::once(row.name).chain(aliases.iter().copied())).collect()
    }
}

/// A probe to be placed.
#[derive(Clone, Debug)]
pub struct PlannedSite {
    /// Function that it is in.
    pub function: String,
    /// For the kernel side; `file` is the caller's to fill in.
    pub site: Site,
    /// What the kernel does with the probed instruction.
    pub kind: Kind,
    /// Why this instruction.
    pub reason: String,
    /// The probe must see sampled calls return.
    pub return_needed: bool,
}

/// Something that is not hooked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// Function, or part of the file.
    pub what: String,
    /// Why, and what follows from it.
    pub why: String,
}

/// The plan for one file.
#[derive(Clone, Debug)]
pub struct AllocatorFile {
    /// Name and version, `glibc 2.36`.
    pub allocator: String,
    /// Library or executable.
    pub kind: FileKind,
    /// GNU build ID; empty if the file has none.
    pub build_id: Vec<u8>,
    /// Probes, by file offset.
    pub sites: Vec<PlannedSite>,
    /// Exact code ranges of the hooked functions and their local helpers, file offsets.
    pub ranges: FileRanges,
    /// Functions that need no probe of their own, with the hooked one that they pass every call on to.
    pub covered: Vec<(String, String)>,
    /// What is not hooked, and why.
    pub missing: Vec<Missing>,
}

/// True if the file defines a function of the table: worth [`analyse`]. Reads symbol tables only.
pub fn defines_any<R: Read + Seek>(reader: R, table: &Table) -> Result<bool, AttachError> {
    let image = FileImage::read(reader)?;
    let wanted = table.symbols();
    Ok(image.functions().any(|(name, _)| wanted.contains(name)))
}

/// A function of the file that is to be hooked.
struct Found<'a> {
    row: Row<'a>,
    extent: Extent,
}

/// Plans the probes of a file.
pub fn analyse(image: &FileImage, rules: &KernelRules, requested: &Table) -> Result<AllocatorFile, AttachError> {
    if image.machine != rules.machine {
        return Err(AttachError::ForeignMachine);
    }
    if image.is_go {
        return Err(AttachError::Go);
    }
    let mut missing: Vec<Missing> = image
        .damaged
        .iter()
        .map(|part| Missing { what: (*part).to_owned(), why: "damaged or cut off in the file".to_owned() })
        .collect();
    let found = find_functions(image, requested, &mut missing)?;
    let names: BTreeSet<&str> = requested.symbols();
    let extents: Vec<Extent> = found.iter().map(|f| f.extent).collect();
    let graph = CallGraph::new(image, &extents);
    let inner = inner_code(&graph, &extents, &|name| names.contains(name));
    let bounding = inner.ranges.ranges.iter().take(inner.ranges.count as usize);
    let inner_start = bounding.clone().map(|r| r[0]).min().unwrap_or(0);
    let inner_end = bounding.map(|r| r[1]).max().unwrap_or(0);

    let mut sites = Vec::new();
    for (function, may_tail_jump) in found.iter().zip(&inner.may_tail_jump) {
        let Row { number, allocator, name, shape } = function.row;
        let mut leave_out = |why: &str| missing.push(Missing { what: name.to_owned(), why: why.to_owned() });
        let Extent { start, end } = function.extent;
        let Some(offset) = image.file_offset(start).filter(|_| image.is_executable(start)) else {
            leave_out("its symbol points outside of the file's code");
            continue;
        };
        let needs = Needs { arguments: shape.arguments, return_address: !shape.is_free() };
        let entered = |address| graph.is_entered(address);
        let code = image.code_between(start, end);
        let Some(placement) = arch::place(rules, start, code, &needs, &entered) else {
            leave_out("the kernel refuses probes on the instructions that it begins with");
            continue;
        };
        let arguments = placement.arguments;
        let tail = if *may_tail_jump { SITE_MAY_TAIL_JUMP } else { 0 };
        sites.push(PlannedSite {
            function: name.to_owned(),
            site: Site {
                offset: offset + placement.offset,
                inner_start,
                inner_end,
                function: number,
                size_argument: arguments.size,
                times_argument: arguments.times,
                old_argument: arguments.old,
                out_argument: arguments.out,
                flags: allocator.flags(shape) | tail,
                ..Site::default()
            },
            kind: placement.kind,
            reason: format!("+{:#x} {}", placement.offset, placement.reason),
            return_needed: !shape.is_free(),
        });
    }
    if inner.left_out > 0 {
        missing.push(Missing {
            what: "calls of the allocator into itself".to_owned(),
            why: format!("{} code ranges did not fit; such calls from there are counted as calls", inner.left_out),
        });
    }
    sites.sort_by_key(|s| s.site.offset);
    let mut allocators: Vec<&Allocator> = Vec::new();
    for function in &found {
        if !allocators.iter().any(|a| a.name == function.row.allocator.name) {
            allocators.push(function.row.allocator);
        }
    }
    let allocator = allocators.iter().map(|a| label(a, image)).collect::<Vec<_>>().join(", ");
    let covered = Vec::new();
    Ok(AllocatorFile {
        allocator,
        kind: image.kind,
        build_id: image.build_id.clone(),
        sites,
        ranges: inner.ranges,
        covered,
        missing,
    })
}

fn label(allocator: &Allocator, image: &FileImage) -> String {
    match (allocator.version)(image) {
        Some(version) => format!("{} {version}", allocator.name),
        None => allocator.name.to_owned(),
    }
}

/// The functions to hook, each address once, by address.
fn find_functions<'a>(
    image: &FileImage,
    requested: &'a Table,
    missing: &mut Vec<Missing>,
) -> Result<Vec<Found<'a>>, AttachError> {
    let mut defined: HashMap<&str, Vec<Symbol>> = HashMap::new();
    let wanted = requested.symbols();
    let markers: BTreeSet<&str> = requested.allocators.iter().flat_map(|a| a.markers.iter().copied()).collect();
    let mut has_symbols = false;
    for (name, symbol) in image.functions() {
        has_symbols = true;
        if wanted.contains(name) || markers.contains(name) {
            defined.entry(name).or_default().push(*symbol);
        }
    }
    let mut by_address: BTreeMap<u64, Found<'a>> = BTreeMap::new();
    for (row, aliases) in requested.rows() {
        if !row.allocator.markers.iter().any(|marker| defined.contains_key(marker)) {
            continue;
        }
        let names = std::iter::once(row.name).chain(aliases.iter().copied());
        for symbol in names.filter_map(|name| defined.get(name)).flatten() {
            if symbol.indirect {
                let why = "chosen when the program starts (IFUNC): its symbol is not its code".to_owned();
                missing.push(Missing { what: row.name.to_owned(), why });
                continue;
            }
            let end = symbol.address.saturating_add(if symbol.size > 0 { symbol.size } else { UNSIZED_FUNCTION_BYTES });
            let extent = Extent { start: symbol.address, end };
            by_address.entry(symbol.address).or_insert(Found { row, extent });
        }
    }
    if by_address.is_empty() {
        let looked_for = requested.allocators.iter().map(|a| a.name).collect::<Vec<_>>().join(", ");
        return Err(AttachError::NoAllocator { looked_for, stripped: !has_symbols });
    }
    Ok(by_address.into_values().collect())
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
