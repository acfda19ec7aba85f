//! Finds test code by its text, as rustfmt formats it: the lines of test-only items, and the files that such items
//! declare.

use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::lines::TestLines;

/// How an attribute of a test-only item begins.
const ATTRIBUTES: [&str; 4] =
    ["#[test]", "#[cfg(test)]", "#[cfg(all(test,", "#[cfg(any(test, feature = \"testing\"))]"];

/// Returns the files of a crate that have production code, with their lines of test code. `root` is the file of its
/// root module. A library's directory may also contain programs, which are left out.
///
/// # Errors
/// A file cannot be read.
pub fn test_lines(root: &Path) -> anyhow::Result<TestLines> {
    let folder = root.parent().context("a source file is in a folder")?;
    let (mut files, mut folders, mut declared) = (TestLines::new(), vec![folder.to_path_buf()], Vec::new());
    let is_library = root.ends_with("lib.rs");
    while let Some(within) = folders.pop() {
        for entry in fs::read_dir(&within).with_context(|| format!("cannot read {}", within.display()))? {
            let path = entry?.path();
            let name = path.strip_prefix(folder).unwrap_or(&path);
            if is_test_file(name) || is_library && (name == Path::new("main.rs") || name == Path::new("bin")) {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
                let lines: Vec<&str> = text.lines().collect();
                let ranges = ranges(&lines);
                declared
                    .extend(ranges.iter().filter_map(|range| module(&lines[range.start() - 1..*range.end()], &path)));
                files.insert(path, ranges);
            }
        }
    }
    files.retain(|file, _| {
        declared.iter().all(|module| *file != module.with_extension("rs") && !file.starts_with(module))
    });
    Ok(files)
}

/// Whether a file contains only test code, judged by its path relative to the crate's source directory: `tests.rs`,
/// `*_tests.rs`, and every file in a directory named `tests`.
fn is_test_file(path: &Path) -> bool {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    stem == "tests" || stem.ends_with("_tests")
}

/// Returns the lines of test-only items, starting at their attribute. The first line of a file is 1.
fn ranges(lines: &[&str]) -> Vec<RangeInclusive<usize>> {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let mut found: Vec<RangeInclusive<usize>> = Vec::new();
    for (begin, line) in lines.iter().enumerate() {
        let is_test = ATTRIBUTES.iter().any(|begin| line.trim_start().starts_with(begin));
        if !is_test || found.last().is_some_and(|last| *last.end() > begin) {
            continue;
        }
        // The item ends on its first line, or on the next line at the same depth that closes something. Multi-line text
        // may be at any depth.
        let item = begin + lines[begin..].iter().take_while(|line| is_before_item(line.trim())).count();
        let ends = |(at, next): (usize, &&str)| {
            let closes = at == 0 || indent(next) == indent(line) && next.trim_start().starts_with(['}', ')', ']']);
            closes && next.ends_with(['}', ';', ','])
        };
        let length = lines[item..].iter().enumerate().position(ends).unwrap_or(lines.len() - item - 1);
        found.push(begin + 1..=item + length + 1);
    }
    found
}

fn is_before_item(line: &str) -> bool {
    line.starts_with("//") || line.starts_with("#[")
}

/// Returns the module that an item in this file declares, as its path without extension, which is also the path of its
/// children.
fn module(item: &[&str], file: &Path) -> Option<PathBuf> {
    let beside = file.parent()?;
    if let Some(path) = item.iter().find_map(|line| line.trim().strip_prefix("#[path = \"")?.strip_suffix("\"]")) {
        return Some(beside.join(path).with_extension(""));
    }
    let name = item.last()?.strip_suffix(';')?.split_once("mod ")?.1;
    let stem = file.file_stem()?;
    let folder =
        if ["lib", "main", "mod"].iter().any(|root| stem == *root) { beside.into() } else { beside.join(stem) };
    Some(folder.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_end_where_their_depth_does() {
        let text = "fn a() {}\n#[cfg(test)]\n#[allow(x)]\nfn b(\n    c: u8,\n) {\n    {\n    }\n}\nimpl A {\n    #[cfg(test)]\n    fn c() {}\n    \
                    fn d() {}\n}\n#[cfg(any(test, feature = \"testing\"))]\nimpl<T> B for T\nwhere\n    T: C,\n{\n    #[test]\n    fn e() {}\n\n}\n\
                    #[cfg(test)]\nmod tests;\n#[cfg(unix)]\nfn f() {}\n";
        assert_eq!(ranges(&text.lines().collect::<Vec<_>>()), [2..=9, 11..=12, 15..=23, 24..=25]);
    }

    #[test]
    fn modules_for_tests_are_found_beside_and_below() {
        let found = |item: &[&str], file| module(item, Path::new(file));
        assert_eq!(found(&["#[cfg(test)]", "pub mod b;"], "src/lib.rs"), Some("src/b".into()));
        assert_eq!(found(&["#[cfg(test)]", "mod b;"], "src/a.rs"), Some("src/a/b".into()));
        assert_eq!(found(&["#[cfg(test)]", "#[path = \"c.rs\"]", "mod b;"], "src/a.rs"), Some("src/c".into()));
        assert_eq!(found(&["#[cfg(test)]", "use b;"], "src/a.rs"), None);
    }

    #[test]
    fn test_files_are_recognized_by_their_name() {
        assert!(["tests.rs", "a/b_tests.rs", "a/tests"].iter().all(|path| is_test_file(Path::new(path))));
        assert!(!["test.rs", "a/testing.rs", "a/tests_of.rs"].iter().any(|path| is_test_file(Path::new(path))));
    }
}
