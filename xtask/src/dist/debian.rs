//! The Debian package, made by dpkg-deb from the files in `packaging/deb`.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, bail};

use super::tree::{Layout, Parts, gzip, set_times, write};
use super::{Release, fill};
use crate::context::Context;
use crate::shell::{on_path, read, run_quietly};

const LAYOUT: Layout = Layout {
    program: "/usr/bin/heapbpf",
    binary: "usr/bin/heapbpf",
    unit: "usr/lib/systemd/system/heapbpf.service",
    man: "usr/share/man/man1",
    bash: "usr/share/bash-completion/completions/heapbpf",
    zsh: "usr/share/zsh/vendor-completions/_heapbpf",
    fish: "usr/share/fish/vendor_completions.d/heapbpf.fish",
    documents: DOCUMENTS,
};

const DOCUMENTS: &str = "usr/share/doc/heapbpf";

/// The file that dpkg asks about if the administrator has changed it.
const CONFIGURATION: &str = "/etc/default/heapbpf";

/// The variable that names the package's maintainer, as `Name <address>`.
const MAINTAINER_VARIABLE: &str = "HEAPBPF_MAINTAINER";
const MAINTAINER: &str = "The heapbpf contributors <heapbpf@users.noreply.invalid>";

/// Packs the package.
pub fn pack(context: &Context, release: &Release, parts: &Parts) -> anyhow::Result<()> {
    if on_path("dpkg-deb").is_none() {
        bail!("there is no dpkg-deb: releases are made on Debian");
    }
    let root = release.work().join("deb");
    let _ = fs::remove_dir_all(&root);
    parts.place(&root, &LAYOUT)?;
    let source = |name: &str| {
        let path = context.root.join("packaging/deb").join(name);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let maintainer = std::env::var(MAINTAINER_VARIABLE).unwrap_or_else(|_| MAINTAINER.to_owned());
    write(&root.join(&CONFIGURATION[1..]), source("default")?.as_bytes(), 0o644)?;
    write(&root.join("usr/share/lintian/overrides/heapbpf"), source("lintian-overrides")?.as_bytes(), 0o644)?;
    documents(context, release, &root, &source("copyright")?, &maintainer)?;

    let control = root.join("DEBIAN");
    let mut names = Vec::new();
    files_below(&root, &root, &mut names)?;
    let size = kibibytes(&root, &names)?.to_string();
    let sums = sums(&root, names)?;
    let text = fill(
        &source("control")?,
        &[
            ("VERSION", release.version.as_str()),
            ("ARCHITECTURE", release.architecture[1]),
            ("MAINTAINER", &maintainer),
            ("SIZE", &size),
        ],
    )?;
    write(&control.join("control"), text.as_bytes(), 0o644)?;
    write(&control.join("conffiles"), format!("{CONFIGURATION}\n").as_bytes(), 0o644)?;
    write(&control.join("md5sums"), sums.as_bytes(), 0o644)?;
    for script in ["postinst", "prerm", "postrm"] {
        write(&control.join(script), source(script)?.as_bytes(), 0o755)?;
    }
    set_times(&root, release.epoch)?;
    let mut command = Command::new("dpkg-deb");
    // One thread: with more, xz splits the data differently.
    command.args(["--root-owner-group", "-Zxz", "--threads-max=1", "--build"]).arg(&root).arg(release.package());
    command.env("SOURCE_DATE_EPOCH", release.epoch.to_string());
    run_quietly(&mut command, context.options.verbose)
}

/// Installs the documents as Debian requires: compressed, with a changelog and a copyright file.
fn documents(
    context: &Context,
    release: &Release,
    root: &Path,
    copyright: &str,
    maintainer: &str,
) -> anyhow::Result<()> {
    let dir = root.join(DOCUMENTS);
    for (name, kept_as) in [
        ("CHANGELOG.md", Some("NEWS")),
        ("THIRD-PARTY-LICENSES.txt", Some("THIRD-PARTY-LICENSES.txt")),
        ("README.md", Some("README.md")),
        ("install.md", Some("install.md")),
        ("LICENSE-APACHE", None),
        ("LICENSE-GPL-2", None),
        ("LICENSE-MIT", None),
    ] {
        let file = dir.join(name);
        let Some(kept_as) = kept_as else {
            fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
            continue;
        };
        let kept = dir.join(kept_as);
        fs::rename(&file, &kept).with_context(|| format!("there is no {}", file.display()))?;
        gzip(&kept)?;
    }
    let mit = fs::read_to_string(context.root.join("LICENSE-MIT")).context("cannot read LICENSE-MIT")?;
    let copyright = fill(copyright, &[("MIT", &paragraph(&mit))])?;
    write(&dir.join("copyright"), copyright.as_bytes(), 0o644)?;
    let date = read(Command::new("date").args(["-u", "-R", "-d", &format!("@{}", release.epoch)]).env("LC_ALL", "C"))?;
    let changelog = format!(
        "heapbpf ({}) unstable; urgency=medium\n\n  * What changed is in NEWS.gz.\n\n -- {maintainer}  {}\n",
        release.version,
        date.trim()
    );
    let file = dir.join("changelog");
    write(&file, changelog.as_bytes(), 0o644)?;
    gzip(&file)
}

/// Formats a text as a field of a control file: every line is indented, and empty lines become a dot.
fn paragraph(text: &str) -> String {
    let lines = text.trim().lines().map(|line| if line.trim().is_empty() { "." } else { line });
    lines.map(|line| format!(" {line}")).collect::<Vec<_>>().join("\n")
}

/// Returns the MD5 of every file, which `dpkg --verify` compares, except those that an administrator may change.
fn sums(root: &Path, mut names: Vec<String>) -> anyhow::Result<String> {
    names.retain(|name| format!("/{name}") != CONFIGURATION);
    names.sort();
    read(Command::new("md5sum").current_dir(root).args(names))
}

/// Returns the space that the files take, in KiB, as Debian's policy counts it: each file rounded up.
fn kibibytes(root: &Path, names: &[String]) -> anyhow::Result<u64> {
    names.iter().try_fold(0, |sum, name| Ok(sum + fs::metadata(root.join(name))?.len().div_ceil(1024)))
}

fn files_below(root: &Path, dir: &Path, names: &mut Vec<String>) -> anyhow::Result<()> {
    for entry in dir.read_dir().with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            files_below(root, &path, names)?;
        } else {
            names.push(path.strip_prefix(root)?.to_string_lossy().into_owned());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    /// Installing a profiler of the whole host is not a request to run it.
    #[test]
    fn the_installation_starts_nothing() {
        let script = include_str!("../../../packaging/deb/postinst");
        let mut commands = script.lines().filter(|line| !line.trim_start().starts_with('#'));
        let starts = |line: &str| ["enable", " start ", "systemctl restart"].iter().any(|word| line.contains(word));
        assert_eq!(commands.find(|line| starts(line)), None);
    }
}
