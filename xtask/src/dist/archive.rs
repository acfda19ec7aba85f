//! The tarball, and the checksums of all files.

use std::fs;
use std::process::Command;

use anyhow::Context as _;

use super::Release;
use super::tree::{Layout, Parts, gzip, set_times};
use crate::context::Context;
use crate::shell::{read, run_quietly};

/// Where files go below /usr/local, or wherever the tarball is unpacked.
const LAYOUT: Layout = Layout {
    program: "/usr/local/bin/heapbpf",
    binary: "bin/heapbpf",
    unit: "lib/systemd/system/heapbpf.service",
    man: "share/man/man1",
    bash: "share/bash-completion/completions/heapbpf",
    zsh: "share/zsh/site-functions/_heapbpf",
    fish: "share/fish/vendor_completions.d/heapbpf.fish",
    documents: "share/doc/heapbpf",
};

/// Packs the tarball.
pub fn pack(context: &Context, release: &Release, parts: &Parts) -> anyhow::Result<()> {
    let parent = release.work().join("tarball");
    let dir = parent.join(release.name());
    let _ = fs::remove_dir_all(&parent);
    parts.place(&dir, &LAYOUT)?;
    set_times(&dir, release.epoch)?;
    let archive = release.work().join(format!("{}.tar", release.name()));
    let mut tar = Command::new("tar");
    tar.args(["--create", "--format=gnu", "--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mode=go-w"]);
    tar.arg(format!("--mtime=@{}", release.epoch)).arg("--file").arg(&archive);
    tar.arg("--directory").arg(&parent).arg(release.name());
    run_quietly(&mut tar, context.options.verbose)?;
    gzip(&archive)?;
    let compressed = archive.with_extension("tar.gz");
    fs::rename(&compressed, release.tarball()).with_context(|| format!("there is no {}", compressed.display()))
}

/// Writes the checksums of the other files.
pub fn sum(release: &Release) -> anyhow::Result<()> {
    let mut command = Command::new("sha256sum");
    command.current_dir(&release.out);
    for file in release.files().iter().filter(|file| **file != release.sums()) {
        command.args(file.file_name());
    }
    fs::write(release.sums(), read(&mut command)?).context("cannot write the checksums")
}
