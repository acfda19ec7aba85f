//! When the probes of a recording were attached, if in time windows: the lengths of windows and pauses.

/// Times of windows, CLOCK_MONOTONIC.
#[derive(Debug, Default)]
pub struct WindowTimes {
    detached_ns: Option<u64>,
    /// Length of the pause before the open window, and when the window began.
    open: Option<(u64, u64)>,
    /// Length of the last closed window. The time before the first pause is not a window.
    last_ns: Option<u64>,
    used: bool,
}

impl WindowTimes {
    /// Notes that the probes were detached: a pause begins.
    pub fn detached(&mut self, now_ns: u64) {
        self.detached_ns = Some(now_ns);
        self.used = true;
    }

    /// Notes that the probes are attached again: a window begins. Returns the length of the pause.
    pub fn attached(&mut self, now_ns: u64) -> u64 {
        let pause_ns = self.detached_ns.take().map_or(0, |since| now_ns.saturating_sub(since));
        self.open = Some((pause_ns, now_ns));
        pause_ns
    }

    /// Closes the open window. Returns the length of the pause before it, and its own.
    pub fn closed(&mut self, now_ns: u64) -> Option<(u64, u64)> {
        let (pause_ns, since_ns) = self.open.take()?;
        let length_ns = now_ns.saturating_sub(since_ns).max(1);
        self.last_ns = Some(length_ns);
        Some((pause_ns, length_ns))
    }

    /// Ends the recording in a pause. Returns its length, and the same in lengths of the last window.
    pub fn ended(&mut self, now_ns: u64) -> Option<(u64, f64)> {
        let pause_ns = now_ns.saturating_sub(self.detached_ns.take()?);
        Some((pause_ns, self.last_ns.map_or(0.0, |length_ns| pause_ns as f64 / length_ns as f64)))
    }

    /// Whether a window is open.
    pub const fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Whether probes were ever detached.
    pub const fn were_used(&self) -> bool {
        self.used
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_stands_for_itself_and_the_pause_before_it() {
        let mut times = WindowTimes::default();
        assert!(!times.were_used() && times.closed(5).is_none() && times.ended(5).is_none());
        times.detached(1000);
        assert_eq!(times.attached(1300), 300);
        assert!(times.were_used());
        assert_eq!(times.closed(1400), Some((300, 100)));
        times.detached(1400);
        assert_eq!(times.ended(1450), Some((50, 0.5)));
        assert_eq!(times.ended(1500), None);
    }

    #[test]
    fn what_was_seen_before_the_first_pause_stands_for_itself() {
        let mut times = WindowTimes::default();
        times.detached(1000);
        assert_eq!(times.ended(9000), Some((8000, 0.0)));
    }
}
