//! The plan for one file: the sites to probe, the ranges of reentrant code, and what cannot be hooked.

use std::collections::BTreeSet;

use heapbpf_audit::{Covered, FileKind, Missing, ProbeKind};
use heapbpf_elf::{ElfFile, Image, Pieces};
use sampler_ebpf::abi::{
    FileRanges, ResultLocation, SITE_CALLS_OUT, SITE_MAY_CALL_INSIDE, SITE_MAY_TAIL_JUMP, SITE_PASSES_BLOCK_ON,
    SITE_THROWS, Site,
};

use crate::arch;
use crate::call_graph::{CallGraph, Extent};
use crate::elf::FileImage;
use crate::error::AttachError;
use crate::flow::Target;
use crate::found::{FoundFunction, double_counts, nearest_symbols, not_hooked, once_per_address, why_nothing};
use crate::leaving::{Leaving, Reader};
use crate::object_search;
use crate::object_table::ObjectTable;
use crate::placement::KernelRules;
use crate::reentrant::{ReentrantCode, reentrant_code};
use crate::runtimes::Runtime;
use crate::table::Table;

/// A function that identifies a C library: it calls `main`.
const C_LIBRARY: &str = "__libc_start_main";

/// A probe to place.
#[derive(Clone, Debug)]
pub struct PlannedSite {
    /// Name of the function that contains it.
    pub function: String,
    /// The site for the kernel side: file offset, function, where the arguments are. The caller fills in `file`.
    pub site: Site,
    /// How the kernel runs the probed instruction.
    pub kind: ProbeKind,
    /// Why this instruction was chosen.
    pub reason: String,
    /// Whether the return of sampled calls must be probed, too, because the result is only known then.
    pub return_needed: bool,
    /// Whether the kernel may replace the return address while the function runs, as it does for return probes.
    pub return_probe: ReturnProbe,
    /// Return sites, which can be probed instead. Empty for most functions.
    pub return_sites: Vec<ReturnSite>,
    /// For a probe where the program announces a sample or its free: the file offset of the counter of listeners, 0 if
    /// there is none. `None` for calls.
    pub announces: Option<u64>,
}

/// Whether a function's return address may be replaced while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReturnProbe {
    /// Yes.
    Harmless,
    /// Only in one call of a thread at a time, which needs session links: the function may switch to another stack
    /// before it returns, but probably does not.
    OneAtATime,
    /// No: an exception may leave the function, or it may switch to another stack before it returns.
    Harmful,
}

/// An instruction that a call of a function executes on its way to returning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReturnSite {
    /// File offset.
    pub offset: u64,
    /// Where the call's result is at this instruction.
    pub result: ResultLocation,
}

/// How the end of a function's calls is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndSeen {
    /// By a return probe.
    Returning,
    /// By probes on its return sites.
    AtReturnSites,
    /// Not at all. Calls count, but the fate of their blocks stays unknown.
    Never,
    /// Not at all, and its calls cannot be distinguished from those that it makes: it must not be hooked.
    Unhookable,
}

impl PlannedSite {
    /// How the end of its calls is seen, with or without session links.
    #[must_use]
    pub fn end_seen(&self, with_sessions: bool) -> EndSeen {
        match self.return_probe {
            ReturnProbe::Harmless => EndSeen::Returning,
            ReturnProbe::OneAtATime if with_sessions => EndSeen::Returning,
            _ if !self.return_sites.is_empty() => EndSeen::AtReturnSites,
            _ if self.site.flags & SITE_THROWS != 0 => EndSeen::Never,
            _ => EndSeen::Unhookable,
        }
    }
}

/// The plan for one file.
#[derive(Clone, Debug)]
pub struct AllocatorFile {
    /// Name and version of the allocator, such as `glibc 2.36`.
    pub allocator: String,
    /// Library or executable.
    pub kind: FileKind,
    /// GNU build ID; empty if the file has none.
    pub build_id: Vec<u8>,
    /// Probes to place, ascending by file offset.
    pub sites: Vec<PlannedSite>,
    /// Exact code ranges of the hooked functions and their local helpers, as file offsets. Calls from there are
    /// reentrant.
    pub ranges: FileRanges,
    /// Code that only the hooked functions lead to, these included, as file offsets in ascending order: whatever runs
    /// there, and whatever that calls, runs for the allocator.
    pub own: Vec<[u64; 2]>,
    /// Whether its calls may lead to another file's allocator. Such calls count once only if both files are counted in
    /// the same way.
    pub may_call_out: bool,
    /// Whether they do that if the other allocator is loaded first, as every allocator is before a C library.
    pub may_be_interposed: bool,
    /// Functions that need no probe because they only jump to another function, which has one.
    pub covered: Vec<Covered>,
    /// Functions that should be hooked but are not, and why.
    pub missing: Vec<Missing>,
    /// What probes cannot follow in this allocator, if the program uses it.
    pub limits: Vec<Missing>,
}

