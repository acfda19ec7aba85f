//! The overhead budget: what probes cost the targets, and what to reduce, in which order, to stay within it. Pure.
//!
//! Probe time p is estimated as the number of calls times the cost of a call as measured on this machine
//! ([`crate::cost::measure`]). The overhead is its share of the targets' CPU time, s = p / (u + p), where u is the
//! time left for the targets' own work. Both p and u grow with the number of calls, so s does not depend on how busy a
//! target is.

use heapbpf_profile::units;
use heapbpf_statistics::optimum::ClassUse;
use heapbpf_statistics::plan::{AIM, Costs, LARGEST_INTERVAL, Workload, automatic};

use crate::cost::probe_costs::ProbeCosts;

/// Mean probe costs of several processes, weighted by their calls. Probes on some kinds of instruction cost twenty
/// times as much as on others, and each process has files of its own.
#[derive(Clone, Copy, Debug, Default)]
pub struct MeanCosts {
    allocations: f64,
    allocation_ns: f64,
    frees: f64,
    free_ns: f64,
}

impl MeanCosts {
    /// Adds a process.
    pub fn add(&mut self, used: &Use, costs: &ProbeCosts) {
        self.allocations += used.allocations;
        self.allocation_ns += used.allocations * costs.allocation_ns;
        self.frees += used.frees;
        self.free_ns += used.frees * costs.free_ns;
    }

    /// The mean; `otherwise` where there were no calls.
    #[must_use]
    pub fn mean(&self, otherwise: &ProbeCosts) -> ProbeCosts {
        let mean = |sum: f64, calls: f64, otherwise: f64| if calls > 0.0 { sum / calls } else { otherwise };
        ProbeCosts {
            allocation_ns: mean(self.allocation_ns, self.allocations, otherwise.allocation_ns),
            free_ns: mean(self.free_ns, self.frees, otherwise.free_ns),
            sample_ns: otherwise.sample_ns,
        }
    }
}

/// Calls during some period, and the CPU time that the targets used in it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Use {
    /// Length of the period, seconds.
    pub seconds: f64,
    /// Allocation calls that reach a probe at their entry, including reentrant ones, which cost as much.
    pub allocations: f64,
    /// Allocation calls that targets count themselves (inline hooks), for 1 to 2 ns. Only the sampled ones reach a
    /// probe, at their end, which costs no more than what a sample adds to a probed call.
    pub counted_inside: f64,
    /// Calls to free that reach a probe, except those of sampled blocks with inline hooks: these are part of a sample's
    /// cost.
    pub frees: f64,
    /// Samples.
    pub samples: f64,
    /// Bytes requested.
    pub bytes: f64,
    /// CPU time of the targets, including probes, seconds.
    pub cpu_seconds: f64,
}

impl Use {
    /// Probe time, seconds.
    pub fn probe_seconds(&self, costs: &ProbeCosts) -> f64 {
        1e-9 * (self.allocations * costs.allocation_ns + self.frees * costs.free_ns + self.samples * costs.sample_ns)
    }

    /// All allocation calls.
    pub fn calls(&self) -> f64 {
        self.allocations + self.counted_inside
    }

    /// Whether most calls are counted inside the targets, so that samples are what costs.
    pub fn is_inside(&self) -> bool {
        self.counted_inside > self.allocations
    }

    /// Probe time as a share of the targets' CPU time; 0 if nothing ran.
    pub fn share(&self, costs: &ProbeCosts) -> f64 {
        share(self.probe_seconds(costs), self.useful_seconds(costs))
    }

    /// CPU time left for the targets' own work, seconds. Clock ticks are coarse and costs are estimates, so at least a
    /// thousandth of the CPU time is assumed.
    fn useful_seconds(&self, costs: &ProbeCosts) -> f64 {
        (self.cpu_seconds - self.probe_seconds(costs)).max(1e-3 * self.cpu_seconds)
    }

    fn and_times(&self, more: &Self, factor: f64) -> Self {
        Self {
            seconds: self.seconds + factor * more.seconds,
            allocations: self.allocations + factor * more.allocations,
            counted_inside: self.counted_inside + factor * more.counted_inside,
            frees: self.frees + factor * more.frees,
            samples: self.samples + factor * more.samples,
            bytes: self.bytes + factor * more.bytes,
            cpu_seconds: self.cpu_seconds + factor * more.cpu_seconds,
        }
    }

    /// The difference to an earlier total.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        self.and_times(before, -1.0)
    }
}

fn share(probes: f64, useful: f64) -> f64 {
    if probes > 0.0 { probes / (probes + useful) } else { 0.0 }
}

/// How closely targets are tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracking {
    /// Sampling interval R, bytes; 0: no samples.
    pub interval: u64,
    /// Whether frees are tracked.
    pub frees: bool,
}

