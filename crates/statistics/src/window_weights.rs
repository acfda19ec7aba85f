//! Weights of time windows: a window, in which probes are attached, represents itself and the pause before it.
//!
//! Probes slow down a CPU-bound target, so a window shows less of its work than a pause of the same length. Its work is
//! measured by its own CPU time: all CPU time in a pause (D'), and all but that of the probes in a window (x). A window then
//! has the weight (D' + x)/x. A target that waits for something else, such as a clock or clients, has CPU time to spare: it
//! spends the probes' time on top of its own and gets the same work done. Its weight is (pause + window)/window by the
//! clock, which does not depend on how well the cost of probes is known. Each pause and window shows which of the two
//! applies: a CPU-bound thread hardly ever sleeps.

/// One process in a window and in the pause before it. All times are in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Observed {
    /// Length of the pause.
    pub pause: f64,
    /// Length of the window.
    pub window: f64,
    /// CPU time used in the pause.
    pub pause_cpu: f64,
    /// CPU time used in the window, probes included.
    pub window_cpu: f64,
    /// The part of `window_cpu` that CPU-bound threads used.
    pub bound_cpu: f64,
    /// Estimated CPU time of probes in the window.
    pub probes: f64,
}

impl Observed {
    /// The CPU times of both, over the pause and window of `self`.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self {
            pause_cpu: self.pause_cpu + other.pause_cpu,
            window_cpu: self.window_cpu + other.window_cpu,
            bound_cpu: self.bound_cpu + other.bound_cpu,
            probes: self.probes + other.probes,
            ..*self
        }
    }

    /// Weight by the clock: (pause + window)/window.
    pub fn by_time(&self) -> f64 {
        1.0 + self.pause / self.window.max(1e-9)
    }

    /// Whether probes take CPU time from the target's own work, because it is CPU-bound.
    pub fn is_slowed(&self) -> bool {
        self.probes > 0.0 && self.bound_cpu > 0.5 * self.window_cpu
    }

    /// The target's own CPU time in the window.
    fn own(&self) -> f64 {
        self.window_cpu * own_share(self.probes / self.window_cpu.max(1e-12))
    }
}

/// Share of its CPU time that a target has left for itself, where probes are estimated to take `probes` of it (which may
/// be more than 1).
///
/// The cost of a probe is known to a factor, of which [`LEAST_COST`] is the lowest; a cost that leaves nothing is ruled out
/// by the target's progress. The result is for the estimate itself or, if that is larger, for the centre of what remains:
/// the smaller the difference between a time and an estimate, the less it may be divided by.
pub fn own_share(probes: f64) -> f64 {
    let centre = f64::midpoint(LEAST_COST * probes, 1.0);
    (1.0 - probes.min(centre)).max(LEAST_OWN)
}

/// Lowest cost of a probe in a program, relative to the estimate.
pub const LEAST_COST: f64 = 0.75;

/// A thread that often sleeps is CPU-bound if it runs or waits for a processor for more than this share of pause and
/// window. (The kernel updates the clocks of a thread only every few milliseconds.)
pub const CPU_BOUND_SHARE: f64 = 0.8;
/// Least share of the CPU time that is taken as the target's own.
const LEAST_OWN: f64 = 0.1;
/// A window represents at most this many pauses like its own, so that the work of a burst is not attributed to an idle
/// moment.
const MOST_PAUSES: f64 = 3.0;

/// Progress of one process. Own CPU time in pauses that no window could represent is carried over to the next windows, so
/// that all of it is accounted for in the end: a ratio estimate over groups of windows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    owed: f64,
    last: Observed,
}

impl Progress {
    /// Weight of a window: how many times itself it represents.
    pub fn factor(&mut self, seen: &Observed) -> f64 {
        self.last = *seen;
        self.owed += seen.pause_cpu;
        if seen.is_slowed() {
            return 1.0 + self.pay(seen.pause);
        }
        let more = seen.by_time() - 1.0;
        self.owed = (self.owed - more * seen.own()).max(0.0);
        1.0 + more
    }

    /// Additional weight of the last window for a pause that no window follows. `cpu` is the CPU time used in that pause, if
    /// known; all times are in seconds.
    pub fn more(&mut self, pause: f64, cpu: Option<f64>, by_time: f64) -> f64 {
        if !self.last.is_slowed() {
            return by_time;
        }
        self.owed += cpu.unwrap_or(self.last.pause_cpu / self.last.pause.max(1e-9) * pause);
        self.pay(pause)
    }

