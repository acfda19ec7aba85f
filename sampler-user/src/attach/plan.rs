//! The plan for one file: sites, ranges, and what cannot be hooked.

use std::collections::BTreeMap;
use std::io::{Read, Seek};

use sampler_ebpf::abi::{
    FileRanges, SITE_CALLS_OUT, SITE_ENDS_PROBED, SITE_MAY_CALL_INSIDE, SITE_MAY_TAIL_JUMP, SITE_PASSES_BLOCK_ON,
    SITE_THROWS, Site,
};
use serde::{Deserialize, Serialize};

use super::AttachError;
use super::allocators::LOADERS;
use super::arch::{self, Target};
use super::elf::{FileImage, FileKind};
use super::exceptions::{self, Leaving};
use super::placement::{KernelRules, Kind, Needs};
use super::ranges::{CallGraph, Extent, InnerCode, inner_code};
use super::resolver::{Resolvers, UNSIZED_FUNCTION_BYTES};
use super::table::{Row, Table};

/// Similar names that a message about an unknown one offers.
const SUGGESTIONS: usize = 3;

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
    /// Return instructions that are probed to see that, because an exception may pass; file offsets.
    pub ends: Vec<u64>,
}

/// Something that is not hooked.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Missing {
    /// Function, or part of the file.
    pub what: String,
    /// Why, and what follows from it.
    pub why: String,
}

impl Missing {
    pub(crate) fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into() }
    }
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
    /// Functions that need no probe because they do nothing but jump to another function, which has one.
    pub covered: Vec<Covered>,
    /// What is not hooked although it should be, and why.
    pub missing: Vec<Missing>,
    /// What no probe can follow in this allocator, if the program uses it.
    pub limits: Vec<Missing>,
}

/// A function that only jumps to a hooked one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Covered {
    /// The function.
    pub function: String,
    /// Where its calls are seen.
    pub by: String,
}

/// A function of the file that is to be hooked.
struct Found<'a> {
    number: u16,
    row: &'a Row,
    extent: Extent,
    /// Its symbols.
    names: Vec<&'a str>,
    /// Whether a resolver (IFUNC) chooses it.
    is_chosen: bool,
}

impl Found<'_> {
    /// What to call it: the row's name, unless it was found under another public one (`mi_memalign`).
    fn name(&self) -> &str {
        let row = self.row.name.as_str();
        let public = |symbol: &&&str| !row.contains(' ') && !symbol.starts_with('_') && !self.names.contains(&row);
        self.names.first().filter(public).copied().unwrap_or(row)
    }
}

/// Reads and plans a file that was found at `path`. Of a file without an allocator, only the symbols are read.
pub fn examine<R: Read + Seek>(
    reader: R,
    path: &str,
    rules: &KernelRules,
    requested: &Table,
) -> Result<AllocatorFile, AttachError> {
    let image = FileImage::read_if(reader, |name| requested.knows(name))?.found_at(path);
    analyse(&image, rules, requested)
}

