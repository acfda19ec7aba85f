//! Keeps probes inside the budget: looks at what they cost, asks [`decide`], does it, and remembers what was done.

use sampler_ebpf::abi::Counters;

use super::accounting;
use crate::attach::hooks::Served;
use crate::cost::budget::{ProbeCosts, Tracking, Use, automatic_interval, decide, share_under};
use crate::cost::free_groups::{FreeGroup, to_give_up};
use crate::cost::measure::Measured;
use crate::sampling::plan::LARGEST_INTERVAL;
use crate::view::units;

/// The first look: what the targets' call rate is.
const FIRST_LOOK_NS: u64 = 200_000_000;
/// Time between looks.
const LOOK_NS: u64 = 1_000_000_000;
/// Length of a time window.
const WINDOW_NS: u64 = 100_000_000;
/// What earlier windows weigh against the next one: clocks tick coarsely against a window, so that one alone says little.
const WINDOW_MEMORY: f64 = 0.8;
/// Calls from which on a rate is worth a decision.
const FEWEST_CALLS: f64 = 100.0;
/// The automatic interval changes only if it is off by this factor: each interval has rows of its own.
const INTERVAL_STEP: u64 = 4;

/// Most groups whose frees are given up in one look that are named.
const MOST_TOLD: usize = 8;

/// What the session has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Use another sampling interval.
    SetInterval(u64),
    /// Take the probes off the functions that free.
    LeaveFrees,
    /// Take those away that these have there.
    LeaveFreesOf(Vec<Served>),
    /// Take all probes away.
    Detach,
    /// Put them back.
    Attach,
}

/// The governor of one recording.
pub struct Governor {
    measured: Option<Measured>,
    costs: Option<ProbeCosts>,
    budget: Option<f64>,
    automatic: bool,
    tracking: Tracking,
    attached: bool,
    next_ns: u64,
    begun_ns: u64,
    detached_since_ns: u64,
    detached_ns: u64,
    last: Use,
    /// Over the last windows, the earlier ones counting less.
    windows: Use,
    first: bool,
    random: u64,
    share: Option<f64>,
    /// Looks in a row that must find the budget exceeded before something is given up, and those that did.
    patience: u32,
    exceeded: u32,
    notes: Vec<String>,
}

impl Governor {
    /// Of a recording that begins now. `budget`: the largest share of the targets' CPU time.
    pub fn new(
        measured: Option<Measured>,
        budget: Option<f64>,
        automatic: bool,
        (interval, live): (u64, bool),
        now_ns: u64,
    ) -> Self {
        let mut notes = Vec::new();
        if measured.is_none() && (budget.is_some() || automatic) {
            notes.push(
                "what probes cost could not be measured here, so no budget could be kept and no interval chosen".into(),
            );
        }
        Self {
            costs: measured.as_ref().map(|measured| measured.costs.in_programs()),
            measured,
            budget,
            automatic,
            tracking: Tracking { interval, frees: live, time: 1.0 },
            attached: true,
            next_ns: now_ns + FIRST_LOOK_NS,
            begun_ns: now_ns,
            detached_since_ns: 0,
            detached_ns: 0,
            last: Use { seconds: now_ns as f64 * 1e-9, ..Use::default() },
            windows: Use::default(),
            first: true,
            random: now_ns | 1,
            share: None,
            patience: 1,
            exceeded: 0,
            notes,
        }
    }

    /// With a budget that nobody asked for, a short burst costs nothing that cannot be had back: two looks decide.
    #[must_use]
    pub fn patient(self) -> Self {
        Self { patience: 2, ..self }
    }

    /// The recording begins now; the targets' CPU clock stands at `cpu_seconds`.
    pub fn begin(&mut self, cpu_seconds: f64, now_ns: u64) {
        self.begun_ns = now_ns;
        self.next_ns = now_ns + FIRST_LOOK_NS;
        self.last = Use { seconds: now_ns as f64 * 1e-9, cpu_seconds, ..Use::default() };
    }

    /// The instructions that are probed now are of these kinds (the most expensive ones count).
    pub fn set_kinds(&mut self, allocation: Option<&str>, free: Option<&str>) {
        if let Some(measured) = &self.measured {
            let allocation = allocation.unwrap_or(&measured.allocation_kind);
            let free = free.unwrap_or(&measured.free_kind);
            self.costs = Some(measured.costs_at(allocation, free).in_programs());
        }
    }

    /// What an instruction of that kind costs, to compare.
    pub fn cost_of_kind(&self, kind: &str) -> f64 {
        self.measured.as_ref().and_then(|measured| measured.nothing_ns.get(kind).copied()).unwrap_or(0.0)
    }

    /// What was measured of probes on this machine.
    pub fn measured(&self) -> Option<&Measured> {
        self.measured.as_ref()
    }

