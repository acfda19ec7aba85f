//! `cargo xtask fuzz`: runs the fuzz targets with coverage, or their corpora once.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::Value;

use crate::cargo_tools;
use crate::context::Context;
use crate::nightly;
use crate::programs::host_cargo;
use crate::shell::{run, say};

/// The version of cargo-fuzz that is installed.
const VERSION: &str = "0.13.1";
/// Maximum size of an input, bytes. Larger ones are slower, and readers treat a few pages like many.
const LARGEST_INPUT: u32 = 16 << 10;

/// What is fuzzed, and for how long.
#[derive(Args, Debug)]
pub struct Selection {
    /// Only this target; without it, each in turn
    target: Option<String>,
    /// Most inputs that each target is given
    #[arg(long, value_name = "N")]
    runs: Option<u64>,
    /// Most seconds that each target runs
    #[arg(long, value_name = "N", default_value = "60")]
    seconds: u64,
    /// Begin no target after so many seconds, and say which were not run; another one is the first each day, and those that
    /// link most of the daemon's crate are the last ones
    #[arg(long, value_name = "N")]
    within: Option<u64>,
    /// Without the address sanitizer: about twice as many inputs a second
    #[arg(long)]
    fast: bool,
    /// Give each target its seeds and its corpus once, without coverage; needs no nightly toolchain
    #[arg(long)]
    replay: bool,
    /// Afterwards keep only inputs that add coverage, as the target's seeds in fuzz/seeds, which are committed
    #[arg(long, conflicts_with = "replay")]
    minimise: bool,
    /// List the targets
    #[arg(long)]
    list: bool,
}

/// A fuzz target.
struct Fuzzed {
    name: String,
    /// Features of the fuzz crate, for what the target links.
    features: Vec<String>,
}

/// What a run reported about itself, as libFuzzer prints it.
#[derive(Debug, Default, PartialEq, Eq)]
struct RunStats {
    inputs: u64,
    /// Edges of the program that inputs have covered.
    edges: u64,
    /// Edges of the whole program, including everything that is linked.
    all_edges: u64,
    per_second: u64,
}

/// Runs the targets and prints a table of inputs and coverage.
///
/// # Errors
/// A target found something, is unknown, or there is no nightly toolchain.
pub fn fuzz(context: &Context, selection: &Selection) -> anyhow::Result<()> {
    let dir = context.root.join("fuzz");
    let mut targets = targets(&dir)?;
    if selection.list {
        targets.iter().for_each(|target| println!("{}", target.name));
        return Ok(());
    }
    if let Some(name) = &selection.target {
        let names = targets.iter().map(|target| target.name.as_str()).collect::<Vec<_>>().join(", ");
        targets.retain(|target| target.name == *name);
        if targets.is_empty() {
            bail!("there is no fuzz target {name}; there are {names}");
        }
    }
    let mut table =
        String::from("| target | inputs | a second | edges taken | of all in the program |\n|---|---|---|---|---|\n");
    let begun = Instant::now();
    if selection.within.is_some() {
        let days = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / (24 * 3600));
        // Targets of the daemon's crate may take longer to build than to run.
        targets.sort_by_key(|target| target.features.iter().any(|feature| feature == "daemon"));
        let light = targets.partition_point(|target| !target.features.iter().any(|feature| feature == "daemon"));
        let first = days as usize % light.max(1);
        targets[..light].rotate_left(first);
    }
    for target in &targets {
        if selection.within.is_some_and(|seconds| begun.elapsed().as_secs() >= seconds) {
            say!("skipped: {} was not fuzzed, because the time was over", target.name);
            continue;
        }
        if selection.replay {
            replay(context, &dir, target)?;
            continue;
        }
        let stats = run_one(context, &dir, target, selection)?;
        let RunStats { inputs, per_second, edges, all_edges } = stats;
        table += &format!("| {} | {inputs} | {per_second} | {edges} | {all_edges} |\n", target.name);
        if selection.minimise {
            minimise(context, &dir, target)?;
        }
    }
    if !selection.replay {
        print!("{table}");
    }
    Ok(())
}

