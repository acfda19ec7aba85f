//! The code of a file that belongs to its allocator: calls of hooked functions from there are reentrant.
//!
//! An allocator's exported functions call each other through local helpers (glibc's `_mid_memalign` calls and jumps to
//! malloc). A helper belongs to the allocator if it can reach a hooked function, and if only the allocator calls or
//! jumps to it. `strdup` calls malloc, too, but has other callers.

use std::collections::BTreeSet;

use sampler_ebpf::abi::{FileRanges, MAX_REENTRANT_RANGES};

use crate::call_graph::{CallGraph, Edge, Extent, HELPERS_MAX};

/// Longest padding between two functions that are merged into one range, bytes.
const PADDING_MAX_BYTES: u64 = 32;

/// The code of one file that belongs to its allocator.
#[derive(Clone, Debug)]
pub struct ReentrantCode {
    /// Its ranges, as file offsets.
    pub ranges: FileRanges,
    /// For each hooked function, in the given order: whether it can end in a jump to another hooked one.
    pub may_tail_jump: Vec<bool>,
    /// For each hooked function: whether it, or code that it leads to, can call a hooked one. `true` if that is
    /// unknown.
    pub may_call_inside: Vec<bool>,
    /// Whether some of the code calls an allocation function of another file.
    pub calls_out: bool,
    /// An allocation function of another file that some of the code calls or jumps to.
    pub passes_on_to: Option<String>,
    /// Whether some of the code calls or jumps to an allocation function by its name. Then the loader decides which
    /// file's function that is: this file's own, or that of another file that comes first (glibc's `reallocarray` jumps
    /// to `realloc` in this way).
    pub calls_by_name: bool,
    /// Functions that call hooked ones and are called both by hooked ones and by others. Their calls count twice if a
    /// hooked function is their caller.
    pub between: Vec<Extent>,
    /// How many ranges did not fit into [`MAX_REENTRANT_RANGES`].
    pub left_out: usize,
    /// Code that only the hooked functions lead to, these included, as file offsets in ascending order.
    pub own: Vec<[u64; 2]>,
}

/// Finds the code that belongs to the `hooked` functions of a file. `is_allocator` says whether an imported function of
/// this name is hooked in its own file.
pub fn reentrant_code(graph: &CallGraph<'_>, hooked: &[Extent], is_allocator: &dyn Fn(&str) -> bool) -> ReentrantCode {
    let by_start: BTreeSet<u64> = hooked.iter().map(|h| h.start).collect();
    let is_hooked =
        |address: u64| by_start.contains(&address) || graph.import_behind(address).is_some_and(is_allocator);
    let leads_to_hooked = |edge: &Edge| {
        let jumps = |e: Extent| e.start == edge.to && graph.may_tail_jump(e, &is_hooked);
        is_hooked(edge.to) || graph.extent_at(edge.to).is_some_and(jumps)
    };
    let own = own_code(graph, hooked);
    let helpers: Vec<Extent> = helpers(graph, &own, &is_hooked).into_iter().collect();
    let calls = |e: &Extent| graph.out_of(*e).any(|edge| edge.is_call && leads_to_hooked(edge));
    let leads_to_helper =
        |e: &Extent| graph.out_of(*e).any(|edge| helpers.iter().any(|h| (h.start..h.end).contains(&edge.to)));
    let may_tail_jump: Vec<bool> = hooked.iter().map(|h| graph.may_tail_jump(*h, &is_hooked)).collect();
    let may_call_inside = hooked
        .iter()
        .zip(&may_tail_jump)
        .map(|(h, jumps)| *jumps || !graph.image.code_is_whole || calls(h) || leads_to_helper(h))
        .collect();

    let mut extents: BTreeSet<Extent> = hooked.iter().chain(&helpers).copied().collect();
    let by_name = |edge: &Edge| graph.import_behind(edge.to).filter(|name| is_allocator(name));
    let named = extents.iter().flat_map(|e| graph.out_of(*e)).filter(|edge| by_name(edge).is_some());
    let named: Vec<&Edge> = named.collect();
    let calls_by_name = !named.is_empty();
    let is_outward = |edge: &&&Edge| by_name(edge).is_some_and(|name| !graph.has_function(name));
    let outward: Vec<&Edge> = named.iter().filter(is_outward).copied().collect();
    let calls_out = outward.iter().any(|edge| edge.is_call);
    let passes_on_to = outward.first().and_then(|edge| graph.import_behind(edge.to)).map(str::to_owned);
    let between = between(graph, &extents, hooked, &is_hooked);
    let mut merged = merge(graph, &extents);
    if merged.len() > MAX_REENTRANT_RANGES {
        // A function needs no range if none of its calls leads to a hooked one.
        extents.retain(calls);
        merged = merge(graph, &extents);
    }
    let in_file = |e: &Extent| {
        let start = graph.image.file_offset(e.start)?;
        Some([start, start.checked_add(e.end - e.start)?])
    };
    let mut ranges = FileRanges::default();
    for (slot, range) in ranges.ranges.iter_mut().zip(merged.iter().filter_map(in_file)) {
        *slot = range;
        ranges.count += 1;
    }
    let left_out = merged.len().saturating_sub(MAX_REENTRANT_RANGES);
    let own = merge(graph, &own.into_iter().chain(hooked.iter().copied()).collect());
    let mut own: Vec<[u64; 2]> = own.iter().filter_map(in_file).collect();
    own.sort_unstable();
    ReentrantCode {
        ranges,
        may_tail_jump,
        may_call_inside,
        calls_out,
        passes_on_to,
        calls_by_name,
        between,
        left_out,
        own,
    }
}

