//! Trees of calls. The lines of the tree view and the boxes of the flame view come from the same walk.

use std::collections::HashMap;

use crate::leaves::Leaves;
use crate::sums::Tally;
use crate::view::{Entry, Path, Root, RowId, View};
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

/// A box.
#[derive(Clone, Debug)]
pub(crate) struct FlameBox {
    /// Functions from the outermost to this one.
    pub(crate) path: Path,
    /// Its figures.
    pub(crate) tally: Tally,
    /// Its leaves.
    pub(crate) leaves: Vec<u32>,
    /// Row on the screen.
    pub(crate) row: usize,
    /// First column.
    pub(crate) x: usize,
    /// Width in columns.
    pub(crate) columns: usize,
}

/// The boxes of some leaves at and below `zoom`, in `rows` rows of `columns`. Boxes narrower than a column are left
/// out.
pub(crate) fn boxes(world: &World, of: &[u32], zoom: &Path, columns: usize, rows: usize) -> Vec<FlameBox> {
    let leaves = leaves_of_path(world, Root::Outermost, zoom, of);
    let mut tally = Tally::default();
    let figures = world.figures();
    leaves.iter().for_each(|leaf| tally.add(&figures(*leaf)));
    let mut boxes = Vec::new();
    add(world, FlameBox { path: zoom.clone(), tally, leaves, row: 0, x: 0, columns }, rows, &mut boxes);
    boxes
}

fn add(world: &World, this: FlameBox, rows: usize, boxes: &mut Vec<FlameBox>) {
    let whole = world.size(&this.tally.sums);
    if this.row >= rows || this.columns == 0 || whole <= 0.0 {
        return;
    }
    let below = branches(world, Root::Outermost, this.path.len(), &this.leaves);
    let (row, start, width) = (this.row + 1, this.x, this.columns);
    let column = |sum: f64| start + (sum / whole * width as f64).round() as usize;
    let parent = this.path.clone();
    boxes.push(this);
    let mut sum = 0.0;
    for branch in below {
        let x = column(sum);
        sum += world.size(&branch.tally.sums).max(0.0);
        let columns = column(sum).saturating_sub(x);
        let mut path = parent.clone();
        path.push(branch.function);
        add(world, FlameBox { path, tally: branch.tally, leaves: branch.leaves, row, x, columns }, rows, boxes);
    }
}

/// The box that a cursor key leads to: down to the widest callee, up to the caller, left and right within a row.
pub(crate) fn neighbour(boxes: &[FlameBox], at: usize, rows: isize, columns: isize) -> usize {
    let Some(this) = boxes.get(at) else { return 0 };
    let is_below = |it: &FlameBox| it.row == this.row + 1 && it.path.starts_with(&this.path);
    let is_above = |it: &FlameBox| it.row + 1 == this.row && this.path.starts_with(&it.path);
    let of_row = || boxes.iter().enumerate().filter(|(_, it)| it.row == this.row);
    let found = match (rows, columns) {
        (1.., _) => boxes.iter().position(is_below),
        (..=-1, _) => boxes.iter().position(is_above),
        (_, 1..) => of_row().filter(|(_, it)| it.x > this.x).min_by_key(|(_, it)| it.x).map(|(index, _)| index),
        (_, ..=-1) => of_row().filter(|(_, it)| it.x < this.x).max_by_key(|(_, it)| it.x).map(|(index, _)| index),
        _ => None,
    };
    found.unwrap_or(at)
}
