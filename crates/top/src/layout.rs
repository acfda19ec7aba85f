//! Which columns a table has at a given width.

use heapbpf_profile::report::text::width;
use ratatui_core::style::Style;

/// A column of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Cell {
    /// Bytes in use.
    #[default]
    Size,
    /// Interval of the bytes in use.
    Bounds,
    /// Resident memory; only programs have it.
    Resident,
    /// Growth of the resident memory per minute.
    ResidentGrowth,
    /// Growth per second, or since the mark.
    Growth,
    /// Interval of the growth.
    GrowthBounds,
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

impl Cell {
    /// All of them, in the order of the screen.
    pub(crate) const ALL: [Self; 11] = [
        Self::Resident,
        Self::ResidentGrowth,
        Self::Size,
        Self::Bounds,
        Self::Growth,
        Self::GrowthBounds,
        Self::Rate,
        Self::Count,
        Self::Lifetime,
        Self::Trend,
        Self::Name,
    ];

    /// Those that rows can be sorted by, in the order of their keys.
    pub(crate) const SORTED: [Self; 7] =
        [Self::Size, Self::Growth, Self::Rate, Self::Count, Self::Lifetime, Self::Name, Self::Resident];

    /// The next one to sort by.
    pub(crate) fn next(self) -> Self {
        let at = Self::SORTED.iter().position(|cell| *cell == self).unwrap_or(0);
        Self::SORTED[(at + 1) % Self::SORTED.len()]
    }

    /// Whether its texts are numbers, which end at the same column.
    pub(crate) const fn is_number(self) -> bool {
        !matches!(self, Self::Bounds | Self::GrowthBounds | Self::Trend | Self::Name)
    }

    /// Columns with the highest number give way first, those with 0 never.
    const fn rank(self) -> u8 {
        match self {
            Self::Size | Self::Name => 0,
            Self::Resident => 1,
            Self::Bounds => 2,
            Self::Growth | Self::GrowthBounds => 3,
            Self::ResidentGrowth => 4,
            Self::Rate => 5,
            Self::Count => 6,
            Self::Lifetime => 7,
            Self::Trend => 8,
        }
    }
}

/// A column with its texts.
#[derive(Clone, Debug)]
pub(crate) struct Column {
    /// What it shows.
    pub(crate) cell: Cell,
    /// Its heading.
    pub(crate) title: String,
    /// Its texts in the visible rows.
    pub(crate) texts: Vec<(String, Style)>,
    /// Its width: what its texts need.
    pub(crate) width: usize,
}

impl Column {
    /// A column that is as wide as its widest text.
    pub(crate) fn new(cell: Cell, title: String, texts: Vec<(String, Style)>) -> Self {
        let widest = texts.iter().map(|(text, _)| width(text)).max().unwrap_or(0);
        Self { cell, width: widest.max(width(&title)), title, texts }
    }
}

/// The columns that fit into a line of `columns`. The last one has the names, and takes what is left. The least
/// informative ones give way first, a figure together with its interval.
pub(crate) fn fitting(mut all: Vec<Column>, columns: usize) -> Vec<Column> {
    all.retain(|column| column.width > 0);
    let needed = |all: &[Column]| all.iter().map(|column| column.width + 1).sum::<usize>().saturating_sub(1);
    while needed(&all) > columns
        && let Some(last) = all.iter().map(|column| column.cell.rank()).max().filter(|rank| *rank > 0)
    {
        all.retain(|column| column.cell.rank() != last);
    }
    let needed = needed(&all);
    if let Some(name) = all.last_mut() {
        name.width = columns.saturating_sub(needed - name.width);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cells of a table of `columns`, where texts are as wide as usual.
    fn cells(columns: usize) -> Vec<Cell> {
        let usual = |cell| match cell {
            Cell::Size | Cell::Resident | Cell::Rate | Cell::Lifetime => "75.8 MiB",
            Cell::Bounds | Cell::GrowthBounds => "[64.6, 89.0]",
            Cell::Growth | Cell::ResidentGrowth => "+64.1 MiB/s",
            Cell::Count => "~8,553",
            Cell::Trend => "▂▃▄▅▆▇██▂▃▄▅▆",
            Cell::Name => "shop::Catalogue::audit",
        };
        let column = |cell| Column::new(cell, String::new(), vec![(usual(cell).to_owned(), Style::new())]);
        let all = fitting(Cell::ALL.map(column).into(), columns);
        let sum = all.iter().map(|column| column.width + 1).sum::<usize>() - 1;
        assert!(sum == columns || all.len() == 2, "{columns}: {all:?}");
        all.iter().map(|column| column.cell).collect()
    }

    #[test]
    fn columns_fit_and_give_way_a_figure_with_its_interval() {
        use Cell::{Bounds, Growth, GrowthBounds, Lifetime, Name, Resident, Size};
        for columns in 20..250 {
            let cells = cells(columns);
            assert_eq!(cells.contains(&Growth), cells.contains(&GrowthBounds), "{columns}");
        }
        assert_eq!(cells(80), [Resident, Size, Bounds, Growth, GrowthBounds, Name]);
        assert_eq!(cells(56), [Resident, Size, Bounds, Name]);
        assert_eq!(cells(24), [Size, Name]);
        assert!(cells(150).len() == Cell::ALL.len() && cells(140).contains(&Lifetime));
    }

    #[test]
    fn what_no_row_has_takes_no_column() {
        let column = |cell, text: &str| Column::new(cell, String::new(), vec![(text.to_owned(), Style::new())]);
        let all = fitting(vec![column(Cell::Size, "1 B"), column(Cell::Bounds, ""), column(Cell::Name, "main")], 80);
        assert_eq!(
            all.iter().map(|column| (column.cell, column.width)).collect::<Vec<_>>(),
            [(Cell::Size, 3), (Cell::Name, 76)]
        );
    }
}
