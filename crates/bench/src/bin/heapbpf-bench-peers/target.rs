//! The process of a workload. It waits for the start. Then it reports what it did, runs to its end, or serves.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use heapbpf_record::cost::cpus::pin;
use heapbpf_record::cost::library::PrivateLibrary;
use serde::Deserialize;

use super::process;
use super::workloads::{Files, Protocol, Workload, requests, socket};

/// The truth about one call site.
#[derive(Clone, Debug, Deserialize)]
pub struct SiteTruth {
    /// Name of the function, `site_NN`.
    pub site: String,
    /// Bytes allocated.
    pub bytes: u64,
    /// Bytes in use at the end.
    pub live_bytes: u64,
}

/// The result of a run.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Done {
    /// CPU time, nanoseconds.
    pub cpu_ns: u64,
    /// Elapsed time, nanoseconds.
    #[serde(default)]
    pub wall_ns: u64,
    /// Truth by call site, for our own programs.
    #[serde(default)]
    pub sites: Vec<SiteTruth>,
    /// Largest resident memory, bytes.
    #[serde(default)]
    pub peak_bytes: u64,
}

/// A process to measure.
pub struct Target {
    child: Child,
    input: Option<ChildStdin>,
    output: Option<BufReader<ChildStdout>>,
    protocol: Protocol,
    operations: u64,
    /// Directory of a server's socket.
    inputs: PathBuf,
    /// Whether the process has been waited for. After that, its PID may belong to another process.
    ended: bool,
}

/// Waits like our own programs do, then executes the program.
const WAIT: &str = r#"echo READY $$; read line; exec env "$@""#;
/// Maximum time to wait for a program or a profiler to get ready.
pub const PATIENCE: Duration = Duration::from_secs(40);

/// Waits until `look` finds something. Fails if the child ends first.
pub fn awaited<T>(what: &str, child: &mut Child, mut look: impl FnMut(u32) -> Option<T>) -> anyhow::Result<T> {
    let begun = Instant::now();
    loop {
        if let Some(found) = look(child.id()) {
            return Ok(found);
        }
        if let Some(status) = child.try_wait()? {
            bail!("no {what}: it ended ({status})");
        }
        anyhow::ensure!(begun.elapsed() < PATIENCE, "no {what} after {} s", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Target {
    /// Starts the process, which waits for [`go`](Self::go), with these environment variables and this copy of the C
    /// library.
    pub fn start(
        workload: &Workload,
        operations: u64,
        variables: &[(String, String)],
        files: &Files,
        library: &PrivateLibrary,
    ) -> anyhow::Result<Self> {
        let inputs = files.inputs.clone();
        let words = workload.words(operations, files)?;
        let variables = variables.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let mut command = if workload.protocol == Protocol::ToEnd {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", WAIT, "sh"]).args(variables.map(|(name, value)| format!("{name}={value}")));
            command.args(&words);
            command
        } else {
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]).envs(variables);
            command
        };
        command.env("LD_LIBRARY_PATH", library.dir()).current_dir(&inputs);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", words[0]))?;
        pin(child.id(), |cpu| workload.all_cpus || cpu != 0);
        let (input, output) = (child.stdin.take(), child.stdout.take().context("piped")?);
        let mut target = Self {
            child,
            input,
            output: Some(BufReader::new(output)),
            protocol: workload.protocol,
            operations,
            inputs,
            ended: false,
        };
        if target.protocol == Protocol::Server {
            target.ignore_output();
            awaited("the server", &mut target.child, |_| UnixStream::connect(socket(&files.inputs)).ok())?;
        } else if !target.line()?.starts_with("READY") {
            bail!("{} does not wait", words[0]);
        }
        Ok(target)
    }

    /// Discards its output, so that a full pipe does not block it.
    fn ignore_output(&mut self) {
        let output = self.output.take();
        std::thread::spawn(move || output.map(|mut output| std::io::copy(&mut output, &mut std::io::sink())));
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        let output = self.output.as_mut().context("the workload has been let go")?;
        if output.read_line(&mut line)? == 0 {
            bail!("the workload ended: {}", self.child.wait()?);
        }
        Ok(line)
    }

    fn send(&mut self) -> std::io::Result<()> {
        self.input.as_mut().map_or(Ok(()), |input| input.write_all(b"\n"))
    }

    /// Starts the work and waits until it is done. One of our own programs then keeps its heap in place, and a server
    /// stays up.
    pub fn go(&mut self) -> anyhow::Result<Done> {
        match self.protocol {
            Protocol::Own => {
                self.send()?;
                let mut done: Done = serde_json::from_str(&self.line()?)?;
                done.peak_bytes = process::peak_bytes(self.pid());
                Ok(done)
            }
            Protocol::ToEnd => {
                self.send()?;
                self.ignore_output();
                self.await_end()
            }
            Protocol::Server => self.serve(),
        }
    }

    fn serve(&self) -> anyhow::Result<Done> {
        let (begun, before) = (Instant::now(), process::cpu_seconds(self.pid()));
        let asked = requests(self.operations, &self.inputs)?.output().context("cannot ask the server")?;
        let wall_ns = u64::try_from(begun.elapsed().as_nanos())?;
        if !asked.status.success() {
            bail!("the server was not asked all: {}", String::from_utf8_lossy(&asked.stderr));
        }
        Ok(Done {
            cpu_ns: ((process::cpu_seconds(self.pid()) - before) * 1e9) as u64,
            wall_ns,
            sites: Vec::new(),
            peak_bytes: process::peak_bytes(self.pid()),
        })
    }

    fn await_end(&mut self) -> anyhow::Result<Done> {
        let begun = Instant::now();
        let (mut status, mut peak_bytes) = (0, 0);
        // SAFETY: the structure has only integers, for which zero is valid.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        loop {
            // SAFETY: the process is a child that nothing else waits for, and both pointers point to initialized
            // variables.
            let ended =
                unsafe { libc::wait4(self.pid().cast_signed(), &raw mut status, libc::WNOHANG, &raw mut usage) };
            if ended != 0 {
                break;
            }
            peak_bytes = process::peak_bytes(self.pid()).max(peak_bytes);
            std::thread::sleep(Duration::from_millis(5));
        }
        self.ended = true;
        if status != 0 {
            bail!("the workload failed: status {status:#x}");
        }
        let ns = |time: libc::timeval| (time.tv_sec * 1_000_000_000 + time.tv_usec * 1000).unsigned_abs();
        Ok(Done {
            cpu_ns: ns(usage.ru_utime) + ns(usage.ru_stime),
            wall_ns: u64::try_from(begun.elapsed().as_nanos())?,
            sites: Vec::new(),
            peak_bytes,
        })
    }

    /// Ends the process normally, so that it writes its results.
    pub fn end(mut self) {
        if !self.ended {
            if self.protocol == Protocol::Server {
                // SAFETY: `kill` takes plain integers. The child has not been waited for, so its PID is still its own.
                unsafe { libc::kill(self.pid().cast_signed(), libc::SIGTERM) };
            } else {
                let _ = self.send();
            }
            self.input = None;
            let _ = self.child.wait();
            self.ended = true;
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if !self.ended {
            // Both fail only if it has exited by itself.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
