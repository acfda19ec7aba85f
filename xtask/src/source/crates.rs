//! The packages and crates of the workspace, as `cargo metadata` lists them.

use std::path::PathBuf;

use anyhow::Context as _;
use cargo_metadata::{MetadataCommand, Package as Found, TargetKind};

use crate::context::Context;
use crate::programs::host_cargo;

/// A package of the workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    /// The package's name in Cargo.toml.
    pub name: String,
    /// Whether its Cargo.toml has `[package.metadata.heapbpf] pure = true`: a pure crate does no I/O and knows neither
    /// the kernel nor the command line.
    pub pure: bool,
    /// Its library, programs, integration tests and so on.
    pub crates: Vec<Crate>,
}

/// One crate of a package.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crate {
    /// The name of the target in cargo's terms.
    pub name: String,
    /// Library, program, integration test or other.
    pub kind: Kind,
    /// The file of its root module.
    pub root: PathBuf,
}

/// The kind of a crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A library, procedural macros included.
    Library,
    /// A program.
    Program,
    /// An integration test.
    Test,
    /// A build script, an example or a benchmark.
    Other,
}

impl Package {
    /// Whether the package has a crate of this kind.
    pub fn has(&self, kind: Kind) -> bool {
        self.crates.iter().any(|krate| krate.kind == kind)
    }
}

/// All packages of the workspace, sorted by name.
pub fn packages(context: &Context) -> anyhow::Result<Vec<Package>> {
    let mut command = MetadataCommand::new();
    command.cargo_path(host_cargo()).current_dir(&context.root).no_deps();
    if context.options.locked {
        command.other_options(["--locked".to_owned()]);
    }
    let metadata = command.exec().context("cargo metadata failed")?;
    let mut packages: Vec<Package> = metadata.packages.into_iter().map(package).collect();
    packages.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(packages)
}

fn package(found: Found) -> Package {
    let crates = found.targets.iter().map(|target| Crate {
        name: target.name.clone(),
        kind: kind(&target.kind),
        root: target.src_path.clone().into_std_path_buf(),
    });
    Package {
        pure: found.metadata["heapbpf"]["pure"].as_bool().unwrap_or(false),
        crates: crates.collect(),
        name: found.name.to_string(),
    }
}

fn kind(kinds: &[TargetKind]) -> Kind {
    match kinds.first() {
        Some(TargetKind::Bin) => Kind::Program,
        Some(TargetKind::Test) => Kind::Test,
        Some(TargetKind::Bench | TargetKind::CustomBuild | TargetKind::Example) | None => Kind::Other,
        Some(_) => Kind::Library,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A package with these targets (kind and name) and this metadata table, as read from cargo's description.
    fn described(targets: &[(&str, &str)], metadata: serde_json::Value) -> Package {
        let targets: Vec<_> = targets
            .iter()
            .map(|(kind, name)| {
                serde_json::json!({ "kind": [kind], "name": name, "src_path": format!("/w/p/{name}.rs") })
            })
            .collect();
        let found = serde_json::json!({
            "name": "p", "version": "0.1.0", "id": "p 0.1.0", "dependencies": [], "features": {},
            "manifest_path": "/w/p/Cargo.toml", "targets": targets, "metadata": metadata,
        });
        package(serde_json::from_value(found).expect("a package as cargo describes it"))
    }

    #[test]
    fn crates_are_classified_by_kind() {
        let found = [("lib", "a"), ("proc-macro", "b"), ("bin", "c"), ("test", "d"), ("custom-build", "e")];
        let package = described(&found, serde_json::Value::Null);
        let kinds: Vec<Kind> = package.crates.iter().map(|krate| krate.kind).collect();
        assert_eq!(kinds, [Kind::Library, Kind::Library, Kind::Program, Kind::Test, Kind::Other]);
        assert_eq!(package.crates[2].root, Path::new("/w/p/c.rs"));
    }

    #[test]
    fn a_package_is_pure_only_if_its_manifest_says_so() {
        let pure = |metadata| described(&[], metadata).pure;
        assert!(pure(serde_json::json!({ "heapbpf": { "pure": true } })));
        assert!(!pure(serde_json::json!({ "heapbpf": { "pure": false } })));
        assert!(!pure(serde_json::json!({ "other": { "pure": true } })));
        assert!(!pure(serde_json::Value::Null));
    }
}
