//! The overhead controller keeps probes within the budget: it checks their cost, calls [`decide`], returns actions, and
//! keeps notes.

use heapbpf_profile::units;
use sampler_ebpf::abi::Counters;

use super::decision::{Tracking, Use, automatic_interval, cheap_samples, cheaper, decide, would_take};
use super::inline_advice::InlineAdvice;
use crate::cost::measure::Measured;
use crate::cost::probe_costs::ProbeCosts;
use crate::intake::counters::exact_bytes;
use crate::plan::SamplingPlan;

/// Time until the first check, which finds the targets' call rate.
const FIRST_LOOK_NS: u64 = 200_000_000;
/// Time between checks.
const LOOK_NS: u64 = 1_000_000_000;
/// Minimum number of calls and frees for a decision.
const FEWEST_CALLS: f64 = 100.0;
/// The automatic interval changes only if it is off by this factor: each interval has rows of its own.
const INTERVAL_STEP: u64 = 4;

/// Share of the budget from which on checks need the calls that targets count themselves.
const CLOSE: f64 = 0.5;
/// Longest time without reading them, seconds. If the kernel cannot read a process's calls at its end, those since the
/// last read are lost.
const LONGEST_UNREAD: f64 = 60.0;

/// How many checks in a row must find the budget exceeded before the recording is reduced, which is permanent.
const PATIENCE: u32 = 2;

/// The note when the probes are detached.
const DETACHED: &str =
    "the probes were detached for the rest of the recording: figures cover what was allocated until then";

/// An action for the session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Change the sampling interval.
    SetInterval(u64),
    /// Stop tracking frees: detach the probes of functions that free.
    StopTrackingFrees,
    /// Detach all probes, for good.
    Detach,
}

/// Results of earlier checks.
struct Looks {
    /// CLOCK_MONOTONIC of the next check.
    next_ns: u64,
    first: bool,
    last: Use,
    /// The same of the last check by [`OverheadController::is_well_within`].
    last_in_kernel: Use,
    /// Whether the last check found anything but samples, or much of the budget used. At first, that is not known.
    is_close: bool,
    /// Probe time as a share of the targets' CPU time.
    share: Option<f64>,
    /// How many checks in a row have found the budget exceeded.
    exceeded: u32,
}

/// The overhead controller of one recording.
pub struct OverheadController {
    measured: Option<Measured>,
    /// What probes cost the targets, on average.
    pub costs: Option<ProbeCosts>,
    /// What inline hooks would take instead, if an option of the recording stands in their way.
    pub advice: Option<InlineAdvice>,
    budget: Option<f64>,
    automatic: bool,
    /// How closely targets are tracked. Without frees, memory in use is unknown.
    pub tracking: Tracking,
    /// Whether the probes are still in place.
    attached: bool,
    /// CLOCK_MONOTONIC.
    begun_ns: u64,
    looks: Looks,
    /// Notes for the user.
    pub notes: Vec<String>,
}

impl OverheadController {
    /// Creates the controller of a recording that begins now.
    pub fn new(measured: Option<Measured>, budget: Option<f64>, sampling: &SamplingPlan, now_ns: u64) -> Self {
        let mut notes = Vec::new();
        if measured.is_none() && (budget.is_some() || sampling.automatic) {
            notes.push(
                "the cost of probes could not be measured here, so no budget was kept and no interval chosen".into(),
            );
        }
        let begun = Use { seconds: now_ns as f64 * 1e-9, ..Use::default() };
        Self {
            costs: measured.as_ref().map(|measured| measured.costs.in_programs()),
            measured,
            advice: None,
            budget,
            automatic: sampling.automatic,
            tracking: Tracking { interval: sampling.interval, frees: sampling.live },
            attached: true,
            begun_ns: now_ns,
            looks: Looks {
                next_ns: now_ns + FIRST_LOOK_NS,
                first: true,
                last: begun,
                last_in_kernel: begun,
                is_close: true,
                share: None,
                exceeded: 0,
            },
            notes,
        }
    }

