//! Builds the binary of a release: statically linked, and without any names from this machine.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use super::Release;
use crate::build::{FLAG_SEPARATOR, Place, build_bpf_at};
use crate::context::Context;
use crate::shell::{read, run};

/// Source paths that appear in the binary.
const SOURCES: &str = "/heapbpf";
const CRATES: &str = "/cargo";

/// Builds the BPF programs and the daemon in a separate directory.
pub fn build(context: &Context, release: &Release) -> anyhow::Result<PathBuf> {
    let renamed = renamed(context)?;
    let flags: Vec<String> = renamed.iter().map(|(path, name)| format!("--remap-path-prefix={path}={name}")).collect();
    let object = build_bpf_at(context, &Place { target: release.work().join("bpf"), flags: flags.clone() })?;
    let target = release.work().join("build");
    let mut command = context.cargo("build");
    for name in env::vars_os().map(|(name, _)| name).filter(changes_what_is_built) {
        command.env_remove(name);
    }
    // Static, so that it runs with any C library, or without one.
    let flags = [vec!["-Ctarget-feature=+crt-static".to_owned()], flags].concat();
    let c_flags: Vec<String> = renamed.iter().map(|(path, name)| format!("-ffile-prefix-map={path}={name}")).collect();
    command
        .args(["--profile", "dist", "--package", "heapbpf"])
        .args(["--target", &release.triple(), "--target-dir"])
        .arg(&target)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join(FLAG_SEPARATOR))
        .env("CFLAGS", c_flags.join(" "))
        .env("SOURCE_DATE_EPOCH", release.epoch.to_string())
        .env("HEAPBPF_BPF_OBJECT", &object);
    run(&mut command, context.options.verbose)?;
    Ok(target.join(release.triple()).join("dist/heapbpf"))
}

/// Whether an environment variable would change the binary.
fn changes_what_is_built(name: &OsString) -> bool {
    const CHANGING: [&str; 6] =
        ["CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_", "CARGO_PROFILE_", "CARGO_TARGET_", "CFLAGS", "RUSTFLAGS"];
    CHANGING.iter().any(|prefix| name.to_string_lossy().starts_with(prefix))
}

/// Returns the directories whose names would end up in the binary, with the names that replace them. The last match
/// counts.
fn renamed(context: &Context) -> anyhow::Result<Vec<(String, String)>> {
    let version = read(Command::new("rustc").arg("-vV"))?;
    let hash = version.lines().find_map(|line| line.strip_prefix("commit-hash: ")).unwrap_or("unknown");
    let sysroot = read(Command::new("rustc").args(["--print", "sysroot"]))?;
    let mut renamed = vec![
        (path_text(&context.root)?, SOURCES.to_owned()),
        (format!("{}/lib/rustlib/src/rust", sysroot.trim()), format!("/rustc/{hash}")),
    ];
    // Each directory has one registry's crates, and a hash of its address in its name.
    let registries = cargo_home()?.join("registry/src");
    let mut dirs: Vec<PathBuf> = registries
        .read_dir()
        .with_context(|| format!("cannot read {}", registries.display()))?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    dirs.sort();
    for dir in dirs {
        renamed.push((path_text(&dir)?, CRATES.to_owned()));
    }
    Ok(renamed)
}

fn cargo_home() -> anyhow::Result<PathBuf> {
    let named = env::var_os("CARGO_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    named
        .or_else(|| Some(Path::new(&env::var_os("HOME")?).join(".cargo")))
        .context("cargo's directory is unknown: set CARGO_HOME or HOME")
}

fn path_text(path: &Path) -> anyhow::Result<String> {
    path.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", path.display()))
}
