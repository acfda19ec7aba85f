//! What a time window stands for: itself and the pause before it, measured in the target's own progress. Pure.
//!
//! Probes slow a target down that has no time to spare: then a window shows less of its work than a pause of the same
//! length. What it gets done is measured by its own CPU time: all of it in a pause, all but the probes' in a window, x.
//! With D' used in the pause a window stands for (D' + x)/x of itself. A target that waits for something else (a clock,
//! clients) has time to spare, spends the probes' time on top of its own, and gets done as much as without: there
//! (pause + window)/window by the clock is right, and does not depend on how well the probes' cost is known. Which of the
//! two it is shows in each pause and window: a thread without time to spare does not rest.

/// One process in a window and in the pause before it, seconds.
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
    /// The part of it used by threads without time to spare.
    pub restless_cpu: f64,
    /// Probe time in the window, as estimated.
    pub probes: f64,
}

impl Observed {
    /// Both together.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self {
            pause_cpu: self.pause_cpu + other.pause_cpu,
            window_cpu: self.window_cpu + other.window_cpu,
            restless_cpu: self.restless_cpu + other.restless_cpu,
            probes: self.probes + other.probes,
            ..*self
        }
    }

    /// By the clock.
    pub fn by_time(&self) -> f64 {
        1.0 + self.pause / self.window.max(1e-9)
    }

    /// Whether probes take their time from the target's own work.
    pub fn is_slowed(&self) -> bool {
        self.probes > 0.0 && self.restless_cpu > 0.5 * self.window_cpu
    }

    /// The target's own CPU time in the window. The probes' cost is an estimate: something is left.
    fn own(&self) -> f64 {
        (self.window_cpu - self.probes).max(LEAST_OWN * self.window_cpu)
    }
}

/// Share of pause and window that a thread without time to spare runs or waits for a processor, if it rests often. The
/// kernel's clocks of a single thread stand still for some milliseconds.
pub const RESTLESS: f64 = 0.8;
/// Share of the CPU time that is taken for the target's own at least: below, the difference to what probes are estimated
/// to cost says nothing.
const LEAST_OWN: f64 = 0.1;
/// A window pays for this many pauses like its own at most: what was done in a burst is not put down to an idle moment.
const MOST_PAUSES: f64 = 3.0;

/// What is known of one process's progress. Own CPU time of pauses that no window was fit to stand for is left to the
/// next ones, so that all of it is accounted for in the end (a ratio estimate whose groups of windows form themselves).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    owed: f64,
    last: Observed,
}

impl Progress {
    /// How many times itself a window stands for.
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

    /// A pause without a window after it: how many more times itself the last window stands for. `cpu`: CPU time used in
    /// it, where that is known.
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

    /// How a target goes on: what it does in the next `step` seconds without probes.
    #[derive(Clone, Copy)]
    enum Target {
        /// Calls per second of its own CPU time, alternately, and how long each lasts in that time.
        Bound { rates: [f64; 2], seconds: f64 },
        /// Calls a second by the clock, each taking `own` seconds of CPU time.
        Paced { rate: f64, own: f64 },
        /// Calls per second of its own CPU time in jobs of `busy` seconds with `idle` seconds of the clock in between.
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
        /// CPU time used in one step of the clock, of which the second is the probes'. `cost`: of a call, seconds.
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

    /// A recording of `end` seconds with windows of 0.1 s after pauses of 0.5 to 1.5 times `mean`. Calls as estimated
    /// with the progress and by the clock, both divided by what they were. `known`: what a call is thought to cost, of
    /// what it does cost.
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
            // Of a single thread.
            seen.restless_cpu = if seen.window_cpu > RESTLESS * seen.window { seen.window_cpu } else { 0.0 };
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

    /// Within 5 standard errors (a false alarm: once in 2 million) and the bias that is stated.
    fn check(what: &str, (mean, error, by_time): (f64, f64, f64), bias: f64) {
        println!("{what}: {mean:.4} ± {error:.4}, by the clock {by_time:.4}");
        assert!((mean - 1.0).abs() < 5.0 * error + bias, "{what}: {mean} ± {error}, by the clock {by_time}");
    }

    #[test]
    fn a_target_without_time_to_spare_is_measured_by_its_own_cpu_time() {
        let bound = Target::Bound { rates: [1e6, 1e6], seconds: 1.0 };
        let found = mean(bound, 1e-6, 1.0, 1.0);
        check("CPU-bound, half of it probes", found, 0.005);
        assert!(found.2 < 0.6, "by the clock {}", found.2);
        // Only as well as the probes' cost is known: x is 1 − 0.9 · 0.5 instead of 0.5.
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
        // Rests within a window look like time to spare, which they are not: off by the probes' share of the clock's
        // time at most, a fifth here.
        let found = mean(Target::Jobs { rate: 1e6, busy: 0.02, idle: 0.06 }, 1e-6, 1.0, 1.0);
        assert!((0.8..1.0).contains(&found.0), "{found:?}");
    }
}
