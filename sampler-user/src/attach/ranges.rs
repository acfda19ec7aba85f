//! Which code of a file belongs to its allocator: calls from there are inner ones, jumps out of there are tail jumps.
//!
//! An allocator's exported functions call each other through local helpers (glibc's `_mid_memalign` calls and jumps to
//! malloc). A helper belongs to the allocator if it can reach a hooked function and if nothing but the allocator calls
//! or jumps to it; `strdup` calls malloc too, but is a caller of its own.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use sampler_ebpf::abi::{FileRanges, MAX_INNER_RANGES};

use super::arch::{self, FlowKind, Target};
use super::elf::FileImage;

/// Helpers beyond this many are no longer looked at; glibc has one.
const HELPERS_MAX: usize = 1024;
/// Longest padding between two functions that are merged into one range.
const PADDING_MAX_BYTES: u64 = 32;
/// `endbr64`, `bti`.
const LANDING_PAD_BYTES: u64 = 4;

/// A hooked function, or a helper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    /// First address.
    pub start: u64,
    /// End (exclusive).
    pub end: u64,
}

/// A transfer of control within the file, or to a function that the file imports by name.
#[derive(Clone, Copy, Debug)]
struct Edge {
    from: u64,
    to: u64,
    is_call: bool,
}

/// Who calls and jumps where in a file.
#[derive(Debug)]
pub struct CallGraph<'a> {
    image: &'a FileImage,
    /// By `from`.
    edges: Vec<Edge>,
    /// Indices into `edges`, by `to`.
    by_target: Vec<u32>,
    /// Addresses of exported functions.
    exported: BTreeSet<u64>,
    /// Starts of functions, as far as known, with their end if that is known.
    starts: BTreeMap<u64, Option<u64>>,
    /// Exported functions by name: where a call through the linkage table goes unless another file comes first.
    by_name: HashMap<&'a str, u64>,
    /// Slots of the global offset table, and the stubs that jump through them, with the imported function's name.
    stubs: HashMap<u64, Option<&'a str>>,
}

impl<'a> CallGraph<'a> {
    /// Decodes the code of a file; of a very large file, only `functions`.
    #[must_use]
    pub fn new(image: &'a FileImage, functions: &[Extent]) -> Self {
        let mut edges = Vec::new();
        let mut slots = Vec::new();
        let mut scan = |address: u64, bytes: &[u8]| {
            arch::flows(image.machine, address, bytes, |flow| match flow.target {
                Target::Address(to) => edges.push(Edge { from: flow.from, to, is_call: flow.kind == FlowKind::Call }),
                Target::Slot(slot) => slots.push((flow.from, slot, flow.kind == FlowKind::Call)),
            });
        };
        if image.code_is_whole {
            image.code().iter().for_each(|code| scan(code.address, &code.bytes));
        } else {
            functions.iter().for_each(|f| scan(f.start, image.code_between(f.start, f.end)));
        }
        let mut starts: BTreeMap<u64, Option<u64>> = BTreeMap::new();
        let mut exported = BTreeSet::new();
        let mut by_name = HashMap::new();
        for (name, symbol) in image.functions() {
            let end = symbol.address.checked_add(symbol.size).filter(|_| symbol.size > 0);
            let known = starts.entry(symbol.address).or_default();
            *known = (*known).max(end);
            if symbol.exported {
                exported.insert(symbol.address);
            }
            // Calls of what a resolver chooses go through a slot, whoever may see the symbol.
            if symbol.exported || symbol.indirect {
                by_name.insert(name, symbol.address);
            }
        }
        for (start, end) in &image.bounds {
            starts.entry(*start).or_default().get_or_insert(*end);
        }
        for edge in edges.iter().filter(|e| e.is_call) {
            starts.entry(edge.to).or_default();
        }
        // A jump out of a function leads to another function, or to a part of it that was moved away.
        for edge in edges.iter().filter(|e| !e.is_call) {
            let around = starts.range(..=edge.from).next_back();
            if let Some((start, Some(end))) = around
                && edge.from < *end
                && !(*start..*end).contains(&edge.to)
            {
                starts.entry(edge.to).or_default();
            }
        }
        // A stub is (a landing pad and) a jump through a slot.
        let mut stubs = HashMap::new();
        for (from, slot, is_call) in slots {
            let name = image.import_at(slot);
            edges.push(Edge { from, to: slot, is_call });
            stubs.insert(slot, name);
            if !is_call {
                stubs.insert(from, name);
                stubs.entry(from.saturating_sub(LANDING_PAD_BYTES)).or_insert(name);
            }
        }
        edges.sort_unstable_by_key(|e| e.from);
        let mut by_target: Vec<u32> = (0..u32::try_from(edges.len()).unwrap_or(u32::MAX)).collect();
        by_target.sort_unstable_by_key(|i| edges[*i as usize].to);
        Self { image, edges, by_target, exported, starts, by_name, stubs }
    }

