//! Reports once per target when probes take much of its CPU time. Where a budget bounds that, the target's probes are
//! detached.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use heapbpf_profile::units;
use sampler_ebpf::abi::ProcessKey;

use super::decision::{Tracking, Use, cheap_samples, cheaper, would_take};
use crate::cost::probe_costs::ProbeCosts;

/// Share of a target's CPU time above which its probes are reported.
const WORTH_A_WORD: f64 = 0.2;
/// CPU time needed for a judgement, seconds: clocks are exact, but a process that hardly runs is not slowed down.
const FEWEST_SECONDS: f64 = 0.04;
/// Time between checks: two checks find a target that has just become busy within a second.
const LOOK_NS: u64 = 400_000_000;
/// Checking takes at most one part in this many of a processor's time.
const SHARE_OF_TIME: u32 = 100;
/// Above this factor, how many times slower a target runs cannot be determined.
const MOST_TIMES: f64 = 50.0;
/// Maximum number of targets that are reported.
const MOST_REPORTED: usize = 8;

/// A target at a check.
pub struct CheckedTarget<'a> {
    /// The process.
    pub process: ProcessKey,
    /// Its name.
    pub comm: &'a str,
    /// Its calls so far, and the CPU time that it has used.
    pub used: Use,
    /// What its probes cost.
    pub costs: ProbeCosts,
    /// Whether it is hooked inline: only samples trap.
    pub is_inline: bool,
}

/// A target that probes were found to slow down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slowed {
    /// The process.
    pub process: ProcessKey,
    /// The line to report.
    pub line: String,
}

/// Targets that probes slow down.
#[derive(Debug, Default)]
pub struct SlowedTargets {
    /// What each target had used when it was last judged.
    before: HashMap<ProcessKey, Use>,
    reported: HashSet<ProcessKey>,
    next_ns: u64,
    /// Notes for the user.
    pub notes: Vec<String>,
}

impl SlowedTargets {
    /// CLOCK_MONOTONIC of the next check.
    pub const fn next_ns(&self) -> u64 {
        self.next_ns
    }

    /// Whether so many targets were reported that no more are, unless a budget must be kept.
    pub fn are_enough(&self) -> bool {
        self.reported.len() >= MOST_REPORTED
    }

    /// Sets the time of the next check, after one that took this much CPU time.
    pub fn looked(&mut self, took: Duration, now_ns: u64) {
        let least_ns = took.saturating_mul(SHARE_OF_TIME).as_nanos() as u64;
        self.next_ns = now_ns.saturating_add(LOOK_NS.max(least_ns));
    }

    /// Judges the targets. Returns those to report at once. `budget`: the share of its CPU time that the probes of a
    /// process may take; beyond it they are to be detached. `seconds`: since the recording began. `about_inline` says
    /// why a process (by its id) is not hooked inline, or what inline hooks would take.
    pub fn look<'a>(
        &mut self,
        targets: impl Iterator<Item = CheckedTarget<'a>>,
        (tracking, budget): (Tracking, Option<f64>),
        seconds: f64,
        about_inline: impl Fn(u32, &Use, &ProbeCosts) -> Option<String>,
    ) -> Vec<Slowed> {
        let (mut seen, mut found) = (HashMap::new(), Vec::new());
        for CheckedTarget { process, comm, used, costs, is_inline } in targets {
            if self.reported.contains(&process) {
                continue;
            }
            let Some(before) = self.before.get(&process) else {
                seen.insert(process, used);
                continue;
            };
            let since = used.since(before);
            if since.cpu_seconds < FEWEST_SECONDS {
                seen.insert(process, *before);
                continue;
            }
            seen.insert(process, used);
            let share = since.share(&costs);
            if share > budget.unwrap_or(WORTH_A_WORD) && (budget.is_some() || !self.are_enough()) {
                self.reported.insert(process);
                let who = if comm.is_empty() {
                    format!("process {}", process.tgid)
                } else {
                    format!("{comm} ({})", process.tgid)
                };
                let line = match budget {
                    Some(budget) => format!(
                        "probes took {} of the CPU time of {who}, more than the budget of {} (--max-overhead; `none` lifts it): \
                         it is not counted any more",
                        units::percent(share),
                        units::percent(budget)
                    ),
                    None if is_inline => format!(
                        "samples take {} of the CPU time of {who}; {}",
                        units::percent(share),
                        would_take(&cheap_samples(&since, &costs))
                    ),
                    None => line(&since, &who, tracking, &costs, about_inline(process.tgid, &since, &costs)),
                };
                if self.notes.len() < MOST_REPORTED {
                    self.notes.push(format!("after {seconds:.1} s: {line}"));
                }
                found.push(Slowed { process, line });
            }
        }
        self.before = seen;
        found
    }
}

