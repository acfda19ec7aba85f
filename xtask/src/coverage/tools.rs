//! Finds the LLVM tools that read coverage data: rustup's component or LLVM's own packages. Installs one of these if
//! neither exists.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use crate::context::Context;
use crate::packages::{self, Package};
use crate::programs::{is_executable, on_path};
use crate::shell::{run_quietly, say};
use crate::toolchain::{self, Host};

/// Where Debian's LLVM packages install, each version in its own directory.
const LLVM_FOLDERS: &str = "/usr/lib";

/// The LLVM tools that read what instrumented programs write.
#[derive(Debug, PartialEq, Eq)]
pub struct Tools {
    /// Merges the profiles of several processes.
    pub profdata: PathBuf,
    /// Maps a profile to lines of source code.
    pub cov: PathBuf,
}

/// Finds the tools. Otherwise installs rustup's component, or else Debian's package.
pub fn ensure(context: &Context) -> anyhow::Result<Tools> {
    let host = toolchain::host()?;
    if let Some(tools) = find(&host) {
        return Ok(tools);
    }
    let mut reasons = Vec::new();
    if on_path("rustup").is_some() {
        say!("adding the component llvm-tools to rustup's toolchain");
        let added =
            run_quietly(Command::new("rustup").args(["component", "add", "llvm-tools"]), context.options.verbose);
        reasons.extend(added.err().map(|error| format!("{error:#}")));
    }
    if find(&host).is_none() {
        let package =
            Package::new(format!("llvm-{}", host.llvm), "llvm-cov and llvm-profdata, which read coverage data");
        reasons.extend(packages::install(context, &[package]).err().map(|error| format!("{error:#}")));
    }
    find(&host).with_context(|| {
        format!("no llvm-cov and llvm-profdata of LLVM {} or later here\n  {}", host.llvm, reasons.join("\n  "))
    })
}

fn find(host: &Host) -> Option<Tools> {
    let component = host.sysroot.join("lib/rustlib").join(&host.triple).join("bin");
    let installed = fs::read_dir(LLVM_FOLDERS).into_iter().flatten().flatten();
    let names = installed.filter_map(|entry| entry.file_name().into_string().ok());
    let folders = std::iter::once(component).chain(
        usable_versions(names, host.llvm).map(|version| Path::new(LLVM_FOLDERS).join(format!("llvm-{version}/bin"))),
    );
    folders
        .map(|folder| Tools { profdata: folder.join("llvm-profdata"), cov: folder.join("llvm-cov") })
        .find(|tools| is_executable(&tools.profdata) && is_executable(&tools.cov))
}

/// Returns the LLVM versions among directory names that can read this version's data, closest first. LLVM reads the
/// data of older versions, but not of newer ones.
fn usable_versions(names: impl Iterator<Item = String>, llvm: u32) -> impl Iterator<Item = u32> {
    let versions = names.filter_map(|name| name.strip_prefix("llvm-")?.parse().ok());
    let mut versions: Vec<u32> = versions.filter(|version| *version >= llvm).collect();
    versions.sort_unstable();
    versions.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closest_version_that_is_not_older_comes_first() {
        let names = ["llvm-23", "llvm-14", "llvm", "llvm-22", "gcc", "llvm-x"].map(str::to_owned);
        assert_eq!(usable_versions(names.clone().into_iter(), 22).collect::<Vec<_>>(), [22, 23]);
        assert_eq!(usable_versions(names.into_iter(), 24).count(), 0);
    }
}
