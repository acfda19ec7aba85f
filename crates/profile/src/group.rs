//! Grouping of rows by program, process or thread.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::str::FromStr;

use super::model::{Process, Profile, Row};

/// What rows are grouped by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupBy {
    /// Program: process name and executable.
    Program,
    /// Process, by name and pid.
    Process,
    /// Process name.
    Comm,
    /// Path of the executable.
    Exe,
    /// cgroup, that is, container or service.
    Cgroup,
    /// Process and thread name.
    Thread,
    /// No grouping: equal stacks of all processes are merged.
    Nothing,
}

impl GroupBy {
    /// Every grouping, in the order in which the command line lists them.
    pub const ALL: [Self; 7] =
        [Self::Program, Self::Process, Self::Comm, Self::Exe, Self::Cgroup, Self::Thread, Self::Nothing];

    /// Name of the grouping on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Program => "program",
            Self::Process => "pid",
            Self::Comm => "comm",
            Self::Exe => "exe",
            Self::Cgroup => "cgroup",
            Self::Thread => "thread",
            Self::Nothing => "none",
        }
    }

    /// The default grouping of a profile: by program if there are several processes, otherwise none.
    pub fn default_of(profile: &Profile) -> Self {
        if profile.number_of_processes() > 1 { Self::Program } else { Self::Nothing }
    }

    /// Whether the grouping distinguishes processes of one program.
    pub const fn separates_processes(self) -> bool {
        matches!(self, Self::Process | Self::Thread)
    }
}

impl FromStr for GroupBy {
    type Err = String;

    /// The grouping with this name; `process` also means `pid`, and `nothing` means `none`.
    fn from_str(name: &str) -> Result<Self, String> {
        let choices = "program, pid, comm, exe, cgroup, thread or none";
        let found = match name {
            "process" => Some(Self::Process),
            "nothing" => Some(Self::Nothing),
            _ => Self::ALL.into_iter().find(|group| group.name() == name),
        };
        found.ok_or_else(|| format!("cannot group by {name:?}: choose {choices}"))
    }
}

/// Names of the groups of a profile.
#[derive(Clone, Debug)]
pub struct Groups<'a> {
    by: GroupBy,
    /// Group name of each process, without its threads.
    of_process: Vec<Cow<'a, str>>,
    /// Group name of each idle process.
    of_idle: Vec<Cow<'a, str>>,
}

/// Process name and executable.
type Program<'a> = (&'a str, &'a str);

impl<'a> Groups<'a> {
    /// Groups with names for display; programs are shown with their number of processes.
    pub fn new(profile: &'a Profile, by: GroupBy) -> Self {
        // Idle processes that have ended count only if nothing else of the program is left.
        let mut counts: HashMap<Program<'a>, (u64, &Process)> = HashMap::new();
        for process in profile.targets() {
            counts.entry(program(process)).or_insert((0, process)).0 += process.count();
        }
        let running: HashSet<Program<'a>> = counts.keys().copied().collect();
        for ended in profile.idle.iter().filter(|process| !running.contains(&program(process))) {
            counts.entry(program(ended)).or_insert((0, ended)).0 += ended.count();
        }
        let mut programs: HashMap<&str, BTreeSet<&str>> = HashMap::new();
        for (comm, exe) in counts.keys() {
            programs.entry(comm).or_default().insert(exe);
        }
        let program_name = |process: &'a Process| {
            let (count, first) = counts.get(&program(process)).copied().unwrap_or((1, process));
            let is_known_by_name = programs.get(&*process.comm).is_none_or(|exes| exes.len() == 1);
            match (count, is_known_by_name || process.exe.is_empty()) {
                (1, _) => process_name(first),
                (_, true) => format!("{} ({count} processes)", name_or_none(process)),
                (_, false) => format!("{} {} ({count} processes)", name_or_none(process), process.exe),
            }
        };
        let name = |process| match by {
            GroupBy::Program => Cow::Owned(program_name(process)),
            _ => plain_name(by, process),
        };
        Self::named(profile, by, name)
    }

    fn named(profile: &'a Profile, by: GroupBy, name: impl Fn(&'a Process) -> Cow<'a, str>) -> Self {
        Self {
            by,
            of_process: profile.processes.iter().map(&name).collect(),
            of_idle: profile.idle.iter().map(name).collect(),
        }
    }

    /// Groups with names that stay the same in other recordings.
    pub fn comparable(profile: &'a Profile, by: GroupBy) -> Self {
        let name = |process: &'a Process| match by {
            GroupBy::Program if process.exe.is_empty() => Cow::Borrowed(&*process.comm),
            GroupBy::Program => format!("{} {}", process.comm, process.exe).into(),
            _ => plain_name(by, process),
        };
        Self::named(profile, by, name)
    }

    /// Name of the group of an idle process (by its index).
    pub fn of_idle(&self, process: usize) -> Cow<'a, str> {
        self.of_idle.get(process).cloned().unwrap_or_default()
    }

    /// Name of the group of a row; empty if rows are not grouped.
    pub fn name(&self, row: &'a Row) -> Cow<'a, str> {
        let name = self.of_process(row.key.process);
        match self.by {
            GroupBy::Thread => format!("{name} / {}", row.key.thread).into(),
            _ => name,
        }
    }

    /// Name of the group of a process (by its index), without its threads.
    pub fn of_process(&self, process: usize) -> Cow<'a, str> {
        self.of_process.get(process).cloned().unwrap_or_default()
    }
}

