//! `cargo xtask coverage`: how many lines of each crate are run by its own tests.

mod lines;
mod readers;
mod table;
mod test_code;
mod tools;

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::Value;

use lines::{Count, Lines};
use table::Row;
use tools::Tools;

use crate::context::Context;
use crate::crates::{self, Kind, Package};
use crate::shell::{read, run_quietly, say};
use crate::test::END_TO_END_PACKAGE;

/// The share of lines that tests of a pure crate must run, in tenths of a percent.
const PURE_LIMIT: usize = 900;

/// Calls rustc with its arguments, and instruments what it compiles, except build scripts. Cargo uses it only for the
/// workspace's crates, so dependencies are not slowed down. It needs bash because other shells drop variables whose
/// names they do not allow, such as `CARGO_BIN_EXE_a-b`.
const WRAPPER: &str = "#!/usr/bin/env bash
rustc=$1
shift
case \"$*\" in *'--crate-name build_script_'*) exec \"$rustc\" \"$@\" ;; esac
exec \"$rustc\" -C instrument-coverage \"$@\"
";

/// What to measure and how to show it.
#[derive(Args, Debug, Default)]
pub struct Selection {
    /// Packages to measure; by default all that have a library
    #[arg(value_name = "CRATE")]
    packages: Vec<String>,
    /// Also show a table of files, the least covered first
    #[arg(long)]
    files: bool,
    /// Write the counts of lines to a file, in lcov's format
    #[arg(long, value_name = "FILE")]
    lcov: Option<PathBuf>,
    /// Instead, how much of each reader of foreign bytes the seeds of its fuzz target run
    #[arg(long, conflicts_with_all = ["packages", "files", "lcov"])]
    seeds: bool,
}

/// Measures packages one by one and prints tables. The exit code is a failure if a test failed or a pure crate is below
/// its limit.
pub fn measure(context: &Context, selection: &Selection) -> anyhow::Result<ExitCode> {
    let packages = select(crates::packages(context)?, &selection.packages)?;
    let folder = Folder::prepare(context)?;
    let tools = tools::ensure(context)?;
    if selection.seeds {
        print!("{}", table::format("fuzz target", &readers::measure(context, &folder, &tools, &packages)?));
        return Ok(ExitCode::SUCCESS);
    }
    let mut failed = false;
    let (mut rows, mut files, mut all) = (Vec::new(), Vec::new(), Lines::new());
    for package in &packages {
        say!("measuring {}", package.name);
        let (lines, passed) = measure_tests(context, &folder, &tools, package, &[])?;
        let lines = lines::production(lines, &test_lines(package)?);
        if lines.is_empty() {
            bail!("the tests of {} measured nothing", package.name);
        }
        failed |= !passed;
        let counts = lines.iter().map(|(file, counts)| (file, Count::of(counts)));
        files.extend(counts.clone().map(|(file, count)| Row {
            name: lines::relative(file, &context.root),
            count,
            remark: String::new(),
        }));
        let count = counts.map(|(_, count)| count).sum();
        let (remark, sufficient) = judge(package.pure, count);
        failed |= !sufficient;
        rows.push(Row { name: package.name.clone(), count, remark });
        all.extend(lines);
    }
    if selection.files {
        table::worst_first(&mut files);
        println!("{}", table::format("file", &files));
    }
    print!("{}", table::format("crate", &rows));
    if let Some(path) = &selection.lcov {
        fs::write(path, lines::format(&all)).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The packages with these names, or all with a library.
fn select(mut packages: Vec<Package>, names: &[String]) -> anyhow::Result<Vec<Package>> {
    if names.is_empty() {
        packages.retain(|package| package.has(Kind::Library));
        return Ok(packages);
    }
    let known: Vec<&str> = packages.iter().map(|package| package.name.as_str()).collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(&name.as_str())) {
        bail!("no package {unknown} in the workspace; there are {}", known.join(", "));
    }
    packages.retain(|package| names.contains(&package.name));
    Ok(packages)
}

/// Returns the message about a crate with this coverage, and whether the coverage is sufficient.
fn judge(pure: bool, count: Count) -> (String, bool) {
    let limit = PURE_LIMIT / 10;
    match (pure, count.per_mille() >= PURE_LIMIT) {
        (false, _) => (String::new(), true),
        (true, true) => ("pure".to_owned(), true),
        (true, false) => (format!("pure: at least {limit} % are required"), false),
    }
}

/// Where coverage builds and their data are stored.
struct Folder {
    /// Cargo's target directory.
    target: PathBuf,
    /// The program that instruments crates.
    wrapper: PathBuf,
    /// Directory of what instrumented programs write.
    profiles: PathBuf,
}

impl Folder {
    fn prepare(context: &Context) -> anyhow::Result<Self> {
        let target = context.host_target().join("coverage");
        let wrapper = target.join("instrument.sh");
        let written = fs::create_dir_all(&target)
            .and_then(|()| fs::write(&wrapper, WRAPPER))
            .and_then(|()| fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)));
        written.with_context(|| format!("cannot write {}", wrapper.display()))?;
        Ok(Self { profiles: target.join("profiles"), target, wrapper })
    }

    /// Removes the data of earlier runs.
    fn clear(&self) -> anyhow::Result<()> {
        if self.profiles.exists() {
            fs::remove_dir_all(&self.profiles).with_context(|| format!("cannot empty {}", self.profiles.display()))?;
        }
        fs::create_dir_all(&self.profiles).with_context(|| format!("cannot create {}", self.profiles.display()))
    }
}

