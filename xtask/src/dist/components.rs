//! What a release consists of: the crates linked into the binary, those in the BPF programs, and parts that are not
//! crates.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::Release;
use crate::cargo_tools;
use crate::context::Context;
use crate::shell::read;
use crate::toolchain;

/// The package that the binary is built from.
const DAEMON: &str = "heapbpf";

/// One part of a release that has a name, a version and a licence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Component {
    pub name: String,
    pub version: String,
    /// An SPDX expression.
    pub licence: String,
    /// Its package URL (<https://github.com/package-url/purl-spec>), which also identifies it here.
    pub purl: String,
    /// SHA-256 of the package as downloaded.
    pub checksum: Option<String>,
    /// Location of its source repository.
    pub repository: Option<String>,
    /// The package URLs of its dependencies.
    pub uses: Vec<String>,
    /// The files with its licence.
    pub texts: Vec<PathBuf>,
    /// Whether it is part of heapbpf itself.
    pub is_own: bool,
}

/// Returns all components. The first is the daemon.
pub fn all(context: &Context, release: &Release) -> anyhow::Result<Vec<Component>> {
    let linked = linked(context, DAEMON, &[], &release.triple())?;
    let loaded = linked_for_bpf(context)?;
    let features = ["--features", "sampler-ebpf/probes"];
    let metadata = cargo_tools::metadata(context.cargo("metadata").args(features))?;
    let lock = fs::read_to_string(context.root.join("Cargo.lock")).context("cannot read Cargo.lock")?;
    let mut components = described(&metadata, &linked.union(&loaded).cloned().collect(), &checksums(&lock))?;
    components.sort_by(|a, b| (a.name != DAEMON, &a.name, &a.version).cmp(&(b.name != DAEMON, &b.name, &b.version)));
    let others = others(context)?;
    components[0].uses.extend(others.iter().map(|other| other.purl.clone()));
    components.extend(others);
    Ok(components)
}

/// Name and version.
type Key = (String, String);

fn linked_for_bpf(context: &Context) -> anyhow::Result<BTreeSet<Key>> {
    // Cargo needs a target only to evaluate conditions, and these are the same for any target here.
    linked(context, "sampler-ebpf", &["--features", "probes"], "x86_64-unknown-linux-gnu")
}

/// Returns the crates that are linked into a package's programs: with the features that they are built with, and
/// without those that only the compiler runs.
fn linked(context: &Context, package: &str, features: &[&str], triple: &str) -> anyhow::Result<BTreeSet<Key>> {
    let mut command = context.cargo("tree");
    command.args(["--package", package, "--edges", "normal,no-proc-macro", "--target", triple]);
    command.args(features).args(["--prefix", "none", "--no-dedupe", "--format", "{p}"]);
    Ok(crates_of_tree(&read(&mut command)?))
}

/// Returns names and versions from the output of `cargo tree`: `name v1.2.3 (/directory)`.
fn crates_of_tree(text: &str) -> BTreeSet<Key> {
    let crates = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.strip_prefix('v')?.to_owned()))
    });
    crates.collect()
}

/// Returns the wanted crates, as cargo's metadata describes them.
fn described(
    metadata: &Value,
    wanted: &BTreeSet<Key>,
    checksums: &BTreeMap<Key, String>,
) -> anyhow::Result<Vec<Component>> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let packages: BTreeMap<String, Value> =
        list(&metadata["packages"]).into_iter().map(|package| (text(&package["id"]), package)).collect();
    let key = |id: &Value| {
        let package = &packages[&text(id)];
        (text(&package["name"]), text(&package["version"]))
    };
    let mut components = Vec::new();
    for node in list(&metadata["resolve"]["nodes"]).iter().filter(|node| wanted.contains(&key(&node["id"]))) {
        let (package, own) = (&packages[&text(&node["id"])], key(&node["id"]));
        let uses: BTreeSet<String> = list(&node["deps"])
            .iter()
            // A normal dependency has no kind.
            .filter(|used| list(&used["dep_kinds"]).iter().any(|kind| kind["kind"].is_null()))
            .map(|used| key(&used["pkg"]))
            .filter(|key| wanted.contains(key))
            .map(|key| crate_url(&key))
            .collect();
        let manifest = PathBuf::from(text(&package["manifest_path"]));
        let licence = package["license"].as_str().with_context(|| format!("{} names no licence", own.0))?;
        components.push(Component {
            licence: modern(licence),
            purl: crate_url(&own),
            checksum: checksums.get(&own).cloned(),
            repository: package["repository"].as_str().map(str::to_owned),
            uses: uses.into_iter().collect(),
            texts: licence_files(manifest.parent().context("a manifest has a directory")?)?,
            is_own: package["source"].is_null(),
            name: own.0,
            version: own.1,
        });
    }
    let found: BTreeSet<Key> = components.iter().map(|found| (found.name.clone(), found.version.clone())).collect();
    ensure!(found == *wanted, "cargo metadata does not name these crates: {:?}", wanted.difference(&found));
    Ok(components)
}

