//! Coverage as a table for people.

use super::lines::Count;

/// A row: its name, its count, and a remark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// A crate or a file.
    pub name: String,
    /// Its lines.
    pub count: Count,
    /// Shown after the figures; may be empty.
    pub remark: String,
}

/// Sorts rows by coverage, lowest first. Among rows with equal coverage, those with more lines come first.
pub fn worst_first(rows: &mut [Row]) {
    rows.sort_by(|a, b| {
        let key = |row: &Row| (row.count.per_mille(), std::cmp::Reverse(row.count.lines));
        key(a).cmp(&key(b)).then_with(|| a.name.cmp(&b.name))
    });
}

/// Formats a table with this title above the names. Several rows are followed by their total.
pub fn format(title: &str, rows: &[Row]) -> String {
    let mut rows = rows.to_vec();
    if rows.len() > 1 {
        let count = rows.iter().map(|row| row.count).sum();
        rows.push(Row { name: "total".to_owned(), count, remark: String::new() });
    }
    let width = rows.iter().map(|row| row.name.chars().count()).chain([title.len()]).max().unwrap_or(0);
    let mut text = format!("{title:width$}    lines  covered      %\n");
    for Row { name, count, remark } in rows {
        let percent = format!("{}.{}", count.per_mille() / 10, count.per_mille() % 10);
        let line = format!("{name:width$}  {:>7}  {:>7}  {percent:>5}  {remark}", count.lines, count.covered);
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, lines: usize, covered: usize, remark: &str) -> Row {
        Row { name: name.to_owned(), count: Count { lines, covered }, remark: remark.to_owned() }
    }

    #[test]
    fn columns_are_aligned_and_summed() {
        let rows = [row("statistics", 2000, 1801, "pure"), row("a", 5, 5, "")];
        let expected = "crate         lines  covered      %\n\
                        statistics     2000     1801   90.0  pure\n\
                        a                 5        5  100.0\n\
                        total          2005     1806   90.0\n";
        assert_eq!(format("crate", &rows), expected);
        assert_eq!(format("crate", &rows[1..]), "crate    lines  covered      %\na            5        5  100.0\n");
    }

    #[test]
    fn the_least_covered_come_first() {
        let mut rows = [row("full", 9, 9, ""), row("b", 4, 2, ""), row("a", 8, 4, ""), row("none", 2, 0, "")];
        worst_first(&mut rows);
        assert_eq!(rows.map(|row| row.name), ["none", "a", "b", "full"]);
    }
}
