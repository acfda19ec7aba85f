//! The overhead controller keeps probes within the budget: it looks at their cost, calls [`decide`], returns actions,
//! and keeps notes.

use std::collections::HashSet;

use sampler_ebpf::abi::Counters;

use super::free_groups::Which;
use super::giving_back::{GivingBack, Room, TakeUp};
use crate::attach::hooks::Served;
use crate::cost::budget::{
    ProbeCosts, SHORTEST_TIME, Tracking, Use, automatic_interval, cheaper, decide, has_room_for_frees,
};
use crate::cost::free_groups::{FreeGroup, groups_to_give_back, groups_to_stop};
use crate::cost::measure::Measured;
use crate::record::intake::counters::exact_bytes;
use crate::record::plan::{BudgetPlan, SamplingPlan};
use heapbpf_profile::units;

/// Time until the first look, which finds the targets' call rate.
const FIRST_LOOK_NS: u64 = 200_000_000;
/// Time between looks.
const LOOK_NS: u64 = 1_000_000_000;
/// Length of a time window.
const WINDOW_NS: u64 = 100_000_000;
/// Weight of earlier windows against the next one. Clock ticks are coarse for one window, so that one alone says
/// little.
const WINDOW_MEMORY: f64 = 0.8;
/// Fewest calls on which a decision is based.
const FEWEST_CALLS: f64 = 100.0;
/// The automatic interval changes only if it is off by this factor: each interval has rows of its own.
const INTERVAL_STEP: u64 = 4;

/// If not even the shortest windows keep the budget: time without probes until one shows whether load has fallen, at first
/// and at the most.
const FIRST_TRIAL_NS: u64 = 60_000_000_000;
const LAST_TRIAL_NS: u64 = 600_000_000_000;

/// Most groups named in the notes when tracking of their frees stops at one look.
const MOST_TOLD: usize = 8;

/// An action for the session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Change the sampling interval.
    SetInterval(u64),
    /// Stop tracking frees: detach the probes of functions that free.
    StopTrackingFrees,
    /// Stop tracking frees of the processes that these links serve.
    StopTrackingFreesOf(Vec<Served>),
    /// Track all frees again but those of `except`: attach the probes of functions that free.
    TrackFreesAgain {
        /// The processes whose frees stay untracked.
        except: Vec<Served>,
    },
    /// Detach all probes.
    Detach,
    /// Attach all probes again.
    Attach,
}

/// When probes are in place. Times are CLOCK_MONOTONIC.
struct ProbeTimes {
    begun_ns: u64,
    attached: bool,
    detached_since_ns: u64,
    /// Length of all pauses that have ended.
    detached_ns: u64,
}

/// Findings of earlier looks.
struct Looks {
    /// CLOCK_MONOTONIC of the next look.
    next_ns: u64,
    first: bool,
    last: Use,
    /// Sum over the last windows, with lower weights for earlier ones.
    windows: Use,
    /// Probe time as a share of the targets' CPU time.
    share: Option<f64>,
    /// How many consecutive looks must find the budget exceeded before tracking is reduced, and how many have.
    patience: u32,
    /// The wait before the next window after all probes were taken away.
    trial_ns: u64,
    exceeded: u32,
}

/// The overhead controller of one recording.
pub struct OverheadController {
    measured: Option<Measured>,
    costs: Option<ProbeCosts>,
    budget: Option<f64>,
    automatic: bool,
    /// Whether frees are tracked as far as the budget allows.
    live: bool,
    tracking: Tracking,
    /// Whether frees of some processes are given up while those of others are tracked.
    some_given_up: bool,
    giving_back: GivingBack,
    /// What to say once the frees that are being taken up are tracked: whoever reads it may rely on that.
    taking_up: Vec<String>,
    times: ProbeTimes,
    looks: Looks,
    random: u64,
    notes: Vec<String>,
}

impl OverheadController {
    /// Creates the controller of a recording that begins now.
    pub fn new(measured: Option<Measured>, budget: BudgetPlan, sampling: &SamplingPlan, now_ns: u64) -> Self {
        let mut notes = Vec::new();
        if measured.is_none() && (budget.share.is_some() || sampling.automatic) {
            notes.push(
                "what probes cost could not be measured here, so no budget could be kept and no interval chosen".into(),
            );
        }
        Self {
            costs: measured.as_ref().map(|measured| measured.costs.in_programs()),
            measured,
            budget: budget.share,
            automatic: sampling.automatic,
            tracking: Tracking { interval: sampling.interval, frees: sampling.live, time: 1.0 },
            live: sampling.live,
            some_given_up: false,
            giving_back: GivingBack::default(),
            taking_up: Vec::new(),
            times: ProbeTimes { begun_ns: now_ns, attached: true, detached_since_ns: 0, detached_ns: 0 },
            looks: Looks {
                next_ns: now_ns + FIRST_LOOK_NS,
                first: true,
                last: Use { seconds: now_ns as f64 * 1e-9, ..Use::default() },
                windows: Use::default(),
                share: None,
                // Under the default budget a short burst does no lasting harm: two looks decide.
                patience: if budget.is_default { 2 } else { 1 },
                exceeded: 0,
                trial_ns: FIRST_TRIAL_NS,
            },
            random: now_ns | 1,
            notes,
        }
    }

