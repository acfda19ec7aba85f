//! Time windows: probes are attached in some windows of time only, and a window also stands for the pause before it.
//!
//! A window of length L follows a pause of length D that was drawn before anything in the window was known. So
//! u = (D + L)/L, the window's expansion factor, is the inverse of its probability to contain a given moment, and the sum y
//! of a row over the window is counted as u·y (Horvitz–Thompson over windows). Both lengths are measured in the target's own
//! progress ([`heapbpf_statistics::window_weights`]). The variance of a row is u (u − 1) y² + (u − 1) v on top of the
//! variance v of its samples (windows as an independent first stage; Särndal, Swensson, Wretman, *Model Assisted Survey
//! Sampling*, result 4.3.1). Rows vary together from window to window, so the variance of a total is not the sum of theirs.

use std::collections::HashMap;

use sampler_ebpf::abi::ProcessKey;

use super::sample::Sample;
use heapbpf_statistics::sums::SampleSums;

/// Sums of the open window and of the last closed one, by row number.
#[derive(Debug)]
pub struct Windows {
    /// First and last moment (CLOCK_MONOTONIC) at which all probes are attached. Attaching and detaching them takes
    /// milliseconds, which are part of no window.
    since_ns: u64,
    until_ns: u64,
    /// `None`: there are no windows, and every sample counts once.
    open: Option<HashMap<u32, SampleSums>>,
    /// Sums and expansion factor.
    closed: HashMap<u32, (SampleSums, f64)>,
}

/// Expansion factors of a window, by process.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    /// Factors of the processes whose progress is known.
    pub known: HashMap<ProcessKey, f64>,
    /// Factor of all others.
    pub others: f64,
}

impl Weights {
    /// Factor of a process.
    pub fn of(&self, process: &ProcessKey) -> f64 {
        self.known.get(process).copied().unwrap_or(self.others)
    }
}

impl Default for Windows {
    fn default() -> Self {
        Self { since_ns: 0, until_ns: u64::MAX, open: None, closed: HashMap::new() }
    }
}

/// Correction of a row's sums for a window's expansion factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Correction {
    /// Added to the bytes.
    pub bytes: f64,
    bytes_variance: f64,
    objects: f64,
    objects_variance: f64,
}

impl Correction {
    /// The correction that raises the factor of `sums` from `from` to `to`.
    fn new(sums: &SampleSums, from: f64, to: f64) -> Self {
        let variance = |y: f64, v: f64| (to * (to - 1.0) - from * (from - 1.0)) * y * y + (to - from) * v;
        Self {
            bytes: (to - from) * sums.bytes,
            bytes_variance: variance(sums.bytes, sums.bytes_variance),
            objects: (to - from) * sums.objects,
            objects_variance: variance(sums.objects, sums.objects_variance),
        }
    }

    /// Adds the correction to a row's sums.
    pub fn apply(&self, sums: &mut SampleSums) {
        sums.bytes_correction += self.bytes;
        sums.bytes_variance += self.bytes_variance;
        sums.objects_correction += self.objects;
        sums.objects_variance += self.objects_variance;
    }
}

impl Windows {
    /// Opens a window if none is open.
    pub fn open(&mut self) {
        self.open.get_or_insert_default();
    }

    /// All probes are attached since this time (CLOCK_MONOTONIC).
    pub fn begin(&mut self, since_ns: u64) {
        (self.since_ns, self.until_ns) = (since_ns, u64::MAX);
    }

    /// Probes are being detached since this time (CLOCK_MONOTONIC).
    pub fn finish(&mut self, until_ns: u64) {
        self.until_ns = until_ns;
    }

    /// Whether all probes were attached at a time.
    pub const fn covers(&self, time_ns: u64) -> bool {
        self.since_ns <= time_ns && time_ns <= self.until_ns
    }

