//! Recordings by the `heapbpf` that is measured.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};

/// Starts a recording with these arguments, and waits until it has begun. It writes `profile.json` and `stats.json` into a
/// directory.
///
/// # Errors
/// heapbpf cannot be started, or ends before it records.
pub fn start(heapbpf: &Path, dir: &Path, arguments: &[&str]) -> anyhow::Result<Child> {
    let mut command = Command::new(heapbpf);
    command.args(arguments).args(["--quiet", "--force", "-o"]).arg(dir.join("profile.json"));
    command.arg("--stats").arg(dir.join("stats.json")).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot start {}", heapbpf.display()))?;
    let mut lines = BufReader::new(child.stderr.take().context("piped")?).lines();
    while let Some(Ok(line)) = lines.next() {
        if line.starts_with("heapbpf: recording") {
            // Later output is discarded, so that a full pipe does not block it.
            std::thread::spawn(move || lines.for_each(drop));
            return Ok(child);
        }
        eprintln!("{line}");
    }
    bail!("heapbpf ended before it recorded: {}", child.wait()?)
}

/// Ends a recording with SIGINT, as Ctrl-C does, and waits for it.
///
/// # Errors
/// It failed.
pub fn stop(child: &mut Child) -> anyhow::Result<()> {
    if child.try_wait()?.is_none() {
        // SAFETY: `kill` takes plain integers. The child has not been waited for, so its PID is still its own.
        unsafe { libc::kill(child.id().cast_signed(), libc::SIGINT) };
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("heapbpf failed: {status}");
    }
    Ok(())
}

/// Whether a process has inline hooks.
#[must_use]
pub fn is_hooked(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains("/memfd:heapbpf-inline"))
}