    fn pay(&mut self, pause: f64) -> f64 {
        let busy = self.last.window_cpu / self.last.window.max(1e-9);
        let paid = self.owed.min(MOST_PAUSES * pause * busy);
        self.owed -= paid;
        paid / self.last.own().max(1e-9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Random(u64);

    impl Random {
        fn uniform(&mut self) -> f64 {
            sampler_ebpf::rng::next(&mut self.0) as f64 / u64::MAX as f64
        }
    }

    /// How a simulated target spends its time.
    #[derive(Clone, Copy)]
    enum Target {
        /// CPU-bound: alternating call rates per second of its own CPU time, each for `seconds` of CPU time.
        Bound { rates: [f64; 2], seconds: f64 },
        /// Calls per second by the clock, each taking `own` seconds of CPU time.
        Paced { rate: f64, own: f64 },
        /// Calls per second of its own CPU time, in jobs of `busy` seconds separated by `idle` seconds of the clock.
        Jobs { rate: f64, busy: f64, idle: f64 },
    }

    const STEP: f64 = 0.001;

    struct Run {
        target: Target,
        own: f64,
        waited: f64,
        calls: f64,
    }

    impl Run {
        /// CPU time used in one step of the clock, in all and by probes. `cost` is the cost of a probed call in seconds.
        fn step(&mut self, cost: f64) -> (f64, f64) {
            match self.target {
                Target::Bound { rates, seconds } => {
                    let rate = rates[(self.own / seconds) as usize % 2];
                    let own = STEP / (1.0 + rate * cost);
                    self.own += own;
                    self.calls += rate * own;
                    (STEP, rate * own * cost)
                }
                Target::Paced { rate, own } => {
                    let calls = rate * STEP;
                    self.calls += calls;
                    (calls * (own + cost), calls * cost)
                }
                Target::Jobs { rate, busy, idle } => {
                    let done = (self.own / busy).floor();
                    if self.waited < done * idle {
                        self.waited += STEP;
                        return (0.0, 0.0);
                    }
                    let own = STEP / (1.0 + rate * cost);
                    self.own += own;
                    self.calls += rate * own;
                    (STEP, rate * own * cost)
                }
            }
        }
    }

    /// A recording with windows of 0.1 s after pauses of 0.5 to 1.5 times `mean` seconds. Returns the number of calls as
    /// estimated by progress and by the clock, both relative to the true number. `known` is the assumed cost of a call
    /// relative to its true cost.
    fn recording(target: Target, cost: f64, known: f64, mean: f64, seed: u64) -> (f64, f64) {
        let mut random = Random(sampler_ebpf::rng::seed(seed, 7));
        let mut run = Run { target, own: 10.0 * random.uniform(), waited: 0.0, calls: 0.0 };
        if let Target::Jobs { busy, idle, .. } = target {
            run.waited = (run.own / busy).floor() * idle;
        }
        let mut progress = Progress::default();
        let (mut estimate, mut by_time) = (0.0, 0.0);
        for _ in 0..60 {
            let mut seen = Observed { window: 0.1, ..Observed::default() };
            for _ in 0..(mean * (0.5 + random.uniform()) / STEP) as usize {
                seen.pause_cpu += run.step(0.0).0;
                seen.pause += STEP;
            }
            let before = run.calls;
            for _ in 0..100 {
                let (cpu, probes) = run.step(cost);
                seen.window_cpu += cpu;
                seen.probes += known * probes;
            }
            // The target has a single thread.
            seen.bound_cpu = if seen.window_cpu > CPU_BOUND_SHARE * seen.window { seen.window_cpu } else { 0.0 };
            estimate += progress.factor(&seen) * (run.calls - before);
            by_time += seen.by_time() * (run.calls - before);
        }
        (estimate / run.calls, by_time / run.calls)
    }

    /// Mean over 200 recordings, its standard error, and the mean by the clock.
    fn mean(target: Target, cost: f64, known: f64, pause: f64) -> (f64, f64, f64) {
        let all: Vec<(f64, f64)> = (0..200).map(|seed| recording(target, cost, known, pause, seed)).collect();
        let n = all.len() as f64;
        let mean = all.iter().map(|(estimate, _)| estimate).sum::<f64>() / n;
        let variance = all.iter().map(|(estimate, _)| (estimate - mean).powi(2)).sum::<f64>() / (n - 1.0);
        (mean, (variance / n).sqrt(), all.iter().map(|(_, by_time)| by_time).sum::<f64>() / n)
    }

    /// The mean is 1 within 5 standard errors (one false alarm in 2 million) plus the stated bias.
    fn check(what: &str, (mean, error, by_time): (f64, f64, f64), bias: f64) {
        println!("{what}: {mean:.4} ± {error:.4}, by the clock {by_time:.4}");
        assert!((mean - 1.0).abs() < 5.0 * error + bias, "{what}: {mean} ± {error}, by the clock {by_time}");
    }

    #[test]
    fn a_cpu_bound_target_is_measured_by_its_own_cpu_time() {
        let bound = Target::Bound { rates: [1e6, 1e6], seconds: 1.0 };
        let found = mean(bound, 1e-6, 1.0, 1.0);
        check("CPU-bound, half of it probes", found, 0.005);
        assert!(found.2 < 0.6, "by the clock {}", found.2);
        // The estimate is only as good as the assumed cost of probes: here x is 1 − 0.9 · 0.5 instead of 0.5.
        let found = mean(bound, 1e-6, 0.9, 1.0);
        assert!((found.0 - 1.0 / 1.1).abs() < 0.02, "{found:?}");
    }

    #[test]
    fn phases_of_any_length_are_met_as_often_as_they_last() {
        for seconds in [0.02, 0.3, 7.0] {
            let bound = Target::Bound { rates: [2e6, 1e5], seconds };
            check(&format!("phases of {seconds} s"), mean(bound, 1e-6, 1.0, 1.0), 0.03);
        }
    }

    #[test]
    fn a_paced_target_is_measured_by_the_clock_whatever_probes_are_thought_to_cost() {
        let paced = Target::Paced { rate: 50_000.0, own: 0.6e-6 };
        for known in [0.7, 1.0, 1.4] {
            check(&format!("paced, cost known as {known}"), mean(paced, 1.3e-6, known, 0.3), 0.005);
        }
    }

    #[test]
    fn jobs_with_rests_are_met_too() {
        for (busy, idle) in [(3.0, 3.0), (0.3, 0.9)] {
            let jobs = Target::Jobs { rate: 1e6, busy, idle };
            check(&format!("jobs of {busy} s, rests of {idle} s"), mean(jobs, 1e-6, 1.0, 1.0), 0.1);
        }
        // Sleeps within a window make the target look as if it were not CPU-bound. The error is at most the probes' share of
        // the clock's time, one fifth here.
        let found = mean(Target::Jobs { rate: 1e6, busy: 0.02, idle: 0.06 }, 1e-6, 1.0, 1.0);
        assert!((0.8..1.0).contains(&found.0), "{found:?}");
    }

    #[test]
    fn a_cost_that_leaves_next_to_nothing_is_not_believed() {
        let close = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        // As estimated up to 0.8, which is the centre of 0.6 and 1; the centre from there on.
        for (probes, own) in [(0.0, 1.0), (0.5, 0.5), (0.8, 0.2), (0.9, 0.1625), (1.0, 0.125), (1.2, 0.1), (5.0, 0.1)] {
            close(own_share(probes), own);
        }
        // Probes that take 0.69 of the time and are thought to take 0.93: a factor of 0.31/0.151 instead of 0.31/0.07.
        let bound = Target::Bound { rates: [2.23e6, 2.23e6], seconds: 1.0 };
        let found = mean(bound, 1e-6, 1.35, 1.0);
        assert!((1.8..2.1).contains(&found.0), "{found:?}");
    }

    #[test]
    fn weights_by_hand() {
        // Half of the window's CPU time is the probes', so the pause holds 20 times as much work as the window.
        let seen = Observed { pause: 1.0, window: 0.1, pause_cpu: 1.0, window_cpu: 0.1, bound_cpu: 0.1, probes: 0.05 };
        let mut progress = Progress::default();
        let close = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        close(progress.factor(&seen), 21.0);
        // A pause at the end of the recording, with and without a known CPU time.
        close(progress.more(0.5, Some(0.4), 5.0), 8.0);
        close(progress.more(0.5, None, 5.0), 10.0);
        let paced = Observed { bound_cpu: 0.0, ..seen };
        let mut progress = Progress::default();
        close(progress.factor(&paced), 11.0);
        close(progress.more(0.5, Some(0.4), 5.0), 5.0);
        let both = seen.and(&paced);
        close(both.pause_cpu, 2.0);
        close(both.window_cpu, 0.2);
        close(both.bound_cpu, 0.1);
        close(both.probes, 0.1);
        assert_eq!((both.pause, both.window), (seen.pause, seen.window));
    }
}