/// Plans the probes of a file.
pub fn analyse(image: &FileImage, rules: &KernelRules, requested: &Table) -> Result<AllocatorFile, AttachError> {
    if image.machine != rules.machine {
        return Err(AttachError::ForeignMachine);
    }
    if image.soname.as_deref().is_some_and(|name| LOADERS.iter().any(|loader| name.starts_with(loader))) {
        return Err(AttachError::Loader);
    }
    let defined = requested.defined_in(image);
    if let Some(symbol) = defined.absent.first() {
        let nearest = nearest_symbols(image, symbol);
        return Err(AttachError::NoSymbol { symbol: symbol.clone(), nearest });
    }
    let mut missing: Vec<Missing> =
        image.damaged.iter().map(|part| Missing::new(*part, "damaged or cut off in the file")).collect();
    let mut covered = Vec::new();
    let found = once_per_address(image, requested, &defined.functions, &mut missing, &mut covered);
    if found.is_empty()
        && !defined.functions.is_empty()
        && let Some(Missing { what, why }) = missing.pop()
    {
        return Err(AttachError::Unhookable { what, why });
    }
    if found.is_empty() && image.is_go {
        return Err(AttachError::Go);
    }
    if found.is_empty() {
        let stripped = image.functions().next().is_none();
        return Err(AttachError::NoAllocator { looked_for: requested.names(), stripped });
    }
    let extents: Vec<Extent> = found.iter().map(|f| f.extent).collect();
    let graph = CallGraph::new(image, &extents);
    let inner = inner_code(&graph, &extents, &|name| requested.shape_of(name).is_some());
    if defined.is_last_resort
        && let Some(to) = inner.passes_on_to
    {
        return Err(AttachError::PassesOn { to });
    }
    if inner.left_out > 0 {
        let why =
            format!("{} code ranges did not fit: such calls from there count as calls of their own", inner.left_out);
        missing.push(Missing::new("calls of the allocator into itself", why));
    }

    for extent in &inner.between {
        let name =
            image.functions().find(|(_, s)| s.address == extent.start).map_or("a local function", |(name, _)| name);
        let why = "calls the allocator and is called by it as well as by others: those calls may count twice";
        missing.push(Missing::new(name, why));
    }

    let mut sites = Vec::new();
    for ((function, may_tail_jump), may_call_inside) in
        found.iter().zip(&inner.may_tail_jump).zip(&inner.may_call_inside)
    {
        if let Some(by) = passes_on_to(image, &graph, function, &found, requested) {
            covered.push(Covered { function: function.name().to_owned(), by });
            continue;
        }
        match place(image, &graph, rules, function) {
            Ok(mut planned) => {
                (planned.site.inner_start, planned.site.inner_end) = bounding_range(&inner);
                planned.site.flags |= if *may_tail_jump { SITE_MAY_TAIL_JUMP } else { 0 };
                let passes_block_on = *may_tail_jump
                    && function.row.shape.is_realloc()
                    && graph.may_tail_jump(function.extent, &|to| takes_block(&graph, to, &found, requested));
                planned.site.flags |= if passes_block_on { SITE_PASSES_BLOCK_ON } else { 0 };
                planned.site.flags |= if *may_call_inside { SITE_MAY_CALL_INSIDE } else { 0 };
                // Of functions that nobody here has read, it is unknown what they call.
                let calls_out = inner.calls_out || function.row.is_unread();
                planned.site.flags |= if calls_out && planned.return_needed { SITE_CALLS_OUT } else { 0 };
                sites.push(planned);
            }
            Err(why) => missing.push(Missing::new(function.name(), why)),
        }
    }
    sites.sort_by_key(|s| s.site.offset);
    Ok(AllocatorFile {
        allocator: defined.allocators.join(", "),
        kind: image.kind,
        build_id: image.build_id.clone(),
        sites,
        ranges: inner.ranges,
        covered,
        missing,
        limits: defined.limits.iter().map(|(what, why)| Missing::new(*what, *why)).collect(),
    })
}

/// The functions to hook by address: aliases are one function, and belong to the row that comes first.
fn once_per_address<'a>(
    image: &'a FileImage,
    table: &'a Table,
    functions: &[(u16, super::elf::Symbol)],
    missing: &mut Vec<Missing>,
    covered: &mut Vec<Covered>,
) -> Vec<Found<'a>> {
    let mut by_address: BTreeMap<u64, Found<'a>> = BTreeMap::new();
    let mut resolvers = Resolvers::new(image);
    for (number, symbol) in functions {
        let Some(row) = table.row(*number) else { continue };
        let name = image.name(symbol);
        let mut extents = Vec::new();
        if symbol.indirect {
            let choices = resolvers.choices(symbol);
            if !choices.is_whole {
                let why = "chosen when the program starts (IFUNC), in a way that cannot be read off its code: calls of \
                           what is not hooked here are missed";
                missing.push(Missing::new(row.name.clone(), why));
            }
            for by in choices.imported {
                if table.shape_of(&by) == Some(row.shape) {
                    covered.push(Covered { function: row.name.clone(), by });
                } else {
                    missing.push(Missing::new(row.name.clone(), format!("may be {by} of another file (IFUNC)")));
                }
            }
            extents.extend(choices.functions);
        } else {
            let size = if symbol.size > 0 { symbol.size } else { UNSIZED_FUNCTION_BYTES };
            extents.push(Extent { start: symbol.address, end: symbol.address.saturating_add(size) });
        }
        for extent in extents {
            if !image.is_executable(extent.start) || image.code_between(extent.start, extent.end).is_empty() {
                missing.push(Missing::new(row.name.clone(), "its symbol points outside of the file's code"));
                continue;
            }
            let found = || Found { number: *number, row, extent, names: Vec::new(), is_chosen: symbol.indirect };
            by_address.entry(extent.start).or_insert_with(found).names.push(name);
        }
    }
    // Both symbol tables may have it.
    missing.dedup();
    covered.dedup();
    by_address.into_values().collect()
}

