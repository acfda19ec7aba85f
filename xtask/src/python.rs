//! Python packages that read heapbpf's output formats, that are recorded, or that heapbpf is compared with. Debian does
//! not have these versions, so they are installed into a virtual environment.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use crate::context::Context;
use crate::packages;
use crate::shell::{is_executable, run_quietly, say};

/// PyPI packages for the tests of formats and of Python stacks.
const PACKAGES: [&str; 6] =
    ["perfetto==0.59.1", "protobuf==7.36.2", "duckdb==2.0.0", "gunicorn==27.0.1", "greenlet==3.5.6", "PyYAML==6.0.4"];

/// Finds or creates the environment of the tests, and returns its Python.
///
/// # Errors
/// If Debian's or PyPI's packages cannot be installed.
pub fn ensure(context: &Context) -> anyhow::Result<PathBuf> {
    environment(context, "test-python", &PACKAGES)
}

/// Finds or creates an environment with these packages, which is kept in the cache, and returns its Python.
///
/// # Errors
/// If Debian's or PyPI's packages cannot be installed.
pub fn environment(context: &Context, name: &str, packages: &[&str]) -> anyhow::Result<PathBuf> {
    let dir = context.cache()?.join(name);
    let python = dir.join("bin/python3");
    // Written last: an environment without it is incomplete.
    let list = dir.join("heapbpf-packages");
    let wanted = packages.join(" ");
    if is_executable(&python) && fs::read_to_string(&list).is_ok_and(|found| found == wanted) {
        return Ok(python);
    }
    // Without it, the module `venv` exists but cannot install pip.
    packages::install(context, &[("python3-venv", "makes an environment for Python packages")])?;
    say!("installing Python packages into {}: {wanted}", dir.display());
    let verbose = context.options.verbose;
    run_quietly(Command::new("/usr/bin/python3").args(["-m", "venv", "--clear"]).arg(&dir), verbose)?;
    run_quietly(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(packages), verbose)?;
    fs::write(&list, &wanted).with_context(|| format!("cannot write {}", list.display()))?;
    Ok(python)
}