    /// The imported function that a stub, or a slot of the global offset table, at `address` stands for.
    #[must_use]
    pub fn import_behind(&self, address: u64) -> Option<&'a str> {
        self.stubs.get(&address).copied().flatten()
    }

    /// Every function that the file imports, as far as something jumps or calls there.
    pub fn imports(&self) -> impl Iterator<Item = &'a str> {
        self.stubs.values().copied().flatten()
    }

    /// Whether code that nothing calls, and that is no function by name, is a part of the one that jumps there.
    #[must_use]
    pub fn is_part_moved_away(&self, part: Extent) -> bool {
        let by_name = |address: u64| self.image.functions().find(|(_, symbol)| symbol.address == address);
        let named_apart = by_name(part.start).is_some_and(|(name, _)| !name.contains(".cold"));
        !named_apart && !self.exported.contains(&part.start) && !self.edges_into(part).any(|edge| edge.is_call)
    }

    /// Where `address` really leads to: behind a stub, the function of that name in this file, if there is one.
    #[must_use]
    pub fn resolve(&self, address: u64) -> u64 {
        self.import_behind(address).and_then(|name| self.by_name.get(name)).copied().unwrap_or(address)
    }

    /// True if a branch or a call, from anywhere in the file, leads to `address`.
    #[must_use]
    pub fn is_entered(&self, address: u64) -> bool {
        self.edges_into(Extent { start: address, end: address.saturating_add(1) }).next().is_some()
    }

    fn edges_into(&self, extent: Extent) -> impl Iterator<Item = &Edge> {
        let first = self.by_target.partition_point(|i| self.edges[*i as usize].to < extent.start);
        self.by_target[first..].iter().map(|i| &self.edges[*i as usize]).take_while(move |e| e.to < extent.end)
    }

    fn out_of(&self, extent: Extent) -> impl Iterator<Item = &Edge> {
        let first = self.edges.partition_point(|e| e.from < extent.start);
        self.edges[first..]
            .iter()
            .take_while(move |e| e.from < extent.end)
            .filter(move |e| !(extent.start..extent.end).contains(&e.to))
    }

    /// The function around `address`, as far as its bounds are known.
    #[must_use]
    pub fn extent_at(&self, address: u64) -> Option<Extent> {
        let (&start, &end) = self.starts.range(..=address).next_back()?;
        let next = self.starts.range(address.checked_add(1)?..).next().map(|(start, _)| *start);
        let end = end.or(next)?;
        (end > address && !self.image.code_between(start, end).is_empty()).then_some(Extent { start, end })
    }

    /// Helpers of `hooked`, see the module's text.
    fn helpers(&self, hooked: &[Extent], is_hooked: &dyn Fn(u64) -> bool) -> BTreeSet<Extent> {
        let mut found = BTreeSet::new();
        if !self.image.code_is_whole {
            return found;
        }
        let mut open: Vec<Extent> = hooked.to_vec();
        while let Some(extent) = open.pop() {
            for edge in self.out_of(extent) {
                let Some(next) = self.extent_at(edge.to) else {
                    continue;
                };
                let local = !self.exported.contains(&next.start) && !hooked.iter().any(|h| h.start == next.start);
                if local && !self.stubs.contains_key(&edge.to) && found.len() < HELPERS_MAX && found.insert(next) {
                    open.push(next);
                }
            }
        }
        // Drop what others call too, until nothing changes: the rest is called by the allocator alone.
        let belongs = |found: &BTreeSet<Extent>, address: u64| {
            hooked.iter().any(|h| (h.start..h.end).contains(&address))
                || found.range(..=Extent { start: address, end: u64::MAX }).next_back().is_some_and(|e| address < e.end)
        };
        loop {
            let kept: BTreeSet<Extent> = found
                .iter()
                .filter(|e| {
                    self.edges_into(**e).all(|edge| (e.start..e.end).contains(&edge.from) || belongs(&found, edge.from))
                })
                .copied()
                .collect();
            let done = kept.len() == found.len();
            found = kept;
            if done {
                break;
            }
        }
        // Keep what reaches a hooked function, directly or through what is kept.
        let mut kept: BTreeSet<Extent> = BTreeSet::new();
        loop {
            let more: Vec<Extent> = found
                .iter()
                .filter(|e| !kept.contains(*e))
                .filter(|e| self.out_of(**e).any(|edge| is_hooked(edge.to) || kept.iter().any(|k| k.start == edge.to)))
                .copied()
                .collect();
            if more.is_empty() {
                return kept;
            }
            kept.extend(more);
        }
    }

    /// True if `function` can end in a jump to another one that is hooked, directly or through local code.
    #[must_use]
    pub fn may_tail_jump(&self, function: Extent, is_hooked: &dyn Fn(u64) -> bool) -> bool {
        let mut seen = BTreeSet::from([function]);
        let mut open = vec![function];
        while let Some(extent) = open.pop() {
            for edge in self.out_of(extent).filter(|e| !e.is_call) {
                if edge.to != function.start && is_hooked(edge.to) {
                    return true;
                }
                if let Some(next) = self.extent_at(edge.to)
                    && next != function
                    && !self.stubs.contains_key(&edge.to)
                    && !self.exported.contains(&next.start)
                    && seen.len() < HELPERS_MAX
                    && seen.insert(next)
                {
                    open.push(next);
                }
            }
        }
        false
    }
}

