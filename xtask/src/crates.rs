//! The packages and crates of the workspace, as `cargo metadata` lists them.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use serde_json::Value;

use crate::context::Context;
use crate::shell::read;

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
    let metadata = metadata(context.cargo("metadata").arg("--no-deps"))?;
    let packages = metadata["packages"].as_array().into_iter().flatten().map(package);
    let mut packages = packages.collect::<Option<Vec<Package>>>().context("cargo metadata describes no packages")?;
    packages.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(packages)
}

/// Returns the output of a `cargo metadata` call.
pub fn metadata(command: &mut Command) -> anyhow::Result<Value> {
    serde_json::from_str(&read(command.arg("--format-version=1"))?).context("cargo metadata wrote no JSON")
}

fn package(found: &Value) -> Option<Package> {
    let crates = found["targets"].as_array()?.iter().map(|target| {
        Some(Crate { kind: kind(target["kind"][0].as_str()?), root: PathBuf::from(target["src_path"].as_str()?) })
    });
    Some(Package {
        pure: found["metadata"]["heapbpf"]["pure"] == true,
        crates: crates.collect::<Option<_>>()?,
        name: found["name"].as_str()?.to_owned(),
    })
}

fn kind(kind: &str) -> Kind {
    match kind {
        "bin" => Kind::Program,
        "test" => Kind::Test,
        "bench" | "custom-build" | "example" => Kind::Other,
        _ => Kind::Library,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A package with these targets (kind and name) and this metadata table, as read from cargo's description.
    fn described(targets: &[(&str, &str)], metadata: Value) -> Package {
        let targets: Vec<_> = targets
            .iter()
            .map(|(kind, name)| {
                serde_json::json!({ "kind": [kind], "name": name, "src_path": format!("/w/p/{name}.rs") })
            })
            .collect();
        let found = serde_json::json!({ "name": "p", "targets": targets, "metadata": metadata });
        package(&found).expect("a package as cargo describes it")
    }

    #[test]
    fn crates_are_classified_by_kind() {
        let found = [("lib", "a"), ("proc-macro", "b"), ("bin", "c"), ("test", "d"), ("custom-build", "e")];
        let package = described(&found, Value::Null);
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
        assert!(!pure(Value::Null));
    }
}
