//! The process that costs are measured on: it runs pairs of malloc and free on request.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use heapbpf_host::arch::MICROBENCHMARKS;
use heapbpf_host::clock::{monotonic_ns, thread_cpu_time};

use super::library::PrivateLibrary;

/// Argument that makes heapbpf run as a workload.
pub const WORD: &str = "pairs-for-measuring";

/// A workload process, killed when dropped.
pub struct Workload {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// Time that a request took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spent {
    /// Wall-clock time, nanoseconds.
    pub wall_ns: u64,
    /// CPU time of all threads together, nanoseconds.
    pub cpu_ns: u64,
}

impl Workload {
    /// Starts a program that implements the protocol of [`serve`], and waits until it is ready.
    ///
    /// # Errors
    /// It cannot be started, or exits at once.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let mut workload = Self { child, input, output: BufReader::new(output) };
        workload.answer()?;
        Ok(workload)
    }

    /// Starts heapbpf itself as a workload, with a private C library if there is one.
    ///
    /// # Errors
    /// Those of [`start`](Self::start).
    pub fn start_own(library: Option<&PrivateLibrary>) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        if let Some(library) = library {
            command.env("LD_LIBRARY_PATH", library.dir());
        }
        Self::start(command.arg(WORD))
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Runs pairs of malloc and free in every thread.
    ///
    /// # Errors
    /// The process is gone.
    pub fn run(&mut self, pairs: u64, size: u64) -> io::Result<Spent> {
        self.request(&format!("run {pairs} {size}\n"))
    }

    /// Calls a microbenchmark, given by its index. Only heapbpf's own workload implements this.
    ///
    /// # Errors
    /// The process is gone.
    pub(super) fn call(&mut self, microbenchmark: usize, calls: u64) -> io::Result<Spent> {
        self.request(&format!("call {calls} {microbenchmark}\n"))
    }

    /// Sends a request, a line of the protocol, and waits for the answer.
    ///
    /// # Errors
    /// The process is gone.
    pub fn request(&mut self, line: &str) -> io::Result<Spent> {
        self.input.write_all(line.as_bytes())?;
        let answer = self.answer()?;
        let mut words = answer.split_ascii_whitespace().map(str::parse);
        match (words.next(), words.next()) {
            (Some(Ok(wall_ns)), Some(Ok(cpu_ns))) => Ok(Spent { wall_ns, cpu_ns }),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    fn answer(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line)
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        // Both fail only if the process has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs as a workload until standard input ends. Answers `run PAIRS SIZE` and `call CALLS MICROBENCHMARK` with
/// `WALL_NS CPU_NS`.
///
/// # Errors
/// Input or output fail, or a request is malformed.
pub fn serve() -> io::Result<()> {
    let mut output = io::stdout().lock();
    writeln!(output, "READY {}", std::process::id())?;
    output.flush()?;
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let [word, count, argument] = words[..] else { return Err(io::ErrorKind::InvalidInput.into()) };
        let (Ok(count), Ok(argument)) = (count.parse::<u64>(), argument.parse::<usize>()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let (wall, cpu) = (monotonic_ns(), thread_cpu_time());
        match (word, MICROBENCHMARKS.get(argument)) {
            ("run", _) => {
                for _ in 0..count {
                    // SAFETY: `free` gets what `malloc` just returned, once; NULL is allowed.
                    unsafe { libc::free(std::hint::black_box(libc::malloc(argument))) };
                }
            }
            ("call", Some((_, microbenchmark))) => {
                let microbenchmark = std::hint::black_box(*microbenchmark);
                (0..count).for_each(|_| microbenchmark());
            }
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        let (cpu_ns, wall_ns) = ((thread_cpu_time() - cpu).as_nanos(), monotonic_ns() - wall);
        writeln!(output, "{wall_ns} {cpu_ns}")?;
        output.flush()?;
    }
    Ok(())
}
