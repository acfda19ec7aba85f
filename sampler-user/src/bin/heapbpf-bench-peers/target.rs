//! A workload's process: waits until it is told to go, says what it did, or runs to its end.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use sampler_user::cost::cpus::pin;
use sampler_user::cost::library::PrivateLibrary;
use serde::Deserialize;

use super::process;

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
    to_end: bool,
    /// Waited for: its id may be another's by now.
    ended: bool,
}

/// What to start.
pub struct Start<'a> {
    /// Program and arguments.
    pub words: &'a [String],
    /// Variables of the program.
    pub variables: &'a [(String, String)],
    /// Whether it is a program that knows nothing of our protocol.
    pub to_end: bool,
    /// Whether it may use all CPUs.
    pub all_cpus: bool,
    /// Its C library.
    pub library: &'a PrivateLibrary,
}

/// Waits like our own programs do, then becomes the program.
const WAIT: &str = r#"echo READY $$; read line; exec env "$@""#;

impl Target {
    /// Starts it; it waits for [`go`](Self::go).
    pub fn start(start: &Start) -> anyhow::Result<Self> {
        let variables = start.variables.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let mut command = if start.to_end {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", WAIT, "sh"]).args(variables.map(|(name, value)| format!("{name}={value}")));
            command.args(start.words);
            command
        } else {
            let mut command = Command::new(&start.words[0]);
            command.args(&start.words[1..]).envs(variables);
            command
        };
        command.env("LD_LIBRARY_PATH", start.library.folder()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot start {}", start.words[0]))?;
        pin(child.id(), |cpu| start.all_cpus || cpu != 0);
        let (input, output) = (child.stdin.take(), child.stdout.take().context("piped")?);
        let mut target =
            Self { child, input, output: Some(BufReader::new(output)), to_end: start.to_end, ended: false };
        if !target.line()?.starts_with("READY") {
            bail!("{} does not wait", start.words[0]);
        }
        Ok(target)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The file of its C library.
    pub fn library(&self) -> anyhow::Result<PathBuf> {
        process::library(self.pid()).context("the workload has no C library")
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

    /// Lets it do its work. One of our own programs then waits with its heap in place.
    pub fn go(&mut self) -> anyhow::Result<Done> {
        self.send()?;
        if !self.to_end {
            let mut done: Done = serde_json::from_str(&self.line()?)?;
            done.peak_bytes = process::status_bytes(self.pid(), "VmHWM");
            return Ok(done);
        }
        let begun = std::time::Instant::now();
        // Nobody reads what it says: it must not wait for us.
        let output = self.output.take();
        std::thread::spawn(move || output.map(|mut output| std::io::copy(&mut output, &mut std::io::sink())));
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
            let _ = self.send();
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
