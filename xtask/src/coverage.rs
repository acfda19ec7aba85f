//! `cargo xtask coverage`: how many lines of each crate its own tests run, measured by cargo-llvm-cov.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::Value;

use crate::cargo_tools::{installed, metadata};
use crate::context::Context;
use crate::fuzz;
use crate::shell::{run_quietly, say};
use crate::test::END_TO_END_PACKAGE;

/// The version of cargo-llvm-cov that is installed.
const VERSION: &str = "0.6.16";
/// The share of lines that tests of a pure crate must run, in tenths of a percent.
const PURE_LIMIT: u64 = 900;

/// What to measure.
#[derive(Args, Debug, Default)]
pub struct Selection {
    /// Packages to measure; by default all that have a library
    #[arg(value_name = "CRATE")]
    packages: Vec<String>,
    /// Instead, how much of each reader of foreign bytes the seeds of its fuzz target run
    #[arg(long, conflicts_with = "packages")]
    seeds: bool,
}

/// A package of the workspace.
#[derive(Debug, PartialEq, Eq)]
struct Package {
    name: String,
    /// The directory of its Cargo.toml.
    directory: PathBuf,
    /// Whether its Cargo.toml has `[package.metadata.heapbpf] pure = true`: a pure crate does no I/O and knows neither
    /// the kernel nor the command line.
    pure: bool,
    has_library: bool,
}

/// A number of lines with code, and how many of them ran at least once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Lines {
    all: u64,
    covered: u64,
}

/// A reader of foreign bytes, as described in the fuzz targets' manifest.
#[derive(Debug)]
struct Reader {
    /// The package whose tests replay the seeds.
    package: String,
    /// Its own source: files and directories below the workspace's.
    source: Vec<PathBuf>,
}

/// Measures packages or readers one by one, and prints a table.
///
/// # Errors
/// A test fails, a pure crate is below its limit, nothing was measured, or cargo-llvm-cov cannot be installed.
pub fn measure(context: &Context, selection: &Selection) -> anyhow::Result<()> {
    if selection.seeds {
        return measure_readers(context);
    }
    let mut below = Vec::new();
    println!("crate                    lines  covered      %");
    for package in select(packages(context)?, &selection.packages)? {
        say!("measuring {}", package.name);
        let lines = run_tests(context, &package.name, &[], &[package.directory])?;
        println!("{}", lines.row(&package.name));
        if package.pure && lines.per_mille() < PURE_LIMIT {
            below.push(package.name);
        }
    }
    if !below.is_empty() {
        bail!("less than {} % of the lines of these pure crates run: {}", PURE_LIMIT / 10, below.join(", "));
    }
    Ok(())
}

/// Measures which lines of each reader are run by the seeds of its fuzz target.
fn measure_readers(context: &Context) -> anyhow::Result<()> {
    println!("fuzz target              lines  covered      %");
    for (target, reader) in readers(&context.root.join("fuzz"))? {
        say!("measuring {target}");
        let test = format!("fuzzed::seeds_of_{target}_are_checked");
        let source: Vec<PathBuf> = reader.source.iter().map(|part| context.root.join(part)).collect();
        let lines = run_tests(context, &reader.package, &["--exact", &test], &source)?;
        if lines.covered == 0 {
            bail!("{test} of {} runs nothing of {source:?}", reader.package);
        }
        println!("{}", lines.row(&target));
    }
    Ok(())
}

/// Runs a package's own tests, with arguments for the test programs. Returns the lines of these files and directories.
fn run_tests(context: &Context, package: &str, arguments: &[&str], source: &[PathBuf]) -> anyhow::Result<Lines> {
    let report = context.host_target().join("coverage.json");
    let mut command = Command::new(installed(context, "cargo-llvm-cov", VERSION)?);
    command.current_dir(&context.root).args(["llvm-cov", "--profile", "bench", "--package", package]);
    if context.options.locked {
        command.arg("--locked");
    }
    if package == END_TO_END_PACKAGE || !arguments.is_empty() {
        command.arg("--lib");
    }
    if package == END_TO_END_PACKAGE {
        // By default, no file below a directory `tests` is in the report, and this package is in one.
        command.arg("--disable-default-ignore-filename-regex");
    }
    // A process that is killed while it writes its data damages only these.
    command.args(["--failure-mode", "all"]);
    command.args(["--json", "--summary-only", "--output-path"]).arg(&report).arg("--").args(arguments);
    run_quietly(&mut command, context.options.verbose)?;
    let text = fs::read_to_string(&report).with_context(|| format!("cannot read {}", report.display()))?;
    let lines = lines_of(&text, source)?;
    if lines.all == 0 {
        bail!("the tests of {package} measured nothing of {source:?}");
    }
    Ok(lines)
}

/// Adds up the lines of these files and directories in a report of cargo-llvm-cov.
fn lines_of(report: &str, source: &[PathBuf]) -> anyhow::Result<Lines> {
    let report: Value = serde_json::from_str(report).context("the report of cargo-llvm-cov is no JSON")?;
    let files = report["data"][0]["files"].as_array().context("the report of cargo-llvm-cov has no files")?;
    let mut lines = Lines::default();
    for file in files {
        let name = Path::new(file["filename"].as_str().unwrap_or_default());
        if source.iter().any(|part| name.starts_with(part)) {
            let number = |key: &str| file["summary"]["lines"][key].as_u64().unwrap_or(0);
            lines.all += number("count");
            lines.covered += number("covered");
        }
    }
    Ok(lines)
}

