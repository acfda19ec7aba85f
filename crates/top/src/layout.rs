//! Which columns a table has at a given width.

use crate::view::Sort;

/// A column of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cell {
    /// Bytes in use.
    Size,
    /// Interval of the bytes in use.
    Bounds,
    /// Resident memory; only programs have it.
    Resident,
    /// Growth of the resident memory per minute.
    ResidentGrowth,
    /// Growth per minute, or since the mark.
    Growth,
    /// Bytes allocated per second.
    Rate,
    /// Blocks in use.
    Count,
    /// Median lifetime.
    Lifetime,
    /// Bars for the last minute.
    Trend,
    /// Name.
    Name,
}

/// Minimum width of the name column.
const NAME: usize = 20;

impl Cell {
    /// Width of the column; the name column takes whatever is left.
    pub(crate) const fn columns(self) -> usize {
        match self {
            Self::Size => 10,
            Self::Bounds => 14,
            Self::Growth | Self::ResidentGrowth => 11,
            Self::Rate | Self::Resident => 9,
            Self::Count => 8,
            Self::Lifetime => 9,
            Self::Trend => 13,
            Self::Name => NAME,
        }
    }

    /// The sort order that belongs to the column.
    pub(crate) const fn sort(self) -> Option<Sort> {
        match self {
            Self::Size => Some(Sort::InUse),
            Self::Growth => Some(Sort::Growth),
            Self::Rate => Some(Sort::Rate),
            Self::Count => Some(Sort::Count),
            Self::Lifetime => Some(Sort::Lifetime),
            Self::Name => Some(Sort::Name),
            Self::Resident => Some(Sort::Resident),
            Self::Bounds | Self::Trend | Self::ResidentGrowth => None,
        }
    }
}

/// The columns of a table that is `width` wide, each with its own width. The least informative columns are dropped
/// first. `has_memory` adds the columns of resident memory.
pub(crate) fn columns(width: usize, has_memory: bool) -> Vec<(Cell, usize)> {
    use Cell::{Bounds, Count, Growth, Lifetime, Name, Rate, Resident, ResidentGrowth, Size, Trend};
    let mut cells = vec![Resident, ResidentGrowth, Size, Bounds, Growth, Rate, Count, Lifetime, Trend, Name];
    cells.retain(|cell| has_memory || !matches!(cell, Resident | ResidentGrowth));
    let needed = |cells: &[Cell]| cells.iter().map(|cell| cell.columns() + 1).sum::<usize>() - 1;
    for dispensable in [Trend, Lifetime, Count, ResidentGrowth, Rate, Bounds, Growth, Resident] {
        if needed(&cells) > width {
            cells.retain(|cell| *cell != dispensable);
        }
    }
    let others = needed(&cells) - NAME;
    let columns = |cell: Cell| if cell == Name { width.saturating_sub(others) } else { cell.columns() };
    cells.into_iter().map(|cell| (cell, columns(cell))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fit_and_give_way() {
        for width in 20..250 {
            let cells = columns(width, width % 2 == 0);
            let sum: usize = cells.iter().map(|(_, columns)| columns + 1).sum::<usize>() - 1;
            assert!(sum <= width || cells.len() == 2, "{width}: {cells:?}");
        }
        let has = |width, cell| columns(width, false).iter().any(|(it, _)| *it == cell);
        assert!(has(80, Cell::Bounds) && has(80, Cell::Count) && !has(80, Cell::Trend));
        assert!(columns(80, true).iter().take(3).map(|it| it.0).eq([Cell::Resident, Cell::Size, Cell::Bounds]));
        assert!(columns(100, true).iter().any(|it| it.0 == Cell::ResidentGrowth) && !has(100, Cell::ResidentGrowth));
        assert!(has(112, Cell::Trend) && has(112, Cell::Lifetime));
    }
}
