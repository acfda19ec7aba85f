//! Temporary resources of benchmarks that run heapbpf: a directory and child processes. They are cleaned up when
//! dropped.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, bail, ensure};

use crate::shell::read;

/// A temporary directory of this run; removed when dropped.
pub struct Dir(PathBuf);

impl Dir {
    /// Creates the directory.
    pub fn new() -> std::io::Result<Self> {
        let path = std::env::temp_dir().join(format!("heapbpf-bench-{}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A child process that is killed when dropped.
pub struct Running(pub Child);

impl Running {
    /// Starts a program and waits for a line that begins with `word` on one of its outputs.
    pub fn start(command: &mut Command, word: &str, on_errors: bool) -> anyhow::Result<Self> {
        command.stdin(Stdio::piped());
        let out = |is_read: bool| if is_read { Stdio::piped() } else { Stdio::null() };
        let mut child = Self(command.stdout(out(!on_errors)).stderr(out(on_errors)).spawn()?);
        let pipe: Box<dyn std::io::Read + Send> = match (child.0.stdout.take(), child.0.stderr.take()) {
            (Some(pipe), None) => Box::new(pipe),
            (_, Some(pipe)) => Box::new(pipe),
            (None, None) => bail!("no pipe"),
        };
        let mut lines = BufReader::new(pipe).lines();
        for line in &mut lines {
            if line?.starts_with(word) {
                // Later output is discarded, so that a full pipe does not block the program.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok(child);
            }
        }
        bail!("{command:?} ended before it said {word:?}")
    }

    /// Writes a line to its input.
    pub fn write(&mut self, line: &str) -> anyhow::Result<()> {
        let input = self.0.stdin.as_mut().context("piped")?;
        Ok(writeln!(input, "{line}")?)
    }

    /// Ends a recording like Ctrl-C, and waits until its files are written.
    pub fn interrupt(&mut self) -> anyhow::Result<()> {
        // With the `kill` command, because xtask has no unsafe code.
        read(Command::new("kill").args(["-INT", &self.0.id().to_string()]))?;
        let status = self.0.wait()?;
        ensure!(status.success(), "heapbpf failed: {status}");
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