    /// Adds a sample to the open window, if there is one.
    pub fn record(&mut self, row: u32, sample: &Sample) {
        if let Some(open) = &mut self.open {
            open.entry(row).or_default().record(sample.size_bytes, sample.trials, sample.offset, sample.key.interval);
        }
    }

    /// Closes the window with the expansion factor of each row, and opens the next one.
    pub fn close(&mut self, factor: impl Fn(u32) -> f64) -> Vec<(u32, Correction)> {
        let sums = self.open.replace(HashMap::new()).unwrap_or_default();
        self.closed = sums.into_iter().map(|(row, sums)| (row, (sums, factor(row)))).collect();
        self.closed.iter().map(|(row, (sums, factor))| (*row, Correction::new(sums, 1.0, *factor))).collect()
    }

    /// Raises the expansion factor of each row of the last closed window by `more(row)`.
    pub fn extend(&mut self, more: impl Fn(u32) -> f64) -> Vec<(u32, Correction)> {
        let extended = self.closed.iter_mut().map(|(row, (sums, factor))| {
            let from = *factor;
            *factor += more(*row);
            (*row, Correction::new(sums, from, *factor))
        });
        extended.collect()
    }

    /// Whether the open window has samples of a row.
    pub fn is_open_for(&self, row: u32) -> bool {
        self.open.as_ref().is_some_and(|open| open.contains_key(&row))
    }

