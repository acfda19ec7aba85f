//! Takes the place of aya's crate of this name in the BPF build: what that one depends on takes as long to compile as all the rest.

use std::convert::Infallible;

/// What a build script returns.
pub type Result<T> = std::result::Result<T, Infallible>;

/// Tells a crate of BPF programs for which machine's registers it is built: `--cfg bpf_target_arch` says it, or it is this machine.
///
/// # Errors
/// None; callers expect a result.
pub fn emit_bpf_target_arch_cfg() -> Result<()> {
    println!("cargo::rustc-check-cfg=cfg(bpf_target_arch, values(any()))");
    println!("cargo::rerun-if-env-changed=CARGO_CFG_BPF_TARGET_ARCH");
    if std::env::var_os("CARGO_CFG_BPF_TARGET_ARCH").is_none() {
        let host = std::env::var("HOST").unwrap_or_default();
        println!("cargo::rustc-cfg=bpf_target_arch=\"{}\"", host.split('-').next().unwrap_or_default());
    }
    Ok(())
}