    /// Notes that the recording begins now, with the targets' CPU clock at `cpu_seconds`.
    pub fn begin(&mut self, cpu_seconds: f64, now_ns: u64) {
        self.begun_ns = now_ns;
        self.looks.next_ns = now_ns + FIRST_LOOK_NS;
        self.looks.last = Use { seconds: now_ns as f64 * 1e-9, cpu_seconds, ..Use::default() };
        (self.looks.last_in_kernel, self.looks.is_close) = (self.looks.last, true);
    }

    /// Probe costs measured on this machine.
    pub fn measured(&self) -> Option<&Measured> {
        self.measured.as_ref()
    }

    /// Whether nothing is decided, and the share is only shown ([`Self::watch`]).
    pub const fn only_shows(&self) -> bool {
        self.budget.is_none() && !self.automatic
    }

    /// CLOCK_MONOTONIC of the next check; `None` if no check is needed.
    pub fn next_ns(&self) -> Option<u64> {
        let needed = self.attached && self.costs.is_some() && !self.only_shows();
        needed.then_some(self.looks.next_ns)
    }

    /// Probe costs in programs, if they are known, and how closely targets are tracked.
    pub fn costs(&self) -> Option<(ProbeCosts, Tracking)> {
        self.costs.map(|costs| (costs, self.tracking))
    }

    /// Probe time as a share of the targets' CPU time between the last two checks.
    pub fn share(&self) -> Option<f64> {
        self.looks.share
    }

    /// Whether a check at a time needs the calls that targets count themselves ([`Self::look`]): to choose an interval,
    /// because the budget may be exceeded, or because they have not been read for long. Reading them takes time for
    /// each target.
    pub fn needs_calls(&self, now_ns: u64) -> bool {
        let unread_for = now_ns as f64 * 1e-9 - self.looks.last.seconds;
        self.automatic || self.looks.is_close || unread_for > LONGEST_UNREAD
    }

    /// Checks counters without the calls that targets count themselves, at the time [`next_ns`](Self::next_ns). Returns
    /// whether only samples took time, and much less than the budget. Otherwise [`Self::look_from`] follows.
    pub fn is_well_within(&mut self, counters: &Counters, cpu_seconds: f64, now_ns: u64) -> bool {
        let (Some(costs), Some(budget)) = (self.costs, self.budget) else { return false };
        // Only the targets' counts tell frees of samples, which are part of a sample's cost, from others.
        let now = Use { frees: 0.0, ..usage(counters, cpu_seconds, now_ns as f64 * 1e-9) };
        let used = now.since(&std::mem::replace(&mut self.looks.last_in_kernel, now));
        self.note_share(&used, &costs, now_ns);
        self.looks.exceeded = u32::from(used.share(&costs) > budget);
        !self.looks.is_close
    }

    /// Notes all counters, from which on the next check compares.
    pub fn look_from(&mut self, counters: &Counters, cpu_seconds: f64, now_ns: u64) {
        self.looks.last = usage(counters, cpu_seconds, now_ns as f64 * 1e-9);
    }

    /// Notes what was used up to now, only to show it.
    pub fn watch(&mut self, counters: &Counters, cpu_seconds: f64, now_ns: u64) {
        let Some(costs) = self.costs else { return };
        let now = usage(counters, cpu_seconds, now_ns as f64 * 1e-9);
        self.looks.share = Some(now.since(&std::mem::replace(&mut self.looks.last, now)).share(&costs));
    }

    /// Notes what was used up to a check now.
    fn note_share(&mut self, used: &Use, costs: &ProbeCosts, now_ns: u64) {
        let share = used.share(costs);
        self.looks.share = Some(share);
        self.looks.is_close = used.allocations > 0.0 || self.budget.is_none_or(|budget| share > CLOSE * budget);
        self.looks.next_ns = now_ns + LOOK_NS;
    }

