//! The input for inline hooks of a file: its complete allocation functions, and the ways in which they reach each
//! other.

use std::collections::HashSet;

use heapbpf_audit::Missing;
use heapbpf_elf::Image;
use sampler_ebpf::abi::inline::TwinArguments;
use sampler_ebpf::abi::{SITE_THROWS, Site};

use crate::call_graph::{CallGraph, Extent, LANDING_PAD_BYTES};
use crate::elf::{Code, FileImage};
use crate::error::AttachError;
use crate::found::{FoundFunction, double_counts, once_per_address, why_nothing};
use crate::leaving::{Leaving, Reader};
use crate::placement::Machine;
use crate::reentrant::reentrant_code;
use crate::table::Table;

/// A function to hook inline.
#[derive(Clone, Debug)]
pub struct InlineFunction {
    /// Its name in the plan.
    pub name: String,
    /// Its address in the file.
    pub address: u64,
    /// Its length, bytes.
    pub length: u64,
    /// Its number, the meaning of its arguments at entry, and its flags. The offset is not filled in.
    pub site: Site,
    /// The function that does the same but returns NULL where this one throws, by index, and how it is called.
    pub twin: Option<(usize, TwinArguments)>,
}

/// A place in the file through which the allocator's code reaches one of the functions, unless another file defines the
/// name first. So the slot in the process has to be checked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InlineSlot {
    /// Address of the slot in the global offset table.
    pub slot: u64,
    /// Address of a stub that jumps through it; the slot's own address if code uses the slot directly.
    pub stub: u64,
    /// Index of the function.
    pub function: usize,
    /// The name by which the loader looks it up.
    pub name: String,
}

/// The functions of one file.
#[derive(Clone, Debug)]
pub struct InlineFile {
    /// Name and version of the allocator.
    pub allocator: String,
    /// Ascending by address.
    pub functions: Vec<InlineFunction>,
    /// Address ranges of the hooked functions and their local helpers: calls from there are reentrant.
    pub inner: Vec<[u64; 2]>,
    /// How the functions may reach each other through the global offset table.
    pub slots: Vec<InlineSlot>,
    /// The file's code.
    pub code: Vec<Code>,
    /// Functions that are not hooked, or may count twice, and why.
    pub missing: Vec<Missing>,
}

/// Reads the file that was found at `path`, and collects what inline hooks need. x86-64 only.
///
/// # Errors
/// [`AttachError`] if there is nothing to hook, or the file cannot be used.
pub fn inline_functions(file: &dyn Image, path: &str, table: &Table) -> Result<InlineFile, AttachError> {
    inline_functions_in(FileImage::read_if(file, path, |image| table.is_in(image))?, table)
}

/// As [`inline_functions`], of a file that was already read.
///
/// # Errors
/// As [`inline_functions`].
pub fn inline_functions_in(image: FileImage<'_>, table: &Table) -> Result<InlineFile, AttachError> {
    if image.machine != Machine::X86_64 {
        return Err(AttachError::ForeignMachine);
    }
    if image.is_loader() {
        return Err(AttachError::Loader);
    }
    let defined = table.defined_in(&image);
    let mut missing = Vec::new();
    let mut covered = Vec::new();
    let mut found = once_per_address(&image, table, &defined.functions, &mut missing, &mut covered);
    if found.is_empty() {
        return Err(why_nothing(&image, table, !defined.functions.is_empty(), missing.pop()));
    }
    let extents: Vec<Extent> = found.iter().map(|f| f.extent).collect();
    let graph = CallGraph::new(&image, &extents);
    let reader = Reader::new(&image, &graph, table);
    let unread = |function: &FoundFunction<'_>| function.row.unread;
    let mut reasons: Vec<Missing> = found
        .iter()
        .filter(|function| unread(function))
        .filter_map(|function| Some(Missing::new(function.name(), unknown(&reader.of(function.extent))?)))
        .collect();
    if !reasons.is_empty() {
        // If a free were not hooked, its blocks would seem to stay in use. So all functions are hooked, or none.
        found.retain(|function| !unread(function));
        missing.append(&mut reasons);
    }
    if found.is_empty() {
        return Err(why_nothing(&image, table, !defined.functions.is_empty(), missing.pop()));
    }
    let extents: Vec<Extent> = found.iter().map(|f| f.extent).collect();
    let reentrant = reentrant_code(&graph, &extents, &|name| table.shape_of(name).is_some());
    if reentrant.calls_out {
        let why = "it calls the allocator of another file, whose calls would count too";
        let what = reentrant.passes_on_to.unwrap_or_else(|| "another file".to_owned());
        return Err(AttachError::Unhookable {
            what: format!("allocator, which gets memory from {what},"),
            why: why.into(),
        });
    }
    missing.extend(double_counts(&image, &reentrant));
    let functions: Vec<InlineFunction> = found.iter().map(|function| described(function, &found)).collect();
    let address = |offset: u64| image.address(offset);
    let used = reentrant.ranges.ranges.iter().take(reentrant.ranges.count as usize);
    let inner = used.filter_map(|[s, e]| Some([address(*s)?, address(*s)?.checked_add(e.checked_sub(*s)?)?])).collect();
    let slots = slots(&graph, &functions);
    let allocator = defined.allocators.join(", ");
    Ok(InlineFile { allocator, functions, inner, slots, missing, code: image.into_code() })
}

