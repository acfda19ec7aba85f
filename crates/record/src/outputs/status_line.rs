//! The status line of a recording on the terminal.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use heapbpf_profile::units;
use heapbpf_symbols::progress::Download;

use super::status::Status;
use crate::output::Output;
use crate::plan::Display;
use crate::progress_line;
use crate::terminal;

/// The current step after the recording, for a user who waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finishing {
    /// Probes are being removed.
    RemovingProbes,
    /// Symbolization: how many places have names, and how many places there are.
    Symbolization(usize, usize),
    /// Downloading a debug file.
    Download(Download),
}

/// Time between two updates of the line.
const PAUSE: Duration = Duration::from_millis(500);

/// The status line on the terminal.
pub struct StatusLine {
    shown: bool,
    enabled: bool,
    last: Option<(Instant, u64)>,
    rate: f64,
    lost: u64,
    /// When losses are counted again. Counting reads the state of every thread of the host.
    next_count: Option<Instant>,
}

impl StatusLine {
    /// Creates the line; nothing is shown yet.
    pub fn new(display: Display) -> Self {
        Self {
            shown: false,
            enabled: display.progress && std::io::stderr().is_terminal(),
            last: None,
            rate: 0.0,
            lost: 0,
            next_count: None,
        }
    }

    /// Shows the status of the recording, twice a second. `status`: the status, without the sample rate and the losses;
    /// `lost`: the hits and samples that were lost, which are slow to count.
    pub fn show(&mut self, status: impl FnOnce() -> Status, lost: impl FnOnce() -> u64) {
        if self.enabled
            && let Some(status) = self.next(status, lost, Instant::now())
        {
            self.write(|columns| status.line(columns));
        }
    }

    /// The status to show now; `None` if it is too early.
    fn next(&mut self, status: impl FnOnce() -> Status, lost: impl FnOnce() -> u64, now: Instant) -> Option<Status> {
        if self.last.is_some_and(|(at, _)| now - at < PAUSE) {
            return None;
        }
        let status = status();
        if let Some((at, samples)) = self.last {
            self.rate = (status.samples - samples) as f64 / (now - at).as_secs_f64();
        }
        self.last = Some((now, status.samples));
        if self.next_count.is_none_or(|at| at <= now) {
            let begun = Instant::now();
            self.lost = lost();
            // Counting takes at most a thousandth of the time.
            self.next_count = Some(now + begun.elapsed() * 1000);
        }
        Some(Status { samples_per_second: self.rate, lost: self.lost, ..status })
    }

    /// Shows the current step after the recording.
    pub fn finishing(&mut self, what: Finishing) {
        self.say(&match what {
            Finishing::RemovingProbes => "removing probes".into(),
            Finishing::Download(download) => download.to_string(),
            Finishing::Symbolization(done, of) => {
                format!("finding names: {} of {} places", units::count(done as f64), units::count(of as f64))
            }
        });
    }

    /// Shows which file is being written.
    pub fn writing(&mut self, output: &Output) {
        // Standard output may be on the same terminal.
        if output.is_standard_output() {
            self.clear();
        } else {
            self.say(&format!("writing {}", output.path().display()));
        }
    }

    fn say(&mut self, what: &str) {
        if self.enabled {
            self.write(|_| what.to_owned());
        }
    }

    fn write(&mut self, line: impl FnOnce(usize) -> String) {
        progress_line::write(&line(terminal::width().unwrap_or(80).saturating_sub(1)));
        self.shown = true;
    }

    /// Removes the line.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            progress_line::remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_that_since_the_last_line_and_lines_are_half_a_second_apart() {
        let mut line = StatusLine::new(Display::default());
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut next = |samples, ms| line.next(|| Status { samples, ..Status::default() }, || 5, at(ms));
        let first = next(0, 0).unwrap();
        assert_eq!((first.samples_per_second, first.lost), (0.0, 5));
        assert_eq!(next(300, 499), None);
        let second = next(300, 2_000).unwrap();
        assert_eq!((second.samples_per_second, second.lost), (150.0, 5));
    }

    #[test]
    fn nothing_is_asked_for_where_no_line_is_shown() {
        let mut line = StatusLine::new(Display { progress: false, ..Display::default() });
        line.show(|| panic!("it is asked for its status"), || panic!("it is asked for its losses"));
    }
}