impl Lines {
    /// Tenths of a percent that are covered, rounded down so that a limit is never shown as reached when it is not.
    fn per_mille(self) -> u64 {
        (self.covered * 1000).checked_div(self.all).unwrap_or(1000)
    }

    fn row(self, name: &str) -> String {
        let share = self.per_mille();
        format!("{name:<22} {:>7}  {:>7}  {:>3}.{}", self.all, self.covered, share / 10, share % 10)
    }
}

/// The packages with these names, or all with a library.
fn select(mut packages: Vec<Package>, names: &[String]) -> anyhow::Result<Vec<Package>> {
    let known: Vec<&str> = packages.iter().map(|package| package.name.as_str()).collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(&name.as_str())) {
        bail!("no package {unknown} in the workspace; there are {}", known.join(", "));
    }
    packages.retain(|package| if names.is_empty() { package.has_library } else { names.contains(&package.name) });
    Ok(packages)
}

/// All packages of the workspace, sorted by name.
fn packages(context: &Context) -> anyhow::Result<Vec<Package>> {
    let metadata = metadata(context.cargo("metadata").arg("--no-deps"))?;
    let packages = metadata["packages"].as_array().into_iter().flatten().map(Package::parse);
    let mut packages = packages.collect::<Option<Vec<Package>>>().context("cargo metadata describes no packages")?;
    packages.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(packages)
}

impl Package {
    fn parse(found: &Value) -> Option<Self> {
        let is_library = |target: &Value| matches!(target["kind"][0].as_str(), Some("lib" | "proc-macro"));
        Some(Self {
            directory: Path::new(found["manifest_path"].as_str()?).parent()?.to_path_buf(),
            pure: found["metadata"]["heapbpf"]["pure"] == true,
            has_library: found["targets"].as_array()?.iter().any(is_library),
            name: found["name"].as_str()?.to_owned(),
        })
    }
}

/// Reads the readers from the manifest in a directory of fuzz targets.
fn readers(directory: &Path) -> anyhow::Result<BTreeMap<String, Reader>> {
    let package = fuzz::package(directory)?;
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
    fn lines_of_a_report_are_those_of_the_source() {
        let file = |name: &str, all: u64, covered: u64| serde_json::json!({ "filename": name, "summary": { "lines": { "count": all, "covered": covered } } });
        let files = [file("/w/a/src/x/y.rs", 1990, 1791), file("/w/b/one.rs", 10, 10), file("/w/b/two.rs", 7, 1)];
        let report = serde_json::json!({ "data": [{ "files": files }] }).to_string();
        let lines = lines_of(&report, &["/w/a/src".into(), "/w/b/one.rs".into()]).expect("a report");
        assert_eq!(lines, Lines { all: 2000, covered: 1801 });
        assert_eq!(lines.row("a"), "a                         2000     1801   90.0");
        assert_eq!(Lines { all: 10_000, covered: 8_999 }.per_mille(), 899);
        assert!(lines_of("{}", &[]).is_err() && lines_of("no JSON", &[]).is_err());
    }

    #[test]
    fn packages_are_selected_by_name_or_all_with_a_library() {
        let package = |name: &str, kind: &str| {
            let found = serde_json::json!({
                "name": name,
                "manifest_path": format!("/w/{name}/Cargo.toml"),
                "targets": [{ "kind": ["test"] }, { "kind": [kind] }],
                "metadata": { "heapbpf": { "pure": kind == "lib" } },
            });
            Package::parse(&found).expect("a package as cargo describes it")
        };
        let selected = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            select(vec![package("a", "lib"), package("b", "bin")], &names)
        };
        let a = Package { name: "a".into(), directory: "/w/a".into(), pure: true, has_library: true };
        let b = Package { name: "b".into(), directory: "/w/b".into(), pure: false, has_library: false };
        assert_eq!(selected(&[]).expect("known"), [a]);
        assert_eq!(selected(&["b"]).expect("known"), [b]);
        let error = selected(&["c"]).expect_err("unknown").to_string();
        assert_eq!(error, "no package c in the workspace; there are a, b");
    }

    #[test]
    fn every_fuzz_target_says_what_it_reads_with() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("it is in the workspace");
        let readers = readers(&root.join("fuzz")).expect("they can be read");
        let targets = root.join("fuzz/fuzz_targets").read_dir().expect("a directory of targets");
        let mut targets: Vec<String> = targets
            .map(|target| target.expect("an entry").path().file_stem().expect("a name").to_string_lossy().into_owned())
            .collect();
        targets.sort();
        assert_eq!(readers.keys().collect::<Vec<_>>(), targets.iter().collect::<Vec<_>>());
        for (target, reader) in readers {
            assert!(!reader.source.is_empty() && reader.source.iter().all(|part| root.join(part).exists()), "{target}");
        }
    }
}
