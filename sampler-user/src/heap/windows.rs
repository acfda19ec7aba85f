//! Time windows: what was seen in one stands for the time without probes before it, too.
//!
//! A window of length L follows a pause of length D that was drawn before anything of the window was known, so
//! u = (D + L)/L is the inverse of the window's chance to hold a given moment, and each row's sum y over the window
//! enters as u·y; both lengths are of the target's own progress ([`crate::sampling::window_weights`]) (Horvitz–Thompson over windows). Variance of a row: u (u − 1) y² + (u − 1) v on top of the v of its
//! samples (windows as independent first stage; Särndal, Swensson, Wretman, *Model Assisted Survey Sampling*, result
//! 4.3.1). Rows vary together from window to window, so these variances do not add up to that of a total.

use std::collections::HashMap;

use sampler_ebpf::abi::ProcessKey;

use super::live::Sample;
use super::sums::SampleSums;

/// Sums of the open window and of the last one that was closed, by row.
#[derive(Debug)]
pub struct Windows {
    /// CLOCK_MONOTONIC from when to when probes are known to be in place: putting them on and taking them off takes
    /// milliseconds, and what they see meanwhile belongs to no time that is measured.
    since_ns: u64,
    until_ns: u64,
    /// `None`: every sample stands for itself.
    open: Option<HashMap<u32, SampleSums>>,
    closed: HashMap<u32, (SampleSums, f64)>,
}

/// How many times itself a window stands for, process by process.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    /// Of those whose progress is known.
    pub known: HashMap<ProcessKey, f64>,
    /// Of the others.
    pub others: f64,
}

impl Weights {
    /// The factor of a process.
    pub fn of(&self, process: &ProcessKey) -> f64 {
        self.known.get(process).copied().unwrap_or(self.others)
    }
}

impl Default for Windows {
    fn default() -> Self {
        Self { since_ns: 0, until_ns: u64::MAX, open: None, closed: HashMap::new() }
    }
}

/// What a window adds to the sums of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Correction {
    /// To bytes.
    pub bytes: f64,
    bytes_variance: f64,
    objects: f64,
    objects_variance: f64,
}

impl Correction {
    /// By raising the factor of `sums` from `from` to `to`.
    fn new(sums: &SampleSums, from: f64, to: f64) -> Self {
        let variance = |y: f64, v: f64| (to * (to - 1.0) - from * (from - 1.0)) * y * y + (to - from) * v;
        Self {
            bytes: (to - from) * sums.bytes,
            bytes_variance: variance(sums.bytes, sums.bytes_variance),
            objects: (to - from) * sums.objects,
            objects_variance: variance(sums.objects, sums.objects_variance),
        }
    }

    /// Adds it.
    pub fn apply(&self, sums: &mut SampleSums) {
        sums.bytes_correction += self.bytes;
        sums.bytes_variance += self.bytes_variance;
        sums.objects_correction += self.objects;
        sums.objects_variance += self.objects_variance;
    }
}

impl Windows {
    /// Samples are of a window from here on, if they are not yet.
    pub fn open(&mut self) {
        self.open.get_or_insert_default();
    }

    /// All probes are in place from this time on.
    pub fn begin(&mut self, since_ns: u64) {
        (self.since_ns, self.until_ns) = (since_ns, u64::MAX);
    }

    /// From this time on they are taken away.
    pub fn finish(&mut self, until_ns: u64) {
        self.until_ns = until_ns;
    }

    /// Whether all probes were in place at a time.
    pub const fn covers(&self, time_ns: u64) -> bool {
        self.since_ns <= time_ns && time_ns <= self.until_ns
    }

    /// A sample came in.
    pub fn record(&mut self, row: u32, sample: &Sample) {
        if let Some(open) = &mut self.open {
            open.entry(row).or_default().record(sample.size_bytes, sample.trials, sample.offset, sample.interval);
        }
    }

    /// The window stands for `factor(row)` times itself; the next one is open.
    pub fn close(&mut self, factor: impl Fn(u32) -> f64) -> Vec<(u32, Correction)> {
        let sums = self.open.replace(HashMap::new()).unwrap_or_default();
        self.closed = sums.into_iter().map(|(row, sums)| (row, (sums, factor(row)))).collect();
        self.closed.iter().map(|(row, (sums, factor))| (*row, Correction::new(sums, 1.0, *factor))).collect()
    }

    /// The last window that was closed stands for `more(row)` times itself more.
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

    /// A row is gone.
    pub fn forget(&mut self, row: u32) {
        self.closed.remove(&row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rate that rises and falls is seen in windows of a length of 1 after pauses of 0.5 to 1.5 times `mean`; every
    /// byte is seen there. What the corrected sums come to, and what their variance is said to be.
    fn seen(seed: u64, mean: f64, end: f64) -> (f64, f64) {
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
        // The rest has no window of its own.
        windows.extend(|_| (pause - (now - end).max(0.0)).max(0.0))[0].1.apply(&mut all);
        (all.bytes + all.bytes_correction, all.bytes_variance)
    }

    /// Mean over 500 recordings against the truth, in standard errors; a false alarm at 5 sigma: once in 2 million.
    #[test]
    fn corrected_sums_are_unbiased_and_their_spread_is_no_larger_than_is_said() {
        // 130 periods: a window stands for what was before it, so that ends matter, by about a segment's worth.
        let (mean_pause, end, runs) = (3.0, 1300.0 * std::f64::consts::PI, 500);
        let truth = 100.0 * end;
        let figures: Vec<(f64, f64)> = (0..runs).map(|seed| seen(seed, mean_pause, end)).collect();
        let n = runs as f64;
        let mean = figures.iter().map(|(bytes, _)| bytes).sum::<f64>() / n;
        let variance = figures.iter().map(|(bytes, _)| (bytes - mean).powi(2)).sum::<f64>() / (n - 1.0);
        let said = figures.iter().map(|(_, variance)| variance).sum::<f64>() / n;
        let tolerance = 5.0 * (variance / n).sqrt() + 0.001 * truth;
        assert!((mean - truth).abs() < tolerance, "{mean} for {truth}, within {tolerance}");
        // Pauses are jittered, not independent: that the windows are spread evenly only makes the figure better.
        assert!(said > variance, "{said} is said, {variance} it is");
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
}
