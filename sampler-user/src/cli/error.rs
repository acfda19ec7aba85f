//! Errors of the command line, and their exit statuses.

use std::path::PathBuf;

use heapbpf_attach::inline::forbidden::Malformed;
use heapbpf_host::cgroup::CgroupError;
use heapbpf_host::process::TargetError;
use heapbpf_profile::formats::FormatError;
use heapbpf_record::output::OutputError;
use heapbpf_record::{Misdescribed, NotStarted};
use heapbpf_serve::listen::ListenError;
use heapbpf_serve::push::PushError;
use heapbpf_statistics::plan::ClassPlanError;

use super::allocators::AllocatorError;

/// Why a plan cannot be made. The exit status is 2 for usage errors, otherwise 1.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The options contradict each other or are incomplete.
    #[error("{0}")]
    Usage(String),
    /// The system forbids the recording.
    #[error("{0}")]
    Blocked(String),
    /// The command does not exist.
    #[error("there is no command {0}")]
    NoCommand(String),
    /// The command exists but cannot be executed.
    #[error("{0} cannot be executed: no permission")]
    NotExecutable(String),
    /// The rules that forbid hooking certain programs cannot be read.
    #[error(transparent)]
    Forbidden(#[from] &'static Malformed),
    /// A target process cannot be used.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A cgroup cannot be used.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// An output cannot be used.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// A format cannot be used.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A file of intervals by size class cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    ClassesUnreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file does not contain intervals by size class.
    #[error("{}: {source}", path.display())]
    Classes {
        /// The file.
        path: PathBuf,
        /// Why.
        source: ClassPlanError,
    },
    /// An allocator that the user describes cannot be used.
    #[error(transparent)]
    Allocator(#[from] AllocatorError),
    /// The server cannot listen.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Profiles cannot be pushed.
    #[error(transparent)]
    Push(#[from] PushError),
}

impl PlanError {
    /// Returns heapbpf's exit status. For a command that cannot be started, it is what a shell's would be.
    pub(super) const fn exit_status(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Format(_) | Self::Classes { .. } | Self::Allocator(_) => 2,
            Self::Push(PushError::Destination(_)) => 2,
            Self::NoCommand(_) => 127,
            Self::NotExecutable(_) => 126,
            _ => 1,
        }
    }
}

/// Returns heapbpf's exit status for an error: 2 for usage errors, 127 or 126 for a command that cannot be found or
/// executed, otherwise 1.
pub fn exit_status(error: &anyhow::Error) -> u8 {
    if let Some(error) = error.downcast_ref::<NotStarted>() {
        return error.exit_status();
    }
    if error.is::<Misdescribed>() {
        return 2;
    }
    error.downcast_ref::<PlanError>().map_or(1, PlanError::exit_status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_wrong_usage_is_status_2() {
        assert_eq!(exit_status(&PlanError::Usage("x".into()).into()), 2);
        assert_eq!(exit_status(&Misdescribed("x.so has no function f".into()).into()), 2);
        assert_eq!(exit_status(&PlanError::Blocked("x".into()).into()), 1);
        assert_eq!(exit_status(&anyhow::anyhow!("anything else")), 1);
        assert_eq!(exit_status(&PlanError::NoCommand("x".into()).into()), 127);
        assert_eq!(exit_status(&PlanError::NotExecutable("x".into()).into()), 126);
        for (kind, expected) in [(std::io::ErrorKind::NotFound, 127), (std::io::ErrorKind::PermissionDenied, 126)] {
            assert_eq!(exit_status(&NotStarted { program: "x".into(), source: kind.into() }.into()), expected);
        }
    }
}
