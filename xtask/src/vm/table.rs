//! The results of a kernel's cases, and the tables that they are compared with.

use std::collections::BTreeMap;

/// The rows of a kernel's column, by row name.
type Column = BTreeMap<String, String>;

/// The first cells of the tables' headers: features, and instructions that the verifier followed.
const TABLES: [&str; 2] = ["feature", "verified instructions"];

/// The results of a run.
#[derive(Debug, Default)]
pub struct Findings {
    /// One column for each table.
    columns: [Column; 2],
    ended: Option<String>,
}

impl Findings {
    /// Parses what the machine wrote.
    pub fn of(said: &str) -> Self {
        let mut findings = Self::default();
        for line in said.lines() {
            if let Some(code) = line.strip_prefix("tests ended: ") {
                findings.ended = Some(code.trim().to_owned());
            }
            for (column, mark) in findings.columns.iter_mut().zip(["kernel: ", "verified: "]) {
                if let Some((name, value)) = line.strip_prefix(mark).and_then(|rest| rest.rsplit_once(": ")) {
                    column.insert(name.to_owned(), value.trim().to_owned());
                }
            }
        }
        findings
    }

    /// Whether all cases passed.
    pub fn passed(&self) -> bool {
        self.ended.as_deref() == Some("0")
    }

    /// Returns the results, one per line.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.columns.iter().flatten().map(|(name, value)| format!("{name}: {value}"))
    }
}

fn cells(line: &str) -> Vec<&str> {
    line.trim().trim_matches('|').split('|').map(str::trim).collect()
}

/// Returns the lines of a table, as a range of line numbers. The first cell of its header is `title`.
fn table_at(lines: &[&str], title: &str) -> Option<std::ops::Range<usize>> {
    let start = lines.iter().position(|line| line.starts_with('|') && cells(line)[0] == title)?;
    let length = lines[start..].iter().take_while(|line| line.starts_with('|')).count();
    Some(start..start + length)
}

/// Returns the kernels that have columns in the document.
pub fn versions(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let header = table_at(&lines, TABLES[0]).map(|range| cells(lines[range.start]));
    header.unwrap_or_default().into_iter().skip(1).map(str::to_owned).collect()
}

/// Returns a kernel's column of a table.
fn column(text: &str, title: &str, version: &str) -> Option<Column> {
    let lines: Vec<&str> = text.lines().collect();
    let range = table_at(&lines, title)?;
    let at = cells(lines[range.start]).iter().position(|cell| *cell == version)?;
    let rows = lines[range].iter().skip(2).map(|line| cells(line));
    let filled = rows.filter_map(|row| Some((row[0].to_owned(), (*row.get(at)?).to_owned())));
    Some(filled.filter(|(_, value)| value != "–").collect())
}

/// Returns the differences between a run and the document. Instruction counts may be lower, or up to a tenth higher.
pub fn differences(text: &str, version: &str, findings: &Findings) -> Vec<String> {
    let mut wrong = Vec::new();
    for (title, found) in TABLES.iter().zip(&findings.columns) {
        let Some(documented) = column(text, title, version) else {
            wrong.push(format!("the table of {title} has no column for {version}"));
            continue;
        };
        let names: std::collections::BTreeSet<&String> = documented.keys().chain(found.keys()).collect();
        for name in names {
            let (says, is) = (documented.get(name), found.get(name));
            if !agrees(says, is) {
                let shown = |value: Option<&String>| value.map_or("nothing", String::as_str).to_owned();
                wrong.push(format!("Linux {version}: {name}: the table says {}, found {}", shown(says), shown(is)));
            }
        }
    }
    wrong
}

fn agrees(says: Option<&String>, is: Option<&String>) -> bool {
    let number = |value: Option<&String>| value.and_then(|value| value.parse::<u64>().ok());
    match (number(says), number(is)) {
        (Some(says), Some(is)) => is * 10 <= says * 11,
        _ => says == is,
    }
}

/// Returns the document with this run's columns in place of the kernel's previous ones.
pub fn with(text: &str, version: &str, package: &str, findings: &Findings) -> String {
    let mut text = with_row(text, version, package);
    for (title, found) in TABLES.iter().zip(&findings.columns) {
        text = with_column(&text, title, version, found);
    }
    text
}

/// Adds or updates the row that names the kernel's package.
fn with_row(text: &str, version: &str, package: &str) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let borrowed: Vec<&str> = text.lines().collect();
    let Some(range) = table_at(&borrowed, "kernel") else { return text.to_owned() };
    let row = format!("| {version} | `{package}` |");
    match range.clone().find(|line| cells(borrowed[*line])[0] == version) {
        Some(line) => lines[line] = row,
        None => lines.insert(range.end, row),
    }
    lines.join("\n") + "\n"
}

fn with_column(text: &str, title: &str, version: &str, found: &Column) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let Some(range) = table_at(&lines, title) else { return text.to_owned() };
    let mut kernels: Vec<String> = cells(lines[range.start]).into_iter().skip(1).map(str::to_owned).collect();
    if !kernels.iter().any(|known| known == version) {
        kernels.push(version.to_owned());
    }
    let mut names: Vec<String> = lines[range.clone()].iter().skip(2).map(|line| cells(line)[0].to_owned()).collect();
    names.extend(found.keys().filter(|name| !names.contains(name)).cloned().collect::<Vec<_>>());
    let columns: Vec<Column> = kernels
        .iter()
        .map(|kernel| if kernel == version { found.clone() } else { column(text, title, kernel).unwrap_or_default() })
        .collect();
    let mut rows = vec![format!("| {title} | {} |", kernels.join(" | ")), "|---".repeat(kernels.len() + 1) + "|"];
    for name in &names {
        let values: Vec<&str> = columns.iter().map(|it| it.get(name).map_or("–", String::as_str)).collect();
        if values.iter().any(|value| *value != "–") {
            rows.push(format!("| {name} | {} |", values.join(" | ")));
        }
    }
    let before = lines[..range.start].iter().map(|line| (*line).to_owned());
    let after = lines[range.end..].iter().map(|line| (*line).to_owned());
    before.chain(rows).chain(after).collect::<Vec<_>>().join("\n") + "\n"
}
