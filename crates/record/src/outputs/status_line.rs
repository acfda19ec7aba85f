//! The status line of a recording on the terminal.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use heapbpf_host::clock::thread_cpu_time;
use heapbpf_profile::report::text::{clip, width};
use heapbpf_profile::units;

use crate::output::Output;
use crate::plan::Display;
use crate::progress_line;

/// The content of the status line.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Status {
    /// Time since the start.
    pub elapsed: Duration,
    /// Length of the recording, if it is limited.
    pub duration: Option<Duration>,
    /// Samples so far.
    pub samples: u64,
    /// Samples per second, recently.
    pub samples_per_second: f64,
    /// Number of lost hits and samples.
    pub lost: u64,
    /// Number of processes with samples.
    pub processes: usize,
    /// Estimated bytes in use; `None` if frees are not tracked.
    pub inuse_bytes: Option<f64>,
    /// Whether `inuse_bytes` leaves out some processes whose frees are not tracked.
    pub inuse_is_partial: bool,
    /// Estimated bytes allocated.
    pub alloc_bytes: f64,
    /// What takes time in the targets, and its share of their CPU time, if known.
    pub overhead: Option<(&'static str, f64)>,
}

impl Status {
    /// The line, at most `columns` wide, without a line end.
    pub fn line(&self, columns: usize) -> String {
        let mut parts = vec![match self.duration {
            Some(duration) => format!("{} of {}", clock(self.elapsed), clock(duration)),
            None => clock(self.elapsed),
        }];
        if let Some(inuse) = self.inuse_bytes {
            let whose = if self.inuse_is_partial { " (without some processes)" } else { "" };
            parts.push(format!("in use {}{whose}", units::bytes(inuse)));
        }
        parts.push(format!("allocated {}", units::bytes(self.alloc_bytes)));
        parts.push(format!("{} samples ({}/s)", units::count(self.samples as f64), rate(self.samples_per_second)));
        // Processes that have no sample yet are not counted.
        if self.processes > 1 {
            parts.push(format!("{} processes", units::count(self.processes as f64)));
        }
        if let Some((what, share)) = self.overhead {
            parts.push(format!("{what} {} of CPU", units::percent(share)));
        }
        // Losses come right after the time, so that a narrow terminal never cuts them off.
        if self.lost > 0 {
            parts.insert(1, format!("{} LOST", units::count(self.lost as f64)));
        }
        // Whole parts are dropped, the last one first.
        while parts.len() > 2 && width(&parts.join(" · ")) > columns {
            parts.pop();
        }
        clip(&parts.join(" · "), columns)
    }
}

fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..3600 => format!("{}:{:02}", seconds / 60, seconds % 60),
        _ => format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60),
    }
}

fn rate(per_second: f64) -> String {
    if per_second < 9.95 { format!("{per_second:.1}") } else { units::count(per_second) }
}

/// Time between two updates of the line.
const PAUSE: Duration = Duration::from_millis(500);

/// The status line on the terminal.
#[derive(Default)]
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
        Self { enabled: display.progress && std::io::stderr().is_terminal(), ..Self::default() }
    }

    /// Shows the status of the recording, twice a second. `status`: the status, without the sample rate and the losses;
    /// `lost`: the hits and samples that were lost, which are slow to count.
    pub fn show(&mut self, status: impl FnOnce() -> Status, lost: impl FnOnce() -> u64) {
        if self.enabled
            && let Some(status) = self.next(status, lost, Instant::now())
        {
            self.write(&status.line(progress_line::columns()));
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
            let cpu_before = thread_cpu_time();
            self.lost = lost();
            // Counting takes at most a thousandth of a processor's time.
            self.next_count = Some(now + thread_cpu_time().saturating_sub(cpu_before) * 1000);
        }
        Some(Status { samples_per_second: self.rate, lost: self.lost, ..status })
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

    /// Shows what is being done after the recording.
    pub fn say(&mut self, what: &str) {
        if self.enabled {
            self.write(what);
        }
    }

    fn write(&mut self, line: &str) {
        progress_line::write(line);
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

    fn status() -> Status {
        Status {
            elapsed: Duration::from_secs(65),
            samples: 1234,
            samples_per_second: 19.0,
            processes: 1,
            inuse_bytes: Some(3.0 * 1_048_576.0),
            alloc_bytes: 2e9,
            ..Status::default()
        }
    }

    #[test]
    fn says_what_is_known() {
        assert_eq!(status().line(200), "1:05 · in use 3.00 MiB · allocated 1.86 GiB · 1,234 samples (19/s)");
        let long = Status {
            elapsed: Duration::from_secs(3_661),
            duration: Some(Duration::from_secs(7_200)),
            inuse_bytes: None,
            processes: 12,
            overhead: Some(("probes", 0.021)),
            samples_per_second: 0.25,
            ..status()
        };
        assert_eq!(
            long.line(200),
            "1:01:01 of 2:00:00 · allocated 1.86 GiB · 1,234 samples (0.2/s) · 12 processes · probes 2.1 % of CPU"
        );
    }

    #[test]
    fn what_is_in_use_of_some_only_is_said_to_be() {
        let line = Status { inuse_is_partial: true, ..status() }.line(200);
        assert!(line.contains("in use 3.00 MiB (without some processes) · "), "{line}");
        let line = Status { inuse_is_partial: true, inuse_bytes: None, ..status() }.line(200);
        assert!(!line.contains("without"), "{line}");
    }

    #[test]
    fn losses_survive_a_narrow_terminal() {
        let line = Status { lost: 7, ..status() }.line(20);
        assert_eq!(line, "1:05 · 7 LOST");
    }

    #[test]
    fn the_line_fits_and_nobody_is_told_of_no_processes() {
        let full = Status {
            elapsed: Duration::from_secs(3_661),
            duration: Some(Duration::from_secs(7_200)),
            processes: 1_234,
            inuse_is_partial: true,
            overhead: Some(("probes", 0.021)),
            ..status()
        };
        for columns in 20..200 {
            let line = full.line(columns);
            assert!(width(&line) <= columns, "{line}");
            assert!(columns < 64 || !line.ends_with('…'), "{line}");
        }
        assert!(!Status { processes: 0, ..status() }.line(200).contains("process"));
    }
}
