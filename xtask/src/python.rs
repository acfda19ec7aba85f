//! Python packages that read heapbpf's output formats, or whose figures are compared with heapbpf's. Debian does not
//! have these versions, so they are installed into a virtual environment.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use crate::context::Context;
use crate::packages::{self, Package};
use crate::programs::is_executable;
use crate::shell::{run_quietly, say};

/// PyPI packages for the tests of formats and of Python stacks. pyspark is left out because it takes half a gigabyte;
/// its test reports that it is skipped.
const PACKAGES: [&str; 8] = [
    "perfetto==0.59.1",
    "protobuf==7.36.2",
    "duckdb==2.0.0",
    "memray==1.20.0",
    "numpy==2.4.6",
    "gunicorn==27.0.1",
    "greenlet==3.5.6",
    "PyYAML==6.0.4",
];

/// Finds or creates the environment, which is kept in the cache, and returns its Python.
///
/// # Errors
/// If Debian's or PyPI's packages cannot be installed.
pub fn ensure(context: &Context) -> anyhow::Result<PathBuf> {
    let dir = context.cache()?.join("test-python");
    let python = dir.join("bin/python3");
    // Written last: an environment without it is incomplete.
    let list = dir.join("heapbpf-packages");
    let wanted = PACKAGES.join(" ");
    if is_executable(&python) && fs::read_to_string(&list).is_ok_and(|found| found == wanted) {
        return Ok(python);
    }
    // Without it, the module `venv` exists but cannot install pip.
    packages::install(context, &[Package::new("python3-venv", "makes an environment for Python packages")])?;
    say!("installing Python packages into {} (about 200 MB): {wanted}", dir.display());
    let verbose = context.options.verbose;
    run_quietly(Command::new("/usr/bin/python3").args(["-m", "venv", "--clear"]).arg(&dir), verbose)?;
    run_quietly(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(PACKAGES), verbose)?;
    fs::write(&list, &wanted).with_context(|| format!("cannot write {}", list.display()))?;
    Ok(python)
}
