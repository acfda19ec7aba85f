//! Filters on the processes in an answer.

use std::borrow::Cow;
use std::path::Path;

use heapbpf_host::process::CommGlob;
use heapbpf_profile::model::{Placement, Process, Profile};

/// The fields of a filter, as users see them.
pub const KEYS: &str = "pid, comm, cgroup, container, pod and unit";

/// A filter on processes. A field that is `None` excludes no process.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    pid: Option<u32>,
    comm: Option<CommGlob>,
    cgroup: Option<String>,
    container: Option<String>,
    pod: Option<String>,
    unit: Option<String>,
}

impl PartialEq for Filter {
    fn eq(&self, other: &Self) -> bool {
        fn parts(filter: &Filter) -> impl PartialEq {
            let Filter { pid, comm, cgroup, container, pod, unit } = filter.clone();
            (pid, comm.map(|glob| glob.pattern().to_owned()), cgroup, container, pod, unit)
        }
        parts(self) == parts(other)
    }
}

impl Filter {
    /// Sets the field `key` ([`KEYS`]). Returns whether the key is known.
    ///
    /// # Errors
    /// Describes what is wrong with the value.
    pub fn set(&mut self, key: &str, value: &str) -> Result<bool, String> {
        let once = |set: bool| if set { Err(format!("{key} may be given only once")) } else { Ok(()) };
        match key {
            "pid" => {
                once(self.pid.is_some())?;
                let pid = value.parse().ok().filter(|pid| *pid > 0);
                self.pid = Some(pid.ok_or_else(|| format!("pid must be a process id, not {value:?}"))?);
            }
            "comm" => {
                once(self.comm.is_some())?;
                if value.is_empty() || value.len() > 64 {
                    return Err("comm must be a name or pattern of 1 to 64 bytes".into());
                }
                self.comm = Some(CommGlob::new(value).map_err(|error| format!("comm: {error}"))?);
            }
            "cgroup" => {
                once(self.cgroup.is_some())?;
                if !value.starts_with('/') {
                    return Err("cgroup must be a path as in /proc/PID/cgroup, beginning with /".into());
                }
                self.cgroup = Some(value.to_owned());
            }
            "container" => {
                once(self.container.is_some())?;
                if value.is_empty() {
                    return Err("container must be an ID, or the beginning of one".into());
                }
                self.container = Some(value.to_owned());
            }
            "pod" | "unit" => {
                let own = if key == "pod" { &mut self.pod } else { &mut self.unit };
                once(own.is_some())?;
                if value.is_empty() {
                    return Err(format!("{key} must not be empty"));
                }
                *own = Some(value.to_owned());
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Whether the filter excludes no process.
    pub const fn is_everything(&self) -> bool {
        let Self { pid, comm, cgroup, container, pod, unit } = self;
        let of_process = pid.is_none() && comm.is_none() && cgroup.is_none();
        of_process && container.is_none() && pod.is_none() && unit.is_none()
    }

    /// Whether the filter names a process by its PID, which another process may have had before.
    pub const fn has_pid(&self) -> bool {
        self.pid.is_some()
    }

    /// Whether a process passes the filter.
    pub fn matches(&self, process: &Process) -> bool {
        self.admits(process.pid, &process.comm, &process.cgroup, &process.placement)
    }

    /// Whether a process with this PID, command name and cgroup passes the filter.
    pub fn admits(&self, pid: u32, comm: &str, cgroup: &str, placement: &Placement) -> bool {
        self.pid.is_none_or(|own| own == pid)
            && self.comm.as_ref().is_none_or(|glob| glob.matches(comm))
            // `Path` compares whole components: `/a/bc` is not below `/a/b`.
            && self.cgroup.as_ref().is_none_or(|group| Path::new(cgroup).starts_with(group))
            && self.container.as_ref().is_none_or(|id| placement.container.starts_with(id))
            && self.pod.as_ref().is_none_or(|uid| placement.pod == *uid)
            && self.unit.as_ref().is_none_or(|unit| placement.unit == *unit)
    }
}

/// The part of a profile for the processes that pass all filters.
pub fn only(profile: &Profile, filters: &[&Filter]) -> Profile {
    let mut number_of = vec![None; profile.processes.len()];
    let mut processes = Vec::new();
    for (process, number) in profile.processes.iter().zip(&mut number_of) {
        if filters.iter().all(|filter| filter.matches(process)) {
            *number = Some(processes.len());
            processes.push(process.clone());
        }
    }
    let rows = profile.rows.iter().filter_map(|row| {
        let process = number_of.get(row.key.process).copied().flatten()?;
        Some(row.clone().with_process(process))
    });
    let idle = profile.idle.iter().filter(|process| filters.iter().all(|filter| filter.matches(process)));
    let mut part =
        Profile { processes, idle: idle.cloned().collect(), rows: rows.collect(), ..profile.without_processes() };
    part.header.live = part.knows_some_inuse();
    part
}

/// The part of a profile that passes `filter`, for a client that may see `scope`. Notes, counters and modules describe
/// all processes, so only a client that may see everything gets all of them.
pub fn shown<'a>(profile: &'a Profile, scope: &Filter, filter: &Filter) -> Cow<'a, Profile> {
    if scope.is_everything() && filter.is_everything() && profile.header.live == profile.knows_some_inuse() {
        return Cow::Borrowed(profile);
    }
    let mut part = only(profile, &[scope, filter]);
    if !scope.is_everything() {
        part.notes.clear();
        part.counters.clear();
        part = part.without_unused_modules();
    }
    Cow::Owned(part)
}

#[cfg(test)]
mod tests {
    use heapbpf_profile::testing;

