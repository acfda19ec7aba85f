//! Runs single steps as root, and always prints the reason first.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;

use anyhow::bail;

use crate::programs::on_path;
use crate::shell::say;

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
        Self::decide(no_root, is_root, on_path("sudo").is_some())
    }

    fn decide(no_root: bool, is_root: bool, has_sudo: bool) -> Self {
        match (no_root, is_root, has_sudo) {
            (true, _, _) => Self::No("--no-root was given"),
            (false, true, _) => Self::Root,
            (false, false, true) => Self::Sudo,
            (false, false, false) => Self::No("this user is not root and there is no sudo"),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_needs_no_sudo_and_the_option_wins() {
        assert_eq!(Privilege::decide(false, true, true), Privilege::Root);
        assert_eq!(Privilege::decide(false, false, true), Privilege::Sudo);
        assert!(Privilege::decide(false, false, false).refusal().is_some());
        assert_eq!(Privilege::decide(true, true, true).refusal(), Some("--no-root was given"));
    }

    #[test]
    fn sudo_carries_the_variables_and_no_root_names_the_purpose() {
        let command = Privilege::Sudo
            .command("install gcc", "apt-get", [("DEBIAN_FRONTEND", "noninteractive")])
            .expect("a command");
        let words: Vec<_> = command.get_args().collect();
        assert_eq!(command.get_program(), "sudo");
        assert_eq!(words, ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"]);
        let error = Privilege::No("--no-root was given").command("install gcc", "apt-get", []).expect_err("no root");
        assert_eq!(error.to_string(), "cannot install gcc: it needs root, and --no-root was given");
    }
}
