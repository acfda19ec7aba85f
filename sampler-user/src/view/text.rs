//! Text for terminals: colours, widths, tables whose columns give way when the line is short.

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

/// How a piece of text looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Style {
    #[default]
    Plain,
    /// Headings and main figures.
    Bold,
    /// What explains a figure: error bars, places.
    Dim,
    /// Names: functions, processes.
    Name,
    /// What the reader must not miss.
    Warning,
}

impl Style {
    /// The text in this style, or as it is without colour.
    pub(super) fn paint(self, text: &str, color: bool) -> String {
        let code = match self {
            Self::Plain => return text.into(),
            Self::Bold => "1",
            Self::Dim => "2",
            Self::Name => "36",
            Self::Warning => "33",
        };
        if !color || text.trim().is_empty() { text.into() } else { format!("\x1b[{code}m{text}\x1b[0m") }
    }
}

/// Columns that a text takes on a terminal.
pub(super) fn width(text: &str) -> usize {
    text.width()
}

/// The text without control characters (names come from other programs: no escape sequences from them), cut with an
/// ellipsis to at most `columns`.
pub fn clip(text: &str, columns: usize) -> String {
    let clean: String = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if width(&clean) <= columns {
        return clean;
    }
    let mut clipped = String::new();
    let mut used = 0;
    for character in clean.chars() {
        let next = character.width().unwrap_or(0);
        if used + next + 1 > columns {
            break;
        }
        used += next;
        clipped.push(character);
    }
    if columns > 0 {
        clipped.push('…');
    }
    clipped
}

/// The words of a text in lines of at most `columns`; at least one line.
pub(super) fn wrap(text: &str, columns: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        let word = clip(word, columns);
        if !line.is_empty() && width(&line) + 1 + width(&word) > columns {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(&word);
    }
    lines.push(line);
    lines
}

/// Alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Align {
    Left,
    Right,
}

/// A column of a table.
#[derive(Clone, Debug)]
pub(super) struct Column {
    pub(super) title: &'static str,
    pub(super) align: Align,
    pub(super) style: Style,
    /// Spaces before it.
    pub(super) gap: usize,
    /// Columns with the highest number go first when the line is too short; 0 never goes.
    pub(super) dispensable: u8,
}

impl Column {
    pub(super) fn left(title: &'static str, style: Style) -> Self {
        Self { title, align: Align::Left, style, gap: 2, dispensable: 0 }
    }

    pub(super) fn right(title: &'static str, style: Style) -> Self {
        Self { align: Align::Right, ..Self::left(title, style) }
    }

    pub(super) fn gap(self, gap: usize) -> Self {
        Self { gap, ..self }
    }

    pub(super) fn dispensable(self, dispensable: u8) -> Self {
        Self { dispensable, ..self }
    }
}

/// A table of single-line cells. A title that is wider than its column's cells runs into the next column if that has
/// no title of its own.
pub(super) struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(columns: Vec<Column>) -> Self {
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row; missing cells are empty.
    pub(super) fn row(&mut self, mut cells: Vec<String>) {
        cells.resize(self.columns.len(), String::new());
        self.rows.push(cells);
    }

    /// The header and the rows as lines, at most `columns` wide as far as dispensable columns allow.
    pub(super) fn lines(&self, columns: usize, color: bool) -> (String, Vec<String>) {
        let widths = self.widths();
        let shown = self.shown(&widths, columns);
        let header = self.line(&shown, &widths, color, |index| (self.columns[index].title, Style::Dim));
        let row = |cells: &Vec<String>| {
            self.line(&shown, &widths, color, |index| (cells[index].as_str(), self.columns[index].style))
        };
        (header, self.rows.iter().map(row).collect())
    }

    fn widths(&self) -> Vec<usize> {
        let cell = |index: usize| self.rows.iter().map(|cells| width(&cells[index])).max().unwrap_or(0);
        let mut widths: Vec<usize> = (0..self.columns.len()).map(cell).collect();
        for index in 0..widths.len() {
            let title = width(self.columns[index].title);
            let next = self.columns.get(index + 1);
            let room = match next {
                Some(next) if next.title.is_empty() && self.columns[index].align == Align::Left => {
                    widths[index] + next.gap + widths[index + 1]
                }
                _ => widths[index],
            };
            if title > room {
                widths[index] += title - room;
            }
        }
        widths
    }

    /// Indices of the columns that fit.
    fn shown(&self, widths: &[usize], columns: usize) -> Vec<usize> {
        let mut shown: Vec<usize> = (0..self.columns.len()).collect();
        let total = |shown: &[usize]| shown.iter().map(|&index| widths[index] + self.columns[index].gap).sum::<usize>();
        while total(&shown) > columns {
            let Some(worst) = shown.iter().map(|&index| self.columns[index].dispensable).max().filter(|&rank| rank > 0)
            else {
                break;
            };
            shown.retain(|&index| self.columns[index].dispensable != worst);
        }
        shown
    }

    fn line<'a>(
        &'a self,
        shown: &[usize],
        widths: &[usize],
        color: bool,
        cell: impl Fn(usize) -> (&'a str, Style),
    ) -> String {
        let mut line = String::new();
        let mut at = 0;
        let mut end = 0;
        for &index in shown {
            let (text, style) = cell(index);
            let start = at + self.columns[index].gap;
            at = start + widths[index];
            if text.is_empty() {
                continue;
            }
            let padding =
                if self.columns[index].align == Align::Right { widths[index].saturating_sub(width(text)) } else { 0 };
            let begin = (start + padding).max(end);
            line.push_str(&" ".repeat(begin - end));
            line.push_str(&style.paint(text, color));
            end = begin + width(text);
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_counts_columns_not_bytes() {
        assert_eq!(clip("short", 10), "short");
        assert_eq!(clip("a long name", 6), "a lon…");
        assert_eq!(width(&clip("漢字漢字", 5)), 5);
        assert_eq!(clip("x\x1b[31my", 20), "x\u{fffd}[31my");
        assert_eq!(clip("abc", 0), "");
    }

    #[test]
    fn words_wrap() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("incomprehensible", 5), ["inco…"]);
        assert_eq!(wrap("", 5), [""]);
    }

    #[test]
    fn columns_align_and_give_way() {
        let mut table = Table::new(vec![
            Column::right("A", Style::Plain).gap(0),
            Column::left("NAME", Style::Plain),
            Column::left("EXTRA", Style::Plain).dispensable(1),
        ]);
        table.row(vec!["1".into(), "x".into(), "long extra".into()]);
        table.row(vec!["100".into(), "yyyy".into()]);
        let (header, rows) = table.lines(80, false);
        assert_eq!(header, "  A  NAME  EXTRA");
        assert_eq!(rows, ["  1  x     long extra", "100  yyyy"]);
        let (header, rows) = table.lines(12, false);
        assert_eq!(header, "  A  NAME");
        assert_eq!(rows, ["  1  x", "100  yyyy"]);
    }

    #[test]
    fn colour_is_asked_for() {
        assert_eq!(Style::Bold.paint("x", false), "x");
        assert_eq!(Style::Bold.paint("x", true), "\x1b[1mx\x1b[0m");
        assert_eq!(Style::Bold.paint("  ", true), "  ");
    }
}