    /// Notes that the recording begins now, with the targets' CPU clock at `cpu_seconds`.
    pub fn begin(&mut self, cpu_seconds: f64, now_ns: u64) {
        self.times.begun_ns = now_ns;
        self.looks.next_ns = now_ns + FIRST_LOOK_NS;
        self.looks.last = Use { seconds: now_ns as f64 * 1e-9, cpu_seconds, ..Use::default() };
    }

    /// Sets what probes cost the targets from now on, on average.
    pub fn set_costs(&mut self, costs: ProbeCosts) {
        self.costs = Some(costs);
    }

    /// Probe costs measured on this machine.
    pub fn measured(&self) -> Option<&Measured> {
        self.measured.as_ref()
    }

    /// CLOCK_MONOTONIC of the next look; `None` if no look is needed.
    pub fn next_ns(&self) -> Option<u64> {
        let needed = self.costs.is_some() && (self.budget.is_some() || self.automatic);
        needed.then_some(self.looks.next_ns)
    }

    /// Probe time of all counted calls, in seconds.
    pub fn probe_seconds(&self, counters: &Counters) -> Option<f64> {
        self.costs.map(|costs| usage(counters, 0.0, 0.0).probe_seconds(&costs))
    }

    /// Probe costs in programs, if they are known, and how closely targets are tracked.
    pub fn costs(&self) -> Option<(ProbeCosts, Tracking)> {
        self.costs.map(|costs| (costs, self.tracking))
    }

    /// Probe time as a share of the targets' CPU time between the last two looks.
    pub fn share(&self) -> Option<f64> {
        self.looks.share
    }

    /// Whether it may ask for groups of processes whose frees can be given up, or taken up again.
    pub fn chooses_whose_frees(&self) -> bool {
        self.budget.is_some() && self.live && self.next_ns().is_some()
    }

    /// Whether no frees are tracked any more. Memory in use is unknown then.
    pub fn stopped_tracking_frees(&self, live: bool) -> bool {
        live && !self.tracking.frees
    }

    /// Whether probes are now attached in time windows only.
    pub fn has_windows(&self) -> bool {
        self.tracking.time < 1.0
    }

    /// Share of the time during which probes were attached.
    pub fn time_share(&self, now_ns: u64) -> f64 {
        let open = if self.times.attached { 0 } else { now_ns.saturating_sub(self.times.detached_since_ns) };
        let all = now_ns.saturating_sub(self.times.begun_ns).max(1);
        1.0 - ((self.times.detached_ns + open) as f64 / all as f64).min(1.0)
    }

    /// Notes for the user.
    pub fn notes(&self, now_ns: u64) -> Vec<String> {
        let mut notes = self.notes.clone();
        let share = self.time_share(now_ns);
        if self.times.detached_ns > 0 || !self.times.attached {
            notes.push(format!(
                "probes were in place {} of the time (windows of {} ms at random times): figures of allocation are \
                 corrected for that, window by window, and have no error bar",
                units::percent(share),
                WINDOW_NS / 1_000_000
            ));
        }
        notes
    }

    /// Notes that a window begins now. If attaching the probes took most of its time, or had to be tried again, the window
    /// gets its whole length from here: one of no length would stand for a whole pause.
    pub fn window_begins(&mut self, now_ns: u64) {
        if self.looks.next_ns < now_ns + WINDOW_NS / 2 {
            self.looks.next_ns = now_ns + WINDOW_NS;
        }
    }

    /// Notes that frees were taken up again as asked for. `some_given_up`: those of some processes are still untracked.
    pub fn frees_were_taken_up(&mut self, some_given_up: bool, now_ns: u64) {
        self.some_given_up = some_given_up;
        for text in std::mem::take(&mut self.taking_up) {
            self.note(now_ns, text);
        }
    }

