//! A target program that implements the protocol of `tests/programs/truth.h`.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::LazyLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use procfs::ProcResult;
use procfs::process::{MMapPath, MemoryMap, Process, Stat};

use crate::others::Beside;
use crate::truth::Truth;

/// Timeout of every wait, as a guard against hanging: nothing in these tests takes that long. On slower, emulated
/// machines, `HEAPBPF_TEST_PATIENCE` sets another one, in seconds.
pub static PATIENCE: LazyLock<Duration> = LazyLock::new(|| {
    let configured = std::env::var("HEAPBPF_TEST_PATIENCE").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(configured.unwrap_or(120))
});

/// The lines of a pipe, read by a separate thread so that waiting for one can time out.
pub struct Lines(Receiver<String>);

impl Lines {
    /// Starts reading the pipe.
    pub fn of(pipe: impl Read + Send + 'static) -> Self {
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            let mut pipe = BufReader::new(pipe);
            let mut line = Vec::new();
            while pipe.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                if sender.send(String::from_utf8_lossy(&line).trim_end_matches('\n').to_owned()).is_err() {
                    return;
                }
                line.clear();
            }
        });
        Self(receiver)
    }

    /// The next line, or `None` at the end of the pipe.
    ///
    /// # Panics
    /// If nothing arrives within [`PATIENCE`].
    pub fn next(&self) -> Option<String> {
        match self.0.recv_timeout(*PATIENCE) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("nothing more was written for {:?}", *PATIENCE),
        }
    }

    /// Lines that have been read so far.
    pub fn ready(&self) -> Vec<String> {
        self.0.try_iter().collect()
    }

    /// All lines up to the end of the pipe.
    pub fn rest(&self) -> Vec<String> {
        std::iter::from_fn(|| self.next()).collect()
    }
}

/// Waits until a condition holds, which another process brings about.
///
/// # Panics
/// If it takes longer than [`PATIENCE`].
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < *PATIENCE, "{what}: still not, after {:?}", *PATIENCE);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A field of the `status` file of a process or a thread; `None` if it has ended.
pub fn status(pid: u32, name: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?.trim().to_owned())
}

/// A size in the `status` file of a process, in bytes; `None` if it has ended.
pub fn status_bytes(pid: u32, name: &str) -> Option<u64> {
    Some(status(pid, name)?.trim_end_matches(" kB").parse::<u64>().ok()? << 10)
}

/// Resident memory of a process in bytes; `None` if it has ended.
pub fn resident_bytes(pid: u32) -> Option<u64> {
    status_bytes(pid, "VmRSS")
}

pub(crate) fn of_process<T>(pid: u32, read: impl FnOnce(&Process) -> ProcResult<T>) -> ProcResult<T> {
    Process::new(pid.cast_signed()).and_then(|process| read(&process))
}

/// The fields of a process's `stat` file.
///
/// # Panics
/// If it does not run.
pub fn stat(pid: u32) -> Stat {
    of_process(pid, Process::stat).expect("it runs")
}

/// The mappings of a process.
///
/// # Panics
/// If it does not run.
pub fn mappings(pid: u32) -> Vec<MemoryMap> {
    of_process(pid, Process::maps).expect("it runs").0
}

/// The sum of a field of `smaps` over the mappings of a process that count, in bytes.
///
/// # Panics
/// If it does not run.
pub fn memory_bytes(pid: u32, field: &str, counts: impl Fn(&MemoryMap) -> bool) -> u64 {
    let all = of_process(pid, Process::smaps).expect("it runs");
    all.iter().filter(|map| counts(map)).filter_map(|map| map.extension.map.get(field)).sum()
}

/// The file of a mapping; empty if it has none.
pub fn file_of(mapping: &MemoryMap) -> &str {
    match &mapping.pathname {
        MMapPath::Path(path) => path.to_str().unwrap_or_default(),
        _ => "",
    }
}

/// The state of a process (proc(5)); `None` if it has ended.
pub fn state_of(pid: u32) -> Option<char> {
    status(pid, "State")?.chars().next()
}

/// The process that traces a process, or 0.
pub fn tracer_of(pid: u32) -> u32 {
    status(pid, "TracerPid").and_then(|pid| pid.parse().ok()).unwrap_or(0)
}

