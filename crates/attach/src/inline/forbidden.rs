//! `/etc/heapbpf.conf`: lists processes that are never hooked inline, whatever the command line says. The first process
//! of the host (PID 1) is never hooked either.

use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::OnceLock;

use globset::{Glob, GlobMatcher};
use heapbpf_host::process::all_pids;
use heapbpf_profile::report::text::clip;

use super::may_be_hooked::Refused;

/// The file with the rules. If it does not exist, there are no rules.
pub const PATH: &str = "/etc/heapbpf.conf";
/// The host's file, for a heapbpf with a different root.
const HOST_PATH: &str = "/proc/1/root/etc/heapbpf.conf";
/// Maximum size of the file in bytes.
const MOST_BYTES: u64 = 1 << 20;
/// Maximum number of processes to name with a rule, and maximum width of a program's name in columns.
const MOST_NAMED: usize = 3;
const MOST_COLUMNS: usize = 60;
/// The user database for looking up names.
const USERS: &str = "/etc/passwd";
/// The word that all rules begin with.
const NEVER_INLINE: &str = "never-inline";
/// Where control groups are mounted.
const CGROUP_MOUNT: &str = "/sys/fs/cgroup";
/// The host's PID namespace, as `/proc/PID/ns/pid` shows it.
const INITIAL_NAMESPACE: &str = "pid:[4026531836]";

/// Why the file cannot be used. Nothing is recorded then.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    /// It cannot be read.
    #[error("{path} cannot be read: {source}")]
    Unreadable {
        /// The file.
        path: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A line is not one of the three kinds.
    #[error("{path}, line {line}, column {column}: {why}")]
    Line {
        /// The file.
        path: &'static str,
        /// Line number, from 1 on.
        line: usize,
        /// Column in characters, from 1 on.
        column: usize,
        /// What is wrong.
        why: String,
    },
}

/// Which processes a rule applies to.
#[derive(Debug)]
enum Whom {
    Exe(GlobMatcher),
    User(u32),
    Cgroup(GlobMatcher),
}

/// A line of the file.
#[derive(Debug)]
struct Rule {
    path: &'static str,
    line: usize,
    text: String,
    whom: Whom,
}

/// The rules of this host.
#[derive(Debug, Default)]
pub struct Forbidden(Vec<Rule>);

/// The facts about a process that rules check.
#[derive(Debug, Default)]
struct Facts {
    exe: String,
    /// Real, effective, saved, file system.
    users: Vec<u32>,
    /// Control groups in all hierarchies.
    cgroups: Vec<String>,
}

/// Returns the rules of this host, which are read once.
///
/// # Errors
/// The rules cannot be used.
pub fn rules() -> Result<&'static Forbidden, &'static Malformed> {
    static RULES: OnceLock<Result<Forbidden, Malformed>> = OnceLock::new();
    RULES.get_or_init(read).as_ref()
}

/// Checks whether a process may be hooked inline now.
///
/// # Errors
/// The rule that forbids it.
pub fn check(pid: u32) -> Result<(), Refused> {
    if pid == 1 && std::fs::read_link("/proc/1/ns/pid").map_or(true, |link| link == Path::new(INITIAL_NAMESPACE)) {
        return Err(Refused::First);
    }
    let rules = rules().map_err(|malformed| Refused::Rules(malformed.to_string()))?;
    if rules.0.is_empty() {
        return Ok(());
    }
    let facts = Facts::read(pid).map_err(|source| Refused::Read { what: "what the rules check", source })?;
    rules
        .rule_for(&facts)
        .map_or(Ok(()), |rule| Err(Refused::Forbidden { path: rule.path, line: rule.line, rule: rule.text.clone() }))
}