    /// Looks at the counters, when [`next_ns`](Self::next_ns) has come. `groups`: groups of processes whose frees are, or
    /// are not, tracked separately; called only if some have to change.
    pub fn look(
        &mut self,
        counters: &Counters,
        cpu_seconds: f64,
        now_ns: u64,
        groups: impl FnOnce(Which) -> Vec<FreeGroup<Served>>,
    ) -> Vec<Action> {
        let Some(costs) = self.costs else { return Vec::new() };
        let now = usage(counters, cpu_seconds, now_ns as f64 * 1e-9);
        if !self.times.attached {
            self.times.attached = true;
            self.times.detached_ns += now_ns.saturating_sub(self.times.detached_since_ns);
            self.looks.next_ns = now_ns + WINDOW_NS;
            self.looks.last = now;
            if self.tracking.time <= 0.0 {
                // What was seen before the probes were taken away says nothing of today.
                self.looks.windows = Use::default();
            }
            return vec![Action::Attach];
        }
        let used = now.since(&self.looks.last);
        self.looks.share = Some(used.share(&costs));
        self.looks.last = now;
        self.looks.next_ns = now_ns + LOOK_NS;
        if used.calls() + used.frees < FEWEST_CALLS {
            self.tracking.time = 1.0;
            self.looks.windows = Use::default();
            return self.take_up(&used, &costs, now_ns, groups).into_iter().collect();
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
            let before = if self.has_windows() { self.looks.windows.times(WINDOW_MEMORY) } else { Use::default() };
            self.looks.windows = before.and(&used);
            let used = self.looks.windows;
            let reduced = self.keep(&used, (&costs, budget), now_ns, groups);
            actions.extend(reduced);
            if actions.iter().any(|action| matches!(action, Action::SetInterval(_))) {
                // Samples at the old interval do not predict those at the new one.
                self.looks.windows = Use::default();
            }
        }
        self.looks.first = false;
        actions
    }

    fn keep(
        &mut self,
        used: &Use,
        (costs, budget): (&ProbeCosts, f64),
        now_ns: u64,
        groups: impl FnOnce(Which) -> Vec<FreeGroup<Served>>,
    ) -> Vec<Action> {
        let tracking = self.tracking;
        let mut next = decide(used, Tracking { time: tracking.time.max(SHORTEST_TIME), ..tracking }, costs, budget);
        if next == self.tracking && next.time >= 1.0 {
            self.looks.exceeded = 0;
            return self.take_up(used, costs, now_ns, groups).into_iter().collect();
        }
        self.looks.exceeded = if next == self.tracking { 0 } else { self.looks.exceeded + 1 };
        if self.tracking.time >= 1.0 && next != self.tracking && self.looks.exceeded < self.looks.patience {
            return Vec::new();
        }
        let old = self.tracking;
        let mut left = Vec::new();
        if old.frees && !next.frees && next.time >= 1.0 {
            let groups = groups(Which::Tracked);
            let stopped = groups_to_stop(&groups, used, Tracking { frees: true, ..next }, costs, budget);
            next.frees = stopped.len() < groups.len();
            if next.frees {
                left = stopped.into_iter().map(|index| groups[index].clone()).collect();
            }
        }
        self.tracking = next;
        if !left.is_empty() || old.frees && !next.frees {
            self.some_given_up |= !left.is_empty();
            self.giving_back.gave_up(now_ns);
        }
        if (next != old || !left.is_empty()) && old.time >= 1.0 {
            self.note(
                now_ns,
                format!(
                    "probes took {} of the targets' CPU time, more than the budget of {} (--max-overhead; `none` \
                     lifts it): {}",
                    units::percent(used.share(costs)),
                    units::percent(budget),
                    options(used, old, costs)
                ),
            );
        }
        self.tell_changes(old, &left, now_ns);
        if next.time < 1.0 {
            self.times.attached = false;
            self.times.detached_since_ns = now_ns;
            self.looks.next_ns =
                now_ns + if next.time > 0.0 { self.pause(next.time) } else { self.wait_for_trial(old) };
        }
        actions(old, next, left)
    }

    /// Takes up frees again that were given up, if load has been low for long enough.
    fn take_up(
        &mut self,
        used: &Use,
        costs: &ProbeCosts,
        now_ns: u64,
        groups: impl FnOnce(Which) -> Vec<FreeGroup<Served>>,
    ) -> Option<Action> {
        let budget = self.budget.filter(|_| self.live && (self.some_given_up || !self.tracking.frees))?;
        let room = |alone| has_room_for_frees(used, self.tracking, costs, budget, alone);
        let room = match (room(false), room(true)) {
            (true, _) => Room::ForAll,
            (_, true) => Room::ForSome,
            _ => Room::None,
        };
        let what = self.giving_back.look(room, now_ns)?;
        let groups = groups(Which::GivenUp);
        let tracking = Tracking { frees: true, ..self.tracking };
        let back: HashSet<usize> = match what {
            TakeUp::All => (0..groups.len()).collect(),
            TakeUp::Some => groups_to_give_back(&groups, used, tracking, costs, budget).into_iter().collect(),
        };
        if back.is_empty() && !groups.is_empty() {
            return None;
        }
        let all = !self.tracking.frees && back.len() == groups.len();
        let (back, except): (Vec<_>, Vec<_>) =
            groups.into_iter().enumerate().partition(|(index, _)| back.contains(index));
        self.say_once_taken_up(all, &back);
        self.giving_back.took_up(now_ns);
        self.tracking.frees = true;
        self.some_given_up = !except.is_empty();
        Some(Action::TrackFreesAgain { except: except.into_iter().flat_map(|(_, group)| group.links).collect() })
    }

