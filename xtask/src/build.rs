//! Builds the BPF object and the daemon's library at the same time, then the program that contains both.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use std::{fs, io};

use anyhow::{Context as _, bail};

use crate::context::Context;
use crate::shell::{Running, announce, describe, run, say};
use crate::toolchain::{Compiler, CoreLibrary, TARGET};
use crate::{cross, linker, toolchain};

/// Separates rustc's flags in `CARGO_ENCODED_RUSTFLAGS`, so that flags may contain spaces.
pub const FLAG_SEPARATOR: &str = "\u{1f}";

/// Where `sudo heapbpf` finds the binary.
const DESTINATION: &str = "/usr/local/bin/heapbpf";

/// The tools that the BPF build needs.
pub struct Tools {
    compiler: Compiler,
    linker: PathBuf,
}

/// Finds or installs everything that the build needs.
pub fn set_up(context: &Context) -> anyhow::Result<Tools> {
    if let Some(machine) = context.machine {
        cross::set_up(context, machine)?;
    }
    let compiler = toolchain::ensure(context)?;
    let linker = linker::ensure(context, compiler.llvm)?;
    Ok(Tools { compiler, linker })
}

/// Builds everything and returns the release binary.
pub fn build(context: &Context) -> anyhow::Result<PathBuf> {
    Ok(build_while(context, || ())?.1)
}

/// Builds and copies the binary. `install` replaces the file, so a running heapbpf keeps the old one.
pub fn install(context: &Context) -> anyhow::Result<()> {
    let binary = build(context)?;
    let mut command = context.privilege.command(&format!("write {DESTINATION}"), "install", [])?;
    run(command.args(["-D", "-m", "755"]).arg(&binary).arg(DESTINATION), context.options.verbose)?;
    say!("installed {DESTINATION}");
    Ok(())
}

/// Builds everything. The library takes longest to compile and is independent of the rest. Meanwhile this runs `other`,
/// such as installing packages, and builds the BPF object. Returns the result of `other`, and the release binary.
pub fn build_while<T>(context: &Context, other: impl FnOnce() -> T) -> anyhow::Result<(T, PathBuf)> {
    if let Some(machine) = context.machine {
        // The library contains C code.
        cross::set_up(context, machine)?;
    }
    let mut command = daemon_command(context, &["--package", "sampler-user", "--lib"]);
    announce(&command, context.options.verbose);
    // Its output waits in the pipe until the terminal is free, because the other steps may ask for a password.
    let library = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut library = Running(library.with_context(|| format!("cannot start {}", describe(&command)))?);
    let said = other();
    build_bpf(context)?;
    if let Some(mut output) = library.0.stderr.take() {
        io::copy(&mut output, &mut io::stderr())?;
    }
    if !library.0.wait()?.success() {
        bail!("this command failed: {}", describe(&command));
    }
    Ok((said, build_daemon(context)?))
}

/// Where BPF programs are built, and with which additional rustc flags.
pub struct Place {
    pub target: PathBuf,
    pub flags: Vec<String>,
}

impl Place {
    /// The place where the daemon's build script finds the object by itself.
    fn usual(context: &Context) -> Self {
        Self { target: context.bpf_target(), flags: Vec::new() }
    }
}

/// Builds the BPF object that the daemon embeds.
pub fn build_bpf(context: &Context) -> anyhow::Result<PathBuf> {
    build_bpf_at(context, &Place::usual(context))
}

/// Builds the BPF object in another place.
pub fn build_bpf_at(context: &Context, place: &Place) -> anyhow::Result<PathBuf> {
    let tools = set_up(context)?;
    let started = Instant::now();
    run(&mut bpf_command(context, &tools, place), context.options.verbose).context("the BPF programs did not build")?;
    let object = Context::bpf_object_in(&place.target);
    let size = fs::metadata(&object).with_context(|| format!("the BPF build left no {}", object.display()))?.len();
    say!(
        "BPF object: {} ({} KiB, {:.1} s)",
        shorten(context, &object),
        size.div_ceil(1024),
        started.elapsed().as_secs_f64()
    );
    Ok(object)
}

/// Shortens rebuilds after a change to the daemon: incremental compilation.
const NOTES: [&str; 2] = ["--config", "profile.release.incremental=true"];

