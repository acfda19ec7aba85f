//! `cargo xtask coverage --seeds`: for each reader of foreign bytes, the lines run by the seeds of its fuzz target.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use serde_json::Value;

use super::lines::{self, Count, TestLines};
use super::table::Row;
use super::tools::Tools;
use super::{Folder, measure_tests, test_lines};
use crate::context::Context;
use crate::crates::Package;
use crate::fuzz;
use crate::shell::say;

/// A reader, as described in the fuzz targets' manifest.
#[derive(Debug)]
struct Reader {
    /// The package whose tests replay the seeds.
    package: String,
    /// Its own source: files and directories below the workspace's.
    source: Vec<PathBuf>,
}

/// Measures the fuzz targets. Returns a row for each, in the order of their names.
///
/// # Errors
/// A target's tests fail or do not exist, or the manifest names something that does not exist.
pub fn measure(context: &Context, folder: &Folder, tools: &Tools, packages: &[Package]) -> anyhow::Result<Vec<Row>> {
    let mut production = TestLines::new();
    for package in packages {
        production.extend(test_lines(package)?);
    }
    let mut rows = Vec::new();
    for (target, reader) in readers(&context.root.join("fuzz"))? {
        let package = packages.iter().find(|package| package.name == reader.package);
        let package = package.with_context(|| format!("fuzz/Cargo.toml: {target}: no package {}", reader.package))?;
        say!("measuring {target}");
        let test = format!("fuzzed::seeds_of_{target}_are_checked");
        let (lines, passed) = measure_tests(context, folder, tools, package, &["--exact", &test])?;
        if !passed {
            bail!("{test} of {} failed", package.name);
        }
        let mut lines = lines::production(lines, &production);
        lines.retain(|file, _| is_of(file, &context.root, &reader.source));
        let count: Count = lines.values().map(Count::of).sum();
        if count.covered == 0 {
            bail!("{test} of {} runs nothing of {:?}", package.name, reader.source);
        }
        rows.push(Row { name: target, count, remark: String::new() });
    }
    Ok(rows)
}

fn is_of(file: &Path, root: &Path, source: &[PathBuf]) -> bool {
    source.iter().any(|part| file.starts_with(root.join(part)))
}

/// Reads the readers from the manifest in a directory of fuzz targets.
fn readers(folder: &Path) -> anyhow::Result<BTreeMap<String, Reader>> {
    let package = fuzz::package(folder)?;
    let readers = package["metadata"]["readers"].as_object().context("fuzz/Cargo.toml has no readers")?;
    let readers = readers.iter().map(|(target, reader)| Some((target.clone(), Reader::parse(reader)?)));
    readers.collect::<Option<_>>().context("fuzz/Cargo.toml: a reader has a package and source")
}

impl Reader {
    fn parse(value: &Value) -> Option<Self> {
        let source = value["source"].as_array()?.iter().map(|part| part.as_str().map(PathBuf::from));
        Some(Self { package: value["package"].as_str()?.to_owned(), source: source.collect::<Option<_>>()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fuzz_target_says_what_it_reads_with() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("it is in the workspace");
        let readers = readers(&root.join("fuzz")).expect("they can be read");
        let targets = root.join("fuzz/fuzz_targets").read_dir().expect("a folder of targets");
        let mut targets: Vec<String> = targets
            .map(|target| target.expect("an entry").path().file_stem().expect("a name").to_string_lossy().into_owned())
            .collect();
        targets.sort();
        assert_eq!(readers.keys().collect::<Vec<_>>(), targets.iter().collect::<Vec<_>>());
        for (target, reader) in readers {
            assert!(!reader.source.is_empty() && reader.source.iter().all(|part| root.join(part).exists()), "{target}");
        }
    }

    #[test]
    fn a_reader_is_its_files_and_folders() {
        let source = [PathBuf::from("a/src"), PathBuf::from("b/src/one.rs")];
        for (file, expected) in [("/w/a/src/x/y.rs", true), ("/w/b/src/one.rs", true), ("/w/b/src/two.rs", false)] {
            assert_eq!(is_of(Path::new(file), Path::new("/w"), &source), expected, "{file}");
        }
    }
}