/// The function that `function` passes every call on to, unchanged, if that is all it does and that one is hooked.
fn passes_on_to(
    image: &FileImage,
    graph: &CallGraph<'_>,
    function: &Found<'_>,
    found: &[Found<'_>],
    table: &Table,
) -> Option<String> {
    let Extent { start, end } = function.extent;
    let address = match arch::forwards_to(image.machine, start, image.code_between(start, end))? {
        Target::Address(address) | Target::Slot(address) => address,
    };
    if let Some(target) = found.iter().find(|f| f.extent.start == address && address != start) {
        return (target.row.shape == function.row.shape && (target.row.flags ^ function.row.flags) & !SITE_THROWS == 0)
            .then(|| target.name().to_owned());
    }
    let name = graph.import_behind(address)?;
    // The loader may bind that name to another file: whichever has it is hooked there.
    let here = found.iter().any(|f| f.names.contains(&name) && f.extent.start != start);
    (here && table.shape_of(name) == Some(function.row.shape)).then(|| name.to_owned())
}

/// Whether a function that is hooked, here or in another file, is at an address and reallocates.
fn takes_block(graph: &CallGraph<'_>, address: u64, found: &[Found<'_>], table: &Table) -> bool {
    found.iter().any(|f| f.extent.start == address && f.row.shape.is_realloc())
        || graph.import_behind(address).and_then(|name| table.shape_of(name)).is_some_and(|shape| shape.is_realloc())
}

fn place(
    image: &FileImage,
    graph: &CallGraph<'_>,
    rules: &KernelRules,
    function: &Found<'_>,
) -> Result<PlannedSite, &'static str> {
    let Found { number, row, extent, .. } = function;
    let is_free = row.shape.is_free();
    let needs = Needs { arguments: row.shape.arguments, return_address: !is_free };
    let code = image.code_between(extent.start, extent.end);
    let placement = arch::place(rules, extent.start, code, &needs, &|address| graph.is_entered(address))
        .ok_or("the kernel refuses probes on the instructions that it begins with")?;
    let offset = image
        .file_offset(extent.start)
        .and_then(|offset| offset.checked_add(placement.offset))
        .ok_or("its symbol points outside of the file's code")?;
    let arguments = placement.arguments;
    let mut ends = Vec::new();
    if row.is_custom && !is_free {
        match exceptions::leaving(image, graph, *extent) {
            Leaving::Returns => {}
            Leaving::Throws(returns) => ends.extend(returns.into_iter().filter_map(|at| image.file_offset(at))),
            Leaving::Unknown => {
                return Err(
                    "it may throw an exception, and how else it ends cannot be read off its code: an exception on \
                            its way past an awaited return would end the program",
                );
            }
        }
    }
    Ok(PlannedSite {
        function: function.name().to_owned(),
        site: Site {
            offset,
            function: *number,
            size_argument: arguments.size,
            times_argument: arguments.times,
            old_argument: arguments.old,
            out_argument: arguments.out,
            flags: row.flags | if ends.is_empty() { 0 } else { SITE_ENDS_PROBED },
            ..Site::default()
        },
        kind: placement.kind,
        reason: format!(
            "+{:#x} {}{}",
            placement.offset,
            placement.reason,
            if function.is_chosen {
                "; one that the resolver of an IFUNC may choose"
            } else if ends.is_empty() {
                ""
            } else {
                "; it may throw, so its return instructions are probed too"
            }
        ),
        return_needed: !is_free,
        ends,
    })
}

fn bounding_range(inner: &InnerCode) -> (u64, u64) {
    let used = || inner.ranges.ranges.iter().take(inner.ranges.count as usize);
    (used().map(|r| r[0]).min().unwrap_or(0), used().map(|r| r[1]).max().unwrap_or(0))
}

/// The defined functions whose names are most like `symbol`, best first.
fn nearest_symbols(image: &FileImage, symbol: &str) -> Vec<String> {
    let mut scored: Vec<(f64, &str)> = image
        .functions()
        .map(|(name, _)| (strsim::jaro_winkler(name, symbol), name))
        .filter(|(score, _)| *score > 0.6)
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.dedup_by(|a, b| a.1 == b.1);
    scored.into_iter().take(SUGGESTIONS).map(|(_, name)| name.to_owned()).collect()
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
