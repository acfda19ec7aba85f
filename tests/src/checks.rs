//! Compares profiles with truths, and with themselves.

use std::collections::{BTreeMap, BTreeSet};

use crate::output::{Estimate, Figures, Process, Profile, Stack, Stats};
use crate::truth::{Law, Sum, Truth, sampled_share};

/// What must hold in every profile, whatever was recorded: the identity of the accounting, and sums that add up.
///
/// # Panics
/// If something does not.
pub fn always(profile: &Profile, stats: &Stats) {
    identity(stats);
    add_up(profile);
    let exact = profile.totals.alloc_bytes.exact;
    // What was counted in time windows is not the total.
    let counted = (!profile.time_windows).then_some(stats.exact_alloc_bytes as f64);
    assert_eq!(exact, counted, "totals in the profile and in --stats");
    let estimate = profile.totals.alloc_bytes.value();
    assert!(close(estimate, stats.estimated_alloc_bytes), "{estimate} and {}", stats.estimated_alloc_bytes);
}

/// hits = unsampled + submitted + failed + Σ lost.
///
/// # Panics
/// If not.
pub fn identity(stats: &Stats) {
    let accounted = stats.unsampled + stats.submitted + stats.failed + stats.lost();
    assert_eq!(stats.hits, accounted, "hits = unsampled + submitted + failed + lost, in {stats:?}");
}

/// Σ stacks = Σ processes = totals, in all figures.
fn add_up(profile: &Profile) {
    let stacks = total(profile.stacks.iter().map(|stack| &stack.figures));
    let processes = total(profile.processes.iter().map(|process| &process.figures));
    let totals = total([&profile.totals]);
    for i in 0..FIGURES {
        assert!(close(stacks[i], totals[i]), "Σ stacks is not the total: {stacks:?}, {totals:?}");
        assert!(close(processes[i], totals[i]), "Σ processes is not the total: {processes:?}, {totals:?}");
    }
    for process in &profile.processes {
        let own = total(profile.stacks.iter().filter(|stack| stack.pid == process.pid).map(|stack| &stack.figures));
        let lives = total(profile.processes.iter().filter(|p| p.pid == process.pid).map(|p| &p.figures));
        assert!((0..FIGURES).all(|i| close(own[i], lives[i])), "process {}: {own:?}, {lives:?}", process.pid);
    }
    for stack in &profile.stacks {
        assert!(stack.samples > 0 || stack.figures.alloc_bytes.value() == 0.0, "figures without samples: {stack:?}");
    }
}

/// Figures of a stack, a process or all: allocated, in use and at exit, bytes and objects each.
const FIGURES: usize = 6;

fn total<'a>(figures: impl IntoIterator<Item = &'a Figures>) -> [f64; FIGURES] {
    let mut sum = [0.0; FIGURES];
    for figure in figures {
        sum[0] += figure.alloc_bytes.estimate.unwrap_or(0.0);
        sum[1] += figure.alloc_objects.estimate.unwrap_or(0.0);
        sum[2] += value(&figure.inuse_bytes);
        sum[3] += value(&figure.inuse_objects);
        sum[4] += value(&figure.at_exit_bytes);
        sum[5] += value(&figure.at_exit_objects);
    }
    sum
}

fn value(estimate: &Option<Estimate>) -> f64 {
    estimate.as_ref().and_then(|e| e.estimate).unwrap_or(0.0)
}

/// Equal but for the rounding of sums in another order.
pub fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs()) + 1e-6
}

/// Estimates of one site, summed over its stacks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SiteSums {
    /// Samples taken.
    pub samples: u64,
    /// `[alloc bytes, alloc objects, in-use bytes, in-use objects]`.
    pub figures: [f64; 4],
    /// What ended processes held when they ended, where that stands apart: bytes and objects.
    pub at_exit: [f64; 2],
}

/// Sums per site: a stack belongs to `site_NN` if a frame's function has that name. Of one process, or of all.
pub fn site_sums(profile: &Profile, pid: Option<u32>) -> BTreeMap<String, SiteSums> {
    let mut sums: BTreeMap<String, SiteSums> = BTreeMap::new();
    for stack in profile.stacks.iter().filter(|stack| pid.is_none_or(|pid| stack.pid == pid)) {
        let Some(site) = stack.site() else { continue };
        let sum = sums.entry(site.to_owned()).or_default();
        sum.samples += stack.samples;
        for (to, from) in sum.figures.iter_mut().chain(&mut sum.at_exit).zip(total([&stack.figures])) {
            *to += from;
        }
    }
    sums
}

/// What of a truth is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// Allocated and in use.
    All,
    /// Allocated, and what ended processes held when they ended, where that is not in use.
    AtExit,
    /// Allocated only (`--no-live`, or in-use figures that are a matter of taste).
    Allocated,
}

