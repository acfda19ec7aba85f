//! Chooses the rustc that compiles the BPF programs: surveys the machine, then makes a pure choice from the result.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::context::Context;
use crate::linker;
use crate::packages;
use crate::shell::{host_cargo, is_executable, on_path, read, run, say};

/// The BPF target. x86-64 and arm64 are both little endian.
pub const TARGET: &str = "bpfel-unknown-none";

/// The nightly that is installed if no other rustc is suitable. It is known to work, and Debian 12 has its LLVM.
const NIGHTLY: &str = "nightly-2026-05-19";

/// Where a rustc gets `core` for BPF from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoreLibrary {
    /// The sysroot contains it compiled.
    Prebuilt,
    /// The sysroot contains its source; cargo compiles it (`-Z build-std=core`).
    Source,
    /// Nowhere.
    Absent,
}

/// How a rustc was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// `$HEAPBPF_BPF_RUSTC`.
    Variable,
    /// The one that a plain `rustc` command runs.
    Current,
    /// A rustup toolchain of this name.
    Rustup(String),
    /// The distribution's, /usr/bin/rustc.
    Distribution,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Variable => write!(f, "$HEAPBPF_BPF_RUSTC"),
            Self::Current => write!(f, "the current toolchain"),
            Self::Rustup(name) => write!(f, "rustup's {name}"),
            Self::Distribution => write!(f, "the distribution's"),
        }
    }
}

/// A rustc on this machine and its capabilities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiler {
    /// The executable.
    pub rustc: PathBuf,
    /// How it was found.
    pub origin: Origin,
    /// Release, such as `1.96.0`.
    pub release: String,
    /// Major version of its LLVM; the linker's must not be older.
    pub llvm: u32,
    /// Where `core` comes from.
    pub core: CoreLibrary,
}

impl Compiler {
    fn is_nightly(&self) -> bool {
        self.release.contains("nightly")
    }

    /// Returns the cargo next to this rustc, or else the host's.
    pub fn cargo(&self) -> PathBuf {
        let beside = self.rustc.with_file_name("cargo");
        if is_executable(&beside) { beside } else { host_cargo() }
    }
}

impl fmt::Display for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let core = match self.core {
            CoreLibrary::Prebuilt => "its sysroot has core for BPF",
            CoreLibrary::Source => "core is built from rust-src",
            CoreLibrary::Absent => "without core for BPF",
        };
        write!(f, "rustc {} ({}, {}, LLVM {}): {core}", self.release, self.origin, self.rustc.display(), self.llvm)
    }
}

/// The result of the survey of this machine.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Every rustc, in order of preference.
    pub compilers: Vec<Compiler>,
    /// Why Debian's packages cannot be installed, if so.
    pub no_packages: Option<String>,
    /// Why rustup cannot be used, if so.
    pub no_rustup: Option<String>,
}

/// What to do to get a rustc for BPF.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Use this compiler as it is.
    Use(Compiler),
    /// Install Debian's packages, then survey the machine again.
    Packages,
    /// Install this rustup toolchain if it is missing, add rust-src to it, then survey the machine again.
    Nightly(String),
    /// Nothing can be done, for these reasons.
    Nothing(Vec<String>),
}

/// Chooses in this order: a sysroot that has the target, Debian's packages, a rustup nightly with rust-src.
pub fn choose(findings: &Findings) -> Choice {
    let mut usable = findings.compilers.iter().filter(|compiler| linker::llvm_for(compiler.llvm).is_some());
    // A rustc that the user named is used without further checks.
    let named = |compiler: &&Compiler| compiler.origin == Origin::Variable && compiler.core != CoreLibrary::Absent;
    let prebuilt = |compiler: &&Compiler| compiler.core == CoreLibrary::Prebuilt;
    if let Some(ready) = usable.clone().find(named).or_else(|| usable.clone().find(prebuilt)) {
        return Choice::Use(ready.clone());
    }
    if findings.no_packages.is_none() {
        return Choice::Packages;
    }
    let nightly = |compiler: &&Compiler| compiler.is_nightly() && compiler.core == CoreLibrary::Source;
    if let Some(ready) = usable.clone().find(nightly) {
        return Choice::Use(ready.clone());
    }
    if findings.no_rustup.is_none() {
        let present = usable.find_map(|compiler| match &compiler.origin {
            Origin::Rustup(name) if compiler.is_nightly() => Some(name.clone()),
            _ => None,
        });
        return Choice::Nightly(present.unwrap_or_else(|| NIGHTLY.to_owned()));
    }
    let mut reasons = vec![format!("no rustc here has a sysroot with {TARGET}")];
    reasons.extend(findings.no_packages.iter().map(|why| format!("Debian's packages cannot be installed: {why}")));
    reasons
        .extend(findings.no_rustup.iter().map(|why| format!("rustup cannot provide a nightly with rust-src: {why}")));
    Choice::Nothing(reasons)
}

