//! Kernels from Debian's archive. apt finds, fetches and verifies them. It uses separate lists and does not change the
//! machine's own. The list of versions is the header of the table of features in docs/kernels.md.

use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::context::Context;
use crate::shell::{read, run_quietly, say};

/// The suites in which apt looks for kernels. Each has a few versions.
const SOURCES: &str = "\
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian-security bullseye-security main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian-security bookworm-security main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie-backports main
";

/// A kernel to boot.
pub struct Kernel {
    /// The package that it comes from.
    pub package: String,
    /// The compressed kernel.
    pub image: PathBuf,
}

/// Returns the newest package of a version's kernel, fetched if needed. If the archive cannot be reached, the lists and
/// packages from before are used.
pub fn kernel(context: &Context, version: &str) -> anyhow::Result<Kernel> {
    let dir = context.cache()?.join("kernels");
    fs::create_dir_all(dir.join("lists/partial")).with_context(|| format!("cannot make {}", dir.display()))?;
    let sources = dir.join("sources.list");
    fs::write(&sources, SOURCES).with_context(|| format!("cannot write {}", sources.display()))?;
    let updated = run_quietly(apt(&dir, "apt-get").arg("update"), context.options.verbose);
    if let Err(error) = updated {
        say!("apt-get failed; using the existing lists: {error:#}");
    }
    let names = read(apt(&dir, "apt-cache").args(["pkgnames", "linux-"]))?;
    let Some(package) = newest(names.lines(), version) else {
        bail!(
            "Debian's archive has no kernel {version} (cloud-amd64) in the suites that xtask/src/vm/kernels.rs names"
        );
    };
    let image = dir.join(&package);
    if !image.exists() {
        fetch(context, &dir, &package, &image)?;
    }
    Ok(Kernel { package, image })
}

/// Returns the newest package with a kernel of this version. Since 7.3 the kernel itself is in a separate package.
fn newest<'a>(names: impl Iterator<Item = &'a str>, version: &str) -> Option<String> {
    let of_version = names.filter_map(|name| {
        let rest = ["linux-binary-", "linux-image-"].iter().find_map(|prefix| name.strip_prefix(prefix))?;
        let release = rest.strip_suffix("-cloud-amd64")?;
        let after = release.strip_prefix(version)?;
        after.starts_with('.').then(|| (numbers(release), Reverse(name)))
    });
    of_version.max().map(|(_, Reverse(name))| name.to_owned())
}

/// Returns the numbers in a release, by which releases are ordered.
fn numbers(release: &str) -> Vec<u32> {
    release.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

fn fetch(context: &Context, dir: &Path, package: &str, image: &Path) -> anyhow::Result<()> {
    let unpacked = dir.join("unpacked");
    let _ = fs::remove_dir_all(&unpacked);
    fs::create_dir_all(&unpacked).with_context(|| format!("cannot make {}", unpacked.display()))?;
    let mut download = apt(dir, "apt-get");
    run_quietly(download.current_dir(&unpacked).args(["download", package]), context.options.verbose)?;
    let archive = files(&unpacked)?.into_iter().find(|path| path.extension().is_some_and(|it| it == "deb"));
    let archive = archive.with_context(|| format!("apt-get fetched no {package}"))?;
    run_quietly(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&unpacked), context.options.verbose)?;
    let modules = files(&unpacked.join("usr/lib/modules")).unwrap_or_default();
    let candidates = modules.into_iter().chain([unpacked.join("boot")]);
    let found = candidates.flat_map(|dir| files(&dir).unwrap_or_default());
    let kernel = found
        .into_iter()
        .find(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("vmlinuz")));
    let kernel = kernel.with_context(|| format!("{package} has no kernel"))?;
    fs::rename(&kernel, image).with_context(|| format!("cannot keep {}", kernel.display()))?;
    fs::remove_dir_all(&unpacked).with_context(|| format!("cannot remove {}", unpacked.display()))
}

fn files(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    Ok(entries.flatten().map(|entry| entry.path()).collect())
}

/// Returns an apt command that knows only these sources.
fn apt(dir: &Path, program: &str) -> Command {
    let mut command = Command::new(program);
    let dir = dir.display();
    for option in [
        format!("Dir::Etc::SourceList={dir}/sources.list"),
        "Dir::Etc::SourceParts=/dev/null".to_owned(),
        format!("Dir::State::Lists={dir}/lists"),
        "Dir::State::Status=/dev/null".to_owned(),
        format!("Dir::Cache={dir}"),
        "APT::Architecture=amd64".to_owned(),
        "APT::Sandbox::User=root".to_owned(),
        "Acquire::Languages=none".to_owned(),
        "Acquire::Retries=3".to_owned(),
    ] {
        command.arg("-o").arg(option);
    }
    command.env("LC_ALL", "C");
    command
}