fn program(process: &Process) -> Program<'_> {
    (&process.comm, &process.exe)
}

fn plain_name(by: GroupBy, process: &Process) -> Cow<'_, str> {
    match by {
        GroupBy::Nothing => Cow::Borrowed(""),
        GroupBy::Program | GroupBy::Process | GroupBy::Thread => process_name(process).into(),
        GroupBy::Comm => Cow::Borrowed(&process.comm),
        GroupBy::Exe => Cow::Borrowed(&process.exe),
        GroupBy::Cgroup => Cow::Borrowed(&process.cgroup),
    }
}

fn name_or_none(process: &Process) -> &str {
    if process.comm.is_empty() { "unnamed" } else { &process.comm }
}

/// Display name of a process: `python3 (1234)`, or `python3 (4 processes)` if several processes were merged.
pub fn process_name(process: &Process) -> String {
    match (process.comm.as_str(), process.pid) {
        (_, 0) if process.count() > 1 => format!("{} ({} processes)", name_or_none(process), process.count()),
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
    fn rows_are_named_by_their_group() {
        let profile = testing::small();
        let name = |by| Groups::new(&profile, by).name(&profile.rows[0]).into_owned();
        assert_eq!(name(GroupBy::Process), "server (4242)");
        assert_eq!(name(GroupBy::Program), "server (4242)", "the only one of its program");
        assert_eq!(name(GroupBy::Comm), "server");
        assert_eq!(name(GroupBy::Thread), "server (4242) / worker");
        assert_eq!(name(GroupBy::Nothing), "");
    }

    #[test]
    fn programs_are_counted_and_told_apart_by_their_executable() {
        let mut profile = testing::small();
        let first = profile.processes[0].clone();
        let of = |pid, exe: &str| Process { pid, exe: exe.into(), ..first.clone() };
        profile.processes.extend([of(1, "/usr/bin/server"), of(2, "/opt/server"), of(3, "/opt/server")]);
        let names = |groups: Groups| (0..5).map(|process| groups.of_process(process).into_owned()).collect::<Vec<_>>();
        let expected = ["server /usr/bin/server (2 processes)", "server /opt/server (2 processes)"];
        let found = names(Groups::new(&profile, GroupBy::Program));
        assert_eq!([&*found[0], &found[2], &found[3], &found[4]], [expected[0], expected[0], expected[1], expected[1]]);
        profile.processes.truncate(3);
        assert_eq!(names(Groups::new(&profile, GroupBy::Program))[0], "server (2 processes)");
        let stable = names(Groups::comparable(&profile, GroupBy::Program));
        assert_eq!([&*stable[0], &stable[2]], ["server /usr/bin/server"; 2]);
    }

    #[test]
    fn idle_processes_that_have_ended_count_only_if_nothing_else_is_left() {
        let mut profile = testing::whole_host();
        let sh = |profile: &Profile| {
            let groups = Groups::new(profile, GroupBy::Program);
            (profile.number_of_targets(), groups.of_idle(1).into_owned(), groups.of_idle(2).into_owned())
        };
        let of = |number, name: &str| (number, name.to_owned(), name.to_owned());
        assert_eq!(sh(&profile), of(5, "sh (2 processes)"));
        profile.idle[1].ended = true;
        assert_eq!(sh(&profile), of(4, "sh (902)"), "one program has one name");
        profile.idle[2].ended = true;
        assert_eq!(sh(&profile), of(3, "sh (2 processes)"));
        (profile.processes, profile.idle[0].ended) = (Vec::new(), true);
        assert_eq!(sh(&profile), of(3, "sh (2 processes)"));
    }

    #[test]
    fn names_are_parsed_or_refused() {
        assert_eq!("cgroup".parse(), Ok(GroupBy::Cgroup));
        let error = "user".parse::<GroupBy>().expect_err("no such grouping").to_string();
        assert_eq!(error, "cannot group by \"user\": choose program, pid, comm, exe, cgroup, thread or none");
    }

    #[test]
    fn a_process_has_a_name_whatever_is_known() {
        let name = |comm: &str, pid| process_name(&Process { comm: comm.into(), pid, ..Process::default() });
        assert_eq!(
            [name("nginx", 7), name("nginx", 0), name("", 7), name("", 0)],
            ["nginx (7)", "nginx", "pid 7", "unnamed process"]
        );
        let several = Process { comm: "nginx".into(), stands_for: 4, ..Process::default() };
        assert_eq!(process_name(&several), "nginx (4 processes)");
    }
}