/// See [`ReentrantCode::between`].
fn between(
    graph: &CallGraph<'_>,
    code: &BTreeSet<Extent>,
    hooked: &[Extent],
    is_hooked: &dyn Fn(u64) -> bool,
) -> Vec<Extent> {
    let reached = code.iter().flat_map(|e| graph.out_of(*e)).map(|edge| graph.resolve(edge.to));
    let reached: BTreeSet<Extent> = reached
        .filter_map(|to| graph.extent_at(to).filter(|e| e.start == to))
        .filter(|e| !code.contains(e) && !hooked.iter().any(|h| h.start == e.start))
        .filter(|e| !graph.is_import(e.start))
        .collect();
    reached.into_iter().filter(|e| graph.out_of(*e).any(|edge| edge.is_call && is_hooked(edge.to))).collect()
}

/// Joins neighbours that only padding separates.
fn merge(graph: &CallGraph<'_>, extents: &BTreeSet<Extent>) -> Vec<Extent> {
    let mut merged: Vec<Extent> = Vec::new();
    for extent in extents {
        match merged.last_mut() {
            Some(last)
                if extent.start <= last.end
                    || (extent.start - last.end <= PADDING_MAX_BYTES
                        && !graph.has_start_between(last.end, extent.start)) =>
            {
                last.end = last.end.max(extent.end);
            }
            _ => merged.push(*extent),
        }
    }
    merged
}

/// The local functions that only `hooked` ones, or others of these, call or jump to.
fn own_code(graph: &CallGraph<'_>, hooked: &[Extent]) -> BTreeSet<Extent> {
    let mut found = BTreeSet::new();
    if !graph.image.code_is_whole {
        return found;
    }
    let mut open: Vec<Extent> = hooked.to_vec();
    while let Some(extent) = open.pop() {
        for edge in graph.out_of(extent) {
            let Some(next) = graph.extent_at(edge.to) else { continue };
            let local = !graph.is_exported(next.start) && !hooked.iter().any(|h| h.start == next.start);
            if local && !graph.is_import(edge.to) && found.len() < HELPERS_MAX && found.insert(next) {
                open.push(next);
            }
        }
    }
    // Drop helpers that other code calls too, until nothing changes: only the allocator calls the rest.
    let belongs = |found: &BTreeSet<Extent>, address: u64| {
        hooked.iter().any(|h| (h.start..h.end).contains(&address))
            || found.range(..=Extent { start: address, end: u64::MAX }).next_back().is_some_and(|e| address < e.end)
    };
    loop {
        let kept: BTreeSet<Extent> = found
            .iter()
            .filter(|e| {
                graph.edges_into(**e).all(|edge| (e.start..e.end).contains(&edge.from) || belongs(&found, edge.from))
            })
            .copied()
            .collect();
        if kept.len() == found.len() {
            return found;
        }
        found = kept;
    }
}

/// The helpers; see the module's documentation. They are those of the allocator's `own` functions that reach a hooked
/// one, directly or through another helper.
fn helpers(graph: &CallGraph<'_>, own: &BTreeSet<Extent>, is_hooked: &dyn Fn(u64) -> bool) -> BTreeSet<Extent> {
    let mut kept: BTreeSet<Extent> = BTreeSet::new();
    loop {
        let more: Vec<Extent> = own
            .iter()
            .filter(|e| !kept.contains(*e))
            .filter(|e| graph.out_of(**e).any(|edge| is_hooked(edge.to) || kept.iter().any(|k| k.start == edge.to)))
            .copied()
            .collect();
        if more.is_empty() {
            return kept;
        }
        kept.extend(more);
    }
}
