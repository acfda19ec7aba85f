//! Checks of profiles, against the truth and for consistency.

use std::collections::{BTreeMap, BTreeSet};

use crate::output::{Estimate, Figures, Process, Profile, Stack, Stats};
use crate::truth::{Law, Sum, Truth, sampled_share};

/// Checks what must hold in every profile: the invariant of the statistics, and sums that add up.
///
/// # Panics
/// If either does not hold.
pub fn always(profile: &Profile, stats: &Stats) {
    identity(stats);
    // For a process with implausible counts, what breaks the identity is left out together with its counts.
    assert!(profile.processes.iter().all(Process::is_believed), "what its inline hooks counted cannot be: {profile:?}");
    add_up(profile);
    let exact = profile.totals.alloc_bytes.exact;
    if profile.processes.iter().any(|process| process.hook.as_deref() == Some("usdt")) {
        assert!(exact.is_none(), "nothing counts what a process allocates that announces its samples");
        return;
    }
    if profile.processes.iter().any(Process::lacks_exact_mappings) {
        assert!(exact.is_none(), "what allocators map for themselves is counted, too");
        return;
    }
    // If another recording hooked a process inline, only a part of its calls was counted.
    let is_whole = !profile.processes.iter().any(Process::was_hidden);
    let counted = is_whole.then_some(stats.exact_alloc_bytes as f64);
    let without_counts = || profile.processes.iter().find(|process| process.figures.alloc_bytes.exact.is_none());
    assert_eq!(exact, counted, "totals in the profile and in --stats; {:?} has none", without_counts());
    let estimate = profile.totals.alloc_bytes.value();
    assert!(close(estimate, stats.estimated_alloc_bytes), "{estimate} and {}", stats.estimated_alloc_bytes);
}

/// Checks the invariant hits = unsampled + submitted + failed + Σ lost.
///
/// # Panics
/// If it does not hold.
pub fn identity(stats: &Stats) {
    let accounted = stats.unsampled + stats.submitted + stats.failed + stats.lost();
    assert_eq!(stats.hits, accounted, "hits = unsampled + submitted + failed + lost, in {stats:?}");
}

/// Checks that stacks and processes each add up to the totals, in all figures.
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
        let lost = stack.has("[records lost]");
        assert!(
            stack.samples > 0 || lost || stack.figures.alloc_bytes.value() == 0.0,
            "figures without samples: {stack:?}"
        );
    }
}

/// Sums of figures: allocated, in use and at exit, bytes and objects each.
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

/// Whether two sums are equal up to rounding, because their terms may be added in another order.
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
    /// Bytes and objects that ended processes held when they ended, where these are separate from those in use.
    pub at_exit: [f64; 2],
}

/// Sums per site, of one process or of all. A stack belongs to `site_NN` if one of its functions has that name.
pub fn site_sums(profile: &Profile, pid: Option<u32>) -> BTreeMap<String, SiteSums> {
    let mut sums: BTreeMap<String, SiteSums> = BTreeMap::new();
    for stack in profile.stacks.iter().filter(|stack| pid.is_none_or(|pid| stack.pid == pid)) {
        let Some(site) = stack.site() else { continue };
        let sum = sums.entry(site.to_owned()).or_default();
        sum.samples += stack.samples;
        let mut figures = total([&stack.figures]);
        // The truth has the sizes of mappings, whatever was written to.
        if stack.figures.address_space_bytes.is_some() {
            figures[2] = value(&stack.figures.address_space_bytes);
        }
        for (to, from) in sum.figures.iter_mut().chain(&mut sum.at_exit).zip(figures) {
            *to += from;
        }
    }
    sums
}

/// Which figures are compared with the truth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// Figures allocated and in use.
    All,
    /// Figures allocated, and what ended processes held when they ended, where that does not count as in use.
    AtExit,
    /// Figures allocated only (`--no-live`, or if in-use figures are ambiguous).
    Allocated,
}

/// Compares every site with the truth, over all processes. The tolerance is [`Sum::tolerance`] (0 at interval 1). Sites
/// that the program never reached must not appear.
///
/// # Panics
/// If a figure is off. The message lists all such figures.
pub fn sites(profile: &Profile, truth: &Truth, interval: u64, compare: Compare) {
    let mut wrong = Vec::new();
    // A process may have several process generations (exec) and a site several processes: the truth is summed likewise.
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

/// Compares the sites of one process with the truth.
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

/// Checks the number of samples of `times` allocations of one size against the binomial distribution.
///
/// # Panics
/// If it is off by more than [`Sum::tolerance`].
pub fn sampled(samples: u64, size: u64, times: u64, interval: u64) {
    let share = sampled_share(size, interval);
    let mut wrong = Vec::new();
    judge(&mut wrong, "samples", Law::of([(size, times)], interval).samples, samples as f64);
    assert!(wrong.is_empty(), "size {size}, R {interval}, share {share}: {wrong:?}");
}

/// Exact bytes and calls of a process, if they were counted.
pub fn exact(process: &Process) -> (Option<u64>, Option<u64>) {
    (process.figures.alloc_bytes.exact.map(|n| n as u64), process.figures.alloc_objects.exact.map(|n| n as u64))
}

/// Exact calls and bytes, summed over processes.
///
/// # Panics
/// If a process was not counted.
pub fn exact_of_all<'a>(processes: impl IntoIterator<Item = &'a Process>) -> [u64; 2] {
    processes.into_iter().map(exact).fold([0; 2], |[all_calls, all_bytes], (bytes, calls)| {
        [all_calls + calls.expect("calls are counted"), all_bytes + bytes.expect("bytes are counted")]
    })
}

/// z = (exact − estimated)/σ of a total. σ is taken from its 95 % confidence interval, whose distance to the estimate
/// on that side is at least 1.96 σ for sums of many samples.
pub fn z(total: &Estimate) -> f64 {
    let (exact, estimate) = (total.exact.expect("exact totals are counted"), total.value());
    let end = if exact < estimate { total.low } else { total.high }.expect("an interval");
    let half = (end - estimate).abs();
    if exact == estimate { 0.0 } else { (exact - estimate) / (half / 1.96) }
}

/// Number of listed stacks whose 95 % confidence interval misses the truth of their site (which has one stack), and
/// number of listed stacks.
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
