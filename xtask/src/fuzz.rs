//! `cargo xtask fuzz`: runs the fuzz targets with coverage, or their corpora once.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::Value;

use crate::cargo_tools;
use crate::context::Context;
use crate::nightly;
use crate::shell::{host_cargo, run, run_quietly, say};

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

/// Runs the targets. libFuzzer prints their inputs and coverage.
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
    for target in &targets {
        if selection.replay {
            replay(context, &dir, target)?;
            continue;
        }
        run_one(context, &dir, target, selection)?;
        if selection.minimise {
            minimise(context, &dir, target)?;
        }
    }
    Ok(())
}

/// Returns the targets in a directory, in the order of their names.
fn targets(dir: &Path) -> anyhow::Result<Vec<Fuzzed>> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let manifest = dir.join("Cargo.toml");
    let mut command = Command::new(host_cargo());
    let metadata = cargo_tools::metadata(command.args(["metadata", "--no-deps", "--manifest-path"]).arg(&manifest))?;
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let own = packages.find(|package| package["manifest_path"].as_str().map(Path::new) == Some(manifest.as_path()));
    let targets = own.context("fuzz/Cargo.toml has no package")?["targets"].as_array().cloned().unwrap_or_default();
    let fuzzed = |target: &Value| Fuzzed {
        name: text(&target["name"]),
        features: target["required-features"].as_array().into_iter().flatten().map(text).collect(),
    };
    Ok(targets.iter().filter(|target| target["kind"][0] == "bin").map(fuzzed).collect())
}

fn run_one(context: &Context, dir: &Path, target: &Fuzzed, selection: &Selection) -> anyhow::Result<()> {
    nightly::require("--list", "")?;
    let mut command = cargo_fuzz(context, "run", target, selection.fast)?;
    let corpus = dir.join("corpus").join(&target.name);
    fs::create_dir_all(&corpus)?;
    command.arg(&corpus).arg(unpacked_seeds(context, dir, target)?);
    command.args(["--", "-print_final_stats=1", "-timeout=10", "-rss_limit_mb=2048"]);
    command.args([format!("-max_len={LARGEST_INPUT}"), format!("-max_total_time={}", selection.seconds)]);
    command.args(selection.runs.map(|runs| format!("-runs={runs}")));
    say!("fuzzing {}", target.name);
    run(&mut command, context.options.verbose)
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
    run_quietly(&mut command, context.options.verbose)
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
    tar.args(["--mode=u=rwX,go=rX", "--use-compress-program=xz -9e", "--file"]).arg(seeds_of(dir, target));
    run(tar.arg("--directory").arg(&seeds).arg("."), context.options.verbose)
}

/// The archive of a target's seeds.
fn seeds_of(dir: &Path, target: &Fuzzed) -> PathBuf {
    dir.join("seeds").join(&target.name).with_extension("tar.xz")
}

/// Returns a fresh directory with a target's seeds. It is empty for a new target.
fn unpacked_seeds(context: &Context, dir: &Path, target: &Fuzzed) -> anyhow::Result<PathBuf> {
    let (archive, unpacked) = (seeds_of(dir, target), context.target().join("fuzz-seeds").join(&target.name));
    let _ = fs::remove_dir_all(&unpacked);
    fs::create_dir_all(&unpacked)?;
    if archive.is_file() {
        let mut tar = Command::new("tar");
        tar.args(["--extract", "--xz", "--file"]).arg(archive).arg("--directory").arg(&unpacked);
        run(&mut tar, context.options.verbose)?;
    }
    Ok(unpacked)
}
