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

/// A recording, as far as the status line shows it.
pub trait Figures {
    /// Its current status; the sample rate and the losses are not filled in.
    fn status(&self) -> Status;

    /// Hits and samples that were lost. This is slow: it reads the state of every thread of the host.
    fn lost(&self) -> u64;
}

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

    /// Shows the status of the recording, twice a second.
    pub fn show(&mut self, recording: &impl Figures, elapsed: Duration) {
        if self.enabled
            && let Some(status) = self.next(recording, elapsed, Instant::now())
        {
            self.write(|columns| status.line(columns));
        }
    }

    /// The status to show now; `None` if it is too early.
    fn next(&mut self, recording: &impl Figures, elapsed: Duration, now: Instant) -> Option<Status> {
        if self.last.is_some_and(|(at, _)| now - at < PAUSE) {
            return None;
        }
        let status = recording.status();
        if let Some((at, samples)) = self.last {
            self.rate = (status.samples - samples) as f64 / (now - at).as_secs_f64();
        }
        self.last = Some((now, status.samples));
        if self.next_count.is_none_or(|at| at <= now) {
            let begun = Instant::now();
            self.lost = recording.lost();
            // Counting takes at most a thousandth of the time.
            self.next_count = Some(now + begun.elapsed() * 1000);
        }
        Some(Status { elapsed, samples_per_second: self.rate, lost: self.lost, ..status })
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
    use std::cell::Cell;

    use super::*;

    /// A recording with a given number of samples, which counts how often it is asked for its losses.
    #[derive(Default)]
    struct Recording {
        samples: u64,
        asked: Cell<u64>,
    }

    impl Figures for Recording {
        fn status(&self) -> Status {
            Status { samples: self.samples, ..Status::default() }
        }

        fn lost(&self) -> u64 {
            self.asked.set(self.asked.get() + 1);
            5
        }
    }

    #[test]
    fn the_rate_is_that_since_the_last_line_and_lines_are_half_a_second_apart() {
        let mut line = StatusLine::new(Display::default());
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut recording = Recording::default();
        let first = line.next(&recording, Duration::ZERO, at(0)).unwrap();
        assert_eq!((first.samples_per_second, first.lost), (0.0, 5));
        recording.samples = 300;
        assert_eq!(line.next(&recording, Duration::ZERO, at(499)), None);
        let second = line.next(&recording, Duration::from_secs(2), at(2_000)).unwrap();
        assert_eq!((second.samples_per_second, second.elapsed), (150.0, Duration::from_secs(2)));
    }

    #[test]
    fn nothing_is_asked_for_where_no_line_is_shown() {
        let mut line = StatusLine::new(Display { progress: false, ..Display::default() });
        let recording = Recording::default();
        line.show(&recording, Duration::ZERO);
        assert_eq!(recording.asked.get(), 0);
    }
}
