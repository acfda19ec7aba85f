//! A terminal for programs under test: a private tmux server with one window.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::environment::{stop_limit, tool};
use crate::target::{children_of, until};

/// A tmux window. Its programs get SIGHUP when it is dropped.
pub struct Tmux {
    tmux: PathBuf,
    dir: TempDir,
}

impl Tmux {
    /// Runs a shell command in a window of this size. Returns `None` if there is no tmux.
    ///
    /// # Panics
    /// If tmux does not start.
    pub fn run(command: &str, columns: u16, rows: u16) -> Option<Self> {
        let tmux =
            Self { tmux: tool("tmux")?, dir: TempDir::with_prefix("heapbpf-tmux-").expect("a temporary directory") };
        let (columns, rows) = (columns.to_string(), rows.to_string());
        let dir = tmux.dir().display().to_string();
        let size = ["-x", &columns, "-y", &rows, "-c", &dir];
        tmux.call(&[&["-f", "/dev/null", "new-session", "-d"], &size[..], &["sh", "-c", command]].concat());
        Some(tmux)
    }

    /// The directory that the command runs in.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn call(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(&self.tmux);
        command.env("LC_ALL", "C.UTF-8").env("TERM", "xterm").env_remove("NO_COLOR").env_remove("TMUX");
        command.envs(stop_limit());
        command.arg("-S").arg(self.dir().join("socket")).args(arguments);
        let output = command.output().expect("tmux runs");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// Process id of the shell in the window.
    ///
    /// # Panics
    /// If tmux does not report it.
    pub fn shell(&self) -> u32 {
        let output = self.call(&["display-message", "-p", "#{pane_pid}"]).stdout;
        String::from_utf8_lossy(&output).trim().parse().expect("a process id")
    }

    /// Process id of the program that the shell runs.
    ///
    /// # Panics
    /// If it runs none.
    pub fn program(&self) -> u32 {
        children_of(self.shell()).first().copied().expect("a child of the shell")
    }

    /// What the window shows.
    pub fn screen(&self) -> String {
        String::from_utf8_lossy(&self.call(&["capture-pane", "-p"]).stdout).into_owned()
    }

    /// What the window shows, with escape sequences for colours and the like.
    pub fn styled(&self) -> String {
        String::from_utf8_lossy(&self.call(&["capture-pane", "-p", "-e"]).stdout).into_owned()
    }

    /// Presses keys, given by tmux's names.
    pub fn press(&self, keys: &[&str]) {
        self.call(&[&["send-keys"], keys].concat());
    }

    /// Changes the size of the window.
    pub fn resize(&self, columns: u16, rows: u16) {
        self.call(&["resize-window", "-x", &columns.to_string(), "-y", &rows.to_string()]);
    }

    /// Waits until the window shows a text. Returns the screen.
    ///
    /// # Panics
    /// If it does not within [`PATIENCE`](crate::target::PATIENCE).
    pub fn await_text(&self, text: &str) -> String {
        let mut last = String::new();
        until(&format!("{text:?} on the screen"), || {
            last = self.screen();
            last.contains(text)
        });
        last
    }

    /// Ends tmux, and with it the terminal.
    pub fn kill(&self) {
        let _ = Command::new(&self.tmux).arg("-S").arg(self.dir().join("socket")).arg("kill-server").output();
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        self.kill();
    }
}
