//! Replaces aya's crate of the same name in the BPF build, because that crate's dependencies take as long to compile as
//! everything else.

use std::convert::Infallible;

/// The result of a build script.
pub type Result<T> = std::result::Result<T, Infallible>;

/// Tells a BPF crate for which machine's registers it is built: the one given by `--cfg bpf_target_arch`, or else this
/// machine's.
///
/// # Errors
/// None, but callers expect a `Result`.
pub fn emit_bpf_target_arch_cfg() -> Result<()> {
    println!("cargo::rustc-check-cfg=cfg(bpf_target_arch, values(any()))");
    println!("cargo::rerun-if-env-changed=CARGO_CFG_BPF_TARGET_ARCH");
    if std::env::var_os("CARGO_CFG_BPF_TARGET_ARCH").is_none() {
        let host = std::env::var("HOST").unwrap_or_default();
        println!("cargo::rustc-cfg=bpf_target_arch=\"{}\"", host.split('-').next().unwrap_or_default());
    }
    Ok(())
}
