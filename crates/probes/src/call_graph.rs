//! The call graph of a file: its direct calls and jumps, and the known bounds of its functions.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound::{Excluded, Included};

use crate::arch;
use crate::elf::{CODE_MAX_BYTES, FileImage, Symbol};
use crate::flow::Target;

/// Maximum helpers that are followed; glibc has one.
pub const HELPERS_MAX: usize = 1024;
/// Maximum functions between one that allocates and the hooked one that it gets its blocks from.
const BETWEEN_MAX: usize = 4;
/// Bytes of code that are read of a function of unknown size.
const UNSIZED_FUNCTION_BYTES: u64 = 256;
/// Length of a landing pad: `endbr64`, `bti`.
pub const LANDING_PAD_BYTES: u64 = 4;

/// The addresses of a function, or of a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    /// First address.
    pub start: u64,
    /// End (exclusive).
    pub end: u64,
}

impl Extent {
    /// That of a function; if its size is unknown, its beginning.
    pub const fn of(symbol: &Symbol) -> Self {
        let unsized_ = Self::beginning(symbol.address);
        if symbol.size > 0 { Self { end: symbol.address.saturating_add(symbol.size), ..unsized_ } } else { unsized_ }
    }

    /// The beginning of a function of unknown size.
    pub const fn beginning(start: u64) -> Self {
        Self { start, end: start.saturating_add(UNSIZED_FUNCTION_BYTES) }
    }
}

/// A transfer of control within the file, or to a slot of the global offset table.
#[derive(Clone, Copy, Debug)]
pub struct Edge {
    /// Address of the instruction.
    pub from: u64,
    /// Its target, or the slot.
    pub to: u64,
    /// Whether it is a call; otherwise a jump.
    pub is_call: bool,
}

/// The calls and jumps of a file.
#[derive(Debug)]
pub struct CallGraph<'a> {
    /// The file.
    pub image: &'a FileImage<'a>,
    /// Sorted by `from`.
    edges: Vec<Edge>,
    /// The target of each edge, and its index in `edges`, sorted. Made on first use, because it is not needed for every
    /// file.
    by_target: OnceCell<Vec<(u64, u32)>>,
    /// Addresses of exported functions.
    exported: BTreeSet<u64>,
    /// Known starts of functions, each with its end if known.
    starts: BTreeMap<u64, Option<u64>>,
    /// Exported functions by name: a call through the linkage table leads there, unless another file defines the name
    /// first.
    by_name: HashMap<&'a str, u64>,
    /// Slots of the global offset table, and stubs that jump through them, with the name of the imported function.
    stubs: HashMap<u64, Option<&'a str>>,
    /// Calls and jumps through slots: the instruction, the slot, and whether it is a call.
    pub through_slots: Vec<(u64, u64, bool)>,
}

