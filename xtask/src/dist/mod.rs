//! `cargo xtask dist`: makes the files of a release, so that everybody who builds it gets the same bytes.

mod archive;
mod build;
mod components;
mod debian;
mod licences;
mod sbom;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::context::Context;
use crate::shell::{read, say};

/// Architectures that releases are made for on themselves: Rust's and Debian's name.
const ARCHITECTURES: [[&str; 2]; 2] = [["x86_64", "amd64"], ["aarch64", "arm64"]];

/// What is released, and where it is made.
pub struct Release {
    /// heapbpf's version.
    version: String,
    /// When the source last changed, in seconds since 1970. All files in the release get this time.
    epoch: u64,
    /// Rust's and Debian's name of the architecture.
    architecture: [&'static str; 2],
    /// The directory of the results.
    out: PathBuf,
}

impl Release {
    fn of(context: &Context) -> anyhow::Result<Self> {
        let architecture = ARCHITECTURES.into_iter().find(|names| names[0] == std::env::consts::ARCH);
        let architecture = architecture.context("releases are made on x86-64 and arm64 only")?;
        let out = context.target().join("dist");
        Ok(Self { version: env!("CARGO_PKG_VERSION").to_owned(), epoch: epoch(context)?, architecture, out })
    }

    /// Rust's target triple.
    fn triple(&self) -> String {
        format!("{}-unknown-linux-gnu", self.architecture[0])
    }

    /// The name of the tarball without its extension, and of the directory in it.
    fn name(&self) -> String {
        format!("heapbpf-{}-{}-linux", self.version, self.architecture[0])
    }

    fn tarball(&self) -> PathBuf {
        self.out.join(format!("{}.tar.gz", self.name()))
    }

    fn package(&self) -> PathBuf {
        self.out.join(format!("heapbpf_{}_{}.deb", self.version, self.architecture[1]))
    }

    fn sbom(&self) -> PathBuf {
        self.out.join(format!("heapbpf-{}.cdx.json", self.version))
    }

    fn sums(&self) -> PathBuf {
        self.out.join("SHA256SUMS")
    }

    /// The directory for everything that is not a result.
    fn work(&self) -> PathBuf {
        self.out.join("work")
    }

    /// All results.
    fn files(&self) -> [PathBuf; 4] {
        [self.tarball(), self.package(), self.sbom(), self.sums()]
    }
}

/// Makes all files of a release.
pub fn dist(context: &Context) -> anyhow::Result<()> {
    let release = &Release::of(context)?;
    let work = release.work();
    fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
    for file in release.files().iter().filter(|file| file.exists()) {
        fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display()))?;
    }
    let binary = build::build(context, release)?;
    let components = components::all(context, release)?;
    let licences = licences::text(context, &components)?;
    let parts = tree::Parts::collect(context, release, &binary, licences)?;
    archive::pack(context, release, &parts)?;
    debian::pack(context, release, &parts)?;
    fs::write(release.sbom(), sbom::document(release, &components, &time_of(release.epoch)?)?)
        .with_context(|| format!("cannot write {}", release.sbom().display()))?;
    archive::sum(release)?;
    for file in release.files() {
        let size = fs::metadata(&file).with_context(|| format!("there is no {}", file.display()))?.len();
        say!("{} ({} KiB)", file.strip_prefix(&context.root).unwrap_or(&file).display(), size.div_ceil(1024));
    }
    Ok(())
}

/// Returns `SOURCE_DATE_EPOCH`, or else the time of the last commit, in seconds since 1970.
fn epoch(context: &Context) -> anyhow::Result<u64> {
    let seconds = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(given) => given,
        Err(_) => {
            let changed = read(git(&context.root).args(["status", "--porcelain"]))?;
            if !changed.is_empty() {
                say!("there are changes that are not committed: the release has the time of the last commit");
            }
            read(git(&context.root).args(["log", "-1", "--format=%ct"]))
                .context("the time of the source is unknown: set SOURCE_DATE_EPOCH")?
        }
    };
    seconds.trim().parse().with_context(|| format!("SOURCE_DATE_EPOCH={seconds} is no number of seconds"))
}

/// Returns a call of git in a directory.
fn git(dir: &Path) -> Command {
    let mut command = Command::new("git");
    command.arg("-C").arg(dir);
    command
}

/// Formats a time in UTC as ISO 8601.
fn time_of(epoch: u64) -> anyhow::Result<String> {
    Ok(read(Command::new("date").args(["-u", "-d", &format!("@{epoch}"), "+%Y-%m-%dT%H:%M:%SZ"]))?.trim().to_owned())
}

/// Returns a text with each `@NAME@` replaced by its value.
///
/// # Errors
/// The text lacks a name, or has one that is not given.
fn fill(template: &str, values: &[(&str, &str)]) -> anyhow::Result<String> {
    let mut text = template.to_owned();
    for (name, value) in values {
        let place = format!("@{name}@");
        if !text.contains(&place) {
            bail!("a template has no {place}");
        }
        text = text.replace(&place, value);
    }
    let is_place = |word: &str| word.len() > 1 && word.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    if let Some(left) = text.split('@').skip(1).find(|word| is_place(word)) {
        bail!("a template has @{left}@, which has no value");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_filled_whole_or_not_at_all() {
        let filled = fill("Version: @VERSION@\nArchitecture: @ARCH@\n", &[("VERSION", "1.2"), ("ARCH", "amd64")]);
        assert_eq!(filled.expect("both are there"), "Version: 1.2\nArchitecture: amd64\n");
        assert!(fill("Version: @VERSION@\nArchitecture: @ARCH@\n", &[("VERSION", "1.2")]).is_err());
        assert!(fill("Version: 1\n", &[("VERSION", "1.2")]).is_err());
        assert!(fill("By: @WHO@ of @ARCH@\n", &[("WHO", "a <a@b.invalid>")]).is_err());
    }
}