/// Reads the file, and also the host's file if heapbpf runs in a container that sees the host's processes.
fn read() -> Result<Forbidden, Malformed> {
    let same = |a: &Metadata, b: &Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    let (own, host) = (std::fs::metadata(PATH), std::fs::metadata(HOST_PATH));
    let is_other = host.is_ok_and(|host| !own.is_ok_and(|own| same(&own, &host)));
    let mut rules = Forbidden::default();
    for path in [PATH, HOST_PATH].into_iter().take(1 + usize::from(is_other)) {
        let failed = |source| Malformed::Unreadable { path, source };
        let mut text = Vec::new();
        match File::open(path) {
            Ok(file) => file.take(MOST_BYTES + 1).read_to_end(&mut text).map_err(failed)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error)),
        };
        if text.len() as u64 > MOST_BYTES {
            return Err(failed(io::ErrorKind::FileTooLarge.into()));
        }
        rules.add((path, &text), &|name| uid(&std::fs::read_to_string(USERS).ok()?, name))?;
    }
    Ok(rules)
}

/// The number of a user by name, from the text of `/etc/passwd`.
fn uid(users: &str, name: &str) -> Option<u32> {
    let mut users = users.lines().map(|line| line.split(':'));
    users.find_map(|mut fields| (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?)
}

impl Forbidden {
    /// Adds the rules of a file. `uid` looks up a user.
    fn add(&mut self, (path, text): (&'static str, &[u8]), uid: &dyn Fn(&str) -> Option<u32>) -> Result<(), Malformed> {
        for (index, bytes) in text.split(|byte| *byte == b'\n').enumerate() {
            let line = index + 1;
            let fail = |column, why| Malformed::Line { path, line, column, why };
            let text = std::str::from_utf8(bytes).map_err(|error| {
                let before = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
                fail(before.chars().count() + 1, "it is not UTF-8".into())
            })?;
            let text = text.trim_end();
            if text.trim_start().is_empty() || text.trim_start().starts_with('#') {
                continue;
            }
            let whom =
                whom(text, uid).map_err(|(rest, why)| fail(text.chars().count() - rest.chars().count() + 1, why))?;
            self.0.push(Rule { path, line, text: text.trim_start().to_owned(), whom });
        }
        Ok(())
    }

    /// Returns one line per rule, with the running processes for which it is the first matching rule.
    pub fn holders(&self) -> Vec<String> {
        let pids = if self.0.is_empty() { Vec::new() } else { all_pids().unwrap_or_default() };
        // Exited processes and kernel threads have no executable.
        let all = pids.into_iter().filter_map(|pid| Some((pid, Facts::read(pid).ok()?)));
        self.holders_among(&all.collect::<Vec<_>>())
    }

    fn holders_among(&self, processes: &[(u32, Facts)]) -> Vec<String> {
        let mut held: Vec<Vec<&(u32, Facts)>> = vec![Vec::new(); self.0.len()];
        for process in processes {
            if let Some(first) = self.0.iter().position(|rule| rule.is_about(&process.1)) {
                held[first].push(process);
            }
        }
        let line = |(rule, held): (&Rule, Vec<&(u32, Facts)>)| {
            let name = |(pid, facts): &&(u32, Facts)| format!("{} ({pid})", clip(&facts.exe, MOST_COLUMNS));
            let named = held.iter().take(MOST_NAMED).map(name).collect::<Vec<_>>().join(", ");
            let more = if held.len() > MOST_NAMED { ", …" } else { "" };
            let who = match held.len() {
                0 => "no running process".to_owned(),
                1 => named,
                number => format!("{number} processes: {named}{more}"),
            };
            format!("{}, line {}: {}: {who}", rule.path, rule.line, rule.text)
        };
        self.0.iter().zip(held).map(line).collect()
    }

    /// The first rule that applies to a process.
    fn rule_for(&self, facts: &Facts) -> Option<&Rule> {
        self.0.iter().find(|rule| rule.is_about(facts))
    }
}

impl Rule {
    fn is_about(&self, facts: &Facts) -> bool {
        match &self.whom {
            Whom::Exe(glob) => glob.is_match(&facts.exe),
            Whom::User(uid) => facts.users.contains(uid),
            // The group itself or any group above it.
            Whom::Cgroup(glob) => {
                facts.cgroups.iter().any(|group| Path::new(group).ancestors().any(|path| glob.is_match(path)))
            }
        }
    }
}

/// Parses whom a line applies to. If the line is malformed, returns the rest of it from the error on, and the reason.
fn whom<'a>(line: &'a str, uid: &dyn Fn(&str) -> Option<u32>) -> Result<Whom, (&'a str, String)> {
    let next = |text: &'a str| {
        let text = text.trim_start();
        text.split_at(text.find(char::is_whitespace).unwrap_or(text.len()))
    };
    let (word, rest) = next(line);
    if word != NEVER_INLINE {
        return Err((line.trim_start(), format!("'{word}' is not known; rules begin with {NEVER_INLINE}")));
    }
    let (kind, rest) = (next(rest).0, next(rest));
    let (at, value) = (rest.0, rest.1.trim());
    let from_kind = &line[line.len() - rest.0.len() - rest.1.len()..];
    let from_value = rest.1.trim_start();
    if !["exe", "user", "cgroup"].contains(&kind) {
        return Err((from_kind, format!("'{at}' is not known; {NEVER_INLINE} is followed by exe, user or cgroup")));
    }
    if value.is_empty() {
        return Err((from_value, format!("{NEVER_INLINE} {kind} needs a value")));
    }
    if kind == "user" {
        let known = value.parse().ok().or_else(|| uid(value));
        return known.map(Whom::User).ok_or_else(|| (from_value, format!("{USERS} has no user '{value}'")));
    }
    if !value.starts_with(['/', '*']) {
        return Err((from_value, format!("'{value}' would match nothing: paths begin with / (or with *)")));
    }
    if kind == "cgroup" && value.starts_with(CGROUP_MOUNT) {
        return Err((from_value, format!("write it as in /proc/PID/cgroup, without {CGROUP_MOUNT}")));
    }
    let glob = Glob::new(value).map_err(|error| (from_value, error.kind().to_string()))?.compile_matcher();
    Ok(if kind == "exe" { Whom::Exe(glob) } else { Whom::Cgroup(glob) })
}

