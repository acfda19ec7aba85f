//! Line coverage as data: read from llvm-cov's lcov export, reduced to production code, written as lcov again.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

/// For each file, how often each of its lines with code ran. The first line of a file is 1.
pub type Lines = BTreeMap<PathBuf, BTreeMap<usize, u64>>;

/// For each file with production code, the ranges of lines that are test code.
pub type TestLines = BTreeMap<PathBuf, Vec<RangeInclusive<usize>>>;

/// Reads an lcov file. Only the records of files (`SF`) and lines (`DA`) are used.
///
/// # Errors
/// If a record cannot be understood.
pub fn parse(text: &str) -> anyhow::Result<Lines> {
    let mut files = Lines::new();
    let mut file = None;
    for record in text.lines() {
        if let Some(path) = record.strip_prefix("SF:") {
            file = Some(PathBuf::from(path));
        } else if let Some(line) = record.strip_prefix("DA:") {
            let Some(file) = &file else { bail!("lcov record without a file: {record}") };
            let (line, count) = parse_line(line).with_context(|| format!("unknown lcov record: {record}"))?;
            // A file may have several sections.
            *files.entry(file.clone()).or_default().entry(line).or_default() += count;
        } else if record == "end_of_record" {
            file = None;
        }
    }
    Ok(files)
}

/// Parses `line,count[,checksum]` into line and count.
fn parse_line(text: &str) -> Option<(usize, u64)> {
    let mut numbers = text.split(',');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Keeps only production code: files with an entry in `test_lines`, and in these the lines outside its ranges. A file
/// without any such line is left out.
pub fn production(lines: Lines, test_lines: &TestLines) -> Lines {
    let mut kept = Lines::new();
    for (file, mut counts) in lines {
        let Some(ranges) = test_lines.get(&file) else { continue };
        counts.retain(|line, _| !ranges.iter().any(|range| range.contains(line)));
        if !counts.is_empty() {
            kept.insert(file, counts);
        }
    }
    kept
}

/// Writes line coverage as lcov.
pub fn format(lines: &Lines) -> String {
    let mut text = String::new();
    let mut write = |record: String| writeln!(text, "{record}").expect("writing to a string cannot fail");
    for (file, counts) in lines {
        let count = Count::of(counts);
        write(format!("SF:{}", file.display()));
        for (line, count) in counts {
            write(format!("DA:{line},{count}"));
        }
        write(format!("LF:{}\nLH:{}\nend_of_record", count.lines, count.covered));
    }
    text
}

/// A number of lines with code, and how many of them ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Lines with code.
    pub lines: usize,
    /// Lines that ran at least once.
    pub covered: usize,
}

impl Count {
    /// Counts the lines of one file.
    pub fn of(counts: &BTreeMap<usize, u64>) -> Self {
        Self { lines: counts.len(), covered: counts.values().filter(|count| **count > 0).count() }
    }

    /// Tenths of a percent that are covered, rounded down so that a limit is never shown as reached when it is not. If
    /// there are no lines, everything is covered.
    pub fn per_mille(self) -> usize {
        (self.covered * 1000).checked_div(self.lines).unwrap_or(1000)
    }
}

impl std::iter::Sum for Count {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |a, b| Self { lines: a.lines + b.lines, covered: a.covered + b.covered })
    }
}

/// The file's path relative to a directory, if it is below that.
pub fn relative(file: &Path, folder: &Path) -> String {
    file.strip_prefix(folder).unwrap_or(file).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPORT: &str = "SF:/w/a/src/lib.rs\nFN:1,_R1f\nFNDA:3,_R1f\nDA:1,3\nDA:2,0\nDA:9,7\nBRF:0\nLF:3\nLH:2\nend_of_record\n\
                          SF:/w/a/src/a_tests.rs\nDA:1,1,checksum\nend_of_record\n\
                          SF:/w/a/src/lib.rs\nDA:2,4\nDA:3,0\nend_of_record\n";

    #[test]
    fn lcov_is_read_and_sections_of_one_file_are_added() {
        let lines = parse(EXPORT).expect("lcov");
        let library: Vec<_> = lines[Path::new("/w/a/src/lib.rs")].iter().map(|(line, count)| (*line, *count)).collect();
        assert_eq!(library, [(1, 3), (2, 4), (3, 0), (9, 7)]);
        assert_eq!(lines.len(), 2);
    }

    #[test]
    fn records_that_are_not_lcov_are_errors() {
        assert!(parse("DA:1,1\n").is_err());
        assert!(parse("SF:a\nDA:1\n").is_err());
        assert!(parse("SF:a\nDA:x,1\n").is_err());
        assert!(parse("SF:a\nend_of_record\nDA:1,1\n").is_err());
    }

    #[test]
    fn test_code_does_not_count() {
        let ranges = |ranges| TestLines::from([(PathBuf::from("/w/a/src/lib.rs"), ranges)]);
        let lines = production(parse(EXPORT).expect("lcov"), &ranges(vec![2..=2, 8..=20]));
        assert_eq!(format(&lines), "SF:/w/a/src/lib.rs\nDA:1,3\nDA:3,0\nLF:2\nLH:1\nend_of_record\n");
        assert_eq!(parse(&format(&lines)).expect("lcov"), lines);
        assert_eq!(production(lines, &ranges(vec![1..=9])), Lines::new());
    }

    #[test]
    fn percentages_are_rounded_down() {
        assert_eq!(Count { lines: 10_000, covered: 8_999 }.per_mille(), 899);
        assert_eq!(Count { lines: 10, covered: 9 }.per_mille(), 900);
        assert_eq!(Count::default().per_mille(), 1000);
    }
}
