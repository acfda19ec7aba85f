//! Trees of calls. The lines of the tree view and the boxes of the flame view come from the same walk.

use std::collections::HashMap;

use crate::leaves::Leaves;
use crate::row::Entry;
use crate::sums::Tally;
use crate::view::{Path, Root, RowId, View};
use crate::world::World;

/// Maximum depth of a tree.
const DEEPEST: usize = 256;

/// A call in a tree, with everything below it.
#[derive(Clone, Debug)]
pub(crate) struct Branch {
    /// Its function.
    pub(crate) function: u32,
    /// Its figures.
    pub(crate) tally: Tally,
    /// Leaves through it.
    pub(crate) leaves: Vec<u32>,
}

/// The function of a leaf's stack at some depth of a tree.
fn at(leaves: &Leaves, leaf: u32, root: Root, depth: usize) -> Option<u32> {
    let path = &leaves.stack_of(leaf).path;
    match root {
        Root::Outermost => path.len().checked_sub(depth + 1).map(|at| path[at]),
        Root::Callers(function) => {
            let first = path.iter().position(|it| *it == function)?;
            path.get(first + depth).copied()
        }
        Root::Callees(function) => {
            let last = path.iter().rposition(|it| *it == function)?;
            last.checked_sub(depth).map(|at| path[at])
        }
    }
}

/// The calls at a depth, for leaves that share the path above it; largest first.
pub(crate) fn branches(world: &World, root: Root, depth: usize, of: &[u32]) -> Vec<Branch> {
    if depth >= DEEPEST {
        return Vec::new();
    }
    let mut found: HashMap<u32, Branch> = HashMap::new();
    let figures = world.figures();
    for &leaf in of {
        let Some(function) = at(&world.leaves, leaf, root, depth) else { continue };
        let new = || Branch { function, tally: Tally::default(), leaves: Vec::new() };
        let branch = found.entry(function).or_insert_with(new);
        branch.tally.add(&figures(leaf));
        branch.leaves.push(leaf);
    }
    let mut branches: Vec<Branch> = found.into_values().collect();
    let size = |branch: &Branch| world.size(&branch.tally.sums);
    branches.retain(|branch| size(branch) > 0.0 || branch.tally.sums.alloc_bytes > 0.0);
    branches.sort_by(|a, b| size(b).total_cmp(&size(a)).then(a.function.cmp(&b.function)));
    branches
}

/// The leaves whose stacks follow a path of a tree.
pub(crate) fn leaves_of_path(world: &World, root: Root, path: &[u32], of: &[u32]) -> Vec<u32> {
    let goes = |leaf: &u32| {
        path.iter().enumerate().all(|(depth, function)| at(&world.leaves, *leaf, root, depth) == Some(*function))
    };
    of.iter().copied().filter(goes).collect()
}

/// The visible lines of a tree: those in open branches.
pub(crate) fn lines(world: &World, view: &View, root: Root, of: &[u32]) -> Vec<Entry> {
    let mut lines = Vec::new();
    add_lines(world, view, root, of, &mut Path::new(), &mut lines);
    lines
}

fn add_lines(world: &World, view: &View, root: Root, of: &[u32], path: &mut Path, lines: &mut Vec<Entry>) {
    for Branch { function, tally, leaves } in branches(world, root, path.len(), of) {
        path.push(function);
        let is_open = view.open.contains(path);
        let has_more = leaves.iter().any(|leaf| at(&world.leaves, *leaf, root, path.len()).is_some());
        let id = RowId::Path(path.clone());
        let branch = has_more.then_some(is_open);
        lines.push(Entry { id, tally, depth: path.len() - 1, is_open: branch, leaves: leaves.clone() });
        if is_open {
            add_lines(world, view, root, &leaves, path, lines);
        }
        path.pop();
    }
}

/// Opens a branch, and everything below it down to the first fork.
pub(crate) fn open(world: &World, view: &mut View, root: Root, path: &Path, of: &[u32]) {
    let mut path = path.clone();
    let mut leaves = leaves_of_path(world, root, &path, of);
    loop {
        view.open.insert(path.clone());
        match &mut branches(world, root, path.len(), &leaves)[..] {
            [only] => {
                path.push(only.function);
                leaves = std::mem::take(&mut only.leaves);
            }
            _ => break,
        }
    }
}

/// Opens the largest branch of a new tree, down to the first fork.
pub(crate) fn open_largest(world: &World, view: &mut View, root: Root, of: &[u32]) {
    if let Some(first) = branches(world, root, 0, of).first() {
        open(world, view, root, &vec![first.function], of);
    }
}