fn line(used: &Use, who: &str, tracking: Tracking, costs: &ProbeCosts, about_inline: Option<String>) -> String {
    let share = used.share(costs);
    // Clocks and costs are estimates, so if probes take nearly all the time, only a lower bound is known.
    let times = match 1.0 / (1.0 - share).max(1e-3) {
        times if times < 10.0 => format!("about {times:.1}×"),
        times if times < MOST_TIMES => format!("about {times:.0}×"),
        _ => format!("more than {MOST_TIMES:.0}×"),
    };
    let options = cheaper(used, tracking, costs);
    let larger = tracking.interval > 0 && !options.iter().any(|(name, _)| name.starts_with("-i "));
    let mut advice = Vec::from_iter(about_inline);
    advice.extend(larger.then(|| "a larger -i does not help".to_owned()));
    advice.extend(options.iter().map(would_take));
    advice.push("--max-overhead 10% limits it, and reports what it leaves out".into());
    format!("{who} runs {times} slower: probes take {} of its CPU time; {}", units::percent(share), advice.join("; "))
}

#[cfg(test)]
mod tests {
    use super::super::inline_advice::tests::ADVICE;
    use super::*;

    const COSTS: ProbeCosts = ProbeCosts { allocation_ns: 500.0, free_ns: 500.0, sample_ns: 3000.0 };
    const FULL: Tracking = Tracking { interval: 512 << 10, frees: true };

    fn key(tgid: u32) -> ProcessKey {
        ProcessKey { start_ns: 1, tgid, exec_id: 0 }
    }

