//! Runs the binary under test: starts a recording, waits for its probes, ends it, and collects its output.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;

use crate::environment::{heapbpf, stop_limit};
use crate::output::{self, Profile, Stats};
use crate::refusing::{Faults, Linking, fail_calls, run_on};
use crate::target::{Lines, Target, until, wait};
use crate::truth::Truth;
use crate::{checks, kernel};

/// The line that heapbpf prints when its probes are in place.
const RECORDING: &str = "heapbpf: recording";

/// A recording to be started. By default it writes all formats into a temporary directory.
pub struct Recorder {
    arguments: Vec<OsString>,
    command: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    through: Vec<OsString>,
    dir: TempDir,
    outputs: bool,
    linking: Linking,
    faults: Option<Arc<Faults>>,
}

impl Default for Recorder {
    fn default() -> Self {
        Self::new()
    }
}

impl Recorder {
    /// A recording without a target, with reproducible draws (`--seed 1`) and stacks by process (`--group-by pid`).
    ///
    /// # Panics
    /// If no temporary directory can be created.
    pub fn new() -> Self {
        let dir = TempDir::with_prefix("heapbpf-test-").expect("a temporary directory");
        Self {
            arguments: ["--seed", "1", "--group-by", "pid"].map(Into::into).to_vec(),
            command: vec![],
            environment: vec![],
            through: vec![],
            dir,
            outputs: true,
            linking: Linking::default(),
            faults: None,
        }
    }

    /// A recording of one process at sampling interval R.
    pub fn of(pid: u32, interval: u64) -> Self {
        Self::new().pid(pid).interval(interval)
    }

    /// Runs it as a service (`heapbpf serve`).
    pub fn service(mut self) -> Self {
        self.arguments.insert(0, "serve".into());
        self
    }

    /// Adds a process to record.
    pub fn pid(self, pid: u32) -> Self {
        self.option("--pid", &pid.to_string())
    }

    /// Sets the sampling interval R in bytes.
    pub fn interval(self, interval: u64) -> Self {
        self.option("--interval", &interval.to_string())
    }

    /// Adds an argument.
    pub fn flag(mut self, flag: &str) -> Self {
        self.arguments.push(flag.into());
        self
    }

    /// Adds several arguments.
    pub fn flags(self, flags: &[&str]) -> Self {
        flags.iter().fold(self, |recorder, flag| recorder.flag(flag))
    }

    /// Adds an option and its value. `--seed` replaces the default seed.
    pub fn option(mut self, option: &str, value: &str) -> Self {
        if option == "--seed"
            && let Some(at) = self.arguments.iter().position(|argument| argument == "--seed")
        {
            self.arguments.drain(at..at + 2);
        }
        self.arguments.extend([option.into(), value.into()]);
        self
    }

    /// Records a command that heapbpf starts itself. heapbpf is quiet, so that only the command writes to standard
    /// output.
    pub fn command<S: AsRef<OsStr>>(mut self, program: &Path, arguments: impl IntoIterator<Item = S>) -> Self {
        self.command = vec![program.into()];
        self.command.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self.flag("-q")
    }

