//! Test programs: those that `cargo test --no-run` builds, and single runs of them, with a watchdog and the time of
//! each test.
//!
//! libtest neither ends a test that hangs nor reports how long each took. Its JSON output (an unstable option, which
//! `RUSTC_BOOTSTRAP` allows) reports when each test starts and ends.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::shell::{announce, describe, read, say};

/// Time limit of a test. A test that exceeds it is ended together with its program. A wait inside a test is limited to
/// two minutes.
const LANDING_LIMIT: Duration = Duration::from_secs(600);
/// The limit in the long set, whose tests repeat a case hundreds of times.
const LONG_LIMIT: Duration = Duration::from_secs(3 * 3600);

/// A test program that cargo built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Name of the package's directory.
    pub package: String,
    /// Name of cargo's target: a library, a binary, or a file of integration tests.
    pub target: String,
    /// The executable.
    pub executable: PathBuf,
    /// The package's directory, in which cargo runs tests.
    pub dir: PathBuf,
}

impl Program {
    /// Returns a command that runs it as cargo would.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command.current_dir(&self.dir).env("CARGO_MANIFEST_DIR", &self.dir);
        command
    }

    /// Returns the names of its tests that contain `filter`.
    ///
    /// # Errors
    /// It cannot be run.
    pub fn tests(&self, filter: &str) -> anyhow::Result<Vec<String>> {
        let listing = read(self.command().args(["--list", filter]))?;
        Ok(listing.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }
}

/// Returns the programs in the messages of `cargo test --no-run --message-format=json`.
pub fn programs(messages: &str) -> Vec<Program> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = |message: Value| {
        let manifest = Path::new(message["manifest_path"].as_str()?);
        let dir = manifest.parent()?.to_path_buf();
        message["profile"]["test"].as_bool().filter(|is_test| *is_test)?;
        Some(Program {
            package: dir.file_name()?.to_string_lossy().into_owned(),
            target: message["target"]["name"].as_str()?.to_owned(),
            executable: PathBuf::from(message["executable"].as_str()?),
            dir,
        })
    };
    messages.filter_map(program).collect()
}

/// What a run found.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Tests that passed, with their seconds.
    pub passed: Vec<(String, f64)>,
    /// Tests that failed or hung, with the reason.
    pub failed: Vec<(String, String)>,
    /// Tests that are ignored.
    pub ignored: usize,
    /// Tests that were running when the time was over.
    pub cut_off: Vec<String>,
}

impl Outcome {
    /// Adds the results of another run.
    pub fn add(&mut self, other: Self) {
        self.passed.extend(other.passed);
        self.failed.extend(other.failed);
        self.ignored += other.ignored;
        self.cut_off.extend(other.cut_off);
    }
}

/// How a test program is run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Manner {
    /// Show each test as it ends.
    pub show: bool,
    /// Show the command.
    pub verbose: bool,
    /// End the program after this time. Tests that are running then have neither passed nor failed.
    pub within: Option<Duration>,
    /// Time limit of each test, instead of its set's.
    pub limit: Option<Duration>,
}

/// Runs a command of [`Program::command`] with these libtest arguments.
///
/// # Errors
/// It cannot be started, or its output is not a test program's.
pub fn run(command: &mut Command, arguments: &[&str], manner: Manner) -> anyhow::Result<Outcome> {
    let begun = Instant::now();
    command.args(arguments).args(["-Z", "unstable-options", "--format", "json", "--report-time"]);
    command.env("RUSTC_BOOTSTRAP", "1").stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    announce(command, manner.verbose);
    let mut child = command.spawn().with_context(|| format!("cannot start {}", describe(command)))?;
    let events = events(&mut child);
    let mut run = Run { show: manner.show, limit: manner.limit, ..Run::default() };
    while !run.ended {
        match events.recv_timeout(Duration::from_secs(1)) {
            Ok(event) => run.heed(&event),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if let Some((name, limit)) = run.hung(Instant::now()) {
            let (left, processes) = (run.not_begun, group(&child));
            let reason = format!("had not ended after {limit:?}; {left} tests had not begun; running: {processes}");
            run.outcome.failed.push((name, reason));
            end_group(&mut child);
            return Ok(run.outcome);
        }
        if !run.ended && manner.within.is_some_and(|within| begun.elapsed() > within) {
            run.outcome.cut_off.extend(run.running.into_keys());
            end_group(&mut child);
            return Ok(run.outcome);
        }
    }
    // Something that a test left running may hold the pipe open.
    let status = child.wait().context("a test program cannot be waited for")?;
    if !run.ended {
        let under_way: Vec<&str> = run.running.keys().map(String::as_str).collect();
        if run.outcome.failed.is_empty() && under_way.is_empty() {
            bail!("{} ended early: {status}", describe(command));
        }
        let name = under_way.join(", ");
        run.outcome.failed.push((name, format!("the test program ended under way: {status}")));
    }
    Ok(run.outcome)
}

/// Returns the events that a test program writes, one per line. Other lines come from the tests.
fn events(child: &mut Child) -> Receiver<Value> {
    let (sender, receiver) = channel();
    let Some(stdout) = child.stdout.take() else { return receiver };
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            match serde_json::from_str::<Value>(&line) {
                Ok(event) if event["type"].is_string() => {
                    if sender.send(event).is_err() {
                        return;
                    }
                }
                _ => println!("{line}"),
            }
        }
    });
    receiver
}