/// Reads the file that was found at `path`, and plans its probes. If the file has no allocator, only its symbols are
/// read.
///
/// # Errors
/// [`AttachError`] if there is nothing to probe, or the file cannot be used.
pub fn examine(file: &dyn Image, path: &str, rules: &KernelRules, table: &Table) -> Result<AllocatorFile, AttachError> {
    examine_avoiding(file, path, rules, table, &BTreeSet::new()).plan
}

/// The results for a file.
#[derive(Debug)]
pub struct Examination<'f> {
    /// The plan, or why there is nothing to probe.
    pub plan: Result<AllocatorFile, AttachError>,
    /// A language runtime with its own heap, which no probe sees.
    pub runtime: Option<Runtime>,
    /// The object allocator of an interpreter, if it was searched for and is in the plan.
    pub objects: Option<ObjectTable>,
    /// The file as it was read, if there is a plan.
    pub image: Option<FileImage<'f>>,
}

/// Like [`examine`], but also looks for a language runtime, and puts no probe on the instructions at the file offsets
/// `avoided` if a function has others. Those have a debugger's breakpoints.
pub fn examine_avoiding<'f>(
    file: &'f dyn Image,
    path: &str,
    rules: &KernelRules,
    table: &Table,
    avoided: &BTreeSet<u64>,
) -> Examination<'f> {
    match FileImage::read_if(file, path, |image| table.is_in(image)) {
        Ok(mut image) => {
            if table.has_objects() && image.has_objects() {
                image.objects = Some(object_search::find(&image, file));
            }
            let plan = plan(&image, rules, table, avoided).map_err(|why| alone(why, file, &image, table));
            let runtime = Runtime::of(&image);
            let objects = image.objects.take().and_then(Result::ok).filter(|_| table.has_objects() && plan.is_ok());
            Examination { objects, runtime, image: plan.is_ok().then_some(image), plan }
        }
        Err(error) => Examination { plan: Err(error), runtime: None, objects: None, image: None },
    }
}

/// If the reason is that a file has no known allocator: that it nevertheless has functions that allocate, if they
/// cannot get their blocks from another file, because it uses no function that allocates and no `dlsym`.
fn alone(why: AttachError, file: &dyn Image, image: &FileImage, table: &Table) -> AttachError {
    let is_without = matches!(why, AttachError::NoAllocator { .. }) && image.damaged.is_empty();
    let functions = if is_without { table.unclaimed(image, &[]) } else { Vec::new() };
    let Some((function, _)) = functions.first() else { return why };
    let pieces = Pieces::of(file);
    let Ok(tables) = ElfFile::parse(&pieces) else { return why };
    let allocates = |name: &str| table.shape_of(name).is_some_and(|shape| !shape.is_free());
    if tables.dynamic_names().undefined().any(|name| allocates(name) || name.starts_with("dlsym")) {
        return why;
    }
    AttachError::Alone { function: (*function).to_owned() }
}