    /// Forgets a row that is removed.
    pub fn forget(&mut self, row: u32) {
        self.closed.remove(&row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a recording of a program whose rate rises and falls, in windows of length 1 after pauses of 0.5 to 1.5
    /// times `mean`; every byte in a window is sampled. Returns the corrected sum and its estimated variance.
    fn estimated(seed: u64, mean: f64, end: f64) -> (f64, f64) {
        let mut random = sampler_ebpf::rng::seed(seed, 0);
        let mut uniform = || sampler_ebpf::rng::next(&mut random) as f64 / u64::MAX as f64;
        let integral = |t: f64| 100.0 * t - 300.0 * (t / 5.0).cos();
        let mut all = SampleSums::default();
        let (mut windows, mut now) = (Windows::default(), mean * uniform());
        let mut pause = now;
        while now + 1.0 < end {
            let bytes = integral(now + 1.0) - integral(now);
            let sums = SampleSums { bytes, samples: 1, ..SampleSums::default() };
            windows.open();
            windows.open.as_mut().unwrap().insert(0, sums);
            all.add(&sums);
            windows.close(|_| pause + 1.0)[0].1.apply(&mut all);
            now += 1.0;
            pause = mean * (0.5 + uniform());
            now += pause;
        }
        // No window follows the last pause.
        windows.extend(|_| (pause - (now - end).max(0.0)).max(0.0))[0].1.apply(&mut all);
        (all.bytes + all.bytes_correction, all.bytes_variance)
    }

    /// Compares the mean over 500 recordings with the truth, within 5 standard errors: one false alarm in 2 million runs.
    #[test]
    fn corrected_sums_are_unbiased_and_vary_no_more_than_estimated() {
        // 130 periods: the bias at both ends of a recording is about one pause and window.
        let (mean_pause, end, runs) = (3.0, 1300.0 * std::f64::consts::PI, 500);
        let truth = 100.0 * end;
        let figures: Vec<(f64, f64)> = (0..runs).map(|seed| estimated(seed, mean_pause, end)).collect();
        let n = runs as f64;
        let mean = figures.iter().map(|(bytes, _)| bytes).sum::<f64>() / n;
        let variance = figures.iter().map(|(bytes, _)| (bytes - mean).powi(2)).sum::<f64>() / (n - 1.0);
        let estimated = figures.iter().map(|(_, variance)| variance).sum::<f64>() / n;
        let tolerance = 5.0 * (variance / n).sqrt() + 0.001 * truth;
        assert!((mean - truth).abs() < tolerance, "{mean} for {truth}, within {tolerance}");
        // Pauses are jittered and not independent: windows are spread more evenly, which lowers the variance.
        assert!(estimated > variance, "estimated {estimated}, observed {variance}");
    }

    #[test]
    fn a_row_without_windows_stands_for_itself() {
        let mut windows = Windows::default();
        assert!(windows.close(|_| 1.0).is_empty() && !windows.is_open_for(0));
        let sums = SampleSums { bytes: 10.0, bytes_variance: 4.0, ..SampleSums::default() };
        let correction = Correction::new(&sums, 1.0, 3.0);
        assert_eq!((correction.bytes, correction.bytes_variance), (20.0, 6.0 * 100.0 + 2.0 * 4.0));
        let more = Correction::new(&sums, 3.0, 4.0);
        assert_eq!(more.bytes_variance, 6.0 * 100.0 + 4.0);
    }

    fn sums(size_bytes: u64, interval: u64) -> SampleSums {
        let mut sums = SampleSums::default();
        sums.record(size_bytes, size_bytes, 0, interval);
        sums
    }

    #[test]
    fn a_factor_that_is_raised_in_steps_corrects_as_much_as_at_once() {
        let open = || {
            let mut windows = Windows::default();
            windows.open();
            windows.open.as_mut().unwrap().insert(3, sums(100, 512));
            windows
        };
        let (mut once, mut steps) = (SampleSums::default(), SampleSums::default());
        open().close(|_| 6.5)[0].1.apply(&mut once);
        let mut windows = open();
        windows.close(|_| 2.0)[0].1.apply(&mut steps);
        for more in [0.5, 0.0, 4.0] {
            let corrections = windows.extend(|row| if row == 3 { more } else { f64::NAN });
            assert_eq!(corrections.len(), 1);
            corrections[0].1.apply(&mut steps);
        }
        for (a, b) in [
            (once.bytes_correction, steps.bytes_correction),
            (once.bytes_variance, steps.bytes_variance),
            (once.objects_correction, steps.objects_correction),
            (once.objects_variance, steps.objects_variance),
        ] {
            assert!(a > 0.0 && (a - b).abs() < 1e-9 * a, "{a} at once, {b} in steps");
        }
    }

    #[test]
    fn a_factor_of_one_corrects_nothing() {
        let one = Correction::new(&sums(100, 512), 1.0, 1.0);
        assert_eq!(one, Correction { bytes: 0.0, bytes_variance: 0.0, objects: 0.0, objects_variance: 0.0 });
    }

    #[test]
    fn only_the_last_closed_window_is_extended_and_not_for_rows_that_are_forgotten() {
        let mut windows = Windows::default();
        windows.open();
        for row in [1, 2] {
            windows.open.as_mut().unwrap().insert(row, sums(100, 1));
        }
        // An open window stays open.
        windows.open();
        assert!(windows.is_open_for(1) && !windows.is_open_for(3));
        assert_eq!(windows.close(|_| 2.0).len(), 2);
        assert!(!windows.is_open_for(1));
        windows.forget(1);
        let rows =
            |corrections: Vec<(u32, Correction)>| corrections.into_iter().map(|(row, _)| row).collect::<Vec<_>>();
        assert_eq!(rows(windows.extend(|_| 1.0)), [2]);
        windows.open.as_mut().unwrap().insert(5, sums(100, 1));
        assert_eq!(rows(windows.close(|_| 2.0)), [5]);
        assert_eq!(rows(windows.extend(|_| 1.0)), [5]);
    }

    #[test]
    fn probes_are_attached_from_the_first_moment_to_the_last() {
        let mut windows = Windows::default();
        assert!(windows.covers(0) && windows.covers(u64::MAX));
        windows.begin(10);
        windows.finish(20);
        assert_eq!([9, 10, 20, 21].map(|time_ns| windows.covers(time_ns)), [false, true, true, false]);
        windows.begin(30);
        assert_eq!([20, 29, 30, u64::MAX].map(|time_ns| windows.covers(time_ns)), [false, false, true, true]);
    }
}