    /// Sets a variable in heapbpf's environment, which its command inherits.
    pub fn variable(mut self, name: &str, value: &OsStr) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Starts heapbpf through another program that takes a command line (`setpriv …`).
    pub fn through(mut self, words: &[&OsStr]) -> Self {
        self.through = words.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// Writes no files except those that the test requests.
    pub fn without_outputs(mut self) -> Self {
        self.outputs = false;
        self
    }

    /// Runs heapbpf as on a kernel that makes links like this.
    pub fn on_kernel(mut self, linking: Linking) -> Self {
        self.linking = linking;
        self
    }

    /// Runs heapbpf as on a kernel where some calls fail.
    pub fn failing(mut self, faults: &Arc<Faults>) -> Self {
        self.faults = Some(Arc::clone(faults));
        self
    }

    /// The directory that heapbpf runs and writes in.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn prepare(&self) -> Command {
        let words: Vec<OsString> = self.through.iter().cloned().chain([heapbpf().into()]).collect();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command.current_dir(self.dir.path()).envs(self.environment.iter().map(|(a, b)| (a, b))).args(&self.arguments);
        if self.outputs {
            command.args([
                "-o",
                "profile.json",
                "-o",
                "profile.pb.gz",
                "-o",
                "profile.folded",
                "--stats",
                "stats.json",
            ]);
        }
        if !self.command.is_empty() {
            command.arg("--").args(&self.command);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.envs(stop_limit());
        let heed_interrupts = || {
            for signal in [libc::SIGINT, libc::SIGHUP] {
                // SAFETY: `signal` with the default action is async-signal-safe, as needed between fork and exec.
                unsafe { libc::signal(signal, libc::SIG_DFL) };
            }
            Ok(())
        };
        // A shell script's background processes ignore SIGINT, those of nohup SIGHUP. heapbpf would as well if these
        // tests run in one.
        // SAFETY: the closure makes async-signal-safe calls and does not allocate, as needed between fork and exec.
        unsafe { command.pre_exec(heed_interrupts) };
        if self.linking.is_other() {
            run_on(self.linking, &mut command).expect("the kernel has filters with listeners");
        }
        if let Some(faults) = &self.faults {
            fail_calls(&mut command, Arc::clone(faults)).expect("the kernel has filters with listeners");
        }
        command
    }

    /// Starts heapbpf and waits until its probes are in place.
    ///
    /// # Panics
    /// If it exits instead. The panic has its message.
    pub fn start(self) -> Recording {
        self.try_start().unwrap_or_else(|said| panic!("heapbpf did not begin to record {said}"))
    }

    /// Starts heapbpf and waits until its probes are in place.
    ///
    /// # Errors
    /// heapbpf exits instead: its exit status and its message.
    ///
    /// # Panics
    /// If the binary under test does not run.
    pub fn try_start(self) -> Result<Recording, String> {
        let mut child = self.prepare().spawn().expect("the binary under test runs");
        let stdout = Lines::of(child.stdout.take().expect("piped"));
        let stderr = Lines::of(child.stderr.take().expect("piped"));
        let mut said = Vec::new();
        while let Some(line) = stderr.next() {
            said.push(line);
            if said.last().is_some_and(|line| line.starts_with(RECORDING)) {
                let links = kernel::links_of(child.id());
                return Ok(Recording { child: Some(child), stdout, stderr, said, links, dir: self.dir });
            }
        }
        let status = wait(&mut child, "heapbpf");
        Err(format!("({status}):\n{}", said.join("\n")))
    }

    /// Records a program from READY to its report, and ends as Ctrl-C would.
    ///
    /// # Panics
    /// If heapbpf fails, or the program ends without a report.
    pub fn record(self, target: &mut Target) -> (Outcome, Truth) {
        let recording = self.start();
        let truth = target.run();
        (recording.stop(), truth)
    }

    /// Like [`Recorder::record`], with the results ([`Outcome::results`]).
    ///
    /// # Panics
    /// As [`Recorder::record`], or if the results contradict themselves.
    pub fn results_of(self, target: &mut Target) -> (Profile, Stats, Truth) {
        let (outcome, truth) = self.record(target);
        let (profile, stats) = outcome.results();
        (profile, stats, truth)
    }

    /// Starts heapbpf with `--listen` on a loopback port, and also returns the address.
    ///
    /// # Panics
    /// As [`Recorder::start`], or if it does not print its address.
    pub fn serve(self) -> (Recording, SocketAddr) {
        let recording = self.option("--listen", "127.0.0.1:0").start();
        let address = loop {
            // Other messages may come first.
            let line = recording.next_line();
            if let Some(address) = line.strip_prefix("heapbpf: listening on http://") {
                break address.split(' ').next().unwrap_or_default().to_owned();
            }
        };
        (recording, address.parse().expect("an address"))
    }

    /// Runs heapbpf and expects it to exit without a recording.
    ///
    /// # Panics
    /// If it keeps running.
    pub fn refused(self) -> Refused {
        let orphans = kernel::orphaned_links();
        let mut child = self.prepare().spawn().expect("the binary under test runs");
        let stdout = Lines::of(child.stdout.take().expect("piped"));
        let stderr = Lines::of(child.stderr.take().expect("piped"));
        let said = stderr.rest().join("\n");
        let shown = stdout.rest().join("\n");
        let status = wait(&mut child, "heapbpf");
        let left = kernel::new_orphaned_links(&orphans);
        assert!(left.is_empty(), "BPF links that nobody holds any more: {left:?}");
        Refused { status, stderr: said, stdout: shown, dir: self.dir }
    }
}

/// The result of a refused run.
pub struct Refused {
    /// Exit status.
    pub status: ExitStatus,
    /// Standard error.
    pub stderr: String,
    /// Standard output.
    pub stdout: String,
    /// The directory it ran in.
    pub dir: TempDir,
}

impl Refused {
    /// Checks the exit status, that standard error contains one of these words, and that it is short and readable.
    ///
    /// # Panics
    /// If a check fails.
    pub fn check(&self, code: i32, words: &[&str]) {
        assert_eq!(self.status.code(), Some(code), "stderr: {}", self.stderr);
        let text = self.stderr.to_lowercase();
        assert!(words.iter().any(|word| text.contains(&word.to_lowercase())), "none of {words:?} in: {}", self.stderr);
        assert!(!text.contains("panicked") && !text.contains("rust_backtrace"), "{}", self.stderr);
        assert!(!self.stderr.lines().any(|line| line.starts_with(RECORDING)), "it began to record: {}", self.stderr);
    }
}

/// A running recording. Killed when dropped.
pub struct Recording {
    child: Option<Child>,
    stdout: Lines,
    stderr: Lines,
    said: Vec<String>,
    /// BPF links it holds.
    pub links: BTreeSet<u32>,
    dir: TempDir,
}

/// Waits until a number that heapbpf changes stays the same. Links are made one right after the other, but on a busy
/// machine a thread that makes them may wait for a CPU or for the kernel for long: what is seen meanwhile is no
/// evidence.
fn settled(what: &str, heapbpf: u32, mut number: impl FnMut() -> usize) {
    let (mut before, mut equal) = (0, 0);
    until(what, || {
        std::thread::sleep(Duration::from_millis(100));
        let is_idle = sleeps(heapbpf);
        let now = number();
        if std::mem::replace(&mut before, now) != now {
            equal = 0;
        } else if is_idle {
            equal += 1;
        }
        equal == 3
    });
}

/// Whether all threads of a process wait for events: none runs, waits for a CPU, or is busy in the kernel.
fn sleeps(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    stats.all(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S')))
}

impl Recording {
    /// heapbpf's process id.
    ///
    /// # Panics
    /// Never while the recording is running.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("under way").id()
    }

    /// Waits until heapbpf holds more links than at the start, that is, until a forked child has its own.
    ///
    /// # Panics
    /// If none is added within [`PATIENCE`](crate::target::PATIENCE).
    pub fn await_more_links(&mut self) {
        let pid = self.pid();
        let added = |known: &BTreeSet<u32>| kernel::links_of(pid).difference(known).next().is_some();
        until("links for a child", || added(&self.links));
        settled("all links for the child", pid, || kernel::links_of(pid).len());
        self.links.extend(kernel::links_of(pid));
    }

    /// Waits until a file has all its links. Other files on the host may get links at the same time.
    ///
    /// # Panics
    /// If it has none within [`PATIENCE`](crate::target::PATIENCE).
    pub fn await_links_of(&mut self, file: &Path) {
        let pid = self.pid();
        if !kernel::reports_files_of_links(pid) {
            return self.await_more_links();
        }
        until("links of a file", || kernel::links_to(pid, file) > 0);
        settled("all links of a file", pid, || kernel::links_to(pid, file));
        self.links.extend(kernel::links_of(pid));
    }

    /// The next line on heapbpf's standard error.
    ///
    /// # Panics
    /// If it exits instead.
    pub fn next_line(&self) -> String {
        self.stderr.next().expect("heapbpf has ended")
    }

    /// Number of lines on heapbpf's standard error so far.
    pub fn lines_by_now(&mut self) -> usize {
        self.said.extend(self.stderr.ready());
        self.said.len()
    }

    /// Waits for a line on heapbpf's standard error that contains these words and comes after the first `after` lines.
    ///
    /// # Panics
    /// If it exits instead.
    pub fn await_line(&mut self, words: &str, after: usize) {
        let has_said = |said: &[String]| said.iter().skip(after).any(|line| line.contains(words));
        while !has_said(&self.said) {
            self.said.push(self.next_line());
        }
    }

    /// What heapbpf wrote to standard error until its probes were in place, and up to the line that was last awaited.
    pub fn said(&self) -> String {
        self.said.join("\n")
    }

    /// Sends heapbpf a signal.
    ///
    /// # Panics
    /// If it has ended.
    pub fn signal(&self, signal: libc::c_int) {
        // SAFETY: `kill` takes plain integers. The child has not been waited for, so its id cannot have been reused.
        let result = unsafe { libc::kill(self.pid() as libc::pid_t, signal) };
        assert_eq!(result, 0, "heapbpf is gone");
    }

    /// The next line on heapbpf's standard output, which it shares with its command.
    ///
    /// # Panics
    /// If there is none.
    pub fn line(&self) -> String {
        self.stdout.next().expect("standard output has ended")
    }

    /// The directory that heapbpf writes in.
    pub fn dir(&self) -> PathBuf {
        self.dir.path().to_path_buf()
    }

    /// Ends heapbpf as Ctrl-C would, and collects its output.
    ///
    /// # Panics
    /// If it fails.
    pub fn stop(self) -> Outcome {
        self.signal(libc::SIGINT);
        self.finish()
    }

    /// Waits until heapbpf exits with status 0, and collects its output.
    ///
    /// # Panics
    /// If it fails.
    pub fn finish(self) -> Outcome {
        let outcome = self.ends();
        assert_eq!(outcome.status.code(), Some(0), "signal {:?}:\n{}", outcome.status.signal(), outcome.stderr);
        outcome
    }

    /// Waits until heapbpf exits with any status, and collects its output. All probes must be gone.
    ///
    /// # Panics
    /// If it does not exit, or leaves links behind.
    pub fn ends(mut self) -> Outcome {
        // If the wait times out, it must not keep running with probes all over the host.
        self.said.extend(self.stderr.rest());
        let stdout = self.stdout.rest().join("\n");
        let mut child = self.child.take().expect("under way");
        let status = wait(&mut child, "heapbpf");
        let left = kernel::links_that_stay(&self.links);
        assert!(left.is_empty(), "BPF links of the recording that outlive it: {left:?}");
        let dir = std::mem::replace(&mut self.dir, TempDir::new().expect("a temporary directory"));
        Outcome { status, stdout, stderr: self.said.join("\n"), dir }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The results of a recording.
pub struct Outcome {
    /// Exit status.
    pub status: ExitStatus,
    /// Standard output: the closing table.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    dir: TempDir,
}

impl Outcome {
    /// Path of a file that heapbpf wrote.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The directory that heapbpf wrote in.
    pub fn dir(&self) -> PathBuf {
        self.dir.path().to_path_buf()
    }

    /// Names of all files that heapbpf wrote, sorted.
    ///
    /// # Panics
    /// If the directory is gone.
    pub fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.path()).expect("our own directory");
        let mut names: Vec<_> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The profile and the statistics, after the checks that hold for every recording ([`checks::always`]).
    ///
    /// # Panics
    /// If they are missing, malformed, or contradict themselves.
    pub fn results(&self) -> (Profile, Stats) {
        let (profile, stats) = (output::read(&self.file("profile.json")), output::read(&self.file("stats.json")));
        checks::always(&profile, &stats);
        (profile, stats)
    }

    /// What `heapbpf report` shows of the profile.
    ///
    /// # Panics
    /// If it fails.
    pub fn report(&self, arguments: &[&str]) -> String {
        self.report_of("profile.json", arguments)
    }

    /// What `heapbpf report` shows of one of the files.
    ///
    /// # Panics
    /// If it fails.
    pub fn report_of(&self, file: &str, arguments: &[&str]) -> String {
        let mut command = Command::new(heapbpf());
        let output = command.arg("report").args(arguments).arg(self.file(file)).output().expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    /// A warning not to trust figures, on standard output or error, in the profile's notes, or in its report.
    ///
    /// # Panics
    /// If there is no profile.
    pub fn alarm(&self) -> Option<String> {
        let report = self.report(&[]);
        assert!(report.contains("in use"), "{report}");
        let profile: Profile = output::read(&self.file("profile.json"));
        let texts = [&self.stdout, &self.stderr, &report, &profile.notes.join("\n")];
        // Lines are wrapped.
        let folded = texts.map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "));
        let alarm = |text: &String| {
            let at = text.find("do not trust")?;
            Some(text[text[..at].rfind('!').unwrap_or(0)..at + "do not trust".len()].to_owned())
        };
        folded.iter().find_map(alarm)
    }
}