/// Finds a rustc for BPF, or installs one, and prints which it uses.
pub fn ensure(context: &Context) -> anyhow::Result<Compiler> {
    let mut findings = Findings {
        compilers: compilers()?,
        no_packages: packages::refusal(context).map(str::to_owned),
        no_rustup: on_path("rustup").is_none().then(|| "there is no rustup".to_owned()),
    };
    loop {
        match choose(&findings) {
            Choice::Use(compiler) => {
                say!("BPF compiler: {compiler}");
                return Ok(compiler);
            }
            Choice::Packages => {
                // Whatever the result, this is tried only once.
                findings.no_packages = Some(match packages::install(context, &DEBIAN_PACKAGES) {
                    Ok(()) => format!("they are installed, and yet /usr/bin/rustc has no {TARGET}"),
                    Err(error) => format!("{error:#}"),
                });
            }
            Choice::Nightly(toolchain) => {
                if let Some(why) = &findings.no_packages {
                    say!("skipped: Debian's packages for BPF: {why}");
                }
                findings.no_rustup = Some(match add_rust_src(context, &toolchain) {
                    Ok(()) => format!("{toolchain} has rust-src, and yet it does not serve"),
                    Err(error) => format!("{error:#}"),
                });
            }
            Choice::Nothing(reasons) => bail!(
                "no rustc can compile the BPF programs.\n  {}\nSet HEAPBPF_BPF_RUSTC to one that has {TARGET}, or let xtask install one (as root, or with sudo).",
                reasons.join("\n  ")
            ),
        }
        findings.compilers = compilers()?;
    }
}

/// Debian's rustc for BPF.
const DEBIAN_PACKAGES: [(&str, &str); 4] = [
    ("rustc-web", "a second rustc, beside your own, that knows BPF"),
    ("cargo-web", "the cargo of that rustc"),
    ("libstd-rust-web-dev-bpf", "core, compiled for BPF"),
    ("rust-web-llvm", "the LLVM tools of that rustc"),
];

fn add_rust_src(context: &Context, toolchain: &str) -> anyhow::Result<()> {
    let verbose = context.options.verbose;
    let is_it = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(toolchain));
    if !rustup_toolchains().iter().any(is_it) {
        say!("installing rustup's {toolchain} (about 300 MB on disk; no root needed)");
        let words = ["toolchain", "install", toolchain, "--profile", "minimal", "--no-self-update"];
        run(Command::new("rustup").args(words), verbose)?;
    }
    say!("adding rust-src to rustup's {toolchain}");
    run(Command::new("rustup").args(["component", "add", "rust-src", "--toolchain", toolchain]), verbose)
}

/// Every rustc on this machine, in order of preference.
fn compilers() -> anyhow::Result<Vec<Compiler>> {
    let mut found: Vec<Compiler> = Vec::new();
    if let Some(path) = env::var_os("HEAPBPF_BPF_RUSTC").filter(|path| !path.is_empty()) {
        let rustc = PathBuf::from(path);
        let compiler = inspect(&rustc, Origin::Variable)
            .with_context(|| format!("HEAPBPF_BPF_RUSTC={} does not serve", rustc.display()))?;
        if compiler.core == CoreLibrary::Absent {
            bail!(
                "HEAPBPF_BPF_RUSTC={} does not serve: its sysroot has neither {TARGET} nor rust-src",
                rustc.display()
            );
        }
        found.push(compiler);
    }
    let current = sysroot().ok().map(|sysroot| sysroot.join("bin/rustc"));
    let others = current.into_iter().map(|path| (path, Origin::Current));
    let others = others.chain(rustup_toolchains().into_iter().map(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        (path.join("bin/rustc"), Origin::Rustup(name))
    }));
    let others = others.chain([(PathBuf::from("/usr/bin/rustc"), Origin::Distribution)]);
    for (rustc, origin) in others.filter(|(rustc, _)| is_executable(rustc)) {
        // A broken toolchain that was not requested is skipped. The current toolchain appears again under its own name,
        // which is the name that rustup expects.
        if let Ok(compiler) = inspect(&rustc, origin) {
            found.push(compiler);
        }
    }
    Ok(found)
}

