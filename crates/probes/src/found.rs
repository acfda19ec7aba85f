//! The functions of a file to hook, by probes or inline, those that its resolvers choose from, and messages about
//! others.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use heapbpf_audit::{Covered, FileKind, Missing};

use crate::arch;
use crate::call_graph::{CallGraph, Extent};
use crate::elf::{FileImage, Symbol};
use crate::error::AttachError;
use crate::flow::{Returned, Target};
use crate::reentrant::ReentrantCode;
use crate::runtimes::Runtime;
use crate::table::{Row, Table};

/// Functions that report errors, and beginnings of such names: what they allocate is the report.
const REPORTING: &[&str] = &["__cxa_", "_Unwind_", "_ZSt", "__assert_fail", "__stack_chk_fail", "abort"];

/// Maximum similar names in the message about an unknown one.
const SUGGESTIONS: usize = 3;

/// A function of the file to hook.
pub(crate) struct FoundFunction<'a> {
    pub(crate) number: u16,
    pub(crate) row: &'a Row,
    pub(crate) extent: Extent,
    /// Its symbols.
    pub(crate) names: Vec<&'a str>,
    /// Whether a resolver (IFUNC) chooses it.
    pub(crate) is_chosen: bool,
}

impl FoundFunction<'_> {
    /// Its name in the plan: the row's name, unless it was found under another public one (`mi_memalign`).
    pub(crate) fn name(&self) -> &str {
        let row = self.row.name.as_str();
        let public = |symbol: &&&str| !row.contains(' ') && !symbol.starts_with('_') && !self.names.contains(&row);
        self.names.first().filter(public).copied().unwrap_or(row)
    }
}

/// Why no function of a file can be hooked. `defines` says whether the file's symbols include any.
pub(crate) fn why_nothing(image: &FileImage, table: &Table, defines: bool, missing: Option<Missing>) -> AttachError {
    match missing {
        Some(Missing { what, why }) if defines || table.has_objects() && image.has_objects() => {
            AttachError::Unhookable { what, why }
        }
        _ if image.runtime_by_section == Some(Runtime::Go) => AttachError::Go,
        _ => {
            let stripped = image.functions().next().is_none();
            if stripped && image.kind == FileKind::StaticExecutable {
                return AttachError::StaticStripped;
            }
            AttachError::NoAllocator { looked_for: table.names(), stripped }
        }
    }
}

/// Those of the `others`, which have the name of a function that allocates but are of no allocator that is hooked in the
/// file, that do not get their blocks from one, as far as their code shows. `None` if there are none.
pub(crate) fn not_hooked(
    image: &FileImage,
    table: &Table,
    graph: &CallGraph<'_>,
    others: &[(&str, Symbol)],
    found: &[FoundFunction<'_>],
) -> Option<Missing> {
    if others.is_empty() {
        return None;
    }
    let is_reporting = |name: &str| REPORTING.iter().any(|begin| name.starts_with(begin));
    let reporting: BTreeSet<u64> =
        image.functions().filter(|function| is_reporting(function.0)).map(|(_, symbol)| symbol.address).collect();
    let is_imported = |name: &str| !graph.has_function(name) && table.shape_of(name).is_some_and(|it| !it.is_free());
    let is_hooked = |address: u64| {
        found.iter().any(|function| function.extent.start == address)
            || graph.import_behind(address).is_some_and(is_imported)
    };
    let is_alone = |symbol: &Symbol| {
        let extent = Extent::of(symbol);
        image.has_code(extent.start)
            && !is_hooked(extent.start)
            && !graph.leads_to(extent, &is_hooked, &|address| reporting.contains(&address))
    };
    let alone: BTreeSet<&str> = others.iter().filter(|(_, symbol)| is_alone(symbol)).map(|(name, _)| *name).collect();
    let first = alone.first()?;
    let more = if alone.len() > 1 { format!(" and {} more", alone.len() - 1) } else { String::new() };
    let why = "not of an allocator that is hooked, and its code calls none: what it takes from other memory is not \
               counted; describe it with --alloc";
    Some(Missing::new(format!("{first}{more}"), why))
}

/// Calls that may count twice because the ranges of reentrant code do not distinguish them.
pub(crate) fn double_counts(image: &FileImage, reentrant: &ReentrantCode) -> Vec<Missing> {
    let mut missing = Vec::new();
    if reentrant.left_out > 0 {
        let why = format!("{} code ranges did not fit: such calls from there count twice", reentrant.left_out);
        missing.push(Missing::new("calls of the allocator into itself", why));
    }
    for extent in &reentrant.between {
        let name =
            image.functions().find(|(_, s)| s.address == extent.start).map_or("a local function", |(name, _)| name);
        let why = "calls the allocator and is called both by it and by other code: these calls may count twice";
        missing.push(Missing::new(name, why));
    }
    missing
}

/// The functions to hook, by address. Aliases are one function, which belongs to the first row.
pub(crate) fn once_per_address<'a>(
    image: &'a FileImage<'a>,
    table: &'a Table,
    functions: &[(u16, Symbol)],
    missing: &mut Vec<Missing>,
    covered: &mut Vec<Covered>,
) -> Vec<FoundFunction<'a>> {
    let mut by_address: BTreeMap<u64, FoundFunction<'a>> = BTreeMap::new();
    let mut resolvers = Resolvers::new(image);
    for (number, symbol) in functions {
        let Some(row) = table.row(*number) else { continue };
        let name = image.name(symbol);
        let mut extents = Vec::new();
        if symbol.indirect {
            let choices = resolvers.choices(symbol);
            if !choices.is_whole {
                let why = "chosen when the program starts (IFUNC), and not all possible choices can be found in its \
                           code: calls of the others are missed";
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
            extents.push(Extent::of(symbol));
        }
        for extent in extents {
            if !image.is_executable(extent.start) || !image.has_code(extent.start) {
                missing.push(Missing::new(row.name.clone(), "its symbol points outside of the file's code"));
                continue;
            }
            let found =
                || FoundFunction { number: *number, row, extent, names: Vec::new(), is_chosen: symbol.indirect };
            by_address.entry(extent.start).or_insert_with(found).names.push(name);
        }
    }
    // A symbol may be in both symbol tables.
    missing.dedup();
    covered.dedup();
    by_address.into_values().collect()
}

