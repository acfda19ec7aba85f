//! `cargo xtask web`: checks, tests and bundles the web page. The bundle is committed, so that nobody else needs node.
//!
//! The page's first comment has a hash of its sources. `cargo xtask web --check` compares it without node, and also
//! rebuilds the page if npm is installed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::context::Context;
use crate::shell::{read, run, run_quietly, say};

/// Maximum size of the compressed page, bytes.
const MOST_COMPRESSED: usize = 200 << 10;

/// The sources of the page, in `web/`.
const SOURCES: &[&str] = &["src", "build.mjs", "package.json", "package-lock.json", "tsconfig.json"];

/// Makes the page. With `check`, only compares it with the committed one: by the hash of its sources, and by its
/// content if npm is installed.
///
/// # Errors
/// A check or test failed, or the committed page is different.
pub fn web(context: &Context, check: bool) -> anyhow::Result<()> {
    let dir = context.root.join("web");
    let page = dir.join("dist/page.html");
    let sources = hash(&dir)?;
    let committed = fs::read(&page).with_context(|| page.display().to_string())?;
    if check {
        let stamp = stamp(&sources);
        ensure!(
            committed.starts_with(stamp.as_bytes()),
            "web/dist/page.html was not built from the files in web/: run `cargo xtask web` and commit it"
        );
        if Command::new("npm").arg("--version").output().is_err() {
            say!("npm is not installed: the page was compared with its sources by their hash alone");
            return Ok(());
        }
    }
    let mut install = npm(&dir, &["ci", "--no-audit", "--no-fund"]);
    run_quietly(&mut install, context.options.verbose).context("npm is needed: https://nodejs.org")?;
    for script in ["check", "test"] {
        run_quietly(&mut npm(&dir, &["run", "--silent", script]), context.options.verbose)?;
    }
    let made = dir.join("target/page.html");
    fs::create_dir_all(dir.join("target"))?;
    let mut build = npm(&dir, &["run", "--silent", "build", "--", "target/page.html"]);
    run(&mut build, context.options.verbose)?;
    let bytes = [stamp(&sources).into_bytes(), fs::read(&made)?].concat();
    if check {
        ensure!(
            bytes == committed,
            "web/dist/page.html is not what `cargo xtask web` makes: run it and commit the page"
        );
        return Ok(());
    }
    fs::write(&page, &bytes)?;
    let compressed = compressed_size(&page)?;
    ensure!(compressed <= MOST_COMPRESSED, "the page has {compressed} bytes compressed, more than {MOST_COMPRESSED}");
    say!("web/dist/page.html: {} bytes, {compressed} compressed", bytes.len());
    Ok(())
}

fn npm(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("npm");
    command.arg("--prefix").arg(dir).args(arguments).current_dir(dir);
    command
}

/// The page's first line.
fn stamp(hash: &str) -> String {
    format!("<!-- Made by `cargo xtask web` from sources with the hash {hash}. -->\n")
}

/// Returns the hash of all sources, by their paths. It is git's hash, because everybody has git.
fn hash(dir: &Path) -> anyhow::Result<String> {
    let mut files = BTreeSet::new();
    for name in SOURCES {
        collect(&dir.join(name), &mut files)?;
    }
    let mut all = Vec::new();
    for path in &files {
        let name = path.strip_prefix(dir).unwrap_or(path);
        all.extend_from_slice(name.as_os_str().as_encoded_bytes());
        all.push(0);
        all.extend_from_slice(&fs::read(path)?);
        all.push(0);
    }
    let file = dir.join("target/sources");
    fs::create_dir_all(dir.join("target"))?;
    fs::write(&file, all)?;
    let hash = read(Command::new("git").args(["hash-object", "--no-filters"]).arg(&file)).context("git is needed")?;
    Ok(hash.trim().to_owned())
}

fn collect(path: &Path, files: &mut BTreeSet<PathBuf>) -> anyhow::Result<()> {
    if !path.is_dir() {
        files.insert(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        collect(&entry?.path(), files)?;
    }
    Ok(())
}

fn compressed_size(file: &Path) -> anyhow::Result<usize> {
    let output = Command::new("gzip").args(["-9", "-c"]).arg(file).output().context("gzip is needed")?;
    Ok(output.stdout.len())
}
