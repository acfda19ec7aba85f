//! Runs single steps as root, and always prints the reason first.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;

use anyhow::bail;

use crate::shell::{on_path, say};

/// How this user can run steps that need root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privilege {
    /// The user is root.
    Root,
    /// The user is not root but has sudo.
    Sudo,
    /// There is no way, for this reason.
    No(&'static str),
}

impl Privilege {
    /// Checks the effective user and the PATH.
    pub fn detect(no_root: bool) -> Self {
        // /proc/self belongs to the effective user. heapbpf cannot run on a system without /proc either.
        let is_root = std::fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0);
        match (no_root, is_root) {
            (true, _) => Self::No("--no-root was given"),
            (false, true) => Self::Root,
            (false, false) if on_path("sudo").is_some() => Self::Sudo,
            (false, false) => Self::No("this user is not root and there is no sudo"),
        }
    }

    /// Returns why steps cannot run as root, if they cannot.
    pub fn refusal(self) -> Option<&'static str> {
        match self {
            Self::No(reason) => Some(reason),
            Self::Root | Self::Sudo => None,
        }
    }

    /// Returns a command that runs as root with these variables set (sudo would drop them). Prints its purpose.
    pub fn command<'a>(
        self,
        purpose: &str,
        program: impl AsRef<OsStr>,
        variables: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> anyhow::Result<Command> {
        let program = program.as_ref();
        match self {
            Self::Root => {
                let mut command = Command::new(program);
                command.envs(variables);
                Ok(command)
            }
            Self::Sudo => {
                say!("using sudo to {purpose}");
                let mut command = Command::new("sudo");
                command
                    .arg("env")
                    .args(variables.into_iter().map(|(name, value)| format!("{name}={value}")))
                    .arg(program);
                Ok(command)
            }
            Self::No(reason) => bail!("cannot {purpose}: it needs root, and {reason}"),
        }
    }
}
