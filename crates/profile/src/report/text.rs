//! Text for terminals: colours, widths, and tables that drop columns on narrow terminals.

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use crate::escape::escaped;

/// The style of a piece of text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    #[default]
    /// Plain text.
    Plain,
    /// Headings and main figures.
    Bold,
    /// Explanations of figures: intervals, locations.
    Dim,
    /// Names of functions and processes.
    Name,
    /// Warnings.
    Warning,
}

impl Style {
    /// The text in this style, or unchanged without colour.
    pub fn paint(self, text: &str, color: bool) -> String {
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

/// Width of a text on a terminal, in columns.
pub fn width(text: &str) -> usize {
    text.width()
}

/// The text, [`escaped`] and cut with an ellipsis to at most `columns`.
pub fn clip(text: &str, columns: usize) -> String {
    let clean = escaped(text);
    if width(&clean) <= columns {
        return clean.into_owned();
    }
    columns.checked_sub(1).map_or_else(String::new, |columns| format!("{}…", prefix(&clean, columns)))
}

/// The beginning of a text, at most `columns` wide.
fn prefix(text: &str, columns: usize) -> &str {
    let end = last_fitting(text.char_indices(), columns).map_or(0, |(at, last)| at + last.len_utf8());
    &text[..end]
}

/// The last of the characters that fit into `columns`.
fn last_fitting(characters: impl Iterator<Item = (usize, char)>, columns: usize) -> Option<(usize, char)> {
    let mut used = 0;
    let fits = |(_, character): &(usize, char)| {
        used += character.width().unwrap_or(0);
        used <= columns
    };
    characters.take_while(fits).last()
}

/// The text, [`escaped`] and cut at its beginning with an ellipsis to at most `columns`.
pub fn clip_start(text: &str, columns: usize) -> String {
    let clean = escaped(text);
    if width(&clean) <= columns {
        return clean.into_owned();
    }
    let Some(columns) = columns.checked_sub(1) else { return String::new() };
    let start = last_fitting(clean.char_indices().rev(), columns).map_or(clean.len(), |(at, _)| at);
    format!("…{}", &clean[start..])
}

/// Shortest beginning of a name that tells something, in columns.
const LEAST_BEGINNING: usize = 4;

/// The name of a function, [`escaped`] and cut in its middle with an ellipsis to at most `columns`. The function's own
/// name, after the last `::`, stays whole if it fits.
pub fn clip_middle(name: &str, columns: usize) -> String {
    let clean = escaped(name);
    if width(&clean) <= columns {
        return clean.into_owned();
    }
    let path = &clean[..clean.find('(').unwrap_or(clean.len())];
    let own = path.rfind("::").map(|end| &clean[end + 2..]);
    let needed = own.map_or(0, |own| width(own) + 1);
    if let Some(own) = own.filter(|_| needed > columns) {
        return clip(own, columns);
    }
    let beginning = columns - needed.max(columns / 2);
    let is_short = own.is_some() && beginning < LEAST_BEGINNING;
    let beginning = prefix(&clean, if is_short { 0 } else { beginning });
    format!("{beginning}{}", clip_start(&clean, columns - width(beginning)))
}

/// Wraps a text into lines of at most `columns`; there is at least one line.
pub fn wrap(text: &str, columns: usize) -> Vec<String> {
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
pub enum Align {
    /// Left.
    Left,
    /// Right.
    Right,
}

/// A column of a table.
#[derive(Clone, Debug)]
pub struct Column {
    /// Heading.
    pub title: &'static str,
    /// Alignment of its cells.
    pub align: Align,
    /// Style of its cells.
    pub style: Style,
    /// Spaces before the column.
    pub gap: usize,
    /// Columns with the highest number are dropped first if the line is too short; 0 is never dropped.
    pub dispensable: u8,
}

impl Column {
    /// A column of texts.
    pub fn left(title: &'static str, style: Style) -> Self {
        Self { title, align: Align::Left, style, gap: 2, dispensable: 0 }
    }

    /// A column of numbers.
    pub fn right(title: &'static str, style: Style) -> Self {
        Self { align: Align::Right, ..Self::left(title, style) }
    }

    /// Sets the number of spaces before the column.
    pub fn gap(self, gap: usize) -> Self {
        Self { gap, ..self }
    }

    /// Makes the column dispensable: if the line is too short, columns with the highest number are dropped first.
    pub fn dispensable(self, dispensable: u8) -> Self {
        Self { dispensable, ..self }
    }
}

/// A table of single-line cells. A title that is wider than its column's cells extends into the next column if that has
/// no title.
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new(columns: Vec<Column>) -> Self {
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row; missing cells are empty.
    pub fn row(&mut self, mut cells: Vec<String>) {
        cells.resize(self.columns.len(), String::new());
        self.rows.push(cells);
    }

    /// The header and the rows as lines, at most `columns` wide as far as columns can be dropped.
    pub fn lines(&self, columns: usize, color: bool) -> (String, Vec<String>) {
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
            let available = match next {
                Some(next) if next.title.is_empty() && self.columns[index].align == Align::Left => {
                    widths[index] + next.gap + widths[index + 1]
                }
                _ => widths[index],
            };
            if title > available {
                widths[index] += title - available;
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
    fn the_end_of_a_path_is_kept() {
        assert_eq!(clip_start("/usr/src/json.c", 20), "/usr/src/json.c");
        assert_eq!(clip_start("/usr/src/json.c", 10), "…rc/json.c");
        assert_eq!([clip_start("abc", 1), clip_start("abc", 0)], ["…", ""]);
        assert!(width(&clip_start("路径/文件", 6)) <= 6);
    }

    #[test]
    fn the_middle_of_a_name_gives_way_and_never_its_own_name() {
        let name = "company::subsystem::Component::operation_17";
        assert_eq!(clip_middle(name, 60), name);
        assert_eq!(clip_middle(name, 30), "company::subsys…::operation_17");
        assert_eq!(clip_middle(name, 17), "comp…operation_17");
        assert_eq!(clip_middle(name, 14), "…:operation_17");
        assert_eq!(clip_middle(name, 8), "operati…");
        assert_eq!(clip_middle("shop::find(std::string)", 18), "…find(std::string)");
        assert_eq!(clip_middle("a long program (4242)", 16), "a long p… (4242)");
        for columns in 0..30 {
            let fits = |name| width(&clip_middle(name, columns)) <= columns;
            assert!(fits(name) && fits("漢字::漢字漢字漢字漢字漢字"), "{columns}");
        }
    }

    #[test]
    fn clipping_counts_columns_not_bytes() {
        assert_eq!(clip("short", 10), "short");
        assert_eq!(clip("a long name", 6), "a lon…");
        assert_eq!(width(&clip("漢字漢字", 5)), 5);
        assert_eq!(clip("x\x1b[31my", 20), "x\\u{1b}[31my");
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
}
