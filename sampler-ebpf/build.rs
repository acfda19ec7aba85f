//! Tells the BPF programs for which machine's registers they are built.
fn main() {
    println!("cargo::rustc-check-cfg=cfg(bpf_target_arch, values(\"x86_64\", \"aarch64\"))");
    println!("cargo::rerun-if-env-changed=CARGO_CFG_BPF_TARGET_ARCH");
    // Set by `cargo xtask build`. Otherwise, as in aya's own crates, it is this machine's.
    if std::env::var_os("CARGO_CFG_BPF_TARGET_ARCH").is_none() {
        let host = std::env::var("HOST").unwrap_or_default();
        println!("cargo::rustc-cfg=bpf_target_arch=\"{}\"", host.split('-').next().unwrap_or_default());
    }
}
