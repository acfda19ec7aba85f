//! What every command starts from: the workspace's folders, the user's options and the way to become root.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use crate::Options;
use crate::cross::Machine;
use crate::root::Privilege;

/// The surroundings of one `cargo xtask` call.
pub struct Context {
    /// The workspace's root folder.
    pub root: PathBuf,
    /// The user's options.
    pub options: Options,
    /// How to do what needs root.
    pub privilege: Privilege,
    /// What is built for, if it is not this machine.
    pub machine: Option<&'static Machine>,
}

impl Context {
    /// Finds the workspace and what this user may do.
    pub fn new(options: Options) -> anyhow::Result<Self> {
        let manifest =
            env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = manifest.parent().context("xtask's folder has no parent folder")?.to_path_buf();
        let privilege = Privilege::detect(options.no_root);
        Ok(Self { root, options, privilege, machine: None })
    }

    /// The workspace's `target` folder, wherever `CARGO_TARGET_DIR` points: what users and tests are promised is there.
    pub fn target(&self) -> PathBuf {
        self.root.join("target")
    }

    /// Where cargo puts what it builds for the host.
    pub fn host_target(&self) -> PathBuf {
        match env::var_os("CARGO_TARGET_DIR") {
            Some(dir) if !dir.is_empty() => self.root.join(dir),
            _ => self.target(),
        }
    }

    /// Where the BPF programs are built: they know the machine's registers.
    pub fn bpf_target(&self) -> PathBuf {
        self.target().join(self.machine.map_or("bpf".to_owned(), |machine| format!("bpf-{}", machine.architecture)))
    }

    /// The BPF object that the daemon embeds.
    pub fn bpf_object(&self) -> PathBuf {
        self.bpf_target().join("bpfel-unknown-none/bpf/heapbpf-probes")
    }

    /// The release binary that `cargo xtask build` promises, below a target folder.
    pub fn binary_in(&self, target: &Path) -> PathBuf {
        target.join(self.machine.map_or("", |machine| machine.triple)).join("release/heapbpf")
    }

    /// The release binary that `cargo xtask build` promises.
    pub fn binary(&self) -> PathBuf {
        self.binary_in(&self.target())
    }

    /// The host's cargo, in the workspace's root, with a subcommand.
    pub fn cargo(&self, subcommand: &str) -> Command {
        let mut command = Command::new(host_cargo());
        command.current_dir(&self.root).arg(subcommand);
        if self.options.locked {
            command.arg("--locked");
        }
        command
    }

    /// Where things that are built once and kept between checkouts live.
    pub fn cache(&self) -> anyhow::Result<PathBuf> {
        cache_folder(|name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))
            .context("no cache folder: set HEAPBPF_CACHE, XDG_CACHE_HOME or HOME")
    }
}

/// The cargo that runs this xtask, else the one on the PATH.
pub fn host_cargo() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// Finds a command on the PATH.
pub fn on_path(command: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join(command)).find(|path| is_executable(path))
}

/// Whether the path is a file that someone may execute.
pub fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

fn cache_folder(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    variable("HEAPBPF_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|dir| dir.join("heapbpf")))
        .or_else(|| variable("HOME").map(|dir| dir.join(".cache/heapbpf")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(variables: &[(&str, &str)]) -> Option<PathBuf> {
        cache_folder(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value)))
    }

    #[test]
    fn own_variable_wins_then_xdg_then_home() {
        let all = [("HEAPBPF_CACHE", "/a"), ("XDG_CACHE_HOME", "/b"), ("HOME", "/c")];
        assert_eq!(cache(&all), Some("/a".into()));
        assert_eq!(cache(&all[1..]), Some("/b/heapbpf".into()));
        assert_eq!(cache(&all[2..]), Some("/c/.cache/heapbpf".into()));
        assert_eq!(cache(&[]), None);
    }
}
