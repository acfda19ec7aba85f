//! The status line of a recording on the terminal.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use super::session::{Finishing, Session};
use super::terminal_width;
use crate::cli::plan::RecordPlan;
use crate::profile::output::Output;
use crate::view::status::Status;
use crate::view::text::clip;
use crate::view::units;

/// The line on the terminal.
pub struct StatusLine {
    shown: bool,
    enabled: bool,
    last: Option<(Instant, u64)>,
    rate: f64,
    lost: u64,
    /// When losses are counted again: that looks at every thread of the host.
    next_count: Option<Instant>,
}

impl StatusLine {
    /// Nothing is shown yet.
    pub fn new(plan: &RecordPlan) -> Self {
        Self {
            shown: false,
            enabled: plan.progress && std::io::stderr().is_terminal(),
            last: None,
            rate: 0.0,
            lost: 0,
            next_count: None,
        }
    }

    /// Shows how the recording stands, twice a second.
    pub fn show(&mut self, session: &Session, elapsed: Duration) {
        let now = Instant::now();
        if !self.enabled || self.last.is_some_and(|(at, _)| now - at < Duration::from_millis(500)) {
            return;
        }
        let estimated = session.recorder.heap.estimated();
        if let Some((at, samples)) = self.last {
            self.rate = (estimated.samples - samples) as f64 / (now - at).as_secs_f64();
        }
        self.last = Some((now, estimated.samples));
        if self.next_count.is_none_or(|at| at <= now) {
            self.lost = session
                .counts()
                .map_or(0, |(_, total)| total.lost_ring_full + total.lost_abandoned + total.lost_no_thread_state);
            // A thousandth of the time at most.
            self.next_count = Some(now + now.elapsed() * 1000);
        }
        let status = Status {
            elapsed,
            duration: session.plan.duration,
            samples: estimated.samples,
            samples_per_second: self.rate,
            lost: self.lost,
            processes: session.recorder.processes.len(),
            inuse_bytes: (session.plan.live && !session.governor.gave_up_frees(true)).then_some(estimated.inuse_bytes),
            inuse_is_partial: session.attaching.hooks.follows_some_frees(),
            alloc_bytes: estimated.alloc_bytes,
            overhead: session.governor.share(),
        };
        self.write(|columns| status.line(columns));
    }

    /// Shows what is done after the recording.
    pub fn finishing(&mut self, what: Finishing) {
        self.say(&match what {
            Finishing::RemovingProbes => "removing probes".into(),
            Finishing::Naming(done, of) => {
                format!("finding names: {} of {} places", units::count(done as f64), units::count(of as f64))
            }
        });
    }

    /// Shows which file is being written.
    pub fn writing(&mut self, output: &Output) {
        // What goes to standard output may be on the same terminal.
        if output.is_standard_output() {
            self.clear();
        } else {
            self.say(&format!("writing {}", output.path().display()));
        }
    }

    fn say(&mut self, what: &str) {
        if self.enabled {
            self.write(|columns| clip(what, columns));
        }
    }

    fn write(&mut self, line: impl FnOnce(usize) -> String) {
        let width = terminal_width().unwrap_or(80);
        let mut out = std::io::stderr().lock();
        let _ = write!(out, "\r\x1b[K{}", line(width.saturating_sub(1)));
        let _ = out.flush();
        self.shown = true;
    }

    /// Takes the line away.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