/// Compares every site, process by process where `per_process`, within the tolerance of [`Sum::tolerance`]: exactly at
/// interval 1. Sites that the program never was at must not appear.
///
/// # Panics
/// With all that is off, if anything is.
pub fn sites(profile: &Profile, truth: &Truth, interval: u64, compare: Compare) {
    let mut wrong = Vec::new();
    // A process may have several lives (exec) and a site several processes: truth is summed likewise.
    let found = site_sums(profile, None);
    let mut names: BTreeSet<&str> = truth.sites.iter().map(|site| site.site.as_str()).collect();
    names.extend(found.keys().map(String::as_str));
    for name in names {
        let here = || truth.sites.iter().filter(|site| site.site == name);
        let law = |live| {
            let pick = move |&[size, allocs, alive]: &[u64; 3]| (size, if live { alive } else { allocs });
            Law::of(here().flat_map(|site| site.sizes.iter().map(pick)), interval)
        };
        let (allocated, live) = (law(false), law(true));
        let sums = found.get(name).copied().unwrap_or_default();
        let [alloc_bytes, alloc_objects, ..] = sums.figures;
        let figures = match compare {
            Compare::AtExit => [alloc_bytes, alloc_objects, sums.at_exit[0], sums.at_exit[1]],
            Compare::All | Compare::Allocated => sums.figures,
        };
        let laws = [
            ("alloc_bytes", allocated.bytes),
            ("alloc_objects", allocated.objects),
            ("inuse_bytes", live.bytes),
            ("inuse_objects", live.objects),
        ];
        let count = if compare == Compare::Allocated { 2 } else { 4 };
        for ((figure, law), estimate) in laws.into_iter().zip(figures).take(count) {
            judge(&mut wrong, &format!("{name} {figure}"), law, estimate);
        }
        judge(&mut wrong, &format!("{name} samples"), allocated.samples, sums.samples as f64);
    }
    assert!(wrong.is_empty(), "at interval {interval}:\n{}", wrong.join("\n"));
}

/// Compares the sites of one process only.
///
/// # Panics
/// As [`sites`].
pub fn sites_of(profile: &Profile, pid: u32, truth: &Truth, interval: u64, compare: Compare) {
    let mut profile = profile.clone();
    profile.stacks.retain(|stack| stack.pid == pid);
    let mut truth = truth.clone();
    truth.sites.retain(|site| site.pid == pid);
    sites(&profile, &truth, interval, compare);
}

fn judge(wrong: &mut Vec<String>, what: &str, law: Sum, estimate: f64) {
    let tolerance = law.tolerance().max(1e-9 * law.truth);
    if (estimate - law.truth).abs() > tolerance {
        let sigma = law.variance.sqrt();
        wrong.push(format!("{what}: {estimate} instead of {} (σ {sigma:.1}, tolerance {tolerance:.1})", law.truth));
    }
}

/// Checks the number of samples of `times` allocations of one size against the binomial law.
///
/// # Panics
/// If it is off by more than [`Sum::tolerance`].
pub fn sampled(samples: u64, size: u64, times: u64, interval: u64) {
    let share = sampled_share(size, interval);
    let mut wrong = Vec::new();
    judge(&mut wrong, "samples", Law::of([(size, times)], interval).samples, samples as f64);
    assert!(wrong.is_empty(), "size {size}, R {interval}, share {share}: {wrong:?}");
}

/// The exact totals of a process.
pub fn exact(process: &Process) -> (Option<u64>, Option<u64>) {
    (process.figures.alloc_bytes.exact.map(|n| n as u64), process.figures.alloc_objects.exact.map(|n| n as u64))
}

/// The health check z = (exact − estimated)/σ of a total, σ from its own 95 % interval (half its width on that side is
/// at least 1.96 σ for sums of many samples).
pub fn z(total: &Estimate) -> f64 {
    let (exact, estimate) = (total.exact.expect("exact totals are counted"), total.value());
    let end = if exact < estimate { total.low } else { total.high }.expect("an interval");
    let half = (end - estimate).abs();
    if exact == estimate { 0.0 } else { (exact - estimate) / (half / 1.96) }
}

/// How many of the listed stacks have a 95 % interval that misses the truth of their site (which has one stack), and how
/// many there are.
pub fn missed(profile: &Profile, truth: &Truth) -> (u64, u64) {
    let single = |stack: &&Stack| {
        let site = stack.site();
        site.is_some() && profile.stacks.iter().filter(|other| other.site() == site).count() == 1
    };
    let mut missed = 0;
    let mut listed = 0;
    for stack in profile.stacks.iter().filter(single) {
        let Some(site) = truth.sites.iter().find(|site| Some(site.site.as_str()) == stack.site()) else { continue };
        let (Some(low), Some(high)) = (stack.figures.alloc_bytes.low, stack.figures.alloc_bytes.high) else { continue };
        listed += 1;
        missed += u64::from(!(low..=high).contains(&(site.bytes as f64)));
    }
    (missed, listed)
}