/// A run in progress.
#[derive(Default)]
struct Run {
    running: BTreeMap<String, Instant>,
    outcome: Outcome,
    show: bool,
    limit: Option<Duration>,
    /// Number of tests that have not begun.
    not_begun: u64,
    ended: bool,
}

impl Run {
    fn heed(&mut self, event: &Value) {
        let kind = event["event"].as_str().unwrap_or_default();
        if event["type"] == "suite" {
            self.ended |= kind == "ok" || kind == "failed";
            self.not_begun = event["test_count"].as_u64().unwrap_or_default();
            return;
        }
        let Some(name) = event["name"].as_str().map(str::to_owned) else { return };
        let seconds = event["exec_time"].as_f64().unwrap_or_default();
        match kind {
            "started" => {
                self.not_begun = self.not_begun.saturating_sub(1);
                self.running.insert(name, Instant::now());
                return;
            }
            "ok" => {
                if self.show {
                    say!("ok {name} ({seconds:.1} s)");
                }
                self.outcome.passed.push((name.clone(), seconds));
            }
            "failed" => {
                let said = event["stdout"].as_str().or(event["message"].as_str()).unwrap_or_default();
                say!("FAILED {name} ({seconds:.1} s)\n{said}");
                self.outcome.failed.push((name.clone(), format!("failed after {seconds:.1} s")));
            }
            "ignored" => self.outcome.ignored += 1,
            _ => return,
        }
        self.running.remove(&name);
    }

    /// Returns a test that has exceeded its time limit, and the limit.
    fn hung(&self, now: Instant) -> Option<(String, Duration)> {
        self.running.iter().find_map(|(name, begun)| {
            let limit = self.limit.unwrap_or(if is_long(name) { LONG_LIMIT } else { LANDING_LIMIT });
            (now.duration_since(*begun) > limit).then(|| (name.clone(), limit))
        })
    }
}

/// Whether a test belongs to the long set: one of its modules is called `long`.
pub fn is_long(name: &str) -> bool {
    name.split("::").any(|part| part == "long")
}

/// Returns the command lines of the processes that a test program started, to show what it may be waiting for.
fn group(child: &Child) -> String {
    let pids = read(Command::new("pgrep").args(["--pgroup", &child.id().to_string(), "--list-full"]));
    pids.unwrap_or_default().lines().collect::<Vec<_>>().join("; ")
}

/// Ends a test program and everything that it started. heapbpf removes its probes on SIGTERM.
fn end_group(child: &mut Child) {
    let group = format!("-{}", child.id());
    for (signal, seconds) in [("-TERM", 5), ("-KILL", 0)] {
        let kill = |mut command: Command| command.args([signal, "--", &group]).status().is_ok_and(|it| it.success());
        // Processes under sudo belong to root.
        let mut as_root = Command::new("sudo");
        as_root.args(["-n", "kill"]);
        let _ = kill(Command::new("kill")) || kill(as_root);
        let end = Instant::now() + Duration::from_secs(seconds);
        while child.try_wait().is_ok_and(|status| status.is_none()) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_script(script: &str, limit: Option<Duration>) -> anyhow::Result<Outcome> {
        // libtest's options become arguments of the script.
        run(Command::new("sh").args(["-c", script, "sh"]), &[], Manner { limit, ..Manner::default() })
    }

    #[test]
    fn a_program_that_ends_in_a_test_names_it() {
        let script = r#"echo '{ "type": "test", "event": "started", "name": "a::b" }'; kill -9 $$"#;
        let failed = run_script(script, None).expect("a test program").failed;
        assert!(failed[0].0 == "a::b" && failed[0].1.contains("signal: 9"), "{failed:?}");
        assert!(run_script("exit 3", None).is_err(), "not a test program");
    }

    #[test]
    fn a_test_that_hangs_is_ended_and_named_with_what_it_started() {
        let script = r#"
            echo '{ "type": "suite", "event": "started", "test_count": 4 }'
            echo '{ "type": "test", "event": "started", "name": "ignored" }'
            echo '{ "type": "test", "name": "ignored", "event": "ignored" }'
            echo '{ "type": "test", "event": "started", "name": "hangs" }'
            sleep 1234"#;
        let failed = run_script(script, Some(Duration::from_secs(3))).expect("a test program").failed;
        let [(name, reason)] = &failed[..] else { panic!("{failed:?}") };
        assert_eq!(name, "hangs");
        assert!(reason.contains("2 tests had not begun") && reason.contains("sleep 1234"), "{reason}");
    }

    #[test]
    fn a_test_may_take_as_long_as_its_set_allows() {
        assert!(is_long("long::torture::killed") && is_long("alone::long::x") && !is_long("belong::x"));
        let mut run = Run::default();
        let begun = Instant::now();
        let later = begun + LANDING_LIMIT + Duration::from_secs(1);
        run.running.insert("long::x".into(), begun);
        assert_eq!(run.hung(later), None);
        run.running.insert("x".into(), begun);
        assert_eq!(run.hung(begun), None);
        assert_eq!(run.hung(later), Some(("x".into(), LANDING_LIMIT)));
    }
}