fn crate_url((name, version): &Key) -> String {
    format!("pkg:cargo/{name}@{version}")
}

/// Returns an SPDX expression. In old manifests, a slash stands for OR.
fn modern(licence: &str) -> String {
    licence.split('/').map(str::trim).collect::<Vec<_>>().join(" OR ")
}

/// Returns the licence files in a crate's directory, sorted.
fn licence_files(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = dir.read_dir().with_context(|| format!("cannot read {}", dir.display()))?;
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_file() && path.file_name().is_some_and(|name| is_licence(&name.to_string_lossy())))
        .collect();
    files.sort();
    Ok(files)
}

fn is_licence(name: &str) -> bool {
    const BEGINNINGS: [&str; 6] = ["licence", "license", "copying", "copyright", "notice", "unlicense"];
    const SOURCES: [&str; 2] = [".rs", ".toml"];
    let name = name.to_lowercase();
    BEGINNINGS.iter().any(|begin| name.starts_with(begin)) && !SOURCES.iter().any(|end| name.ends_with(end))
}

/// Returns the checksums in Cargo.lock.
fn checksums(lock: &str) -> BTreeMap<Key, String> {
    let packages = lock.split("[[package]]").filter_map(|package| {
        let value = |key: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(key))?;
            Some(line.trim_start_matches(" = ").trim_matches('"').to_owned())
        };
        Some(((value("name")?, value("version")?), value("checksum")?))
    });
    packages.collect()
}

/// Returns the parts of the binary that are not crates: the standard library, the C library, and what the web page is
/// bundled with.
fn others(context: &Context) -> anyhow::Result<Vec<Component>> {
    let version = read(Command::new("rustc").arg("-vV"))?;
    let rust = version.lines().find_map(|line| line.strip_prefix("release: ")).context("rustc -vV names no release")?;
    let texts = toolchain::sysroot()?.join("share/doc/rust/licenses");
    let rust_texts = ["MIT.txt", "Apache-2.0.txt"].map(|name| texts.join(name));
    let query = ["-W", "-f=${Version}", "libc6-dev"];
    let glibc = read(Command::new("dpkg-query").args(query)).context("the C library's version is unknown")?;
    let page = fs::read_to_string(context.root.join("web/package.json")).context("cannot read web/package.json")?;
    let page: Value = serde_json::from_str(&page).context("web/package.json")?;
    let plain = |name: &str, version: &str, licence: &str, purl: String, texts: Vec<PathBuf>| Component {
        name: name.to_owned(),
        version: version.to_owned(),
        licence: licence.to_owned(),
        purl,
        texts,
        ..Component::default()
    };
    let mut others = vec![
        plain(
            "rust-std",
            rust,
            "MIT OR Apache-2.0",
            format!("pkg:generic/rust-std@{rust}"),
            rust_texts.into_iter().filter(|path| path.is_file()).collect(),
        ),
        plain(
            "glibc",
            &glibc,
            "LGPL-2.1-or-later",
            format!("pkg:deb/debian/libc6-dev@{}", glibc.replace('+', "%2B")),
            ["/usr/share/doc/libc6-dev/copyright", "/usr/share/common-licenses/LGPL-2.1"].map(PathBuf::from).to_vec(),
        ),
    ];
    let bundled = page["dependencies"].as_object().into_iter().flatten();
    for (name, version) in bundled {
        let version = version.as_str().context("a version is text")?;
        let text = context.root.join("packaging/licences").join(format!("{name}.txt"));
        ensure!(text.is_file(), "the web page is bundled with {name}, whose licence is not in {}", text.display());
        others.push(plain(name, version, "MIT", format!("pkg:npm/{name}@{version}"), vec![text]));
    }
    Ok(others)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_read_from_the_lock_file_and_own_crates_have_none() {
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nsource = \"registry+x\"\nchecksum = \"0f\"\n\n\
                    [[package]]\nname = \"own\"\nversion = \"0.1.0\"\ndependencies = [\n \"a\",\n]\n";
        let found = checksums(lock);
        assert_eq!(found.len(), 1);
        assert_eq!(found[&("a".to_owned(), "1.0.0".to_owned())], "0f");
    }

    #[test]
    fn licences_are_found_by_name_and_written_in_spdx() {
        for name in ["LICENSE", "LICENSE-MIT", "license.md", "COPYING", "UNLICENSE", "NOTICE.txt", "LICENCE"] {
            assert!(is_licence(name), "{name}");
        }
        for name in ["license.rs", "README.md", "src"] {
            assert!(!is_licence(name), "{name}");
        }
        assert_eq!(modern("MIT/Apache-2.0"), "MIT OR Apache-2.0");
        assert_eq!(modern("(MIT OR Apache-2.0) AND GPL-2.0-only"), "(MIT OR Apache-2.0) AND GPL-2.0-only");
    }
}
