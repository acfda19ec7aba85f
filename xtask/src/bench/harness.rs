//! What the benchmarks share that run heapbpf on a host: a temporary directory, child processes that end with it,
//! recordings, and what is read from them.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::str::FromStr;

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use crate::context::Context;
use crate::root::Privilege;
pub use crate::shell::Running;
use crate::shell::read;

/// A benchmark of the heapbpf that is built, with a directory that is removed when this is dropped.
pub struct Bench {
    /// The directory.
    pub dir: PathBuf,
    /// The program `heapbpf`.
    pub heapbpf: PathBuf,
}

impl Bench {
    /// Makes the directory. `name` is that of the benchmark.
    ///
    /// # Errors
    /// This does not run as root, or there is no heapbpf.
    pub fn new(context: &Context, name: &str) -> anyhow::Result<Self> {
        let is_root = matches!(context.privilege, Privilege::Root);
        ensure!(is_root, "this benchmark runs as root: sudo cargo xtask bench {name}");
        let heapbpf = std::env::var_os("HEAPBPF_BIN").map_or_else(|| context.binary(), PathBuf::from);
        ensure!(heapbpf.exists(), "no {}: cargo xtask build makes it", heapbpf.display());
        let dir = std::env::temp_dir().join(format!("heapbpf-bench-{}", std::process::id()));
        fs::create_dir_all(&dir)?;
        Ok(Self { dir, heapbpf })
    }

    /// A file in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns a call of heapbpf that writes a profile, and its statistics for [`Self::stats`].
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.heapbpf);
        command.args(arguments).arg("--force").arg("-o").arg(self.path("profile.json"));
        command.arg("--stats").arg(self.path("stats.json"));
        command
    }

    /// Starts a recording, and waits until it has begun.
    pub fn record(&self, arguments: &[&str]) -> anyhow::Result<Running> {
        Ok(Running::start(self.command(arguments).arg("-q"), "heapbpf: recording", true)?.0)
    }

    /// Starts a recording that serves HTTP. Returns its address as well.
    pub fn serve(&self, arguments: &[&str]) -> anyhow::Result<(Running, String)> {
        let arguments = [arguments, &["--listen", "127.0.0.1:0"]].concat();
        let (running, said) = Running::start(&mut self.command(&arguments), "heapbpf: listening on http://", true)?;
        Ok((running, said.split(' ').next().unwrap_or_default().to_owned()))
    }

    /// Returns the numbers that the last recording wrote for `--stats`, by name; NaN for what it did not write.
    pub fn stats(&self) -> anyhow::Result<impl Fn(&str) -> f64 + use<>> {
        let stats: Value = serde_json::from_str(&fs::read_to_string(self.path("stats.json"))?)?;
        Ok(move |name: &str| {
            let places = [&stats[name], &stats["lost"][name], &stats["other"][name]];
            places.into_iter().find_map(Value::as_f64).unwrap_or(f64::NAN)
        })
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl Running {
    /// Starts a program, and waits for a line that begins with `word` on one of its outputs. Returns the rest of that
    /// line as well.
    pub fn start(command: &mut Command, word: &str, on_errors: bool) -> anyhow::Result<(Self, String)> {
        command.stdin(Stdio::piped());
        let out = |is_read: bool| if is_read { Stdio::piped() } else { Stdio::null() };
        let mut child = Self(command.stdout(out(!on_errors)).stderr(out(on_errors)).spawn()?);
        let output = child.0.stdout.take().map(OwnedFd::from);
        let pipe = output.or_else(|| child.0.stderr.take().map(OwnedFd::from)).context("piped")?;
        let mut lines = BufReader::new(fs::File::from(pipe)).lines();
        for line in &mut lines {
            if let Some(rest) = line?.strip_prefix(word) {
                let rest = rest.to_owned();
                // Later output is discarded, so that a full pipe does not block the program.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok((child, rest));
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

/// A number among the user's arguments.
pub fn number<T: FromStr>(args: &[String], i: usize, otherwise: T) -> anyhow::Result<T> {
    let Some(text) = args.get(i) else { return Ok(otherwise) };
    text.parse::<T>().ok().with_context(|| format!("{text:?} is not a number"))
}

/// The median; in brackets, the least and the largest.
pub fn spread(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    match (values.get(values.len() / 2), values.first(), values.last()) {
        (Some(middle), Some(least), Some(most)) => format!("{middle:.3} [{least:.3}, {most:.3}]"),
        _ => "–".to_owned(),
    }
}

/// Returns an HTTP server's answer, head and body.
pub fn get(address: &str, path: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
