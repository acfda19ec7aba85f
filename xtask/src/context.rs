//! The context of every command: the workspace's directories, the user's options and the way to become root.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use crate::Options;
use crate::cross::Machine;
use crate::root::Privilege;
use crate::shell::host_cargo;

/// The context of one `cargo xtask` call.
pub struct Context {
    /// The workspace's root directory.
    pub root: PathBuf,
    /// The user's options.
    pub options: Options,
    /// How to run steps that need root.
    pub privilege: Privilege,
    /// The machine to build for, if it is not the host.
    pub machine: Option<&'static Machine>,
    /// Whether the daemon is built incrementally, so that the next build is short.
    pub keeps_notes: bool,
}

impl Context {
    /// Finds the workspace, and what this user may do.
    pub fn new(options: Options) -> anyhow::Result<Self> {
        let manifest =
            env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = manifest.parent().context("xtask's directory has no parent directory")?.to_path_buf();
        let privilege = Privilege::detect(options.no_root);
        Ok(Self { root, options, privilege, machine: None, keeps_notes: false })
    }

    /// The workspace's `target` directory, regardless of `CARGO_TARGET_DIR`: users and tests rely on its contents.
    pub fn target(&self) -> PathBuf {
        self.root.join("target")
    }

    /// The directory where cargo puts its builds for the host.
    pub fn host_target(&self) -> PathBuf {
        match env::var_os("CARGO_TARGET_DIR") {
            Some(dir) if !dir.is_empty() => self.root.join(dir),
            _ => self.target(),
        }
    }

    /// The directory where the BPF programs are built. Each machine has its own, because they depend on its registers.
    pub fn bpf_target(&self) -> PathBuf {
        self.target().join(self.machine.map_or("bpf".to_owned(), |machine| format!("bpf-{}", machine.architecture)))
    }

    /// The BPF object that a build in this directory makes.
    pub fn bpf_object_in(target: &Path) -> PathBuf {
        target.join("bpfel-unknown-none/bpf/heapbpf-probes")
    }

    /// The path of the release binary that `cargo xtask build` creates, below a target directory.
    pub fn binary_in(&self, target: &Path) -> PathBuf {
        target.join(self.machine.map_or("", |machine| machine.triple)).join("release/heapbpf")
    }

    /// The release binary that `cargo xtask build` creates.
    pub fn binary(&self) -> PathBuf {
        self.binary_in(&self.target())
    }

    /// Returns a call of the host's cargo with a subcommand, in the workspace's root.
    pub fn cargo(&self, subcommand: &str) -> Command {
        let mut command = Command::new(host_cargo());
        command.current_dir(&self.root).arg(subcommand);
        if self.options.locked {
            command.arg("--locked");
        }
        command
    }

    /// Returns a call of cargo with the tests' profile, which shares external packages with the release build.
    pub fn cargo_for_tests(&self, subcommand: &str) -> Command {
        let mut command = self.cargo(subcommand);
        command.args(["--profile", "bench"]);
        command
    }

    /// The directory of things that are built once and shared between checkouts.
    pub fn cache(&self) -> anyhow::Result<PathBuf> {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        variable("HEAPBPF_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|dir| dir.join("heapbpf")))
            .or_else(|| variable("HOME").map(|dir| dir.join(".cache/heapbpf")))
            .context("no cache directory: set HEAPBPF_CACHE, XDG_CACHE_HOME or HOME")
    }
}