    /// CLOCK_MONOTONIC of the next look; `None` if there is nothing to look for.
    pub fn next_ns(&self) -> Option<u64> {
        let needed = self.costs.is_some() && (self.budget.is_some() || self.automatic) && self.tracking.time > 0.0;
        needed.then_some(self.next_ns)
    }

    /// Probe time of all calls counted, seconds.
    pub fn probe_seconds(&self, counters: &Counters) -> Option<f64> {
        self.costs.map(|costs| usage(counters, 0.0, 0.0).probe_seconds(&costs))
    }

    /// Probe time as a share of the targets' CPU time since the last look but one.
    pub fn share(&self) -> Option<f64> {
        self.share
    }

    /// Whether frees may be given up yet, of some or all.
    pub fn may_leave_frees(&self) -> bool {
        self.budget.is_some() && self.tracking.frees && self.next_ns().is_some()
    }

    /// Whether frees of all were given up: then nothing is known any more of what is in use.
    pub fn gave_up_frees(&self, live: bool) -> bool {
        live && !self.tracking.frees
    }

    /// Whether probes are in place in time windows only from here on.
    pub fn has_windows(&self) -> bool {
        self.tracking.time < 1.0
    }

    /// Share of the time during which probes were in place.
    pub fn time_share(&self, now_ns: u64) -> f64 {
        let open = if self.attached { 0 } else { now_ns.saturating_sub(self.detached_since_ns) };
        let all = now_ns.saturating_sub(self.begun_ns).max(1);
        1.0 - ((self.detached_ns + open) as f64 / all as f64).min(1.0)
    }

    /// What the user must know.
    pub fn notes(&self, now_ns: u64) -> Vec<String> {
        let mut notes = self.notes.clone();
        let share = self.time_share(now_ns);
        if self.detached_ns > 0 || !self.attached {
            notes.push(format!(
                "probes were in place {} of the time (windows of {} ms at random times): figures of allocation are \
                 corrected for that, window by window, and have no error bar",
                units::percent(share),
                WINDOW_NS / 1_000_000
            ));
        }
        notes
    }

    /// A look at what was counted up to now, when [`next_ns`](Self::next_ns) has come. `groups`: whose frees can be given up
    /// without those of others; asked for if some have to be.
    pub fn look(
        &mut self,
        counters: &Counters,
        cpu_seconds: f64,
        now_ns: u64,
        groups: impl FnOnce() -> Vec<FreeGroup<Served>>,
    ) -> Vec<Action> {
        let Some(costs) = self.costs else { return Vec::new() };
        let now = usage(counters, cpu_seconds, now_ns as f64 * 1e-9);
        if !self.attached {
            self.attached = true;
            self.detached_ns += now_ns.saturating_sub(self.detached_since_ns);
            self.next_ns = now_ns + WINDOW_NS;
            self.last = now;
            return vec![Action::Attach];
        }
        let used = now.since(&self.last);
        self.share = Some(used.share(&costs));
        self.last = now;
        self.next_ns = now_ns + LOOK_NS;
        if used.allocations + used.frees < FEWEST_CALLS {
            return Vec::new();
        }
        let mut actions = Vec::new();
        if self.automatic {
            let interval = automatic_interval(&used, self.tracking.frees, &costs, self.budget);
            let old = self.tracking.interval;
            if self.first || interval >= old * INTERVAL_STEP || interval * INTERVAL_STEP <= old {
                self.note(
                    now_ns,
                    format!("sampling interval {}, chosen for the call rate", units::bytes(interval as f64)),
                );
                self.tracking.interval = interval;
                actions.push(Action::SetInterval(interval));
            }
        }
        if let Some(budget) = self.budget {
            let before = if self.has_windows() { self.windows.times(WINDOW_MEMORY) } else { Use::default() };
            self.windows = before.and(&used);
            let used = self.windows;
            actions.extend(self.keep(&used, (&costs, budget), now_ns, groups));
            if actions.iter().any(|action| matches!(action, Action::SetInterval(_))) {
                // Samples of the old interval say nothing of what is to come.
                self.windows = Use::default();
            }
        }
        self.first = false;
        actions
    }