/// Returns the package of the targets in a directory, as cargo's metadata describes it.
pub fn package(dir: &Path) -> anyhow::Result<Value> {
    let manifest = dir.join("Cargo.toml");
    let mut command = Command::new(host_cargo());
    let metadata = cargo_tools::metadata(command.args(["metadata", "--no-deps", "--manifest-path"]).arg(&manifest))?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let found = packages.clone().find(|package| package["manifest_path"].as_str().map(Path::new) == Some(&manifest));
    found.cloned().context("fuzz/Cargo.toml has no package")
}

/// Returns the targets, in the order of their names.
fn targets(dir: &Path) -> anyhow::Result<Vec<Fuzzed>> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let targets = package(dir)?["targets"].as_array().cloned().unwrap_or_default();
    let fuzzed = |target: &Value| Fuzzed {
        name: text(&target["name"]),
        features: target["required-features"].as_array().into_iter().flatten().map(text).collect(),
    };
    Ok(targets.iter().map(fuzzed).collect())
}

fn run_one(context: &Context, dir: &Path, target: &Fuzzed, selection: &Selection) -> anyhow::Result<RunStats> {
    nightly::require("--list", "")?;
    let mut command = cargo_fuzz(context, "run", target, selection.fast)?;
    let corpus = dir.join("corpus").join(&target.name);
    fs::create_dir_all(&corpus)?;
    command.arg(&corpus).arg(unpacked_seeds(context, dir, target)?);
    command.args(["--", "-print_final_stats=1", "-timeout=10", "-rss_limit_mb=2048"]);
    command.args([format!("-max_len={LARGEST_INPUT}"), format!("-max_total_time={}", selection.seconds)]);
    command.args(selection.runs.map(|runs| format!("-runs={runs}")));
    say!("fuzzing {}", target.name);
    let said = read_errors(&mut command, context.options.verbose)?;
    Ok(parse_stats(&said))
}

/// Returns `cargo fuzz SUBCOMMAND` for a target, linking only what the target needs.
fn cargo_fuzz(context: &Context, subcommand: &str, target: &Fuzzed, fast: bool) -> anyhow::Result<Command> {
    let program = cargo_tools::installed(context, "cargo-fuzz", VERSION)?;
    let mut command = Command::new(program);
    command.current_dir(&context.root).env("RUSTUP_TOOLCHAIN", "nightly");
    for variable in ["CARGO", "RUSTC", "RUSTDOC"] {
        command.env_remove(variable);
    }
    command.args(["fuzz", subcommand, "--no-default-features", "--features", &target.features.join(",")]);
    command.args(["--sanitizer", if fast { "none" } else { "address" }]);
    command.arg(&target.name);
    Ok(command)
}

/// Runs a target on its seeds and corpus, built like any other program. A panic or a hang ends it.
fn replay(context: &Context, dir: &Path, target: &Fuzzed) -> anyhow::Result<()> {
    let inputs = [unpacked_seeds(context, dir, target)?, dir.join("corpus").join(&target.name)];
    let files = inputs.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten();
    let inputs: Vec<PathBuf> = files.map(|file| file.path()).collect();
    if inputs.is_empty() {
        bail!("{} has neither seeds nor a corpus", target.name);
    }
    let mut command = context.cargo_for_tests("run");
    command.args(["--quiet", "--package", "heapbpf-fuzz", "--no-default-features"]);
    command.args(["--features", &target.features.join(","), "--bin", &target.name, "--"]);
    command.args(inputs);
    say!("replaying {}", target.name);
    read_errors(&mut command, context.options.verbose)?;
    Ok(())
}

