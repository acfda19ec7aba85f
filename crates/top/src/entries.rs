//! The rows of a view with their figures, sorted and filtered.

use std::collections::HashMap;

use heapbpf_profile::model::Resident;

use crate::layout::Cell;
use crate::sums::Tally;
use crate::tree;
use crate::view::{Entry, Kind, RowId, View};
use crate::world::World;

/// The leaves that belong to a view.
pub(crate) fn scope(world: &World, view: &View) -> Vec<u32> {
    let leaves = &world.leaves;
    let is_of = |leaf: &u32| {
        view.program.is_none_or(|program| leaves.program(*leaf) == program)
            && view.through.is_none_or(|function| leaves.stack_of(*leaf).through.binary_search(&function).is_ok())
    };
    (0..leaves.len() as u32).filter(is_of).collect()
}

/// The row numbers that a leaf counts towards in a table.
fn keys<'a>(world: &'a World, kind: Kind, leaf: &'a u32, program: &'a mut u32) -> &'a [u32] {
    match kind {
        Kind::Programs => {
            *program = world.leaves.program(*leaf);
            std::slice::from_ref(program)
        }
        Kind::Functions => &world.leaves.stack_of(*leaf).through,
        _ => std::slice::from_ref(leaf),
    }
}

/// The identity of a table row.
fn row_id(kind: Kind, key: u32) -> RowId {
    match kind {
        Kind::Programs => RowId::Program(key),
        Kind::Functions => RowId::Function(key),
        _ => RowId::Leaf(key),
    }
}

/// The rows of a view.
pub(crate) fn entries(world: &World, view: &View) -> Vec<Entry> {
    let scope = scope(world, view);
    if let Kind::Tree(root) = view.kind {
        return tree::lines(world, view, root, &scope);
    }
    let count = match view.kind {
        Kind::Programs => world.leaves.programs(),
        Kind::Functions => world.leaves.functions(),
        _ => world.leaves.len(),
    };
    let mut tallies = vec![Tally::default(); count];
    let figures_of = world.figures();
    for leaf in &scope {
        let figures = figures_of(*leaf);
        if figures.is_nothing() {
            continue;
        }
        keys(world, view.kind, leaf, &mut 0).iter().for_each(|key| tallies[*key as usize].add(&figures));
    }
    let entry = |(key, tally)| {
        let id = row_id(view.kind, key);
        Entry { id, tally, depth: 0, is_open: None, leaves: Vec::new() }
    };
    let all = (0..).zip(tallies).map(entry);
    let mut entries: Vec<Entry> =
        all.filter(|entry| !entry.tally.is_nothing() || world.resident(&entry.id).is_some()).collect();
    if !view.filter.is_empty() {
        let matching = Matching::new(world, &view.filter);
        entries.retain(|entry| matching.has(world, &entry.id));
    }
    sort(world, view, &mut entries);
    entries
}

fn sort(world: &World, view: &View, entries: &mut Vec<Entry>) {
    let order = world.order(view);
    let mut lifetimes = match order {
        Cell::Lifetime => medians(world, view, entries),
        _ => Vec::new(),
    }
    .into_iter();
    let resident = |entry: &Entry| world.resident(&entry.id).map_or(0, Resident::total_bytes) as f64;
    let key = |entry: Entry| {
        let tally = &entry.tally;
        let figure = match order {
            Cell::Size => world.size(&tally.sums),
            Cell::Growth if world.marked.is_some() => world.growth_since_mark(tally),
            Cell::Growth => tally.sums.grown_bytes,
            Cell::Rate => world.rate(tally).unwrap_or(0.0),
            Cell::Count => world.count(&tally.sums),
            Cell::Lifetime => lifetimes.next().unwrap_or(f64::INFINITY),
            Cell::Resident => resident(&entry),
            _ => 0.0,
        };
        let name = if order == Cell::Name { world.name(&entry.id).to_lowercase() } else { String::new() };
        (figure, name, entry)
    };
    let mut keyed: Vec<(f64, String, Entry)> = std::mem::take(entries).into_iter().map(key).collect();
    keyed.sort_by(|a, b| {
        let order = b.0.total_cmp(&a.0).then_with(|| a.1.cmp(&b.1));
        let order = if view.reversed { order.reverse() } else { order };
        let size = |it: &Entry| it.tally.sums.alloc_bytes;
        order.then_with(|| size(&b.2).total_cmp(&size(&a.2))).then_with(|| resident(&b.2).total_cmp(&resident(&a.2)))
    });
    entries.extend(keyed.into_iter().map(|(.., entry)| entry));
}

/// Median lifetimes. Those that are unknown or longer than the recording count as the longest.
fn medians(world: &World, view: &View, entries: &[Entry]) -> Vec<f64> {
    let Some(lives) = &world.lives else { return vec![f64::INFINITY; entries.len()] };
    let ids: Vec<&RowId> = entries.iter().map(|entry| &entry.id).collect();
    let median = |leaves: Vec<u32>| lives.median_seconds(&leaves).unwrap_or(f64::INFINITY);
    leaves_of(world, view, &ids).into_iter().map(median).collect()
}

/// The leaves of each of the given table rows.
pub(crate) fn leaves_of(world: &World, view: &View, ids: &[&RowId]) -> Vec<Vec<u32>> {
    if view.kind == Kind::Stacks {
        // In this view, each row is one leaf.
        let leaf = |id: &&RowId| if let RowId::Leaf(leaf) = id { vec![*leaf] } else { Vec::new() };
        return ids.iter().map(leaf).collect();
    }
    let mut found = vec![Vec::new(); ids.len()];
    let places: HashMap<&RowId, usize> = ids.iter().enumerate().map(|(at, id)| (*id, at)).collect();
    for leaf in scope(world, view) {
        for key in keys(world, view.kind, &leaf, &mut 0) {
            if let Some(at) = places.get(&row_id(view.kind, *key)) {
                found[*at].push(leaf);
            }
        }
    }
    found
}

/// Functions whose names contain a text, ignoring case.
pub(crate) struct Matching {
    text: String,
    functions: Vec<bool>,
}

impl Matching {
    /// Searches the names and places of all functions for the text.
    pub(crate) fn new(world: &World, text: &str) -> Self {
        let text = text.to_lowercase();
        Self { functions: world.leaves.functions_with(&text), text }
    }

    /// Whether a row's name, or a name on its stack, contains the text.
    pub(crate) fn has(&self, world: &World, id: &RowId) -> bool {
        let is_in = |name: &str| name.to_lowercase().contains(&self.text);
        match id {
            RowId::Program(program) => is_in(world.leaves.program_name(*program)),
            RowId::Function(function) => self.functions[*function as usize],
            RowId::Leaf(leaf) => {
                let mut through = world.leaves.stack_of(*leaf).through.iter();
                through.any(|function| self.functions[*function as usize])
            }
            RowId::Path(path) => path.last().is_some_and(|function| self.functions[*function as usize]),
        }
    }
}