/// What belongs to the allocator of one file.
#[derive(Clone, Debug)]
pub struct InnerCode {
    /// File offsets.
    pub ranges: FileRanges,
    /// For each hooked function, in the order given: can it end in a jump to another hooked one?
    pub may_tail_jump: Vec<bool>,
    /// For each hooked function: can it, or what it leads to, call a hooked one? `true` if that is not known.
    pub may_call_inside: Vec<bool>,
    /// Local helpers that are in the ranges.
    pub helpers: Vec<Extent>,
    /// Some of this code calls an allocation function of another file.
    pub calls_out: bool,
    /// An allocation function of another file that some of this code calls or jumps to.
    pub passes_on_to: Option<String>,
    /// Functions that are called both by hooked ones and by others, and that call hooked ones themselves: such calls
    /// count twice when a hooked function is behind them.
    pub between: Vec<Extent>,
    /// Ranges that did not fit into [`MAX_INNER_RANGES`].
    pub left_out: usize,
}

/// Finds the code of `hooked` functions of the file that `graph` was made of. `is_allocator` tells by name whether an
/// imported function is one that is hooked wherever it is.
#[must_use]
pub fn inner_code(graph: &CallGraph<'_>, hooked: &[Extent], is_allocator: &dyn Fn(&str) -> bool) -> InnerCode {
    let by_start: BTreeSet<u64> = hooked.iter().map(|h| h.start).collect();
    let is_hooked = |address: u64| {
        by_start.contains(&address) || graph.stubs.get(&address).is_some_and(|name| name.is_some_and(is_allocator))
    };
    let leads_to_hooked = |edge: &Edge| {
        let jumps = |e: Extent| e.start == edge.to && graph.may_tail_jump(e, &is_hooked);
        is_hooked(edge.to) || graph.extent_at(edge.to).is_some_and(jumps)
    };
    let helpers: Vec<Extent> = graph.helpers(hooked, &is_hooked).into_iter().collect();
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
    let outward = |edge: &&Edge| {
        graph.import_behind(edge.to).filter(|name| is_allocator(name) && !graph.by_name.contains_key(name)).is_some()
    };
    let outward: Vec<&Edge> = extents.iter().flat_map(|e| graph.out_of(*e)).filter(outward).collect();
    let calls_out = outward.iter().any(|edge| edge.is_call);
    let passes_on_to = outward.first().and_then(|edge| graph.import_behind(edge.to)).map(str::to_owned);
    let between = between(graph, &extents, hooked, &is_hooked);
    let mut merged = merge(graph, &extents);
    if merged.len() > MAX_INNER_RANGES {
        // A function that no call from which ends up in a hooked one needs no range.
        extents.retain(calls);
        merged = merge(graph, &extents);
    }
    let mut ranges = FileRanges::default();
    let in_file = merged.iter().filter_map(|e| {
        let start = graph.image.file_offset(e.start)?;
        Some([start, start.checked_add(e.end - e.start)?])
    });
    for (slot, range) in ranges.ranges.iter_mut().zip(in_file) {
        *slot = range;
        ranges.count += 1;
    }
    let left_out = merged.len().saturating_sub(MAX_INNER_RANGES);
    InnerCode { ranges, may_tail_jump, may_call_inside, helpers, calls_out, passes_on_to, between, left_out }
}

/// See [`InnerCode::between`].
fn between(
    graph: &CallGraph<'_>,
    inner: &BTreeSet<Extent>,
    hooked: &[Extent],
    is_hooked: &dyn Fn(u64) -> bool,
) -> Vec<Extent> {
    let reached = inner.iter().flat_map(|e| graph.out_of(*e)).map(|edge| graph.resolve(edge.to));
    let reached: BTreeSet<Extent> = reached
        .filter_map(|to| graph.extent_at(to).filter(|e| e.start == to))
        .filter(|e| !inner.contains(e) && !hooked.iter().any(|h| h.start == e.start))
        .filter(|e| !graph.stubs.contains_key(&e.start))
        .collect();
    reached.into_iter().filter(|e| graph.out_of(*e).any(|edge| edge.is_call && is_hooked(edge.to))).collect()
}

/// Joins neighbours that have nothing but padding between them.
fn merge(graph: &CallGraph<'_>, extents: &BTreeSet<Extent>) -> Vec<Extent> {
    let mut merged: Vec<Extent> = Vec::new();
    for extent in extents {
        match merged.last_mut() {
            Some(last)
                if extent.start <= last.end
                    || (extent.start - last.end <= PADDING_MAX_BYTES
                        && graph.starts.range(last.end..extent.start).next().is_none()) =>
            {
                last.end = last.end.max(extent.end);
            }
            _ => merged.push(*extent),
        }
    }
    merged
}
