//! A workload's process: waits until it is told to go, says what it did, runs to its end, or serves.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use sampler_user::cost::cpus::pin;
use sampler_user::cost::library::PrivateLibrary;
use serde::Deserialize;

use super::process;
use super::workloads::{Files, Protocol, Workload, requests, socket};

/// What one call site did.
#[derive(Clone, Debug, Deserialize)]
pub struct SiteTruth {
    /// `site_NN`.
    pub site: String,
    /// Bytes allocated.
    pub bytes: u64,
    /// Bytes in use at the end.
    pub live_bytes: u64,
}

/// What a run came to.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Done {
    /// CPU time, nanoseconds.
    pub cpu_ns: u64,
    /// Time on the clock, nanoseconds.
    #[serde(default)]
    pub wall_ns: u64,
    /// Truth by site, of our own programs.
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
    /// Folder of what a server serves at.
    inputs: PathBuf,
    /// Waited for: its id may be another's by now.
    ended: bool,
}

/// What to start.
pub struct Start<'a> {
    /// What it does.
    pub workload: &'a Workload,
    /// How much of it.
    pub operations: u64,
    /// Variables of the program.
    pub variables: &'a [(String, String)],
    /// Where inputs and programs are.
    pub files: &'a Files,
    /// Libraries of its own.
    pub library: &'a PrivateLibrary,
}

/// Waits like our own programs do, then becomes the program.
const WAIT: &str = r#"echo READY $$; read line; exec env "$@""#;
/// A server that does not serve by then never will.
const LONGEST_START: Duration = Duration::from_secs(30);

impl Target {
    /// Starts it; it waits for [`go`](Self::go).
    pub fn start(start: &Start) -> anyhow::Result<Self> {
        let (workload, inputs) = (start.workload, start.files.inputs.clone());
        let words = workload.words(start.operations, start.files)?;
        let variables = start.variables.iter().map(|(name, value)| (name.as_str(), value.as_str()));
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
        command.env("LD_LIBRARY_PATH", start.library.folder()).current_dir(&inputs);
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
            operations: start.operations,
            inputs,
            ended: false,
        };
        if target.protocol == Protocol::Server {
            target.ignore_output();
            target.await_service()?;
        } else if !target.line()?.starts_with("READY") {
            bail!("{} does not wait", words[0]);
        }
        Ok(target)
    }

    /// Nobody reads what it says: it must not wait for us.
    fn ignore_output(&mut self) {
        let output = self.output.take();
        std::thread::spawn(move || output.map(|mut output| std::io::copy(&mut output, &mut std::io::sink())));
    }

    fn await_service(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        while UnixStream::connect(socket(&self.inputs)).is_err() {
            if let Some(status) = self.child.try_wait()? {
                self.ended = true;
                bail!("the server ended: {status}");
            }
            if begun.elapsed() > LONGEST_START {
                bail!("the server does not listen after {} s", LONGEST_START.as_secs());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
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

    /// Lets it do its work. One of our own programs then waits with its heap in place, and a server for more requests.
    pub fn go(&mut self) -> anyhow::Result<Done> {
        match self.protocol {
            Protocol::Own => {
                self.send()?;
                let mut done: Done = serde_json::from_str(&self.line()?)?;
                done.peak_bytes = process::status_bytes(self.pid(), "VmHWM");
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
        let asked = requests(self.operations, &self.inputs).output().context("cannot ask the server")?;
        let wall_ns = u64::try_from(begun.elapsed().as_nanos())?;
        if !asked.status.success() {
            bail!("the server was not asked all: {}", String::from_utf8_lossy(&asked.stderr));
        }
        Ok(Done {
            cpu_ns: ((process::cpu_seconds(self.pid()) - before) * 1e9) as u64,
            wall_ns,
            sites: Vec::new(),
            peak_bytes: process::status_bytes(self.pid(), "VmHWM"),
        })
    }

    fn await_end(&mut self) -> anyhow::Result<Done> {
        let begun = Instant::now();
        let (mut status, mut peak_bytes) = (0, 0);
        // SAFETY: plain integers, all zeros is a value.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        loop {
            // SAFETY: our own child, which nobody else waits for; room for both results.
            let ended =
                unsafe { libc::wait4(self.pid().cast_signed(), &raw mut status, libc::WNOHANG, &raw mut usage) };
            if ended != 0 {
                break;
            }
            peak_bytes = process::status_bytes(self.pid(), "VmHWM").max(peak_bytes);
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

    /// Lets it end, so that what it writes then is written.
    pub fn end(mut self) {
        if !self.ended {
            if self.protocol == Protocol::Server {
                // SAFETY: a signal to our own child, which was not waited for.
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
            // Both fail only if it has ended by itself.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