fn rustup_toolchains() -> Vec<PathBuf> {
    let home = env::var_os("RUSTUP_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(Path::new(&env::var_os("HOME")?).join(".rustup")));
    let entries = home.and_then(|home| home.join("toolchains").read_dir().ok());
    let mut paths: Vec<PathBuf> = entries.into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

fn inspect(rustc: &Path, origin: Origin) -> anyhow::Result<Compiler> {
    let rustc_command = || {
        let mut command = Command::new(rustc);
        command.env_remove("RUSTUP_TOOLCHAIN");
        command
    };
    let (release, llvm) =
        parse_version(&read(rustc_command().arg("-vV"))?).context("rustc -vV names no release or no LLVM")?;
    let sysroot = PathBuf::from(read(rustc_command().args(["--print", "sysroot"]))?.trim());
    let libraries = sysroot.join("lib/rustlib");
    let has_core = libraries.join(TARGET).join("lib").read_dir().is_ok_and(|entries| {
        entries.flatten().any(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with("libcore-") && name.ends_with(".rlib")
        })
    });
    let core = if has_core {
        CoreLibrary::Prebuilt
    } else if libraries.join("src/rust/library/core/Cargo.toml").is_file() {
        CoreLibrary::Source
    } else {
        CoreLibrary::Absent
    };
    Ok(Compiler { rustc: rustc.to_path_buf(), origin, release, llvm, core })
}

/// The directory with the libraries and tools of the rustc on the PATH.
pub fn sysroot() -> anyhow::Result<PathBuf> {
    Ok(PathBuf::from(read(Command::new("rustc").args(["--print", "sysroot"]))?.trim()))
}

/// The release and LLVM's major version from the output of `rustc -vV`.
fn parse_version(text: &str) -> Option<(String, u32)> {
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
    let llvm = value("LLVM version: ")?.split('.').next()?.trim().parse().ok()?;
    Some((value("release: ")?.trim().to_owned(), llvm))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compiler(origin: Origin, release: &str, llvm: u32, core: CoreLibrary) -> Compiler {
        Compiler {
            rustc: PathBuf::from(format!("/{release}/bin/rustc")),
            origin,
            release: release.to_owned(),
            llvm,
            core,
        }
    }

    fn stable() -> Compiler {
        compiler(Origin::Current, "1.95.0", 22, CoreLibrary::Absent)
    }

    fn refused(compilers: Vec<Compiler>, packages: bool, rustup: bool) -> Findings {
        let why = |possible: bool| (!possible).then(|| "a reason".to_owned());
        Findings { compilers, no_packages: why(packages), no_rustup: why(rustup) }
    }

    /// A sysroot with the target comes first, in the order found; then packages; then a nightly, which gets what it
    /// lacks. A compiler that is newer than every linker is passed over.
    #[test]
    fn the_compiler_that_needs_least_is_chosen() {
        let nightly = |core, llvm| {
            let origin = Origin::Rustup("nightly-x86_64-unknown-linux-gnu".to_owned());
            compiler(origin, "1.97.0-nightly", llvm, core)
        };
        let named = |core| compiler(Origin::Variable, "1.99.0", 22, core);
        let (prebuilt, builds) = (named(CoreLibrary::Prebuilt), named(CoreLibrary::Source));
        let distribution = compiler(Origin::Distribution, "1.96.0", 22, CoreLibrary::Prebuilt);
        let (ready, bare) = (nightly(CoreLibrary::Source, 22), nightly(CoreLibrary::Absent, 22));
        let (future, too_new) =
            (nightly(CoreLibrary::Source, 99), compiler(Origin::Current, "2.0.0", 99, CoreLibrary::Prebuilt));
        let there = Choice::Nightly("nightly-x86_64-unknown-linux-gnu".to_owned());
        let fresh = Choice::Nightly(NIGHTLY.to_owned());
        for (others, packages, rustup, expected) in [
            (vec![&prebuilt, &ready, &distribution], true, true, Choice::Use(prebuilt.clone())),
            (vec![&ready, &distribution], true, true, Choice::Use(distribution.clone())),
            (vec![&builds], true, true, Choice::Use(builds.clone())),
            (vec![&ready], true, true, Choice::Packages),
            (vec![], true, false, Choice::Packages),
            (vec![&too_new], true, true, Choice::Packages),
            (vec![&ready], false, true, Choice::Use(ready.clone())),
            (vec![&ready], false, false, Choice::Use(ready.clone())),
            (vec![&bare], false, true, there),
            (vec![], false, true, fresh.clone()),
            (vec![&future], false, true, fresh),
        ] {
            let compilers = std::iter::once(stable()).chain(others.into_iter().cloned()).collect();
            let findings = refused(compilers, packages, rustup);
            assert_eq!(choose(&findings), expected, "{findings:?}");
        }
    }

    #[test]
    fn when_nothing_can_be_done_every_reason_is_given() {
        let Choice::Nothing(reasons) = choose(&refused(vec![stable()], false, false)) else {
            panic!("nothing was left to choose")
        };
        assert_eq!(reasons.len(), 3, "{reasons:?}");
    }

    #[test]
    fn version_is_read_from_rustc() {
        let text = "rustc 1.97.0-nightly (e50aa6fba 2026-05-19)\nbinary: rustc\nrelease: 1.97.0-nightly\nLLVM version: 22.1.4\n";
        assert_eq!(parse_version(text), Some(("1.97.0-nightly".to_owned(), 22)));
        assert_eq!(parse_version("rustc 1.2.3"), None);
        assert_eq!(parse_version("release: 1.0.0\nLLVM version: none\n"), None);
    }
}