impl<'a> CallGraph<'a> {
    /// Decodes the code of `image`, or only that of `functions` and of what these lead to if the file is very large.
    pub fn new(image: &'a FileImage<'a>, functions: &[Extent]) -> Self {
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
            // Calls of a function that a resolver chooses go through a slot, even if its symbol is local.
            if symbol.exported || symbol.indirect {
                by_name.insert(name, symbol.address);
            }
        }
        for (start, end) in &image.bounds {
            starts.entry(*start).or_default().get_or_insert(*end);
        }
        let mut decoded = Decoded::default();
        if image.code_is_whole {
            let code = image.code.iter().filter_map(|code| Some((code.address, code.bytes.as_deref()?)));
            code.for_each(|(address, bytes)| decoded.read(image, address, bytes));
        } else {
            decoded.follow(image, functions, &starts);
        }
        let Decoded { mut edges, slots } = decoded;
        let mut called: Vec<u64> = edges.iter().filter(|e| e.is_call).map(|e| e.to).collect();
        called.sort_unstable();
        called.dedup();
        for to in called {
            starts.entry(to).or_default();
        }
        // This sort is fast on mostly sorted data.
        edges.sort_by_key(|e| e.from);
        // A jump out of a function leads to another function, or to a part of it that was placed elsewhere.
        let mut parts = BTreeSet::new();
        let mut functions = starts.iter().peekable();
        let mut function = None;
        for edge in &edges {
            while let Some((start, end)) = functions.next_if(|(start, _)| **start <= edge.from) {
                function = end.map(|end| *start..end);
            }
            if let Some(around) = &function
                && !edge.is_call
                && around.contains(&edge.from)
                && !around.contains(&edge.to)
                && parts.range((Excluded(around.start), Included(edge.from))).next().is_none()
            {
                parts.insert(edge.to);
            }
        }
        for part in parts {
            starts.entry(part).or_default();
        }
        // A stub is a jump through a slot, with or without a landing pad in front.
        let mut stubs = HashMap::new();
        for &(from, slot, is_call) in &slots {
            let name = image.import_at(slot);
            edges.push(Edge { from, to: slot, is_call });
            stubs.insert(slot, name);
            if !is_call {
                stubs.insert(from, name);
                stubs.entry(from.saturating_sub(LANDING_PAD_BYTES)).or_insert(name);
            }
        }
        edges.sort_by_key(|e| e.from);
        Self { image, edges, by_target: OnceCell::new(), exported, starts, by_name, stubs, through_slots: slots }
    }

    /// The name of the imported function that the stub or slot at `address` leads to.
    pub fn import_behind(&self, address: u64) -> Option<&'a str> {
        self.stubs.get(&address).copied().flatten()
    }

    /// The imported functions that the file's code calls or jumps to.
    pub fn imports(&self) -> impl Iterator<Item = &'a str> {
        self.stubs.values().copied().flatten()
    }

    /// The address that a call of `address` leads to. For a stub, this is the function of that name in this file, if
    /// there is one.
    pub fn resolve(&self, address: u64) -> u64 {
        self.import_behind(address).and_then(|name| self.by_name.get(name)).copied().unwrap_or(address)
    }

    /// Whether a branch or call from anywhere in the file leads to `address`.
    pub fn is_entered(&self, address: u64) -> bool {
        self.edges_into(Extent { start: address, end: address.saturating_add(1) }).next().is_some()
    }

    /// Calls and jumps from anywhere into `extent`.
    pub fn edges_into(&self, extent: Extent) -> impl Iterator<Item = &Edge> {
        let by_target = self.by_target.get_or_init(|| {
            let mut by_target: Vec<(u64, u32)> = self.edges.iter().map(|edge| edge.to).zip(0..).collect();
            by_target.sort_unstable();
            by_target
        });
        let first = by_target.partition_point(|(to, _)| *to < extent.start);
        by_target[first..].iter().take_while(move |(to, _)| *to < extent.end).map(|(_, i)| &self.edges[*i as usize])
    }

    /// Calls and jumps from inside `extent` to outside.
    pub fn out_of(&self, extent: Extent) -> impl Iterator<Item = &Edge> {
        let first = self.edges.partition_point(|e| e.from < extent.start);
        self.edges[first..]
            .iter()
            .take_while(move |e| e.from < extent.end)
            .filter(move |e| !(extent.start..extent.end).contains(&e.to))
    }

    /// The function that contains `address`, if its bounds are known.
    pub fn extent_at(&self, address: u64) -> Option<Extent> {
        let (&start, &end) = self.starts.range(..=address).next_back()?;
        let next = self.starts.range(address.checked_add(1)?..).next().map(|(start, _)| *start);
        let end = end.or(next)?;
        (end > address && self.image.has_code(start)).then_some(Extent { start, end })
    }

    /// Whether the stub or slot of an imported function is at `address`.
    pub fn is_import(&self, address: u64) -> bool {
        self.stubs.contains_key(&address)
    }

    /// Whether the file exports a function at `address`.
    pub fn is_exported(&self, address: u64) -> bool {
        self.exported.contains(&address)
    }

    /// Whether this file has a function that calls by this name lead to.
    pub fn has_function(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// Whether a function is known to start in `start..end`.
    pub fn has_start_between(&self, start: u64, end: u64) -> bool {
        self.starts.range(start..end).next().is_some()
    }

    /// Whether calls and jumps of `function` lead to code for which `is_hooked` holds, over at most [`BETWEEN_MAX`]
    /// functions. Code for which `is_passed_over` holds is not followed. Also true if there are too many functions to
    /// tell.
    pub fn leads_to(
        &self,
        function: Extent,
        is_hooked: &dyn Fn(u64) -> bool,
        is_passed_over: &dyn Fn(u64) -> bool,
    ) -> bool {
        let mut seen = BTreeSet::from([function.start]);
        let mut open = vec![function];
        for _ in 0..=BETWEEN_MAX {
            let mut next = Vec::new();
            for edge in open.iter().flat_map(|extent| self.out_of(*extent)) {
                let to = self.resolve(edge.to);
                if is_hooked(to) {
                    return true;
                }
                if !self.is_import(to)
                    && let Some(extent) = self.extent_at(to).filter(|extent| !is_passed_over(extent.start))
                    && seen.insert(extent.start)
                {
                    next.push(extent);
                }
            }
            if seen.len() > HELPERS_MAX {
                return true;
            }
            open = next;
        }
        false
    }

    /// Whether `function` can end in a jump to another function for which `is_hooked` holds, directly or through local
    /// code.
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
                    && !self.is_import(edge.to)
                    && !self.is_exported(next.start)
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

/// Calls and jumps, as decoded.
#[derive(Default)]
struct Decoded {
    edges: Vec<Edge>,
    /// As [`CallGraph::through_slots`].
    slots: Vec<(u64, u64, bool)>,
}

impl Decoded {
    fn read(&mut self, image: &FileImage, address: u64, code: &[u8]) {
        arch::flows(image.machine, address, code, |flow| match flow.target {
            Target::Address(to) => self.edges.push(Edge { from: flow.from, to, is_call: flow.is_call }),
            Target::Slot(slot) => self.slots.push((flow.from, slot, flow.is_call)),
        });
    }

    /// Reads functions, and what they lead to as far as [`CallGraph::leads_to`] looks, up to the stubs of imported
    /// functions.
    fn follow(&mut self, image: &FileImage, functions: &[Extent], starts: &BTreeMap<u64, Option<u64>>) {
        let around = |address: u64| {
            let (&start, &end) = starts.range(..=address).next_back()?;
            end.filter(|end| address < *end).map(|end| Extent { start, end })
        };
        let mut seen: BTreeSet<u64> = functions.iter().map(|function| function.start).collect();
        let (mut open, mut bytes) = (functions.to_vec(), 0);
        for _ in 0..=BETWEEN_MAX + 1 {
            let first = self.edges.len();
            for Extent { start, end } in open {
                let code = image.code_between(start, end);
                bytes += code.len() as u64;
                if bytes > CODE_MAX_BYTES {
                    return;
                }
                self.read(image, start, &code);
            }
            let led_to = self.edges[first..].iter().map(|edge| around(edge.to).unwrap_or(Extent::beginning(edge.to)));
            open = led_to.filter(|function| seen.insert(function.start)).collect();
        }
    }
}