/// Plans the probes of a file that was already read: which allocator of `table` it has, and which instruction of each
/// function a kernel with these `rules` should probe.
fn plan(
    image: &FileImage,
    rules: &KernelRules,
    table: &Table,
    avoided: &BTreeSet<u64>,
) -> Result<AllocatorFile, AttachError> {
    if image.machine != rules.machine {
        return Err(AttachError::ForeignMachine);
    }
    if image.is_loader() {
        return Err(AttachError::Loader);
    }
    let defined = table.defined_in(image);
    if let Some(symbol) = defined.absent.first() {
        let nearest = nearest_symbols(image, symbol);
        return Err(AttachError::NoSymbol { symbol: symbol.clone(), nearest });
    }
    let mut missing: Vec<Missing> =
        image.damaged.iter().map(|part| Missing::new(*part, "damaged or cut off in the file")).collect();
    missing.extend(object_search::missing_objects(image, table));
    let mut covered = Vec::new();
    let found = once_per_address(image, table, &defined.functions, &mut missing, &mut covered);
    if found.is_empty() {
        return Err(why_nothing(image, table, !defined.functions.is_empty(), missing.pop()));
    }
    let extents: Vec<Extent> = found.iter().map(|f| f.extent).collect();
    let others = table.unclaimed(image, &defined.functions);
    let read: Vec<Extent> =
        others.iter().map(|(_, symbol)| Extent::of(symbol)).chain(extents.iter().copied()).collect();
    let graph = CallGraph::new(image, &read);
    let leaving = Reader::new(image, &graph, table);
    if defined.are_own_operators
        && let Some(to) =
            found.iter().filter(|f| !f.row.shape.is_free()).find_map(|f| leaving.of(f.extent).passes_on_to)
    {
        return Err(AttachError::PassesOn { to });
    }
    let reentrant = reentrant_code(&graph, &extents, &|name| table.shape_of(name).is_some());
    if defined.is_last_resort
        && let Some(to) = reentrant.passes_on_to
    {
        return Err(AttachError::PassesOn { to });
    }
    missing.extend(double_counts(image, &reentrant));
    missing.extend(not_hooked(image, table, &graph, &others, &found));
    let planning =
        Planning { image, rules, table, graph: &graph, found: &found, reentrant: &reentrant, leaving, avoided };
    let sites = planning.sites(&mut missing, &mut covered);
    let may_call_out =
        reentrant.passes_on_to.is_some() || sites.iter().any(|planned| planned.site.flags & SITE_CALLS_OUT != 0);
    Ok(AllocatorFile {
        allocator: defined.allocators.join(", "),
        kind: image.kind,
        build_id: image.build_id.clone(),
        sites,
        ranges: reentrant.ranges,
        own: reentrant.own,
        may_call_out,
        may_be_interposed: reentrant.calls_by_name && graph.has_function(C_LIBRARY),
        covered,
        missing,
        limits: defined
            .limits
            .iter()
            .map(|(what, why)| Missing::new(*what, *why))
            .chain(object_search::copies(image, table))
            .collect(),
    })
}

/// The data on which the planning of a file's sites is based.
struct Planning<'a> {
    image: &'a FileImage<'a>,
    rules: &'a KernelRules,
    table: &'a Table,
    graph: &'a CallGraph<'a>,
    found: &'a [FoundFunction<'a>],
    reentrant: &'a ReentrantCode,
    leaving: Reader<'a>,
    /// File offsets of instructions that are only probed if there are no others.
    avoided: &'a BTreeSet<u64>,
}