/// Why a function of an unknown allocator is not hooked, if its code does not show enough.
fn unknown(leaving: &Leaving) -> Option<&'static str> {
    if leaving.throws {
        return Some("it may throw an exception, which cannot pass through a hook");
    }
    if leaving.switches || leaving.allocates_elsewhere {
        return Some("it may call another allocator, whose calls would count too");
    }
    // A compiler that sees both may keep a caller's values in registers that such a function leaves alone. If a
    // function calls another file's code, no caller may rely on that.
    (!leaving.calls_out).then_some("it calls nothing, so its callers may rely on registers that a hook changes")
}

fn described(function: &FoundFunction<'_>, all: &[FoundFunction<'_>]) -> InlineFunction {
    let row = function.row;
    InlineFunction {
        name: function.name().to_owned(),
        address: function.extent.start,
        length: function.extent.end - function.extent.start,
        site: row.site_at_entry(function.number),
        twin: if row.flags & SITE_THROWS == 0 { None } else { twin(function, all) },
    }
}

/// C functions that do the same as a function that throws, but without calling a new-handler. The function itself then
/// calls the handler and throws the exception, once. By symbol, in order of preference.
const PLAIN_TWINS: &[(&str, &[&str], TwinArguments)] = &[
    // Its aliases have these names, too.
    ("mi_new", &["mi_malloc"], TwinArguments::Same),
    ("mi_new_aligned", &["mi_malloc_aligned"], TwinArguments::Same),
    ("mi_new_n", &["mi_mallocn"], TwinArguments::Same),
    ("mi_new_realloc", &["mi_realloc"], TwinArguments::Same),
    ("mi_new_reallocn", &["mi_reallocn"], TwinArguments::Same),
    ("mi_heap_alloc_new", &["mi_heap_malloc"], TwinArguments::Same),
    ("mi_heap_alloc_new_n", &["mi_heap_mallocn"], TwinArguments::Same),
    ("_Znwm", &["tc_malloc", "malloc", "je_malloc", "_rjem_malloc"], TwinArguments::Same),
    ("_Znam", &["tc_malloc", "malloc", "je_malloc", "_rjem_malloc"], TwinArguments::Same),
    ("_ZnwmSt11align_val_t", &["tc_memalign", "aligned_alloc", "je_aligned_alloc"], TwinArguments::Swapped),
    ("_ZnamSt11align_val_t", &["tc_memalign", "aligned_alloc", "je_aligned_alloc"], TwinArguments::Swapped),
];

/// Symbols of the allocators whose C and C++ functions return blocks of the same kind for the same arguments, so that a
/// sized delete is right for both: jemalloc, gperftools' tcmalloc, mimalloc. (Google's tcmalloc aligns the two
/// differently.)
const OF_ONE_KIND: &[&str] = &["mallocx", "je_mallocx", "_rjem_mallocx", "tc_malloc", "mi_malloc"];

/// C++ functions that do the same and return NULL. They call the new-handler, and the function itself then calls it
/// again.
const NOTHROW_TWINS: &[(&str, &[&str], TwinArguments)] = &[
    ("_Znwm", &["_ZnwmRKSt9nothrow_t"], TwinArguments::WithReference(1)),
    ("_Znam", &["_ZnamRKSt9nothrow_t"], TwinArguments::WithReference(1)),
    ("_ZnwmSt11align_val_t", &["_ZnwmSt11align_val_tRKSt9nothrow_t"], TwinArguments::WithReference(2)),
    ("_ZnamSt11align_val_t", &["_ZnamSt11align_val_tRKSt9nothrow_t"], TwinArguments::WithReference(2)),
];

/// The function among `all` that returns NULL where `function` throws.
fn twin(function: &FoundFunction<'_>, all: &[FoundFunction<'_>]) -> Option<(usize, TwinArguments)> {
    let of_one_kind = all.iter().any(|other| other.names.iter().any(|name| OF_ONE_KIND.contains(name)));
    let plain = PLAIN_TWINS.iter().filter(|_| of_one_kind);
    plain.chain(NOTHROW_TWINS).filter(|(symbol, ..)| function.names.contains(symbol)).find_map(
        |(_, names, arguments)| {
            let has_name =
                |other: &FoundFunction<'_>, name| other.names.contains(name) && other.row.flags & SITE_THROWS == 0;
            let found = names.iter().find_map(|name| all.iter().position(|other| has_name(other, name)))?;
            Some((found, *arguments))
        },
    )
}

fn slots(graph: &CallGraph<'_>, functions: &[InlineFunction]) -> Vec<InlineSlot> {
    let mut found = HashSet::new();
    for &(from, slot, is_call) in &graph.through_slots {
        let resolved = graph.resolve(slot);
        let Some(function) = functions.iter().position(|f| f.address == resolved) else { continue };
        let name = graph.import_behind(slot).unwrap_or_default();
        let mut insert = |stub| found.insert(InlineSlot { slot, stub, function, name: name.to_owned() });
        insert(slot);
        if !is_call {
            // The stub begins at the jump, or at a landing pad in front of it.
            insert(from);
            insert(from.saturating_sub(LANDING_PAD_BYTES));
        }
    }
    let mut found: Vec<InlineSlot> = found.into_iter().collect();
    found.sort_unstable();
    found
}

/// Whether a file exports a function of this name, as a symbol lookup finds it. Loaders do not count, because they come
/// last in a lookup.
///
/// # Errors
/// [`AttachError`] if it cannot be read.
pub fn defines(file: &dyn Image, name: &str) -> Result<bool, AttachError> {
    let image = FileImage::read_if(file, "", |_| false)?;
    Ok(!image.is_loader() && image.functions().any(|(known, symbol)| known == name && symbol.exported))
}

#[cfg(test)]
#[path = "inline_tests.rs"]
mod tests;