/// Whether the daemon is compiled with [`NOTES`]. A command that only builds it is probably followed by changes. Once
/// there is incremental data, every command continues to use it.
fn has_notes(context: &Context) -> bool {
    let is_usual = env::var_os("CARGO_INCREMENTAL").is_none() && context.machine.is_none();
    let is_noted = || {
        let dir = fs::read_dir(context.host_target().join("release/incremental"));
        let mut entries = dir.into_iter().flatten().flatten();
        entries.any(|entry| entry.file_name().to_string_lossy().starts_with("sampler_user-"))
    };
    is_usual && (context.keeps_notes || is_noted())
}

/// Returns the command for a release build of a part of the daemon.
fn daemon_command(context: &Context, part: &[&str]) -> Command {
    let mut command = context.cargo("build");
    if has_notes(context) {
        command.args(NOTES);
    }
    command.arg("--release").args(part).arg("--target-dir").arg(context.host_target());
    // The build script finds the newly built object by itself.
    command.env_remove("HEAPBPF_BPF_OBJECT");
    if let Some(machine) = context.machine {
        machine.aim(&mut command);
    }
    command
}

fn build_daemon(context: &Context) -> anyhow::Result<PathBuf> {
    run(&mut daemon_command(context, &["--package", "heapbpf"]), context.options.verbose)?;
    let built = context.binary_in(&context.host_target());
    let binary = context.binary();
    if built != binary {
        let dir = binary.parent().context("the binary has no directory")?;
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        // A running binary cannot be overwritten, but it can be replaced.
        let fresh = binary.with_extension("new");
        let copied = fs::copy(&built, &fresh).and_then(|_| fs::rename(&fresh, &binary));
        copied.with_context(|| format!("cannot copy {} to {}", built.display(), binary.display()))?;
    }
    if !binary.is_file() {
        bail!("the build left no {}", binary.display());
    }
    say!("heapbpf: {}", shorten(context, &binary));
    Ok(binary)
}

fn shorten(context: &Context, path: &Path) -> String {
    path.strip_prefix(&context.root).unwrap_or(path).display().to_string()
}

/// Returns the cargo call that compiles and links the BPF programs, in an environment without the outer cargo's
/// variables.
fn bpf_command(context: &Context, tools: &Tools, place: &Place) -> Command {
    let architecture = context.machine.map_or(std::env::consts::ARCH, |machine| machine.architecture);
    let machine = format!("bpf_target_arch=\"{architecture}\"");
    let usual = ["-Cdebuginfo=2", "-Ctarget-cpu=v3", "-Clink-arg=--btf", "--cfg", &machine];
    let mut command = Command::new(tools.compiler.cargo());
    command.current_dir(&context.root);
    for (name, _) in std::env::vars_os().filter(|(name, _)| !reaches_inner_cargo(name)) {
        command.env_remove(name);
    }
    command
        // rustc's own switch for unstable features, which a BPF target requires.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTC", &tools.compiler.rustc)
        .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", &tools.linker)
        // bpf-linker generates BTF, which the loader uses for relocation, from the debug information.
        // v3 is the instruction set whose atomic additions return the previous value; every kernel since 5.12 has it.
        .env(
            "CARGO_ENCODED_RUSTFLAGS",
            [usual.map(str::to_owned).to_vec(), place.flags.clone()].concat().join(FLAG_SEPARATOR),
        )
        .args(["build", "--profile", "bpf", "--target", TARGET])
        .args(["--package", "sampler-ebpf", "--features", "probes", "--bin", "heapbpf-probes"])
        .arg("--target-dir")
        .arg(&place.target);
    if tools.compiler.core == CoreLibrary::Source {
        command.args(["-Z", "build-std=core"]);
    }
    if context.options.locked {
        command.arg("--locked");
    }
    if !context.options.verbose {
        // Print warnings and errors only.
        command.arg("--quiet");
    }
    command
}

/// Whether an environment variable may reach the cargo of another toolchain. Of cargo's and rustup's variables, only
/// those for locations and network access may. The others (RUSTC, RUSTFLAGS, CARGO_TARGET_DIR, …) would name the outer
/// toolchain or change what is built.
fn reaches_inner_cargo(name: &OsStr) -> bool {
    const KEPT: &str = "CARGO_HOME CARGO_NET_ CARGO_HTTP_ CARGO_REGISTR CARGO_TERM_ CARGO_SOURCE_ RUST_BACKTRACE \
                        RUSTUP_HOME";
    let name = name.to_string_lossy();
    let of_the_toolchain = ["CARGO", "RUST"].iter().any(|prefix| name.starts_with(prefix));
    !of_the_toolchain || KEPT.split(' ').any(|kept| name.starts_with(kept))
}