/// Replaces the target's seeds by the inputs that add coverage.
fn minimise(context: &Context, dir: &Path, target: &Fuzzed) -> anyhow::Result<()> {
    let (corpus, seeds) = (dir.join("corpus").join(&target.name), unpacked_seeds(context, dir, target)?);
    let mut command = cargo_fuzz(context, "run", target, true)?;
    // As few inputs as cover all edges, however often. Covering each count of each edge would take several times as
    // many.
    command.args([&seeds, &corpus]).args(["--", "-set_cover_merge=1", "-use_counters=0"]);
    command.args(["-timeout=10", "-max_len=4096"]);
    run(command.stderr(Stdio::null()), context.options.verbose)?;
    // The same seeds must make the same archive.
    let mut tar = Command::new("tar");
    tar.args(["--create", "--format=gnu", "--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0"]);
    tar.args(["--mode=u=rwX,go=rX", "--use-compress-program=gzip -9n", "--file"]).arg(seeds_of(dir, target));
    run(tar.arg("--directory").arg(&seeds).arg("."), context.options.verbose)
}

/// The archive of a target's seeds.
fn seeds_of(dir: &Path, target: &Fuzzed) -> PathBuf {
    dir.join("seeds").join(&target.name).with_extension("tar.gz")
}

/// Returns a fresh directory with a target's seeds. It is empty for a new target.
fn unpacked_seeds(context: &Context, dir: &Path, target: &Fuzzed) -> anyhow::Result<PathBuf> {
    let (archive, unpacked) = (seeds_of(dir, target), context.target().join("fuzz-seeds").join(&target.name));
    let _ = fs::remove_dir_all(&unpacked);
    fs::create_dir_all(&unpacked)?;
    if archive.is_file() {
        let mut tar = Command::new("tar");
        tar.args(["--extract", "--gzip", "--file"]).arg(archive).arg("--directory").arg(&unpacked);
        run(&mut tar, context.options.verbose)?;
    }
    Ok(unpacked)
}

/// Runs a command. Returns its standard error, or shows it if the command fails.
fn read_errors(command: &mut Command, verbose: bool) -> anyhow::Result<String> {
    crate::shell::announce(command, verbose);
    let output = command.stdin(Stdio::null()).output().context("cannot start cargo")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if verbose || !output.status.success() {
        eprint!("{said}");
    }
    if !output.status.success() {
        bail!("this command failed ({}): {}", output.status, crate::shell::describe(command));
    }
    Ok(said)
}

/// Parses libFuzzer's last lines.
fn parse_stats(said: &str) -> RunStats {
    let after = |line: &str, word: &str| {
        let rest = line.split_once(word)?.1.trim_start();
        rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    let mut stats = RunStats::default();
    for line in said.lines() {
        stats.inputs = after(line, "stat::number_of_executed_units:").unwrap_or(stats.inputs);
        stats.per_second = after(line, "stat::average_exec_per_sec:").unwrap_or(stats.per_second);
        stats.edges = after(line, " cov: ").unwrap_or(stats.edges);
        if line.contains("inline 8-bit counters") {
            stats.all_edges = after(line, "modules   (").unwrap_or(stats.all_edges);
        }
    }
    stats
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_libfuzzer_says_is_read() {
        let said = "INFO: Loaded 1 modules   (10462 inline 8-bit counters): 10462 [0x5, 0x6),\n\
                    #2\tINITED cov: 33 ft: 34 corp: 1/1b exec/s: 0 rss: 40Mb\n\
                    #1000\tDONE   cov: 321 ft: 900 corp: 20/1Kb lim: 43 exec/s: 500 rss: 45Mb\n\
                    stat::number_of_executed_units: 1000\nstat::average_exec_per_sec:     500\n";
        assert_eq!(parse_stats(said), RunStats { inputs: 1000, edges: 321, all_edges: 10_462, per_second: 500 });
        assert_eq!(parse_stats("nothing"), RunStats::default());
    }

    #[test]
    fn every_target_says_what_it_links() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("fuzz");
        let targets = targets(&dir).expect("the manifest can be read");
        assert!(targets.len() > 9 && targets.iter().all(|target| !target.features.is_empty()));
    }
}