/// Measures which lines a package's own tests run, and whether they passed. `arguments` are passed to the test
/// programs.
fn measure_tests(
    context: &Context,
    folder: &Folder,
    tools: &Tools,
    package: &Package,
    arguments: &[&str],
) -> anyhow::Result<(Lines, bool)> {
    let mut build = test_command(context, folder, package);
    let built = read(build.args(["--no-run", "--message-format=json-render-diagnostics"]))?;
    let programs = programs(&built)?;
    folder.clear()?;
    let mut test = test_command(context, folder, package);
    // One file per process, because a process that is killed while it writes corrupts its file.
    test.args(["--no-fail-fast", "--"]).args(arguments);
    test.env("LLVM_PROFILE_FILE", folder.profiles.join("%p-%m.profraw"));
    let outcome = run_quietly(&mut test, context.options.verbose);
    if let Err(error) = &outcome {
        say!("tests of {} failed: {error:#}", package.name);
    }
    let merged = merge(folder, tools, context.options.verbose)?;
    let mut export = Command::new(&tools.cov);
    export.args(["export", "--format=lcov", "--instr-profile"]).arg(&merged);
    export.args(programs.iter().flat_map(|program| [OsString::from("--object"), program.into()]));
    Ok((lines::parse(&read(&mut export)?)?, outcome.is_ok()))
}

/// Returns an instrumented call of `cargo test` for all tests of a package except the end-to-end tests.
fn test_command(context: &Context, folder: &Folder, package: &Package) -> Command {
    let mut command = context.cargo_for_tests("test");
    command.arg("--quiet").arg("--target-dir").arg(&folder.target).args(["--package", &package.name]);
    command.arg(if package.has(Kind::Library) { "--lib" } else { "--bins" });
    if package.has(Kind::Test) && package.name != END_TO_END_PACKAGE {
        command.args(["--test", "*"]);
    }
    command.env("RUSTC_WORKSPACE_WRAPPER", &folder.wrapper);
    command
}

/// Returns the programs that cargo built, from its messages.
fn programs(messages: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut programs = Vec::new();
    for message in messages.lines() {
        let message: Value = serde_json::from_str(message).context("cargo wrote an unknown message")?;
        programs.extend(message["executable"].as_str().map(PathBuf::from));
    }
    Ok(programs)
}

