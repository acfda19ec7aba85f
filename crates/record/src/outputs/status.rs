//! The one-line status while a recording runs.

use std::time::Duration;

use heapbpf_profile::report::text::{clip, width};
use heapbpf_profile::units;

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
    /// Probe time as a share of the targets' CPU time, if known.
    pub overhead: Option<f64>,
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
        if let Some(overhead) = self.overhead {
            parts.push(format!("probes {} of CPU", units::percent(overhead)));
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

#[cfg(test)]
mod tests {
    use super::*;

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
            overhead: Some(0.021),
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
            overhead: Some(0.021),
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
