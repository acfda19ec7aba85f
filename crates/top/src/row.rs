//! A row of a view.

use crate::sums::Tally;
use crate::view::RowId;

/// A row.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// Identity of the row.
    pub(crate) id: RowId,
    /// Its figures.
    pub(crate) tally: Tally,
    /// Its depth in a tree.
    pub(crate) depth: usize,
    /// Whether the row's branch is open; `None` if there is nothing below it.
    pub(crate) is_open: Option<bool>,
    /// Leaves of the row, if it is in a tree.
    pub(crate) leaves: Vec<u32>,
}

impl Entry {
    /// A row of a table.
    pub(crate) fn new(id: RowId, tally: Tally) -> Self {
        Self { id, tally, depth: 0, is_open: None, leaves: Vec::new() }
    }
}