    /// What to say once frees are tracked again: of `all` processes, or of these groups.
    fn say_once_taken_up(&mut self, all: bool, groups: &[(usize, FreeGroup<Served>)]) {
        const SINCE: &str = "what is in use there is of blocks allocated since then";
        if all {
            let since = "what is in use is of blocks allocated since then, in processes that are older";
            self.taking_up.push(format!("load has fallen: frees are followed again; {since}"));
            return;
        }
        let each = groups.iter().take(MOST_TOLD).map(|(_, FreeGroup { name, .. })| name);
        let each = each.map(|name| format!("load has fallen: frees of {name} are followed again; {SINCE}"));
        self.taking_up.extend(each);
        if let Some(more @ 1..) = groups.len().checked_sub(MOST_TOLD) {
            self.taking_up.push(format!("frees of {more} more are followed again; {SINCE}"));
        }
    }

    /// Notes what changed from `old`. `left`: groups whose frees are no longer tracked.
    fn tell_changes(&mut self, old: Tracking, left: &[FreeGroup<Served>], now_ns: u64) {
        let next = self.tracking;
        if next.interval != old.interval {
            self.note(now_ns, format!("the sampling interval is {} from here on", units::bytes(next.interval as f64)));
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
        if !next.frees && old.frees {
            self.note(now_ns, "frees are not followed any more: nothing is said of memory in use".into());
        }
        if next.time <= 0.0 && old.time > 0.0 {
            let text = "no window is short enough for the budget: the probes were taken away, and are tried again";
            self.note(now_ns, format!("{text} after {} at first", units::seconds(FIRST_TRIAL_NS as f64 * 1e-9)));
        } else if next.time > 0.0 && old.time <= 0.0 {
            self.note(now_ns, "load has fallen: probes are in place again".into());
        } else if next.time < 1.0 && old.time >= 1.0 {
            let text = format!("probes are in place in time windows only, {} of the time", units::percent(next.time));
            self.note(now_ns, text);
        }
    }

    /// How long no probe is in place before the next window shows whether load has fallen. It grows while it has not.
    fn wait_for_trial(&mut self, old: Tracking) -> u64 {
        self.looks.trial_ns =
            if old.time > 0.0 { FIRST_TRIAL_NS } else { (2 * self.looks.trial_ns).min(LAST_TRIAL_NS) };
        self.looks.trial_ns
    }

    /// Length of a pause, in nanoseconds, so that probes are attached for a share `time` on average. It is random, so
    /// that nothing periodic in a target falls in step with it.
    fn pause(&mut self, time: f64) -> u64 {
        let random = sampler_ebpf::rng::next(&mut self.random) as f64 / u64::MAX as f64;
        let mean = WINDOW_NS as f64 * (1.0 - time) / time.max(1e-6);
        (mean * (0.5 + random)) as u64
    }

    fn note(&mut self, now_ns: u64, text: String) {
        const MOST: usize = 32;
        let at = now_ns.saturating_sub(self.times.begun_ns) as f64 * 1e-9;
        log::warn!("{text}");
        if self.notes.len() >= MOST {
            // The first ones say how it began, the last ones how it is now.
            self.notes.remove(MOST / 2);
        }
        self.notes.push(format!("after {at:.1} s: {text}"));
    }
}

/// Actions that lead from `old` to `next`. `left`: groups whose frees are no longer tracked.
fn actions(old: Tracking, next: Tracking, left: Vec<FreeGroup<Served>>) -> Vec<Action> {
    let mut actions = Vec::new();
    if next.time < 1.0 {
        // First, because the other actions take time.
        actions.push(Action::Detach);
    }
    if next.interval != old.interval {
        actions.push(Action::SetInterval(next.interval));
    }
    if !left.is_empty() {
        actions.push(Action::StopTrackingFreesOf(left.into_iter().flat_map(|group| group.links).collect()));
    }
    if !next.frees && old.frees {
        actions.push(Action::StopTrackingFrees);
    }
    actions
}

/// Options that cost less than the current tracking, as text.
fn options(used: &Use, now: Tracking, costs: &ProbeCosts) -> String {
    let priced = cheaper(used, now, costs).into_iter();
    let priced: Vec<String> =
        priced.map(|(name, share)| format!("{name} would take {}", units::percent(share))).collect();
    if priced.is_empty() { "no option is known to cost less".into() } else { priced.join(", ") }
}

/// What calls and CPU time say about the use of probes.
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
