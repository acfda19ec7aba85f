//! bpf-linker: found on the machine, or built once per version and LLVM and kept in the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use crate::context::Context;
use crate::packages;
use crate::shell::{host_cargo, is_executable, on_path, read, run_quietly, say};

/// The bpf-linker version that heapbpf is built with.
const VERSION: &str = "0.13.0";

/// The LLVM versions that this bpf-linker can be built with and that we use, oldest first.
const LLVMS: [u32; 2] = [22, 23];

/// The LLVM version to link with: the oldest that can read the compiler's bitcode.
pub fn llvm_for(compiler_llvm: u32) -> Option<u32> {
    LLVMS.into_iter().find(|llvm| *llvm >= compiler_llvm)
}

/// Finds a bpf-linker for a compiler with this LLVM, or builds one, and prints which it uses.
pub fn ensure(context: &Context, compiler_llvm: u32) -> anyhow::Result<PathBuf> {
    let llvm = llvm_for(compiler_llvm)
        .with_context(|| format!("bpf-linker {VERSION} cannot link what LLVM {compiler_llvm} wrote"))?;
    let dir = context.cache()?.join(format!("bpf-linker-{VERSION}-llvm-{llvm}"));
    let cached = dir.join("bin/bpf-linker");
    if is_right_version(&cached) {
        say!("BPF linker: bpf-linker {VERSION} from the cache ({})", cached.display());
        return Ok(cached);
    }
    if let Some(path) = on_path("bpf-linker").filter(|path| is_right_version(path)) {
        say!("BPF linker: bpf-linker {VERSION} from the PATH ({})", path.display());
        return Ok(path);
    }
    build(context, llvm, &dir)?;
    say!("BPF linker: bpf-linker {VERSION}, built now and kept in {}", dir.display());
    Ok(cached)
}

fn is_right_version(path: &Path) -> bool {
    is_executable(path)
        && read(Command::new(path).arg("--version")).is_ok_and(|text| text.split_whitespace().nth(1) == Some(VERSION))
}

fn build(context: &Context, llvm: u32, dir: &Path) -> anyhow::Result<()> {
    let (library, mut missing) = (format!("llvm-{llvm}-dev"), Vec::new());
    if llvm_prefix(llvm).is_none() {
        missing.push((library.as_str(), "the library that bpf-linker is made of"));
    }
    missing.extend(missing_cpp());
    packages::install(context, &missing).with_context(|| {
        format!(
            "bpf-linker {VERSION} cannot be built here: put one on the PATH, or set LLVM_PREFIX to where LLVM {llvm} is"
        )
    })?;
    let prefix = llvm_prefix(llvm).with_context(|| format!("LLVM {llvm} was installed but not found"))?;

    say!("building bpf-linker {VERSION} with LLVM {llvm} (once, about a minute)");
    let parent = dir.parent().context("the cache directory has no parent directory")?;
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    // Another xtask may be building too, so build into a temporary directory and rename it.
    let scratch = parent.join(format!("bpf-linker-{VERSION}.{}.tmp", std::process::id()));
    let built = run_quietly(&mut install_command(llvm, &prefix, &scratch), context.options.verbose);
    let placed = built.and_then(|()| place(&scratch.join("install"), dir));
    // Best effort: files left behind only take disk space.
    let _ = fs::remove_dir_all(&scratch);
    placed
}

fn install_command(llvm: u32, prefix: &Path, scratch: &Path) -> Command {
    let mut command = Command::new(host_cargo());
    command
        .args(["install", "bpf-linker", "--version", VERSION, "--locked", "--no-default-features", "--features"])
        .arg(format!("llvm-{llvm}"))
        .arg("--root")
        .arg(scratch.join("install"))
        .env("LLVM_PREFIX", prefix)
        .env("CARGO_TARGET_DIR", scratch.join("target"))
        .env_remove("RUSTFLAGS")
        // LLVM does the work. With its default optimization and debug information, it takes three times as long to
        // build.
        .envs([("OPT_LEVEL", "0"), ("DEBUG", "false"), ("CODEGEN_UNITS", "16")].map(profile))
        // Outside the workspace, so that its .cargo/config.toml does not apply.
        .current_dir("/");
    command
}

/// Overrides a setting of the release profile.
fn profile((setting, value): (&str, &'static str)) -> (String, &'static str) {
    (format!("CARGO_PROFILE_RELEASE_{setting}"), value)
}

fn place(installed: &Path, dir: &Path) -> anyhow::Result<()> {
    // The existing directory is incomplete or of another version. Or another xtask was faster; then its copy is used.
    let _ = fs::remove_dir_all(dir);
    match fs::rename(installed, dir) {
        Err(_) if is_right_version(&dir.join("bin/bpf-linker")) => Ok(()),
        result => result.with_context(|| format!("cannot put bpf-linker into {}", dir.display())),
    }
}

/// Returns the directory with LLVM's development files: from `LLVM_PREFIX`, this version's llvm-config, or Debian's
/// default.
fn llvm_prefix(llvm: u32) -> Option<PathBuf> {
    let named = std::env::var_os("LLVM_PREFIX").map(PathBuf::from);
    let asked =
        read(Command::new(format!("llvm-config-{llvm}")).arg("--prefix")).ok().map(|text| PathBuf::from(text.trim()));
    let usual = Some(PathBuf::from(format!("/usr/lib/llvm-{llvm}")));
    [named, asked, usual].into_iter().flatten().find(|prefix| prefix.join("include/llvm-c/Core.h").is_file())
}

/// Returns the package of the C++ library, if that is missing: bpf-linker links with it, and cargo links with `cc`.
fn missing_cpp() -> Option<(&'static str, &'static str)> {
    let found = on_path("cc").and_then(|cc| read(Command::new(cc).arg("-print-file-name=libstdc++.so")).ok());
    // If the compiler does not know the file, it prints the bare name.
    let has_library = found.is_some_and(|path| Path::new(path.trim()).is_absolute());
    (!has_library).then_some(("g++", "the C and C++ libraries that bpf-linker links with"))
}