/// Smallest share of samples in the probe time for which a larger R is tried.
const SAMPLES_MATTER: f64 = 0.1;
/// Error of the targets' CPU time, seconds: two ticks of their clock of 10 ms. It must not cause a reduction.
const COARSENESS: f64 = 0.02;
/// Decides how to track from here on, after a period `used` during all of which the probes of `tracking` were in place.
/// `None`: nothing is left to reduce but the probes themselves.
///
/// The steps, each taken only if needed: a larger R if samples matter; no frees; no probes. The last step cannot be
/// undone, so it is based on what was observed after the others, not on what they were expected to save. Where
/// processes are hooked one by one (`takes_in`), only R is common to all of them.
pub fn decide(used: &Use, tracking: Tracking, costs: &ProbeCosts, budget: f64, takes_in: bool) -> Option<Tracking> {
    if used.cpu_seconds <= 0.0 || used.seconds <= 0.0 {
        return Some(tracking);
    }
    let used = &Use { cpu_seconds: used.cpu_seconds + COARSENESS, ..*used };
    let useful = used.useful_seconds(costs);
    let with = |tracking: &Tracking| probe_seconds(used, tracking, costs);
    if share(with(&tracking), useful) <= budget {
        return Some(tracking);
    }
    let fits = |tracking: &Tracking| share(with(tracking), useful) <= AIM * budget;
    let mut next = tracking;
    if next.interval > 0 && 1e-9 * used.samples * costs.sample_ns > SAMPLES_MATTER * with(&next) {
        while !fits(&next) && next.interval < LARGEST_INTERVAL {
            next.interval = (next.interval * 2).min(LARGEST_INTERVAL);
            if samples_at(used, next.interval) * costs.sample_ns < 0.01 * used.allocations * costs.allocation_ns {
                break;
            }
        }
    }
    if !takes_in && !fits(&next) {
        next.frees = false;
    }
    (takes_in || next != tracking).then_some(next)
}

/// Options that cost less than the current tracking, and their shares of the targets' CPU time.
pub fn cheaper(used: &Use, now: Tracking, costs: &ProbeCosts) -> Vec<(String, f64)> {
    let wide = |tracking: Tracking| Tracking { interval: LARGEST_INTERVAL, ..tracking };
    let without = Tracking { frees: false, ..now };
    let interval = format!("-i {}MiB", LARGEST_INTERVAL >> 20);
    let options = [
        (interval.clone(), wide(now), now.interval > 0),
        ("--no-live".to_owned(), without, now.frees),
        (format!("--no-live {interval}"), wide(without), now.frees && now.interval > 0),
    ];
    // Compared as additions to a target's own work: 90 % instead of 95 % is half as much.
    let added = |share: f64| share / (1.0 - share).max(1e-9);
    let mut least = added(used.share(costs));
    let mut priced = Vec::new();
    for (name, how, _) in options.into_iter().filter(|(.., offered)| *offered) {
        let share = share_under(used, &how, costs);
        // An option that saves next to nothing is not worth mentioning.
        if added(share) < 0.9 * least {
            least = added(share);
            priced.push((name, share));
        }
    }
    priced
}

/// For targets that count their calls themselves: the interval that makes samples cheap, as an option, and the share of
/// the targets' CPU time that they would then take.
pub fn cheap_samples(used: &Use, costs: &ProbeCosts) -> (String, f64) {
    let interval = automatic_interval(used, true, costs, None);
    let option = format!("-i {}", units::bytes(interval as f64).replace(' ', ""));
    (option, share_under(used, &Tracking { interval, frees: true }, costs))
}

/// What an option would take of the targets' CPU time, for the user.
pub fn would_take((option, share): &(String, f64)) -> String {
    format!("{option} would take {}", units::percent(*share))
}

/// Share of the targets' CPU time that hooks with other costs would take.
pub fn share_with(used: &Use, costs: &ProbeCosts, other: &ProbeCosts) -> f64 {
    share(used.probe_seconds(other), used.useful_seconds(costs))
}

/// Share of the targets' CPU time that probes would take if the calls were tracked like that.
pub fn share_under(used: &Use, tracking: &Tracking, costs: &ProbeCosts) -> f64 {
    share(probe_seconds(used, tracking, costs), used.useful_seconds(costs))
}

/// Probe time, in seconds, of the same calls if they were tracked like that.
fn probe_seconds(used: &Use, tracking: &Tracking, costs: &ProbeCosts) -> f64 {
    let frees = if tracking.frees { used.frees } else { 0.0 };
    let samples = if tracking.interval == 0 { 0.0 } else { samples_at(used, tracking.interval) };
    Use { frees, samples, ..*used }.probe_seconds(costs)
}

