//! Root file systems of other systems: made once and kept, copied for each use, and used to run programs.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use crate::context::Context;
use crate::packages::{self, Package};
use crate::shell::{announce, run_quietly, say};

/// Runs a script in a root. Its mounts are in a separate namespace and disappear with it.
const ENTER: &str = "\
mount -t proc proc \"$1/proc\"
mount --rbind /sys \"$1/sys\"
mount --rbind /dev \"$1/dev\"
exec chroot \"$1\" /bin/sh -exc \"$2\"";

/// Returns the root of a Debian system with some packages, freshly installed. It must not be changed.
pub fn debian(context: &Context, suite: &str, packages: &[&str]) -> anyhow::Result<PathBuf> {
    let dir = context.cache()?.join("roots").join([&[suite], packages].concat().join("-"));
    if dir.is_dir() {
        return Ok(dir);
    }
    packages::install(context, &[Package::new("debootstrap", "installs roots of Debian")])?;
    say!("installing a root of Debian {suite} into {} (about 300 MB)", dir.display());
    let fresh = dir.with_extension("new");
    remove(context, &fresh)?;
    let mut command = context.privilege.command("install a root of Debian", "debootstrap", [])?;
    command.arg("--variant=minbase");
    if !packages.is_empty() {
        command.arg(format!("--include={}", packages.join(",")));
    }
    run_quietly(command.arg(suite).arg(&fresh), context.options.verbose)?;
    fs::rename(&fresh, &dir).with_context(|| format!("cannot rename {}", fresh.display()))?;
    Ok(dir)
}

/// Copies a root to a new directory.
pub fn copy(context: &Context, root: &Path, dir: &Path) -> anyhow::Result<()> {
    remove(context, dir)?;
    let mut command = context.privilege.command("copy a root", "cp", [])?;
    run_quietly(command.args(["--archive", "--one-file-system"]).arg(root).arg(dir), context.options.verbose)
}

/// Copies a file into a root.
pub fn add(context: &Context, file: &Path, root: &Path, name: &str) -> anyhow::Result<()> {
    let mut command = context.privilege.command("write into a root", "install", [])?;
    command.args(["-D", "-m", "755"]).arg(file).arg(root.join(name));
    run_quietly(&mut command, context.options.verbose)
}

/// Removes a root.
pub fn remove(context: &Context, dir: &Path) -> anyhow::Result<()> {
    let mut command = context.privilege.command("remove a root", "rm", [])?;
    run_quietly(command.args(["-rf", "--one-file-system"]).arg(dir), context.options.verbose)
}

/// Runs a script in a root. Returns its standard output.
///
/// # Errors
/// A command of the script failed. The error has its last lines of output.
pub fn run(context: &Context, root: &Path, script: &str) -> anyhow::Result<String> {
    let variables =
        [("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"), ("HOME", "/root"), ("LC_ALL", "C")];
    let mut command = context.privilege.command("run programs in a root", "unshare", variables)?;
    command.args(["--mount", "--propagation", "private", "sh", "-ec", ENTER, "sh"]).arg(root).arg(script);
    announce(&command, context.options.verbose);
    let output = command.output().context("cannot start unshare")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    if context.options.verbose {
        eprint!("{said}{errors}");
    }
    if !output.status.success() {
        let lines: Vec<&str> = said.lines().chain(errors.lines()).collect();
        bail!("in {} ({}):\n{}", root.display(), output.status, lines[lines.len().saturating_sub(40)..].join("\n"));
    }
    Ok(said)
}