    fn keep(
        &mut self,
        used: &Use,
        (costs, budget): (&ProbeCosts, f64),
        now_ns: u64,
        groups: impl FnOnce() -> Vec<FreeGroup<Served>>,
    ) -> Vec<Action> {
        let mut next = decide(used, self.tracking, costs, budget);
        self.exceeded = if next == self.tracking { 0 } else { self.exceeded + 1 };
        if self.tracking.time >= 1.0 && next != self.tracking && self.exceeded < self.patience {
            return Vec::new();
        }
        let mut actions = Vec::new();
        if next.time < 1.0 {
            // Before anything else, which would take its time.
            actions.push(Action::Detach);
        }
        let (old, share) = (self.tracking, used.share(costs));
        let mut left = Vec::new();
        if old.frees && !next.frees && next.time >= 1.0 {
            let groups = groups();
            let given_up = to_give_up(&groups, used, Tracking { frees: true, ..next }, costs, budget);
            next.frees = given_up.len() < groups.len();
            if next.frees {
                left = given_up.into_iter().map(|index| groups[index].clone()).collect();
            }
        }
        self.tracking = next;
        if (next != old || !left.is_empty()) && old.time >= 1.0 {
            self.note(
                now_ns,
                format!(
                    "probes took {} of the targets' CPU time, more than the budget of {} (--max-overhead; `none` \
                     lifts it): {}",
                    units::percent(share),
                    units::percent(budget),
                    cheaper(used, old, costs)
                ),
            );
        }
        if next.interval != old.interval {
            self.note(now_ns, format!("the sampling interval is {} from here on", units::bytes(next.interval as f64)));
            actions.push(Action::SetInterval(next.interval));
        }
        for FreeGroup { name, frees, inuse_bytes, .. } in left.iter().take(MOST_TOLD) {
            let (inuse, frees) = (units::bytes(*inuse_bytes), units::count(*frees));
            self.note(
                now_ns,
                format!(
                    "frees of {name} are not followed any more, as they showed least ({inuse} known in use for {frees} \
                     calls): nothing is said of its memory in use, and totals in use are without it"
                ),
            );
        }
        if let Some(more @ 1..) = left.len().checked_sub(MOST_TOLD) {
            self.note(now_ns, format!("frees of {more} more are not followed any more, for the same reason"));
        }
        if !left.is_empty() {
            actions.push(Action::LeaveFreesOf(left.into_iter().flat_map(|group| group.links).collect()));
        }
        if !next.frees && old.frees {
            self.note(now_ns, "frees are not followed any more: nothing is said of memory in use".into());
            actions.push(Action::LeaveFrees);
        }
        if next.time <= 0.0 {
            self.note(now_ns, "no window is short enough for the budget: the probes were taken away".into());
        } else if next.time < 1.0 && old.time >= 1.0 {
            let text = format!("probes are in place in time windows only, {} of the time", units::percent(next.time));
            self.note(now_ns, text);
        }
        if next.time < 1.0 {
            self.attached = false;
            self.detached_since_ns = now_ns;
            self.next_ns = now_ns + self.pause(next.time);
        }
        actions
    }

    /// Time without probes, so that they are in place for `time` of it on average; random, so that nothing periodic in
    /// a target falls in step with it.
    fn pause(&mut self, time: f64) -> u64 {
        let random = sampler_ebpf::rng::next(&mut self.random) as f64 / u64::MAX as f64;
        let mean = WINDOW_NS as f64 * (1.0 - time) / time.max(1e-6);
        (mean * (0.5 + random)) as u64
    }

    fn note(&mut self, now_ns: u64, text: String) {
        const MOST: usize = 32;
        let at = now_ns.saturating_sub(self.begun_ns) as f64 * 1e-9;
        log::warn!("{text}");
        if self.notes.len() < MOST {
            self.notes.push(format!("after {at:.1} s: {text}"));
        }
    }
}

/// Options that cost less than what is done now, and what they would take of the targets' CPU time.
fn cheaper(used: &Use, now: Tracking, costs: &ProbeCosts) -> String {
    let wide = |tracking: Tracking| Tracking { interval: LARGEST_INTERVAL, ..tracking };
    let without = Tracking { frees: false, ..now };
    let interval = format!("-i {}MiB", LARGEST_INTERVAL >> 20);
    let options = [
        (interval.clone(), wide(now), now.interval > 0),
        ("--no-live".to_owned(), without, now.frees),
        (format!("--no-live {interval}"), wide(without), now.frees && now.interval > 0),
    ];
    let mut least = used.share(costs);
    let mut priced = Vec::new();
    for (name, how, _) in options.into_iter().filter(|(.., offered)| *offered) {
        let share = share_under(used, &how, costs);
        // What changes next to nothing is no advice.
        if share < 0.9 * least {
            least = share;
            priced.push(format!("{name} would take {}", units::percent(share)));
        }
    }
    if priced.is_empty() { "no option is known to cost less".into() } else { priced.join(", ") }
}

fn usage(counters: &Counters, cpu_seconds: f64, seconds: f64) -> Use {
    Use {
        seconds,
        allocations: (counters.hits() + counters.inner) as f64,
        frees: counters.frees_seen as f64,
        samples: counters.sampled as f64,
        bytes: accounting::exact_bytes(counters) as f64,
        cpu_seconds,
    }
}

#[cfg(test)]
#[path = "governor_tests.rs"]
mod tests;
