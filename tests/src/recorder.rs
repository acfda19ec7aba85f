//! Runs the binary under test: starts a recording, waits for its probes, ends it, collects what it wrote.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::environment::heapbpf;
use crate::output::{self, Profile, Stats};
use crate::refusing::refuse_links;
use crate::target::{Lines, until, wait};
use crate::{checks, kernel};

/// The line that says that the probes are in place.
const RECORDING: &str = "heapbpf: recording";

/// A recording to be started. Writes all formats into a folder of its own.
pub struct Recorder {
    arguments: Vec<OsString>,
    command: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    through: Vec<OsString>,
    folder: TempDir,
    outputs: bool,
    refused_links: &'static [u32],
}

impl Default for Recorder {
    fn default() -> Self {
        Self::new()
    }
}

impl Recorder {
    /// Without a target yet; draws are reproducible (`--seed 1`).
    ///
    /// # Panics
    /// If there is no room for temporary files.
    pub fn new() -> Self {
        let folder = TempDir::with_prefix("heapbpf-test-").expect("a temporary folder");
        Self {
            arguments: vec!["--seed".into(), "1".into()],
            command: vec![],
            environment: vec![],
            through: vec![],
            folder,
            outputs: true,
            refused_links: &[],
        }
    }

    /// A recording of one process at mean interval R.
    pub fn of(pid: u32, interval: u64) -> Self {
        Self::new().pid(pid).interval(interval)
    }

    /// Adds a process.
    pub fn pid(self, pid: u32) -> Self {
        self.option("--pid", &pid.to_string())
    }

    /// Sets the mean interval R in bytes.
    pub fn interval(self, interval: u64) -> Self {
        self.option("--interval", &interval.to_string())
    }

    /// Adds an argument.
    pub fn flag(mut self, flag: &str) -> Self {
        self.arguments.push(flag.into());
        self
    }

    /// Adds an option and its value; replaces the seed.
    pub fn option(mut self, option: &str, value: &str) -> Self {
        if option == "--seed" {
            self.arguments.drain(..2);
        }
        self.arguments.extend([option.into(), value.into()]);
        self
    }

    /// Profiles a command that heapbpf starts itself, quietly: standard output is the command's alone.
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

    /// Writes no files but those that the case asks for itself.
    pub fn without_outputs(mut self) -> Self {
        self.outputs = false;
        self
    }

    /// Runs it where the kernel refuses links of these attach types.
    pub fn refusing(mut self, attach_types: &'static [u32]) -> Self {
        self.refused_links = attach_types;
        self
    }

    /// The folder that heapbpf runs and writes in.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn prepare(&self) -> Command {
        let words: Vec<OsString> = self.through.iter().cloned().chain([heapbpf().into()]).collect();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command
            .current_dir(self.folder.path())
            .envs(self.environment.iter().map(|(a, b)| (a, b)))
            .args(&self.arguments);
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
        let heed_interrupts = || {
            // SAFETY: no memory; safe between fork and exec.
            unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
            Ok(())
        };
        // What a script starts in the background ignores Ctrl-C, and so would all that these tests start there.
        // SAFETY: the closure does one system call.
        unsafe { command.pre_exec(heed_interrupts) };
        if !self.refused_links.is_empty() {
            refuse_links(&mut command, self.refused_links).expect("the kernel has filters with listeners");
        }
        command
    }

    /// Starts it and waits until its probes are in place.
    ///
    /// # Panics
    /// If it ends instead; its message is in the panic.
    pub fn start(self) -> Recording {
        let mut child = self.prepare().spawn().expect("the binary under test runs");
        let stdout = Lines::of(child.stdout.take().expect("piped"));
        let stderr = Lines::of(child.stderr.take().expect("piped"));
        let mut said = Vec::new();
        while let Some(line) = stderr.next() {
            said.push(line);
            if said.last().is_some_and(|line| line.starts_with(RECORDING)) {
                let links = kernel::links_of(child.id());
                return Recording { child: Some(child), stdout, stderr, said, links, folder: self.folder };
            }
        }
        let status = wait(&mut child, "heapbpf");
        panic!("heapbpf did not begin to record ({status}):\n{}", said.join("\n"));
    }

    /// Starts it with `--listen` on some port of loopback, and returns the address, too.
    ///
    /// # Panics
    /// As [`Recorder::start`], or if it does not say where it listens.
    pub fn serve(self) -> (Recording, SocketAddr) {
        let recording = self.option("--listen", "127.0.0.1:0").start();
        let line = recording.next_line();
        let address = line.strip_prefix("heapbpf: listening on http://").unwrap_or_else(|| panic!("{line}"));
        (recording, address.parse().expect("an address"))
    }

    /// Runs it to an end that is expected to come by itself and without a recording.
    ///
    /// # Panics
    /// If it runs on.
    pub fn refused(self) -> Refused {
        let orphans = kernel::orphaned_links();
        let mut child = self.prepare().spawn().expect("the binary under test runs");
        let stdout = Lines::of(child.stdout.take().expect("piped"));
        let stderr = Lines::of(child.stderr.take().expect("piped"));
        let said = stderr.rest().join("\n");
        let shown = stdout.rest().join("\n");
        let status = wait(&mut child, "heapbpf");
        let left: BTreeSet<u32> = kernel::orphaned_links().difference(&orphans).copied().collect();
        let left = kernel::links_that_stay(&left);
        assert!(left.is_empty(), "BPF links that nobody holds any more: {left:?}");
        Refused { status, stderr: said, stdout: shown, folder: self.folder }
    }
}

