//! One run of one workload under one profiler.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use heapbpf_record::cost::library::PrivateLibrary;
use heapbpf_record::cost::trial::{Allocator, Baseline};

use super::parse::Sites;
use super::peers::{How, Peer, Place};
use super::process;
use super::target::{PATIENCE, SiteTruth, Target};
use super::workloads::{Files, Workload};

/// The measurements of a run.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// CPU time of the target per operation, nanoseconds.
    pub cpu_ns: f64,
    /// CPU time of the target, as a share of elapsed time.
    pub cpu_share: f64,
    /// CPU time of the profiler while the workload ran, as a share of elapsed time.
    pub own_share: f64,
    /// Time from the profiler's start until its probes were in place, seconds.
    pub start_seconds: f64,
    /// Largest resident memory of the target, bytes.
    pub target_bytes: u64,
    /// Resident memory of the profiler at the end of the work, with its maps in the kernel, bytes.
    pub own_bytes: u64,
    /// Events lost, if the profiler reports them.
    pub lost: Option<u64>,
    /// Σ |estimate − truth| / Σ truth over the sites, of bytes allocated.
    pub allocated_error: Option<f64>,
    /// The same of bytes in use.
    pub in_use_error: Option<f64>,
    /// Estimate / truth − 1 of the bytes that the leaking site has in use.
    pub leak_error: Option<f64>,
}

/// The setup that all runs share.
pub struct Bench {
    /// Directories of inputs and programs.
    pub files: Files,
    /// The program `heapbpf`.
    pub heapbpf: PathBuf,
    /// The copy of the C library for workloads.
    pub library: PrivateLibrary,
    /// The no-op baseline.
    pub baseline: Baseline,
    /// Directory for results, removed at the end.
    pub results: tempfile::TempDir,
    /// Kernel headers for bcc, if the kernel does not provide them.
    pub headers: Option<PathBuf>,
}

/// The site that leaks in the workload `leak`.
const LEAKING: &str = "site_13";
/// Time to wait at the end: memleak prints once a second, and must print after the work has ended.
const LAST_WORDS: Duration = Duration::from_millis(2200);
/// Interval between checks of the target's code, and how many in a row must find it unchanged.
const PAUSE: Duration = Duration::from_millis(25);
const STEADY: u32 = 16;

impl Bench {
    /// Runs the workload under the profiler, and measures both.
    pub fn run(&mut self, peer: &Peer, workload: &Workload, number: usize) -> anyhow::Result<Measured> {
        let operations = workload.operations[peer.pace as usize];
        let out = self.results.path().join(format!("run{number}"));
        let program = PathBuf::from(&workload.words(operations, &self.files)?[0]);
        let (heapbpf, dir) = (self.heapbpf.clone(), self.files.programs.clone());
        let nobody =
            Place { pid: 0, library: Path::new(""), out: &out, heapbpf: &heapbpf, program: &program, dir: &dir };
        let variables = match peer.how {
            How::Preload(variables) => variables(&nobody),
            _ => Vec::new(),
        };
        let mut target = Target::start(workload, operations, &variables, &self.files, &self.library)?;
        let library = process::library(target.pid(), workload.allocator).unwrap_or_default();
        let place = Place { pid: target.pid(), library: &library, ..nobody };
        let mut measured = Measured::default();
        let (done, output) = match peer.how {
            How::Bare | How::Preload(_) => (target.go()?, String::new()),
            How::Baseline => {
                let allocator = Allocator::in_library(target.pid(), workload.allocator)?;
                let offsets: Vec<u64> = allocator.sites.iter().map(|(offset, ..)| *offset).collect();
                self.baseline.link((&allocator.path, &offsets), target.pid(), false, false)?;
                let done = target.go();
                self.baseline.off();
                (done?, String::new())
            }
            How::Attach(command) => {
                let begun = Instant::now();
                let mut tool = Tool::start(&command(&place), self.headers.as_deref())?;
                tool.await_probes(target.pid(), workload.allocator)?;
                measured.start_seconds = (begun.elapsed() - PAUSE * STEADY).as_secs_f64();
                let before = process::cpu_seconds(tool.pid());
                let done = target.go()?;
                let used = process::cpu_seconds(tool.pid()) - before;
                measured.own_share = used / (done.wall_ns as f64 * 1e-9);
                if peer.needs.contains("memleak") {
                    std::thread::sleep(LAST_WORDS);
                }
                measured.own_bytes = process::resident_bytes(tool.pid()) + process::map_bytes(tool.pid());
                (done, tool.stop()?)
            }
        };
        target.end();
        let said = (peer.said)(&place, &output);
        measured.cpu_ns = done.cpu_ns as f64 / operations as f64;
        measured.cpu_share = done.cpu_ns as f64 / done.wall_ns.max(1) as f64;
        measured.target_bytes = done.peak_bytes;
        measured.lost = said.lost;
        if !said.sites.is_empty() && !done.sites.is_empty() {
            measured.allocated_error = error(&done.sites, &said.sites, |site| site.bytes, |sums| sums.allocated);
            if workload.name == "leak" {
                let truth = done.sites.iter().find(|site| site.site == LEAKING).map_or(0, |site| site.live_bytes);
                let estimate = said.sites.get(LEAKING).and_then(|sums| sums.in_use);
                measured.leak_error = estimate.map(|estimate| estimate / truth as f64 - 1.0);
            } else {
                measured.in_use_error = error(&done.sites, &said.sites, |site| site.live_bytes, |sums| sums.in_use);
            }
        }
        for file in std::fs::read_dir(self.results.path())?.flatten() {
            std::fs::remove_file(file.path())?;
        }
        Ok(measured)
    }
}

