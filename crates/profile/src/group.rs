//! Grouping of rows by process, program or thread.

use std::borrow::Cow;
use std::str::FromStr;

use thiserror::Error;

use super::model::{Process, Profile, Row};

/// What rows are grouped by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupBy {
    /// No grouping: equal stacks of all processes are one.
    Nothing,
    /// Process, by name and pid.
    Process,
    /// Process name, for example all workers of one server.
    Comm,
    /// Path of the executable.
    Exe,
    /// cgroup, that is container or service.
    Cgroup,
    /// Process and thread name.
    Thread,
}

impl GroupBy {
    /// Every grouping, in the order in which the command line lists them.
    pub const ALL: [Self; 6] = [Self::Nothing, Self::Process, Self::Comm, Self::Exe, Self::Cgroup, Self::Thread];

    /// Name of the grouping on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "none",
            Self::Process => "pid",
            Self::Comm => "comm",
            Self::Exe => "exe",
            Self::Cgroup => "cgroup",
            Self::Thread => "thread",
        }
    }

    /// The grouping with this name; `process` also means `pid`, and `nothing` means `none`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "process" => Some(Self::Process),
            "nothing" => Some(Self::Nothing),
            _ => Self::ALL.into_iter().find(|group| group.name() == name),
        }
    }

    /// The default grouping of a profile: by process if there are several, else none.
    pub fn default_of(profile: &Profile) -> Self {
        if profile.processes.len() > 1 { Self::Process } else { Self::Nothing }
    }

    /// Name of the group of a row, empty for [`GroupBy::Nothing`].
    pub fn key<'a>(self, profile: &'a Profile, row: &'a Row) -> Cow<'a, str> {
        let Some(process) = profile.processes.get(row.key.process) else { return Cow::Borrowed("") };
        match self {
            Self::Nothing => Cow::Borrowed(""),
            Self::Process => process_name(process).into(),
            Self::Comm => Cow::Borrowed(&process.comm),
            Self::Exe => Cow::Borrowed(&process.exe),
            Self::Cgroup => Cow::Borrowed(&process.cgroup),
            Self::Thread => format!("{} / {}", process_name(process), row.key.thread).into(),
        }
    }
}

/// No grouping has this name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("cannot group by {0:?}: choose none, pid, comm, exe, cgroup or thread")]
pub struct UnknownGroup(String);

impl FromStr for GroupBy {
    type Err = UnknownGroup;

    fn from_str(name: &str) -> Result<Self, UnknownGroup> {
        Self::from_name(name).ok_or_else(|| UnknownGroup(name.into()))
    }
}

/// Display name of a process: `python3 (1234)`.
pub fn process_name(process: &Process) -> String {
    match (process.comm.as_str(), process.pid) {
        ("", 0) => "unnamed process".into(),
        ("", pid) => format!("pid {pid}"),
        (comm, 0) => comm.into(),
        (comm, pid) => format!("{comm} ({pid})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn names_lead_back() {
        for group in GroupBy::ALL {
            assert_eq!(GroupBy::from_name(group.name()), Some(group));
        }
        assert_eq!(GroupBy::from_name("process"), Some(GroupBy::Process));
        assert_eq!(GroupBy::from_name("nothing"), Some(GroupBy::Nothing));
        assert_eq!(GroupBy::from_name("user"), None);
    }

    #[test]
    fn rows_are_named_by_their_group() {
        let profile = testing::small();
        let row = &profile.rows[0];
        assert_eq!(GroupBy::Process.key(&profile, row), "server (4242)");
        assert_eq!(GroupBy::Comm.key(&profile, row), "server");
        assert_eq!(GroupBy::Thread.key(&profile, row), "server (4242) / worker");
        assert_eq!(GroupBy::Nothing.key(&profile, row), "");
    }

    #[test]
    fn names_are_parsed_or_refused() {
        assert_eq!("cgroup".parse(), Ok(GroupBy::Cgroup));
        let error = "user".parse::<GroupBy>().expect_err("no such grouping").to_string();
        assert_eq!(error, "cannot group by \"user\": choose none, pid, comm, exe, cgroup or thread");
    }

    #[test]
    fn a_process_has_a_name_whatever_is_known() {
        let name = |comm: &str, pid| process_name(&Process { comm: comm.into(), pid, ..Process::default() });
        assert_eq!(
            [name("nginx", 7), name("nginx", 0), name("", 7), name("", 0)],
            ["nginx (7)", "nginx", "pid 7", "unnamed process"]
        );
    }
}