impl Planning<'_> {
    /// A site for every function to hook, by file offset. Adds functions that need no site to `covered`, and functions
    /// that cannot have one to `missing`.
    fn sites(&self, missing: &mut Vec<Missing>, covered: &mut Vec<Covered>) -> Vec<PlannedSite> {
        let mut sites = Vec::new();
        let may = self.reentrant.may_tail_jump.iter().zip(&self.reentrant.may_call_inside);
        for (function, (may_tail_jump, may_call_inside)) in self.found.iter().zip(may) {
            if let Some(by) = self.passes_on_to(function) {
                covered.push(Covered { function: function.name().to_owned(), by });
                continue;
            }
            match self.place(function) {
                Ok(mut planned) => {
                    let site = &mut planned.site;
                    (site.reentrant_start, site.reentrant_end) = bounding_range(self.reentrant);
                    let passes_block_on = *may_tail_jump
                        && function.row.shape.is_realloc()
                        && self.graph.may_tail_jump(function.extent, &|to| self.reallocates(to));
                    // It is unknown what functions outside of the table of known allocators call.
                    let calls_out = (self.reentrant.calls_out || function.row.unread) && planned.return_needed;
                    for (is_set, flag) in [
                        (*may_tail_jump, SITE_MAY_TAIL_JUMP),
                        (passes_block_on, SITE_PASSES_BLOCK_ON),
                        (*may_call_inside, SITE_MAY_CALL_INSIDE),
                        (calls_out, SITE_CALLS_OUT),
                    ] {
                        site.flags |= if is_set { flag } else { 0 };
                    }
                    sites.push(planned);
                }
                Err(why) => missing.push(Missing::new(function.name(), why)),
            }
        }
        sites.sort_by_key(|s| s.site.offset);
        sites
    }

    /// The hooked function that `function` forwards every call to unchanged, if it does nothing else.
    fn passes_on_to(&self, function: &FoundFunction<'_>) -> Option<String> {
        let Extent { start, end } = function.extent;
        let address = match arch::forwards_to(self.image.machine, start, &self.image.code_between(start, end))? {
            Target::Address(address) | Target::Slot(address) => address,
        };
        if let Some(target) = self.found.iter().find(|f| f.extent.start == address && address != start) {
            let is_same =
                target.row.shape == function.row.shape && (target.row.flags ^ function.row.flags) & !SITE_THROWS == 0;
            return is_same.then(|| target.name().to_owned());
        }
        let name = self.graph.import_behind(address)?;
        // The loader may bind that name to another file. Whichever file it is, the function is hooked there.
        let here = self.found.iter().any(|f| f.names.contains(&name) && f.extent.start != start);
        (here && self.table.shape_of(name) == Some(function.row.shape)).then(|| name.to_owned())
    }

    /// Whether the function at `address` is hooked, in this or another file, and reallocates.
    fn reallocates(&self, address: u64) -> bool {
        let imported = || self.graph.import_behind(address).and_then(|name| self.table.shape_of(name));
        self.found.iter().any(|f| f.extent.start == address && f.row.shape.is_realloc())
            || imported().is_some_and(|shape| shape.is_realloc())
    }

    /// The site of `function`, without the flags that depend on other functions.
    ///
    /// # Errors
    /// Why it cannot be probed.
    fn place(&self, function: &FoundFunction<'_>) -> Result<PlannedSite, &'static str> {
        let Self { image, rules, graph, .. } = self;
        let FoundFunction { number, row, extent, .. } = function;
        let is_free = row.shape.is_free();
        let code = image.code_between(extent.start, extent.end);
        let entered = |address| graph.is_entered(address);
        let avoided = |address| image.file_offset(address).is_some_and(|offset| self.avoided.contains(&offset));
        let placement = arch::place(rules, extent.start, &code, row.shape, &entered, &avoided)
            .or_else(|| arch::place(rules, extent.start, &code, row.shape, &entered, &|_| false))
            .ok_or("the kernel refuses probes on the instructions that it begins with")?;
        let offset = image
            .file_offset(extent.start)
            .and_then(|offset| offset.checked_add(placement.offset))
            .ok_or("its symbol points outside of the file's code")?;
        let leaving = if is_free {
            Leaving::default()
        } else if row.flags & SITE_THROWS != 0 {
            self.leaving.of_thrower(*extent)
        } else if row.unread {
            self.leaving.of(*extent)
        } else {
            Leaving::default()
        };
        if row.is_custom && leaving.throws && leaving.return_sites.is_empty() {
            return Err(
                "it may throw an exception, and its return instructions cannot be found: an exception that passes a \
                 probed return address would crash the program",
            );
        }
        let (return_probe, why) = match &leaving {
            Leaving { throws: true, .. } => (ReturnProbe::Harmful, "; it may throw"),
            // A signal handler may leave any function for another stack. The allocators that we know are not called on
            // the way there.
            Leaving { return_sites, .. } if row.is_custom && !return_sites.is_empty() => {
                (ReturnProbe::Harmful, "; it may switch to another stack")
            }
            Leaving { switches: true, .. } => (ReturnProbe::OneAtATime, ""),
            _ => (ReturnProbe::Harmless, ""),
        };
        let return_sites = leaving.return_sites.into_iter().filter_map(|(at, result)| {
            let offset = image.file_offset(at).filter(|_| return_probe != ReturnProbe::Harmless)?;
            Some(ReturnSite { offset, result })
        });
        let return_sites: Vec<ReturnSite> = return_sites.collect();
        let throws = if leaving.throws { SITE_THROWS } else { 0 };
        Ok(PlannedSite {
            function: function.name().to_owned(),
            site: Site { offset, function: *number, flags: row.flags | throws, ..placement.arguments.site() },
            kind: placement.kind,
            reason: format!(
                "+{:#x} {}{}{}",
                placement.offset,
                placement.reason,
                if function.is_chosen { "; an IFUNC resolver may choose it" } else { "" },
                match (why, return_sites.is_empty()) {
                    ("", _) => String::new(),
                    (why, true) => format!("{why}, and its return instructions cannot be found"),
                    (why, false) => format!("{why}, so its returns are probed inside it"),
                },
            ),
            return_needed: !is_free,
            return_probe,
            return_sites,
            announces: None,
        })
    }
}

/// The smallest range of file offsets that contains all code ranges; (0, 0) if there are none.
fn bounding_range(reentrant: &ReentrantCode) -> (u64, u64) {
    let used = || reentrant.ranges.ranges.iter().take(reentrant.ranges.count as usize);
    (used().map(|r| r[0]).min().unwrap_or(0), used().map(|r| r[1]).max().unwrap_or(0))
}

#[cfg(test)]
#[path = "plan_exceptions_tests.rs"]
mod exceptions_tests;
#[cfg(test)]
#[path = "plan_ifunc_tests.rs"]
mod ifunc_tests;
#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
