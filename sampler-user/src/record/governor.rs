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
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const SECOND: u64 = 1_000_000_000;

    fn governor(budget: Option<f64>, automatic: bool) -> Governor {
        let measured = Measured {
            identity: String::new(),
            allocator: String::new(),
            allocation_kind: "emulated".into(),
            free_kind: "emulated".into(),
            bare_pair_ns: 8.0,
            costs: ProbeCosts { allocation_ns: 500.0, free_ns: 500.0, sample_ns: 3000.0 },
            nothing_ns: BTreeMap::new(),
        };
        Governor::new(Some(measured), budget, automatic, (512 << 10, true), SECOND)
    }

    fn counters(calls: u64) -> Counters {
        Counters { unsampled: calls, unsampled_bytes: 100 * calls, frees_seen: calls, ..Counters::default() }
    }

    #[test]
    fn without_budget_nothing_is_looked_at_but_probe_time_is_told() {
        let governor = governor(None, false);
        assert_eq!(governor.next_ns(), None);
        // What costs a second in a loop.
        assert!((governor.probe_seconds(&counters(1_000_000)).unwrap() - 1.2).abs() < 1e-9);
        assert!(governor.notes(2 * SECOND).is_empty());
    }

    #[test]
    fn the_first_look_comes_early_and_quiet_targets_change_nothing() {
        let mut governor = governor(Some(0.25), false);
        assert_eq!(governor.next_ns(), Some(SECOND + FIRST_LOOK_NS));
        assert!(governor.look(&counters(1_000), 0.19, SECOND + FIRST_LOOK_NS, Vec::new).is_empty());
        assert_eq!(governor.next_ns(), Some(SECOND + FIRST_LOOK_NS + LOOK_NS));
        assert!(governor.share().unwrap() < 0.01 && governor.notes(2 * SECOND).is_empty());
    }

    #[test]
    fn a_hot_target_is_left_step_by_step_and_each_step_is_told() {
        let mut governor = governor(Some(0.05), false);
        let at = SECOND + FIRST_LOOK_NS;
        // 100,000 pairs take 120 ms of 200 ms.
        assert_eq!(governor.look(&counters(100_000), 0.2, at, Vec::new), [Action::Detach, Action::LeaveFrees]);
        assert!(governor.gave_up_frees(true));
        let next = governor.next_ns().unwrap();
        assert!(next > at + WINDOW_NS, "{next}");
        assert_eq!(governor.look(&counters(100_000), 1.0, next, Vec::new), [Action::Attach]);
        assert_eq!(governor.next_ns(), Some(next + WINDOW_NS));
        assert!(governor.time_share(next) < 0.5);
        let notes = governor.notes(next).join("\n");
        for part in [
            "more than the budget of 5",
            "--no-live would take 42.9 %",
            "frees are not followed",
            "time windows",
            "of the time",
        ] {
            assert!(notes.contains(part), "{part}: {notes}");
        }
    }

    #[test]
    fn frees_go_group_by_group_where_that_is_enough() {
        let mut governor = governor(Some(0.05), false);
        let group = |pid: u32, frees: u64, inuse_bytes: f64| FreeGroup {
            name: format!("p ({pid})"),
            links: vec![Served::Process(pid)],
            frees: frees as f64,
            inuse_bytes,
        };
        let counted = |frees: u64| Counters { unsampled: 1_000, frees_seen: frees, ..Counters::default() };
        let at = SECOND + FIRST_LOOK_NS;
        // 100,000 frees take 60 ms of 200 ms, all but 1,000 of them in one process.
        let groups = || vec![group(7, 1_000, 5e6), group(8, 99_000, 6e6)];
        let actions = governor.look(&counted(100_000), 0.2, at, groups);
        assert_eq!(actions, [Action::LeaveFreesOf(vec![Served::Process(8)])]);
        assert!(governor.may_leave_frees() && !governor.gave_up_frees(true));
        let notes = governor.notes(at).join("\n");
        for part in ["after 0.2 s: frees of p (8)", "5.72 MiB known in use for 99,000 calls", "budget of 5"] {
            assert!(notes.contains(part), "{part}: {notes}");
        }
        // The rest is inside the budget, until it frees more.
        let at = at + LOOK_NS;
        assert!(governor.look(&counted(105_000), 1.2, at, || panic!("nothing is to be given up")).is_empty());
        let actions = governor.look(&counted(205_000), 1.5, at + LOOK_NS, || vec![group(7, 100_000, 5e6)]);
        assert_eq!(actions, [Action::LeaveFrees]);
        assert!(!governor.may_leave_frees() && governor.gave_up_frees(true));
    }

    #[test]
    fn samples_of_an_interval_that_was_left_do_not_widen_the_next_one() {
        let mut governor = governor(Some(0.05), false);
        let mut counted = Counters { sampled: 20_000, ..counters(100_000) };
        let mut at = SECOND + FIRST_LOOK_NS;
        let widened = |actions: Vec<Action>| actions.iter().any(|action| matches!(action, Action::SetInterval(_)));
        assert!(widened(governor.look(&counted, 0.2, at, Vec::new)));
        for window in 1..5 {
            at = governor.next_ns().unwrap();
            assert_eq!(governor.look(&counted, f64::from(window), at, Vec::new), [Action::Attach]);
            at = governor.next_ns().unwrap();
            counted = Counters { sampled: 20_000, ..counters(100_000 + 50_000 * window as u64) };
            assert!(!widened(governor.look(&counted, f64::from(window) + 0.1, at, Vec::new)), "window {window}");
        }
    }

    #[test]
    fn a_short_burst_is_forgiven_where_nobody_asked_for_a_budget() {
        let mut governor = governor(Some(0.25), false).patient();
        let at = SECOND + FIRST_LOOK_NS;
        assert!(governor.look(&counters(150_000), 0.2, at, Vec::new).is_empty());
        assert!(governor.look(&counters(151_000), 1.2, at + LOOK_NS, Vec::new).is_empty());
        assert!(governor.look(&counters(851_000), 2.2, at + 2 * LOOK_NS, Vec::new).is_empty());
        assert!(!governor.look(&counters(1_551_000), 3.2, at + 3 * LOOK_NS, Vec::new).is_empty());
    }

    #[test]
    fn what_cannot_be_held_ends_at_once() {
        let mut governor = governor(Some(0.0005), false);
        let actions = governor.look(&counters(190_000), 0.2, SECOND + FIRST_LOOK_NS, Vec::new);
        assert_eq!(actions.first(), Some(&Action::Detach));
        assert_eq!(governor.next_ns(), None);
    }

    #[test]
    fn the_automatic_interval_is_set_at_the_first_look_and_then_kept() {
        let mut governor = governor(None, true);
        let at = SECOND + FIRST_LOOK_NS;
        assert_eq!(governor.look(&counters(100_000), 0.2, at, Vec::new), [Action::SetInterval(32_768)]);
        assert!(governor.look(&counters(200_000), 0.4, at + LOOK_NS, Vec::new).is_empty());
    }
}