    /// Checks all counters, at the time [`next_ns`](Self::next_ns). `takes_in`: processes are hooked one by one, inline
    /// or by links of their own, so that only the interval is common to them.
    pub fn look(&mut self, counters: &Counters, cpu_seconds: f64, takes_in: bool, now_ns: u64) -> Vec<Action> {
        let Some(costs) = self.costs else { return Vec::new() };
        let now = usage(counters, cpu_seconds, now_ns as f64 * 1e-9);
        let used = now.since(&self.looks.last);
        self.note_share(&used, &costs, now_ns);
        self.looks.last = now;
        if used.calls() + used.frees < FEWEST_CALLS {
            self.looks.exceeded = 0;
            return Vec::new();
        }
        let mut actions = Vec::new();
        if self.automatic {
            let interval = automatic_interval(&used, self.tracking.frees, &costs, self.budget);
            let old = self.tracking.interval;
            if self.looks.first || interval >= old * INTERVAL_STEP || interval * INTERVAL_STEP <= old {
                self.note(
                    now_ns,
                    format!("sampling interval {}, chosen for the call rate", units::bytes(interval as f64)),
                );
                self.tracking.interval = interval;
                actions.push(Action::SetInterval(interval));
            }
        }
        if let Some(budget) = self.budget {
            actions.extend(self.keep(&used, takes_in, (&costs, budget), now_ns));
        }
        self.looks.first = false;
        actions
    }

    /// Keeps the budget.
    fn keep(&mut self, used: &Use, takes_in: bool, (costs, budget): (&ProbeCosts, f64), now_ns: u64) -> Vec<Action> {
        let old = self.tracking;
        let next = decide(used, old, costs, budget, takes_in);
        if next == Some(old) {
            self.looks.exceeded = 0;
            return Vec::new();
        }
        self.looks.exceeded += 1;
        if self.looks.exceeded < PATIENCE {
            return Vec::new();
        }
        self.looks.exceeded = 0;
        self.note(
            now_ns,
            format!(
                "{} took {} of the targets' CPU time, more than the budget of {} (--max-overhead; `none` lifts it): {}",
                if used.is_inside() { "samples" } else { "probes" },
                units::percent(used.share(costs)),
                units::percent(budget),
                options(used, old, costs, self.advice)
            ),
        );
        let Some(next) = next else {
            (self.attached, self.looks.share) = (false, None);
            self.note(now_ns, DETACHED.into());
            return vec![Action::Detach];
        };
        self.tracking = next;
        let mut actions = Vec::new();
        if next.interval != old.interval {
            self.note(now_ns, format!("the sampling interval is {} from here on", units::bytes(next.interval as f64)));
            actions.push(Action::SetInterval(next.interval));
        }
        if next.frees != old.frees {
            self.note(now_ns, "frees are no longer tracked: in-use figures are unavailable".into());
            actions.push(Action::StopTrackingFrees);
        }
        actions
    }

    fn note(&mut self, now_ns: u64, text: String) {
        const MOST: usize = 32;
        let at = now_ns.saturating_sub(self.begun_ns) as f64 * 1e-9;
        log::warn!("{text}");
        if self.notes.len() >= MOST {
            // The first notes say how it began, the last ones how it is now.
            self.notes.remove(MOST / 2);
        }
        self.notes.push(format!("after {at:.1} s: {text}"));
    }
}

/// Options that cost less than the current tracking, as text.
fn options(used: &Use, now: Tracking, costs: &ProbeCosts, advice: Option<InlineAdvice>) -> String {
    if used.is_inside() {
        return would_take(&cheap_samples(used, costs));
    }
    let mut priced: Vec<String> = advice.iter().map(|advice| advice.text(used, costs)).collect();
    priced.extend(cheaper(used, now, costs).iter().map(would_take));
    if priced.is_empty() { "no cheaper option is known".into() } else { priced.join(", ") }
}

/// How much the probes were used, by counted calls and CPU time.
pub fn usage(counters: &Counters, cpu_seconds: f64, seconds: f64) -> Use {
    Use {
        seconds,
        allocations: (counters.hits() + counters.reentrant)
            .saturating_sub(counters.counted_inside.saturating_add(counters.inline_sampled))
            as f64,
        counted_inside: counters.counted_inside.saturating_add(counters.inline_sampled) as f64,
        frees: counters.frees_seen.saturating_sub(counters.inline_frees) as f64,
        samples: counters.sampled as f64,
        bytes: exact_bytes(counters) as f64,
        cpu_seconds,
    }
}

#[cfg(test)]
#[path = "controller_tests.rs"]
mod tests;
