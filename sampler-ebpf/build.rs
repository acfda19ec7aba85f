//! Tells the BPF programs for which machine's registers they are built.
fn main() {
    println!("cargo::rustc-check-cfg=cfg(bpf_target_arch, values(\"x86_64\", \"aarch64\"))");
    println!("cargo::rerun-if-env-changed=CARGO_CFG_BPF_TARGET_ARCH");
    let arch = std::env::var("CARGO_CFG_BPF_TARGET_ARCH").unwrap_or_else(|_| {
        let host = std::env::var("HOST").unwrap_or_default();
        host.split('-').next().unwrap_or_default().to_owned()
    });
    println!("cargo::rustc-cfg=bpf_target_arch=\"{arch}\"");
}