/// Σ |estimate − truth| / Σ truth. `None` if the profiler has no estimates, or the truth is zero.
fn error(
    truth: &[SiteTruth],
    said: &Sites,
    of_truth: impl Fn(&SiteTruth) -> u64,
    of_sums: impl Fn(&super::parse::SiteBytes) -> Option<f64>,
) -> Option<f64> {
    let all: u64 = truth.iter().map(&of_truth).sum();
    if all == 0 || !said.values().any(|sums| of_sums(sums).is_some()) {
        return None;
    }
    let off = |site: &SiteTruth| {
        let estimate = said.get(&site.site).and_then(&of_sums).unwrap_or(0.0);
        (estimate - of_truth(site) as f64).abs()
    };
    Some(truth.iter().map(off).sum::<f64>() / all as f64)
}

/// A profiler that runs beside its target.
pub struct Tool {
    child: Child,
    output: Arc<Mutex<String>>,
    readers: Vec<std::thread::JoinHandle<()>>,
}

impl Tool {
    /// Starts it.
    pub fn start(words: &[String], headers: Option<&Path>) -> anyhow::Result<Self> {
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("PYTHONUNBUFFERED", "1").env("BPFTRACE_MAP_KEYS_MAX", "131072");
        if let Some(headers) = headers {
            command.env("BCC_KERNEL_SOURCE", headers);
        }
        let mut child = command.spawn().with_context(|| format!("cannot start {}", words[0]))?;
        let output = Arc::new(Mutex::new(String::new()));
        let streams: [Option<Box<dyn Read + Send>>; 2] = [
            child.stdout.take().map(|stream| Box::new(stream) as Box<dyn Read + Send>),
            child.stderr.take().map(|stream| Box::new(stream) as Box<dyn Read + Send>),
        ];
        let read = |mut stream: Box<dyn Read + Send>| {
            let output = Arc::clone(&output);
            std::thread::spawn(move || {
                let mut bytes = vec![0; 1 << 16];
                while let Ok(count @ 1..) = stream.read(&mut bytes) {
                    let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
                    output.push_str(&String::from_utf8_lossy(&bytes[..count]));
                }
            })
        };
        let readers = streams.into_iter().flatten().map(read).collect();
        Ok(Self { child, output, readers })
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns its output so far.
    pub fn said(&self) -> String {
        self.output.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// If it has ended, returns its exit status and the end of its output.
    pub fn ended(&mut self) -> std::io::Result<Option<String>> {
        Ok(self.child.try_wait()?.map(|status| format!("{status}: {}", tail(&self.said()))))
    }

    /// Waits until all probes are in place: the code of the target's allocator has changed, and no longer changes.
    pub fn await_probes(&mut self, target: u32, library: &str) -> anyhow::Result<()> {
        let begun = Instant::now();
        let (mut last, mut steady) = (0, 0);
        while steady < STEADY {
            if let Some(status) = self.child.try_wait()? {
                bail!("the profiler ended ({status}): {}", tail(&self.said()));
            }
            if begun.elapsed() > PATIENCE {
                bail!("no probes after {} s: {}", PATIENCE.as_secs(), tail(&self.said()));
            }
            std::thread::sleep(PAUSE);
            let now = process::changed_code_bytes(target, library).unwrap_or(0);
            steady = if now > 0 && now == last { steady + 1 } else { 0 };
            last = now;
        }
        Ok(())
    }

    /// Ends it with SIGINT, as Ctrl-C does, and returns its output.
    pub fn stop(mut self) -> anyhow::Result<String> {
        // SAFETY: `kill` takes plain integers. The child has not been waited for, so its PID is still its own.
        unsafe { libc::kill(self.pid().cast_signed(), libc::SIGINT) };
        let begun = Instant::now();
        while self.child.try_wait()?.is_none() {
            if begun.elapsed() > PATIENCE {
                self.child.kill()?;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        Ok(self.said())
    }
}

impl Drop for Tool {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn tail(text: &str) -> &str {
    let from = text.len().saturating_sub(300);
    text.get(from..).unwrap_or(text).trim()
}