    use super::*;

    fn filter(pairs: &[(&str, &str)]) -> Filter {
        let mut filter = Filter::default();
        pairs.iter().for_each(|(key, value)| assert_eq!(filter.set(key, value), Ok(true), "{key}={value}"));
        filter
    }

    #[test]
    fn processes_are_chosen_by_all_that_is_said() {
        let placement = Placement { container: "3f5c1b".into(), pod: "2c48".into(), unit: "web.service".into() };
        let process =
            Process { pid: 7, comm: "nginx".into(), cgroup: "/a/web".into(), placement, ..Process::default() };
        for (pairs, chosen) in [
            (&[][..], true),
            (&[("pid", "7")], true),
            (&[("pid", "8")], false),
            (&[("comm", "ngi*")], true),
            (&[("comm", "ngi")], false),
            (&[("cgroup", "/a")], true),
            (&[("cgroup", "/a/we")], false),
            (&[("pid", "7"), ("comm", "nginx"), ("cgroup", "/a/web")], true),
            (&[("container", "3f5c1b")], true),
            (&[("container", "3f5")], true),
            (&[("container", "f5c")], false),
            (&[("pod", "2c48")], true),
            (&[("pod", "2c4")], false),
            (&[("unit", "web.service")], true),
            (&[("unit", "web")], false),
            (&[("container", "3f5c1b"), ("unit", "db.service")], false),
            (&[("pid", "7"), ("comm", "apache")], false),
        ] {
            assert_eq!(filter(pairs).matches(&process), chosen, "{pairs:?}");
        }
    }

    #[test]
    fn every_field_tells_filters_apart() {
        let everything = Filter::default();
        assert!(everything.is_everything());
        for pair in [("pid", "7"), ("comm", "a"), ("cgroup", "/a"), ("container", "a"), ("pod", "a"), ("unit", "a")] {
            let own = filter(&[pair]);
            assert!(KEYS.contains(pair.0) && !own.is_everything() && own != everything && own == filter(&[pair]));
            assert!(!own.matches(&Process::default()), "{pair:?}");
        }
    }

    #[test]
    fn bad_values_are_explained() {
        let bad = [("pid", "x"), ("pid", "-1"), ("pid", "0"), ("comm", ""), ("comm", "a[b"), ("cgroup", "web")];
        let bad = bad.into_iter().chain(["container", "pod", "unit"].map(|key| (key, "")));
        for (key, value) in bad {
            assert!(Filter::default().set(key, value).unwrap_err().contains(key), "{key}={value}");
        }
        assert!(filter(&[("pid", "7")]).set("pid", "8").unwrap_err().contains("once"));
        assert_eq!(Filter::default().set("color", "red"), Ok(false));
    }

    #[test]
    fn a_part_of_a_profile_is_whole_in_itself() {
        let profile = testing::small();
        let pid = profile.processes[1].pid;
        let part = only(&profile, &[&filter(&[("pid", &pid.to_string())])]);
        assert_eq!(part.processes, profile.processes[1..2]);
        let rows = profile.rows.iter().filter(|row| row.key.process == 1).count();
        assert!(rows > 0 && part.rows.len() == rows && part.rows.iter().all(|row| row.key.process == 0));
        let (all, own) = (Filter::default(), filter(&[("pid", &pid.to_string())]));
        let mut noted = profile.clone();
        noted.notes.push("another process".into());
        assert_eq!(shown(&noted, &all, &own).notes, noted.notes);
        let scoped = shown(&noted, &own, &all);
        assert_eq!((scoped.rows.len(), scoped.notes.len(), scoped.counters.len()), (rows, 0, 0));
        let nobody = only(&profile, &[&filter(&[("pid", &pid.to_string())]), &filter(&[("comm", "no-such")])]);
        assert!(nobody.processes.is_empty() && nobody.rows.is_empty());
        let idle = only(&testing::whole_host(), &[&filter(&[("comm", "sh")])]).idle;
        assert_eq!(idle.iter().map(|process| process.pid).collect::<Vec<_>>(), [901, 902]);
    }
}