/// The defined functions whose names are most similar to `symbol`, best first.
pub(crate) fn nearest_symbols(image: &FileImage, symbol: &str) -> Vec<String> {
    let mut scored: Vec<(f64, &str)> = image
        .functions()
        .map(|(name, _)| (strsim::jaro_winkler(name, symbol), name))
        .filter(|(score, _)| *score > 0.6)
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.dedup_by(|a, b| a.1 == b.1);
    scored.into_iter().take(SUGGESTIONS).map(|(_, name)| name.to_owned()).collect()
}

/// Most resolvers of one file that are analysed; an allocator has fewer functions.
const RESOLVERS_MAX: usize = 128;

/// The functions that a resolver chooses from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Choices {
    /// Functions of the same file.
    pub(super) functions: Vec<Extent>,
    /// Names of functions that the loader binds, mostly to another file.
    pub(super) imported: Vec<String>,
    /// Whether these are all.
    pub(super) is_whole: bool,
}

/// Every function in a file's symbols or unwind tables.
struct Functions<'a> {
    /// Start and end.
    bounds: BTreeMap<u64, u64>,
    by_name: HashMap<&'a str, u64>,
}

impl<'a> Functions<'a> {
    fn of(image: &'a FileImage) -> Self {
        let sized = image.functions().filter_map(|(_, s)| Some((s.address, s.address.checked_add(s.size)?)));
        let mut bounds: BTreeMap<u64, u64> = sized.collect();
        bounds.extend(image.bounds.iter().copied());
        let direct = image.functions().filter(|(_, symbol)| !symbol.indirect);
        Self { bounds, by_name: direct.map(|(name, symbol)| (name, symbol.address)).collect() }
    }

    fn end(&self, address: u64) -> u64 {
        let around = self.bounds.range(..=address).next_back().map(|(_, end)| *end).filter(|end| address < *end);
        around.unwrap_or(Extent::beginning(address).end)
    }
}

/// The resolvers of one file.
pub(super) struct Resolvers<'a> {
    image: &'a FileImage<'a>,
    /// Filled when first needed.
    functions: Option<Functions<'a>>,
    known: HashMap<u64, Returned>,
}

impl<'a> Resolvers<'a> {
    pub(super) fn new(image: &'a FileImage<'a>) -> Self {
        Self { image, functions: None, known: HashMap::new() }
    }

    /// The functions that the resolver at `symbol` can choose: the addresses it returns at which a function is known to
    /// start.
    pub(super) fn choices(&mut self, symbol: &Symbol) -> Choices {
        let image = self.image;
        let functions = self.functions.get_or_insert_with(|| Functions::of(image));
        if !self.known.contains_key(&symbol.address) && self.known.len() >= RESOLVERS_MAX {
            return Choices::default();
        }
        let code_at = |address: u64| image.code_between(address, functions.end(address));
        let returned =
            self.known.entry(symbol.address).or_insert_with(|| arch::returns(image.machine, symbol.address, &code_at));
        let mut found = Choices { is_whole: returned.is_whole, ..Choices::default() };
        for target in &returned.targets {
            let (imported, address) = match *target {
                Target::Address(address) => (None, Some(address)),
                Target::Slot(slot) => {
                    let name = image.import_at(slot);
                    let here = name.and_then(|name| functions.by_name.get(name)).copied();
                    (name.filter(|_| here.is_none()), here)
                }
            };
            match (imported, address.filter(|address| functions.bounds.contains_key(address))) {
                (Some(name), _) => found.imported.push(name.to_owned()),
                (None, Some(start)) => found.functions.push(Extent { start, end: functions.end(start) }),
                (None, None) => found.is_whole = false,
            }
        }
        found
    }
}