    /// A process that has made this many pairs of 100 bytes and run for this many seconds.
    fn seen(tgid: u32, pairs: f64, cpu_seconds: f64) -> CheckedTarget<'static> {
        let used = Use {
            seconds: cpu_seconds,
            allocations: pairs,
            frees: pairs,
            bytes: 100.0 * pairs,
            cpu_seconds,
            ..Use::default()
        };
        CheckedTarget { process: key(tgid), comm: "octave", used, costs: COSTS, is_inline: false }
    }

    fn nothing(_: u32, _: &Use, _: &ProbeCosts) -> Option<String> {
        None
    }

    fn look(slowed: &mut SlowedTargets, targets: Vec<CheckedTarget<'static>>) -> Vec<String> {
        let about = |pid, used: &Use, costs: &ProbeCosts| (pid == 7).then(|| ADVICE.text(used, costs));
        slowed.look(targets.into_iter(), (FULL, None), 0.8, about).into_iter().map(|slowed| slowed.line).collect()
    }

    #[test]
    fn a_slowed_target_is_told_once_at_its_second_look() {
        let mut slowed = SlowedTargets::default();
        assert!(look(&mut slowed, vec![seen(7, 1e6, 5.0)]).is_empty(), "since when is not known");
        // 380,000 pairs take 0.38 s of 0.4 s.
        let lines = look(&mut slowed, vec![seen(7, 1.38e6, 5.4)]);
        assert_eq!(lines.len(), 1);
        for part in [
            "octave (7) runs about 20× slower: probes take 95 % of its CPU time; without --hook probe, inline hooks \
             would take 3.7 %; ",
            "a larger -i does not help",
            "--no-live would take 90.5 %",
            "--max-overhead 10% limits it",
        ] {
            assert!(lines[0].contains(part), "{part}: {}", lines[0]);
        }
        assert_eq!(slowed.notes, [format!("after 0.8 s: {}", lines[0])]);
        let all = line(&seen(7, 1e6, 1.0).used, "process 7", FULL, &COSTS, None);
        assert!(all.starts_with("process 7 runs more than 50× "), "{all}");
        // Where every block is sampled, an interval shorter than the blocks saves nothing.
        let inline = |samples| CheckedTarget {
            used: Use { samples, counted_inside: samples, bytes: 100.0 * samples, ..seen(8, 0.0, 1e-5 * samples).used },
            is_inline: true,
            ..seen(8, 0.0, 0.0)
        };
        look(&mut slowed, vec![inline(1e5)]);
        let lines = look(&mut slowed, vec![inline(2e5)]);
        let expected = "samples take 30 % of the CPU time of octave (8); -i 8.00KiB would take 0.5 %";
        assert_eq!(lines, [expected]);
        assert!(look(&mut slowed, vec![seen(7, 1.76e6, 5.8)]).is_empty(), "once");
    }

    #[test]
    fn who_hardly_runs_or_hardly_calls_is_not_slowed() {
        let mut slowed = SlowedTargets::default();
        look(&mut slowed, vec![seen(1, 0.0, 0.0), seen(2, 0.0, 0.0)]);
        // 18 ms of 20 ms, and 70 ms of 400 ms.
        assert!(look(&mut slowed, vec![seen(1, 18_000.0, 0.02), seen(2, 70_000.0, 0.4)]).is_empty());
        // Small amounts add up.
        assert_eq!(look(&mut slowed, vec![seen(1, 38_000.0, 0.041), seen(2, 140_000.0, 0.8)]).len(), 1);
    }

    #[test]
    fn samples_are_cheaper_with_a_larger_interval_and_it_is_said() {
        let mut slowed = SlowedTargets::default();
        let every = Tracking { interval: 1, ..FULL };
        let with = |pairs: f64, cpu_seconds| {
            let CheckedTarget { process, comm, used, costs, is_inline } = seen(7, pairs, cpu_seconds);
            CheckedTarget { process, comm, used: Use { samples: pairs, ..used }, costs, is_inline }
        };
        slowed.look(std::iter::once(with(0.0, 0.0)), (every, None), 0.4, nothing);
        let found = slowed.look(std::iter::once(with(60_000.0, 0.4)), (every, None), 0.8, nothing);
        let line = &found[0].line;
        assert!(line.contains("; -i 64MiB would take") || line.contains(": -i 64MiB would take"), "{line}");
        assert!(!line.contains("does not help"), "{line}");
    }

    #[test]
    fn beyond_a_budget_probes_are_given_up_and_below_nothing_is_said() {
        let mut slowed = SlowedTargets::default();
        let mut look =
            |pairs, seconds| slowed.look(std::iter::once(seen(7, pairs, seconds)), (FULL, Some(0.25)), 0.8, nothing);
        assert!(look(0.0, 0.0).is_empty());
        assert!(look(80_000.0, 0.4).is_empty(), "80 ms of 400 ms");
        let found = look(280_000.0, 0.8);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].process, key(7));
        assert_eq!(
            found[0].line,
            "probes took 50 % of the CPU time of octave (7), more than the budget of 25 % (--max-overhead; `none` lifts it): it is \
             not counted any more"
        );
        assert_eq!(slowed.notes, [format!("after 0.8 s: {}", found[0].line)]);
    }

    #[test]
    fn lines_and_looks_are_bounded() {
        let mut slowed = SlowedTargets::default();
        let all = |pairs, seconds| (0..100).map(|pid| seen(pid, pairs, seconds)).collect::<Vec<_>>();
        look(&mut slowed, all(0.0, 0.0));
        assert_eq!(look(&mut slowed, all(4e5, 0.4)).len(), MOST_REPORTED);
        assert!(slowed.notes.len() == MOST_REPORTED && slowed.are_enough());
        let mut slowed = SlowedTargets::default();
        slowed.looked(Duration::from_nanos(1_000), 2_000);
        assert_eq!((slowed.next_ns(), slowed.are_enough()), (2_000 + LOOK_NS, false));
        slowed.looked(Duration::from_millis(100), 100_000_000);
        assert_eq!(slowed.next_ns(), 10_100_000_000);
    }
}