/// Upper bound of the number of samples under the interval R. It assumes that all calls have the mean size: the
/// sampling probability P is concave in the size, so a mix of sizes gives fewer (Jensen's inequality).
pub fn samples_at(used: &Use, interval: u64) -> f64 {
    let calls = used.calls();
    if calls <= 0.0 || interval == 0 {
        return 0.0;
    }
    let mean = (used.bytes / calls).max(1.0);
    if interval == 1 {
        return calls;
    }
    calls * -f64::exp_m1(mean * f64::ln_1p(-1.0 / interval as f64))
}

/// The interval of `--interval auto`, as `heapbpf plan` would choose it for these calls. All are taken to have the mean
/// size, which gives an upper bound of the samples.
pub fn automatic_interval(used: &Use, frees: bool, costs: &ProbeCosts, budget: Option<f64>) -> u64 {
    let used = &Use { cpu_seconds: used.cpu_seconds + COARSENESS, ..*used };
    let probes = probe_seconds(used, &Tracking { interval: 0, frees }, costs);
    let calls = used.calls();
    let mean = (used.bytes / calls.max(1.0)).max(1.0);
    // All rates are per period instead of per second.
    let workload = Workload {
        classes: vec![ClassUse { size_bytes: mean, allocations: calls, live: 0.0 }],
        inline_share: used.counted_inside / calls.max(1.0),
        work_cpus: Some(used.useful_seconds(costs)),
        ..Workload::default()
    };
    let probe_ns = 1e9 * probes / used.allocations.max(1.0);
    let per_call = Costs { probe_ns, inline_ns: 0.0, sample_ns: costs.sample_ns };
    automatic(&workload, per_call, budget).map_or(LARGEST_INTERVAL, |found| found.interval)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quiet_process_with_dear_probes_makes_the_others_no_dearer() {
        let dear = ProbeCosts { allocation_ns: 20.0 * COSTS.allocation_ns, ..COSTS };
        let used = |allocations| Use { allocations, frees: 10.0, ..Use::default() };
        let mut mean = MeanCosts::default();
        assert_eq!(mean.mean(&COSTS), COSTS);
        mean.add(&used(99_000.0), &COSTS);
        mean.add(&used(1_000.0), &dear);
        let expected = ProbeCosts { allocation_ns: 1.19 * COSTS.allocation_ns, ..COSTS };
        assert!((mean.mean(&COSTS).allocation_ns - expected.allocation_ns).abs() < 1e-6);
        assert_eq!(mean.mean(&COSTS).free_ns, COSTS.free_ns);
    }

    const COSTS: ProbeCosts = ProbeCosts { allocation_ns: 500.0, free_ns: 500.0, sample_ns: 3000.0 };

    /// One second of a program that makes `calls` pairs of 100 bytes, with `useful` CPU seconds of its own work.
    fn second(calls: f64, useful: f64, tracking: Tracking) -> Use {
        let used = Use { seconds: 1.0, allocations: calls, frees: calls, bytes: 100.0 * calls, ..Use::default() };
        let samples = samples_at(&used, tracking.interval);
        let frees = if tracking.frees { calls } else { 0.0 };
        let used = Use { samples, frees, ..used };
        Use { cpu_seconds: useful + used.probe_seconds(&COSTS), ..used }
    }

    const FULL: Tracking = Tracking { interval: 512 << 10, frees: true };
    const WITHOUT: Tracking = Tracking { frees: false, ..FULL };

    #[test]
    fn the_share_is_of_all_cpu_time() {
        let used = second(100_000.0, 0.9, FULL);
        assert!((used.probe_seconds(&COSTS) - 0.1).abs() < 1e-3);
        assert!((used.share(&COSTS) - 0.1).abs() < 1e-3);
        assert_eq!(Use::default().share(&COSTS), 0.0);
    }

    /// One second of the same program, hooked inline.
    fn inline_second(calls: f64, useful: f64, interval: u64) -> Use {
        let used = Use { seconds: 1.0, counted_inside: calls, bytes: 100.0 * calls, ..Use::default() };
        let samples = samples_at(&used, interval);
        let used = Use { samples, ..used };
        Use { cpu_seconds: useful + used.probe_seconds(&COSTS), ..used }
    }

    #[test]
    fn calls_that_the_target_counts_are_no_traps() {
        // 20 million calls a second: as traps, they would take ten times the available CPU time.
        let used = inline_second(20e6, 0.97, 512 << 10);
        assert!(used.share(&COSTS) < 0.05, "{}", used.share(&COSTS));
        assert_eq!(decide(&used, FULL, &COSTS, 0.05, true), Some(FULL));
        let automatic = automatic_interval(&used, true, &COSTS, Some(0.05));
        let next = inline_second(20e6, 0.97, automatic);
        assert!(next.share(&COSTS) <= 0.011 && next.share(&COSTS) > 0.004, "{automatic}: {}", next.share(&COSTS));
        // All of them sampled: a wider interval is enough.
        let every = Tracking { interval: 1, ..FULL };
        let next = decide(&inline_second(1e6, 0.97, 1), every, &COSTS, 0.05, true).expect("it fits");
        assert!(next.frees && next.interval > 1, "{next:?}");
        assert!(inline_second(1e6, 0.97, next.interval).share(&COSTS) <= 0.05);
        let large = Use { bytes: 1e12, samples: 1e6, ..inline_second(1e6, 0.01, 1) };
        let next = decide(&large, every, &COSTS, 0.001, true).expect("there is nothing else to give up");
        assert_eq!(next, Tracking { interval: LARGEST_INTERVAL, ..FULL });
        assert_eq!(decide(&large, next, &COSTS, 0.001, true), Some(next));
    }

    #[test]
    fn what_fits_stays() {
        assert_eq!(decide(&second(100_000.0, 0.9, FULL), FULL, &COSTS, 0.25, false), Some(FULL));
        assert_eq!(decide(&Use::default(), FULL, &COSTS, 0.25, false), Some(FULL));
    }

    #[test]
    fn samples_give_way_first() {
        // 10,000 pairs a second cost 10 ms, and 30 ms more if all are sampled.
        let every = Tracking { interval: 1, ..FULL };
        let next = decide(&second(10_000.0, 0.96, every), every, &COSTS, 0.02, false).expect("it fits");
        assert!(next.frees && next.interval > 1, "{next:?}");
        let after = second(10_000.0, 0.96, next);
        assert!(after.share(&COSTS) <= 0.02, "{}", after.share(&COSTS));
        // No larger than needed: half of it would miss the aim.
        let narrower = Tracking { interval: next.interval / 2, ..next };
        assert!(second(10_000.0, 0.96, narrower).share(&COSTS) > AIM * 0.02);
    }

    #[test]
    fn frees_give_way_next_and_the_interval_stays() {
        // Full tracking takes a third; allocations alone a fifth.
        let next = decide(&second(500_000.0, 1.0, FULL), FULL, &COSTS, 0.25, false);
        assert_eq!(next, Some(WITHOUT));
        assert_eq!(decide(&second(500_000.0, 1.0, WITHOUT), WITHOUT, &COSTS, 0.25, false), next, "which is enough");
    }

    #[test]
    fn the_probes_go_last_and_only_for_what_was_seen_without_frees() {
        assert_eq!(decide(&second(900_000.0, 0.1, FULL), FULL, &COSTS, 0.001, false), Some(WITHOUT));
        assert_eq!(decide(&second(900_000.0, 0.1, WITHOUT), WITHOUT, &COSTS, 0.001, false), None);
        // Samples that matter go before.
        let every = Tracking { interval: 1, ..WITHOUT };
        let next = decide(&second(900_000.0, 0.1, every), every, &COSTS, 0.001, false).expect("a larger R");
        assert!(next.interval > 1, "{next:?}");
    }

    #[test]
    fn a_first_look_of_two_ticks_takes_no_probes_away() {
        // 10 ms of probes in 200 ms, and a CPU clock that has ticked once.
        let used = Use { seconds: 0.2, cpu_seconds: 0.01, ..second(10_000.0, 0.0, FULL) };
        assert!(decide(&used, FULL, &COSTS, 0.2, false).is_some());
    }

    #[test]
    fn ticks_that_are_too_coarse_make_no_negative_work() {
        // The clock shows 10 ms for probes that should have taken 20 ms.
        let used = Use { cpu_seconds: 0.01, ..second(20_000.0, 0.0, FULL) };
        assert_eq!(decide(&used, FULL, &COSTS, 0.5, false), Some(WITHOUT));
    }

    #[test]
    fn the_automatic_interval_is_the_smallest_that_stays_below_a_hundredth() {
        let used = second(1_000_000.0, 1.0, FULL);
        let interval = automatic_interval(&used, true, &COSTS, None);
        let share = |interval| samples_at(&used, interval) * COSTS.sample_ns / (1e6 * 1000.0);
        assert!(interval.is_power_of_two() && share(interval) <= 0.01 && share(interval / 2) > 0.01, "{interval}");
        // 100 bytes, 3 µs per sample, 1 µs per pair: R above 100 · 3 · 100.
        assert_eq!(interval, 32_768);
        assert_eq!(automatic_interval(&used, true, &COSTS, Some(0.1)), LARGEST_INTERVAL);
        assert_eq!(automatic_interval(&Use::default(), true, &COSTS, None), 1);
    }
}
