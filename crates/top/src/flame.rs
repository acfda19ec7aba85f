//! The flame view: calls as boxes, the outermost at the top. The width of a box shows how much is in use below it.

use crate::sums::Tally;
use crate::tree::{branches, leaves_of_path};
use crate::view::{Path, Root};
use crate::world::World;

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