/// The processes of the host.
pub fn processes() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The children of a process.
pub fn children_of(pid: u32) -> Vec<u32> {
    let threads = of_process(pid, Process::tasks).into_iter().flatten().flatten();
    threads.filter_map(|thread| thread.children().ok()).flatten().collect()
}

/// CPU time that a process has used.
///
/// # Panics
/// If it does not run.
pub fn cpu_time(pid: u32) -> Duration {
    let stat = stat(pid);
    Duration::from_secs_f64((stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64)
}

/// Waits for a child to exit.
///
/// # Panics
/// If it takes longer than [`PATIENCE`]; the child is killed first.
pub fn wait(child: &mut Child, what: &str) -> ExitStatus {
    let step = Duration::from_millis(5);
    for _ in 0..PATIENCE.as_millis() / step.as_millis() {
        if let Some(status) = child.try_wait().expect("our own child") {
            return status;
        }
        std::thread::sleep(step);
    }
    let _ = child.kill();
    panic!("{what} did not end within {:?}", *PATIENCE);
}

/// A started program that waits after READY. Killed when dropped.
pub struct Target {
    child: Beside,
    stdin: Option<ChildStdin>,
    lines: Lines,
}

impl Target {
    /// Starts a program and waits until it prints READY.
    ///
    /// # Panics
    /// If it does not start, or prints something else.
    pub fn start<S: AsRef<OsStr>>(program: &Path, arguments: impl IntoIterator<Item = S>) -> Self {
        Self::start_command(Command::new(program).args(arguments))
    }

    /// Like [`Target::start`], with a prepared command.
    ///
    /// # Panics
    /// As [`Target::start`].
    pub fn start_command(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("{}: {e}", command.get_program().display()));
        let lines = Lines::of(child.stdout.take().expect("piped"));
        let target = Self { stdin: child.stdin.take(), child: Beside(child), lines };
        let first = target.lines.next().unwrap_or_default();
        assert!(first.starts_with("READY "), "instead of READY: {first:?}");
        target
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Lets the program continue: to its sites after READY, to its next step, or to its end after the report.
    pub fn go(&mut self) {
        if let Some(stdin) = &mut self.stdin {
            // Writing fails if the program killed itself.
            let _ = stdin.write_all(b"go\n");
        }
    }

    /// Waits until the program has finished a step.
    ///
    /// # Panics
    /// If it prints its report or exits instead.
    pub fn step(&self) {
        assert_eq!(self.lines.next().as_deref(), Some("STEP"));
    }

    /// Waits for the next line that the program prints.
    ///
    /// # Panics
    /// If it ends instead.
    pub fn line(&self) -> String {
        self.lines.next().expect("the program ended without a report")
    }

    /// Waits for a line of sums: `SUM` and `N` numbers.
    ///
    /// # Panics
    /// If it prints another line, or ends instead.
    pub fn sums<const N: usize>(&self) -> [u64; N] {
        let line = self.line();
        let mut numbers = line.strip_prefix("SUM ").expect("sums").split(' ').map(|number| number.parse());
        [(); N].map(|()| numbers.next().expect("enough numbers").expect("a number"))
    }

    /// Waits for the program's report, the truth. The program keeps running, with its live blocks in place.
    ///
    /// # Panics
    /// If it exits without a report.
    pub fn truth(&self) -> Truth {
        let line = self.line();
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("not a report: {e}: {line}"))
    }

    /// Waits for the report of `churn`, and returns how many bytes it has allocated.
    ///
    /// # Panics
    /// If it exits without a report.
    pub fn churned_bytes(&self) -> f64 {
        let report: serde_json::Value = serde_json::from_str(&self.line()).expect("a report");
        report["sites"].as_array().expect("sites").iter().map(|site| site["bytes"].as_f64().expect("bytes")).sum()
    }

    /// Lets the program continue to its sites, and waits for its report.
    pub fn run(&mut self) -> Truth {
        self.go();
        self.truth()
    }

    /// Checks that the program has not ended.
    ///
    /// # Panics
    /// If it has ended. The message has its exit status and `last`, the last thing done to it.
    pub fn assert_runs(&mut self, last: &str) {
        let ended = self.child.0.try_wait().expect("our child");
        assert!(ended.is_none(), "it came to harm: {ended:?}, after {last}");
    }

    /// Lets the program exit.
    pub fn end(mut self) -> ExitStatus {
        self.go();
        drop(self.stdin.take());
        wait(&mut self.child.0, "the program")
    }
}
