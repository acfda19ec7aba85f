//! What is shown, and where the cursor is.

use std::collections::HashSet;

use crate::layout::Cell;
use crate::sums::Tally;

/// Functions from the root of a tree to one of its calls.
pub(crate) type Path = Vec<u32>;

/// Identifies a row of a view.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RowId {
    /// A program.
    Program(u32),
    /// A function.
    Function(u32),
    /// A stack of a program.
    Leaf(u32),
    /// A call in a tree.
    Path(Path),
}

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

/// Where a tree starts, and in which direction it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Root {
    /// At the outermost functions, down to the allocations.
    Outermost,
    /// At a function, up to its callers.
    Callers(u32),
    /// At a function, down to its callees.
    Callees(u32),
}

/// The kind of rows that a view has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Programs.
    #[default]
    Programs,
    /// Stacks.
    Stacks,
    /// Functions.
    Functions,
    /// Calls in a tree.
    Tree(Root),
    /// Calls as boxes.
    Flame,
}

/// A view.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    /// Kind of rows.
    pub(crate) kind: Kind,
    /// Only stacks of this program.
    pub(crate) program: Option<u32>,
    /// Only stacks through this function.
    pub(crate) through: Option<u32>,
    /// The column that the user wants rows sorted by; [`World::order`](crate::world::World::order) has the default.
    pub(crate) sort: Option<Cell>,
    /// Whether the smallest come first.
    pub(crate) reversed: bool,
    /// Only rows whose name has this text.
    pub(crate) filter: String,
    /// The selected row. [`Self::cursor`] is its index.
    pub(crate) selected: Option<RowId>,
    /// Index of the selected row.
    pub(crate) cursor: usize,
    /// Index of the first visible row.
    pub(crate) offset: usize,
    /// Branches of a tree that are open.
    pub(crate) open: HashSet<Path>,
    /// The path that the flame view is zoomed to.
    pub(crate) zoom: Path,
}

impl View {
    /// A view of everything.
    pub(crate) fn new(kind: Kind) -> Self {
        Self { kind, ..Self::default() }
    }

    /// A view within this one: the same program, function and sort order.
    pub(crate) fn inside(&self, kind: Kind) -> Self {
        Self { program: self.program, through: self.through, sort: self.sort, ..Self::new(kind) }
    }

    /// Whether rows are in tree order.
    pub(crate) const fn is_tree(&self) -> bool {
        matches!(self.kind, Kind::Tree(_))
    }
}