impl Facts {
    fn read(pid: u32) -> io::Result<Self> {
        let exe = std::fs::read_link(format!("/proc/{pid}/exe"))?.to_string_lossy().into_owned();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let cgroups = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        Ok(Self::of(exe, &status, &cgroups))
    }

    fn of(exe: String, status: &str, cgroups: &str) -> Self {
        let users = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
        Self {
            exe: exe.strip_suffix(" (deleted)").map(str::to_owned).unwrap_or(exe),
            users: users.split_whitespace().filter_map(|uid| uid.parse().ok()).collect(),
            // hierarchy:controllers:path
            cgroups: cgroups.lines().filter_map(|line| Some(line.splitn(3, ':').nth(2)?.to_owned())).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &[u8]) -> Result<Forbidden, Malformed> {
        let mut rules = Forbidden::default();
        rules.add((PATH, text), &|name| uid("root:x:0:0:root:/root:/bin/sh\npg:x:70:70::/:/bin/sh\n", name))?;
        Ok(rules)
    }

    fn facts(exe: &str, users: [u32; 4], cgroup: &str) -> Facts {
        let [real, effective, saved, files] = users;
        let status = format!("Name:\tx\nUid:\t{real}\t{effective}\t{saved}\t{files}\n");
        Facts::of(exe.to_owned(), &status, &format!("1:cpu,cpuacct:/\n0::{cgroup}\n"))
    }

    #[test]
    fn the_first_rule_that_is_about_a_process_holds() {
        let text = b"# databases\n\n  never-inline exe /opt/my db/*\nnever-inline user pg\nnever-inline\tuser 71\n\
                     never-inline cgroup /system.slice/nginx.service\nnever-inline cgroup /*/docker-ab*.scope  \n";
        let rules = parse(text).expect("it is well-formed");
        let line = |exe, users, cgroup| rules.rule_for(&facts(exe, users, cgroup)).map(|rule| rule.line);
        assert_eq!(line("/opt/my db/bin/server", [70; 4], "/"), Some(3));
        assert_eq!(line("/opt/my db/bin/server (deleted)", [1; 4], "/"), Some(3));
        assert_eq!(line("/opt/my", [1, 1, 70, 1], "/"), Some(4), "the saved user");
        assert_eq!(line("/x", [71; 4], "/"), Some(5));
        assert_eq!(line("/x", [1; 4], "/system.slice/nginx.service"), Some(6));
        assert_eq!(line("/x", [1; 4], "/system.slice/nginx.service/worker:1"), Some(6));
        assert_eq!(line("/x", [1; 4], "/system.slice/nginx.service2"), None);
        assert_eq!(line("/x", [1; 4], "/system.slice/docker-abc.scope/init"), Some(7));
        assert_eq!(line("/x", [0; 4], "/system.slice"), None);
        assert_eq!(rules.0[4].text, "never-inline cgroup /*/docker-ab*.scope");
        let processes = [
            (1, facts("/x", [70; 4], "/")),
            (2, facts("/\x1b", [71; 4], "/")),
            (3, facts("/opt/my db/x", [70; 4], "/")),
        ];
        let holders = rules.holders_among(&processes);
        assert_eq!(holders[0], "/etc/heapbpf.conf, line 3: never-inline exe /opt/my db/*: /opt/my db/x (3)");
        assert_eq!(holders[1], "/etc/heapbpf.conf, line 4: never-inline user pg: /x (1)");
        assert!(holders[2].ends_with(": /\\u{1b} (2)") && holders[3].ends_with(": no running process"), "{holders:?}");
        assert!(parse(b"").is_ok_and(|rules| rules.0.is_empty()));
    }

    #[test]
    fn what_is_malformed_is_told_with_its_place() {
        for (text, line, column, why) in [
            (&b"\nnever-hook exe /x\n"[..], 2, 1, "'never-hook' is not known; rules begin with never-inline"),
            (b"  never-inline comm x", 1, 16, "'comm' is not known; never-inline is followed by exe, user or cgroup"),
            (b"never-inline", 1, 13, "'' is not known; never-inline is followed by exe, user or cgroup"),
            (b"never-inline exe  \r\n", 1, 17, "never-inline exe needs a value"),
            (b"never-inline exe nginx", 1, 18, "'nginx' would match nothing: paths begin with / (or with *)"),
            (b"#\nnever-inline   user  nobody2", 2, 22, "/etc/passwd has no user 'nobody2'"),
            (b"never-inline user -1", 1, 19, "/etc/passwd has no user '-1'"),
            (b"never-inline cgroup /sys/fs/cgroup/x", 1, 21, "write it as in /proc/PID/cgroup, without /sys/fs/cgroup"),
            ("never-inline exe /\u{e9}[a".as_bytes(), 1, 18, "unclosed character class; missing ']'"),
            (b"# \xc3\xa9 \xff", 1, 5, "it is not UTF-8"),
        ] {
            let error = parse(text).expect_err(why);
            assert_eq!(error.to_string(), format!("/etc/heapbpf.conf, line {line}, column {column}: {why}"));
        }
    }

    #[test]
    fn this_process_has_what_rules_ask() {
        let facts = Facts::read(std::process::id()).expect("it runs");
        assert_eq!(Path::new(&facts.exe), std::env::current_exe().expect("it has a file"));
        // SAFETY: no arguments.
        assert!(facts.users.len() == 4 && facts.users[0] == unsafe { libc::getuid() } && !facts.cgroups.is_empty());
    }
}
