//! Brings the BPF object into the build, where the crate embeds it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

fn main() -> Result<(), String> {
    let variable = |name: &str| env::var_os(name).ok_or(format!("cargo did not set {name}"));
    let embedded = Path::new(&variable("OUT_DIR")?).join("heapbpf-probes");
    let crate_dir = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let workspace = crate_dir.ancestors().nth(2).ok_or("the crate's directory is not in the workspace")?;
    let object = match env::var_os("HEAPBPF_BPF_OBJECT") {
        Some(path) => PathBuf::from(path),
        None => {
            // As xtask does: the programs know the registers of one machine, and those of this one are in `bpf`.
            let architecture =
                variable("CARGO_CFG_TARGET_ARCH")?.into_string().map_err(|_| "a strange architecture")?;
            let host = variable("HOST")?;
            let is_host = host.to_string_lossy().split('-').next() == Some(&architecture);
            let dir = if is_host { "bpf".to_owned() } else { format!("bpf-{architecture}") };
            workspace.join("target").join(dir).join("bpfel-unknown-none/bpf/heapbpf-probes")
        }
    };
    println!("cargo::rerun-if-env-changed=HEAPBPF_BPF_OBJECT");
    // Of a file that does not exist cargo takes note as well: it looks again each time.
    println!("cargo::rerun-if-changed={}", object.display());
    println!("cargo::rerun-if-changed=build.rs");
    let bytes = fs::read(&object).unwrap_or_else(|error| {
        println!(
            "cargo::warning=no BPF programs inside ({}: {error}): this heapbpf will read profiles and not record; run \
             `cargo xtask build --bpf` in {}, then this command again",
            object.display(),
            workspace.display()
        );
        Vec::new()
    });
    fs::write(&embedded, bytes).map_err(|error| format!("cannot write {}: {error}", embedded.display()))
}
