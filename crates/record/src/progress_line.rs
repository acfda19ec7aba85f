//! One line on standard error while the user waits: shown only on a terminal, after a second, and removed when the work
//! is done.

use std::io::{IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use heapbpf_profile::report::text::clip;

use crate::terminal;

/// Work that finishes sooner shows no line.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time between two updates.
const PAUSE: Duration = Duration::from_millis(200);

/// Does some work. `line` says what is being done; it is called again and again.
pub fn during<T>(line: impl Fn() -> String + Send, work: impl FnOnce() -> T) -> T {
    if !std::io::stderr().is_terminal() {
        return work();
    }
    std::thread::scope(|scope| {
        let (done, ended) = mpsc::channel::<()>();
        scope.spawn(move || {
            let mut pause = PATIENCE;
            let mut shown = false;
            while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                write(&line());
                (pause, shown) = (PAUSE, true);
            }
            if shown {
                remove();
            }
        });
        let result = work();
        drop(done);
        result
    })
}

/// Shows a line in place of the last one. The caller has checked that standard error is a terminal.
pub fn write(line: &str) {
    let mut out = std::io::stderr().lock();
    let _ = write!(out, "\r\x1b[K{}", clip(line, columns()));
    let _ = out.flush();
}

/// Number of columns of a line.
pub fn columns() -> usize {
    terminal::width().unwrap_or(80).saturating_sub(1)
}

/// Removes the line.
pub fn remove() {
    let _ = write!(std::io::stderr(), "\r\x1b[K");
}