/// Merges the data of all processes into one file. A damaged file is reported and left out.
fn merge(folder: &Folder, tools: &Tools, verbose: bool) -> anyhow::Result<PathBuf> {
    let list = folder.profiles.join("list");
    let merged = folder.profiles.join("merged.profdata");
    let entries =
        fs::read_dir(&folder.profiles).with_context(|| format!("cannot read {}", folder.profiles.display()))?;
    let raw: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(|path| is_raw(path)).collect();
    let text: String = raw.iter().map(|path| format!("{}\n", path.display())).collect();
    fs::write(&list, text).with_context(|| format!("cannot write {}", list.display()))?;
    let mut command = Command::new(&tools.profdata);
    command.args(["merge", "--sparse", "--failure-mode=all", "--output"]).arg(&merged);
    command.arg("--input-files").arg(&list);
    run_quietly(&mut command, verbose)?;
    for path in raw {
        // Best effort: the next run removes what is left.
        let _ = fs::remove_file(path);
    }
    Ok(merged)
}

fn is_raw(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "profraw")
}

/// Returns the files of the package's library (or programs, if it has none) with their lines of test code.
fn test_lines(package: &Package) -> anyhow::Result<lines::TestLines> {
    let kind = if package.has(Kind::Library) { Kind::Library } else { Kind::Program };
    let mut found = lines::TestLines::new();
    for krate in package.crates.iter().filter(|krate| krate.kind == kind) {
        found.extend(test_code::test_lines(&krate.root)?);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crates::Crate;

    fn package(name: &str, kinds: &[Kind]) -> Package {
        let crates = kinds.iter().map(|kind| Crate { kind: *kind, root: PathBuf::new() });
        Package { name: name.to_owned(), pure: false, crates: crates.collect() }
    }

    fn selected(names: &[&str]) -> anyhow::Result<Vec<String>> {
        let packages = vec![package("a", &[Kind::Library, Kind::Program]), package("b", &[Kind::Program])];
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        Ok(select(packages, &names)?.into_iter().map(|package| package.name).collect())
    }

    #[test]
    fn packages_are_selected_by_name_or_all_with_a_library() {
        assert_eq!(selected(&[]).expect("known"), ["a"]);
        assert_eq!(selected(&["b", "a"]).expect("known"), ["a", "b"]);
        let error = selected(&["c"]).expect_err("unknown").to_string();
        assert_eq!(error, "no package c in the workspace; there are a, b");
    }

    #[test]
    fn only_pure_crates_have_a_limit() {
        let count = |covered| Count { lines: 10_000, covered };
        assert_eq!(judge(true, count(9_000)), ("pure".to_owned(), true));
        assert_eq!(judge(true, count(8_999)), ("pure: at least 90 % are required".to_owned(), false));
        assert_eq!(judge(false, count(0)), (String::new(), true));
    }

    #[test]
    fn the_wrapper_instruments_all_but_build_scripts() {
        let called = |name: &str| {
            let mut command = Command::new("bash");
            command.args(["-c", WRAPPER, "wrapper", "echo", "--crate-name", name, "a  b"]);
            read(&mut command).expect("bash runs")
        };
        assert_eq!(called("mine"), "-C instrument-coverage --crate-name mine a  b\n");
        assert_eq!(called("build_script_build"), "--crate-name build_script_build a  b\n");
    }

    #[test]
    fn programs_are_read_from_cargos_messages() {
        let artifact = |executable: Value| serde_json::json!({"reason": "compiler-artifact", "executable": executable});
        let finished = serde_json::json!({"reason": "build-finished", "success": true});
        let messages = format!("{}\n{}\n{finished}\n", artifact(Value::Null), artifact("/t/a-1".into()));
        assert_eq!(programs(&messages).expect("messages"), [PathBuf::from("/t/a-1")]);
    }
}