/// What a run came to that was refused.
pub struct Refused {
    /// Exit status.
    pub status: ExitStatus,
    /// Standard error.
    pub stderr: String,
    /// Standard output.
    pub stdout: String,
    /// Where it ran.
    pub folder: TempDir,
}

impl Refused {
    /// Checks the exit status, that standard error says one of these words, and that it is a short text for people.
    ///
    /// # Panics
    /// If not.
    pub fn check(&self, code: i32, words: &[&str]) {
        assert_eq!(self.status.code(), Some(code), "stderr: {}", self.stderr);
        let text = self.stderr.to_lowercase();
        assert!(words.iter().any(|word| text.contains(&word.to_lowercase())), "none of {words:?} in: {}", self.stderr);
        assert!(!text.contains("panicked") && !text.contains("rust_backtrace"), "{}", self.stderr);
        assert!(!self.stderr.lines().any(|line| line.starts_with(RECORDING)), "it began to record: {}", self.stderr);
    }
}

/// A recording under way. Killed when dropped.
pub struct Recording {
    child: Option<Child>,
    stdout: Lines,
    stderr: Lines,
    said: Vec<String>,
    /// BPF links it holds.
    pub links: BTreeSet<u32>,
    folder: TempDir,
}

impl Recording {
    /// heapbpf's process id.
    ///
    /// # Panics
    /// Never while the recording is under way.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("under way").id()
    }

    /// Waits until it holds more links than when it began: a target has forked, and the child has its own.
    ///
    /// # Panics
    /// If none is added for a long time.
    pub fn await_more_links(&mut self) {
        let pid = self.pid();
        let added = |known: &BTreeSet<u32>| kernel::links_of(pid).difference(known).next().is_some();
        until("links for a child", || added(&self.links));
        // They come one after the other, in no time.
        let mut before = 0;
        until("all links for the child", || {
            std::thread::sleep(Duration::from_millis(100));
            let now = kernel::links_of(pid).len();
            std::mem::replace(&mut before, now) == now
        });
        self.links.extend(kernel::links_of(pid));
    }

    /// Waits until a file has all its links, whatever else of the host gets some meanwhile.
    ///
    /// # Panics
    /// If it has none for a long time.
    pub fn await_links_of(&mut self, file: &Path) {
        let pid = self.pid();
        if !kernel::tells_files_of_links(pid) {
            return self.await_more_links();
        }
        let mut before = 0;
        until("links of a file", || {
            let now = kernel::links_to(pid, file);
            std::thread::sleep(Duration::from_millis(100));
            now > 0 && std::mem::replace(&mut before, now) == now
        });
        self.links.extend(kernel::links_of(pid));
    }

    /// The next line that it writes to standard error.
    ///
    /// # Panics
    /// If it ends instead.
    pub fn next_line(&self) -> String {
        self.stderr.next().expect("heapbpf has ended")
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// If it has ended.
    pub fn signal(&self, signal: libc::c_int) {
        // SAFETY: a plain system call; the process is our child and not yet waited for, so the id is still its own.
        let result = unsafe { libc::kill(self.pid() as libc::pid_t, signal) };
        assert_eq!(result, 0, "heapbpf is gone");
    }

    /// The next line on its standard output, which is its command's too.
    ///
    /// # Panics
    /// If there is none.
    pub fn line(&self) -> String {
        self.stdout.next().expect("standard output has ended")
    }

    /// The folder that it writes in.
    pub fn folder(&self) -> PathBuf {
        self.folder.path().to_path_buf()
    }

    /// Ends it as Ctrl-C would, and collects.
    ///
    /// # Panics
    /// If it fails.
    pub fn stop(self) -> Outcome {
        self.signal(libc::SIGINT);
        self.finish()
    }

    /// Waits for its end, whose exit status must be 0, and collects.
    ///
    /// # Panics
    /// If it fails.
    pub fn finish(self) -> Outcome {
        let outcome = self.ends();
        assert_eq!(outcome.status.code(), Some(0), "signal {:?}:\n{}", outcome.status.signal(), outcome.stderr);
        outcome
    }

    /// Waits for its end, whatever the exit status is, and collects. All probes must be gone.
    ///
    /// # Panics
    /// If it does not end, or something stays attached.
    pub fn ends(mut self) -> Outcome {
        // Whoever gives up waiting must not leave it running, with probes all over the host.
        self.said.extend(self.stderr.rest());
        let stdout = self.stdout.rest().join("\n");
        let mut child = self.child.take().expect("under way");
        let status = wait(&mut child, "heapbpf");
        let left = kernel::links_that_stay(&self.links);
        assert!(left.is_empty(), "BPF links of the recording that outlive it: {left:?}");
        let folder = std::mem::replace(&mut self.folder, TempDir::new().expect("a temporary folder"));
        Outcome { status, stdout, stderr: self.said.join("\n"), folder }
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

/// A recording's results.
pub struct Outcome {
    /// Exit status.
    pub status: ExitStatus,
    /// Standard output: the closing table.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    folder: TempDir,
}

impl Outcome {
    /// A file that it wrote.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The folder that it wrote in.
    pub fn folder(&self) -> PathBuf {
        self.folder.path().to_path_buf()
    }

    /// Names of all the files that it wrote, sorted.
    ///
    /// # Panics
    /// If the folder is gone.
    pub fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).expect("our own folder");
        let mut names: Vec<_> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The profile and the accounting, after the checks that hold for every recording ([`checks::always`]).
    ///
    /// # Panics
    /// If they are missing, malformed, or contradict themselves.
    pub fn results(&self) -> (Profile, Stats) {
        let (profile, stats) = (output::read(&self.file("profile.json")), output::read(&self.file("stats.json")));
        checks::always(&profile, &stats);
        (profile, stats)
    }
}
