//! The accounting of a recording: turns counters into the `--stats` output and into remarks for the user.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::sync::Arc;

use heapbpf_attach::inline::SetBound;
use heapbpf_audit::{FileAudit, Hook};
use heapbpf_host::clock::cpu_seconds_of;
use heapbpf_host::resident::bytes_of;
use heapbpf_probes::Runtime;
use heapbpf_profile::model::{Criterion, Process, Profile, Resident};
use heapbpf_profile::units;
use heapbpf_statistics::plan::LARGEST_INTERVAL;
use sampler_ebpf::abi::Counters;

use crate::intake::counters::{DaemonCounters, exact_bytes, exact_objects};
use crate::plan::SamplingPlan;
use crate::profiles::snapshot::Measured;
use crate::remarks::first_of;
use crate::stats::Stats;

/// Maximum number of names in a remark.
const MOST_NAMES: usize = 3;

/// Adds the CPU time and the peak memory that this process has used so far.
pub fn with_daemon_cost(stats: Stats) -> Stats {
    // VmHWM rather than ru_maxrss, which survives an exec, so that it has the peak of the program that started us.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    Stats {
        daemon_cpu_seconds: cpu_seconds_of(std::process::id()).unwrap_or_default(),
        daemon_peak_rss_bytes: bytes_of(&status, "VmHWM").unwrap_or_default(),
        ..stats
    }
}

/// Samples that the BPF programs sent and that are not in the profile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    /// Their number.
    pub samples: u64,
    /// Whether the rings could not be read in time. Otherwise nothing explains the missing samples, and the accounting
    /// identity does not hold.
    pub unread: bool,
}

impl Missing {
    /// Compares the samples that the BPF programs counted with those taken in. `slack`: samples that the programs may
    /// have counted although they belong to a later moment. `unread`: the rings could not be read in time.
    pub fn of(submitted: u64, taken_in: u64, slack: u64, unread: bool) -> Self {
        Self { samples: submitted.saturating_sub(taken_in.saturating_add(slack)), unread }
    }
}

/// Remarks about language runtimes whose own heaps are not included, with the names of the processes that run them.
/// Go's heaps are reported where they are read ([`super::go_heaps`]).
pub fn runtimes<'a>(processes: impl Iterator<Item = &'a Process> + Clone) -> Vec<String> {
    let remark = |runtime: Runtime| {
        let runs = |process: &&Process| process.missing.iter().any(|missing| missing.what == runtime.heap());
        let who: Vec<&Process> = processes.clone().filter(runs).collect();
        let text = format!("{} is not included ({}): {}", runtime.heap(), some_names(&who), runtime.advice());
        (!who.is_empty()).then_some(text)
    };
    Runtime::ALL.into_iter().filter(|runtime| *runtime != Runtime::Go).filter_map(remark).collect()
}

/// A remark about processes whose Python objects were not counted from the start, with their names.
pub fn early_objects(processes: &[Process]) -> Option<String> {
    let is_late = |process: &&Process| {
        process.missing.iter().any(|missing| missing.what == heapbpf_audit::Missing::EARLY_OBJECTS)
    };
    let late: Vec<&Process> = processes.iter().filter(is_late).collect();
    let text = format!(
        "objects that Python allocated before the process had inline hooks are not included ({})",
        some_names(&late)
    );
    (!late.is_empty()).then_some(text)
}

/// Reports how much of the targets' anonymous memory is counted, in addition to their CPU time. `None` if that was not
/// measured, or is all of it.
pub fn memory_share(profile: &Profile) -> Option<String> {
    let (mut counted, mut all) = (0_u64, 0_u64);
    for process in profile.processes.iter().chain(&profile.idle) {
        let is_counted = |it: &Resident| !it.is_before_end && process.hook != Some(Hook::GoRuntime);
        let Some(resident) = process.resident.filter(is_counted) else { continue };
        // Memory that is not divided into parts may not be counted.
        let parts = [resident.heap_bytes, resident.jit_code_bytes, resident.not_seen_bytes(), resident.undivided_bytes];
        all = parts.into_iter().fold(all, u64::saturating_add);
        counted = counted.saturating_add(process.counted_heap_bytes());
    }
    let share = counted as f64 / all.max(1) as f64;
    let text = || format!("{} of the targets' anonymous memory is in heaps that are counted", units::percent(share));
    (all > 0 && share < 0.9995).then(text)
}

/// Names of processes, and their number.
fn some_names(processes: &[&Process]) -> String {
    let number = if processes.len() > 1 { format!(", {} processes", processes.len()) } else { String::new() };
    names_of(&processes.iter().map(|process| &*process.comm).collect()) + &number
}

/// The first few of many names.
pub fn names_of<S: Display>(names: &BTreeSet<S>) -> String {
    first_of(names, MOST_NAMES)
}

/// A remark about processes that announce their samples, with their names.
pub fn announcements(processes: &[Process]) -> Option<String> {
    let announcing = processes.iter().filter(|process| process.hook == Some(Hook::Usdt));
    let names: BTreeSet<&str> = announcing.map(|process| &*process.comm).collect();
    let text = format!(
        "{}: figures come from samples that the process announces (USDT), at its own interval; its other \
         allocations are not counted, so there are no exact totals",
        names_of(&names)
    );
    (!names.is_empty()).then_some(text)
}

/// Fields of a struct, each with its name.
macro_rules! named {
    ($of:ident: $($field:ident)*) => { [$((stringify!($field).to_owned(), $of.$field)),*] };
}

/// Builds the accounting from counters. Of the samples that the BPF programs sent, those that are `missing` do not
/// count as submitted.
pub fn stats(
    counters: &Counters,
    missing: Missing,
    daemon: &DaemonCounters,
    estimated_alloc_bytes: f64,
    probe_seconds: Option<f64>,
    audits: &[Arc<FileAudit>],
) -> Stats {
    let lost = [
        ("ring_full", counters.lost_ring_full),
        ("abandoned", counters.lost_abandoned),
        ("unread", if missing.unread { missing.samples } else { 0 }),
        ("in_flight", counters.lost_in_flight),
        ("undecided", counters.lost_undecided),
        ("no_thread_state", counters.lost_no_thread_state),
        ("result_unreadable", counters.lost_result_unreadable),
    ];
    let mut other = BTreeMap::from(named! { counters:
        sampled untracked set_full unsampled_failed frees_lost frees_no_thread_state mappings_lost unmaps_lost
        system_calls_lost removals_refused stacks_lost process_events_lost stale_replaced threads
    });
    other.extend(named! { daemon:
        frees_reconciled allocations_reconciled mappings_reconciled mappings_of_allocators mappings_early
        mappings_undecided stacks_missing stacks_shortened stacks_unwound stacks_repeated stacks_complete
        host_events_lost errors ends_found blocks_of_ended inline_incomplete modules modules_open
        mapping_calls_skipped waited_ns records_unknown
    });
    other.extend([
        ("stacks_put_together".to_owned(), daemon.stacks_merged),
        ("lifecycle_runs_skipped".to_owned(), daemon.lifecycle.runs),
        ("lifecycle_runs_lost".to_owned(), daemon.lifecycle.lost),
    ]);
    Stats {
        hits: counters.hits(),
        unsampled: counters.unsampled,
        submitted: counters.submitted.saturating_sub(missing.samples),
        failed: counters.failed,
        lost: lost.into_iter().map(|(name, n)| (name.to_owned(), n)).collect(),
        reentrant: counters.reentrant,
        frees_seen: counters.frees_seen,
        frees_matched: counters.frees_matched,
        exact_alloc_bytes: exact_bytes(counters),
        exact_alloc_objects: exact_objects(counters),
        estimated_alloc_bytes,
        probe_seconds,
        attach: audits.iter().flat_map(|file| &file.attach).cloned().collect(),
        other,
        ..Stats::default()
    }
}

/// What a recording can do about losses.
#[derive(Clone, Copy, Debug)]
pub struct Remedies<'a> {
    /// Which allocations are sampled.
    pub sampling: &'a SamplingPlan,
    /// Whether processes with inline hooks could wait.
    pub can_wait: bool,
    /// Samples that did not fit into the set in their process, by what limits the set.
    pub sets_full: &'a BTreeMap<SetBound, u64>,
}

impl Remedies<'_> {
    /// What helps if samples arrive faster than they are taken in.
    fn fewer(&self, counters: &Counters, daemon: &DaemonCounters) -> String {
        let incomplete = counters.stacks_lost + daemon.stacks_missing + daemon.stacks_shortened;
        let interval = self.interval_for(counters, counters.submitted.saturating_sub(incomplete) / 2);
        let interval = interval.map_or_else(|| "a larger -i".to_owned(), |interval| format!("-i {interval} or larger"));
        let wait = if self.can_wait { ", or --lossless (targets with inline hooks then wait)" } else { "" };
        format!("Use {interval}{wait}")
    }

    /// The smallest power of two above the sampling interval at which about this many samples would have been taken.
    /// `None` if the interval changes by itself or depends on the size.
    fn interval_for(&self, counters: &Counters, samples: u64) -> Option<u64> {
        let SamplingPlan { interval, criterion, automatic, .. } = *self.sampling;
        let (calls, bytes) = (exact_objects(counters) as f64, exact_bytes(counters) as f64);
        let taken = |interval: u64| match criterion {
            // Sizes that vary around this mean are sampled less often (Jensen's inequality).
            Criterion::Bytes => calls * -f64::exp_m1(bytes / calls * f64::ln_1p(-1.0 / interval as f64)),
            Criterion::Allocations | Criterion::SizeClass => calls / interval as f64,
        };
        let larger = (1..=LARGEST_INTERVAL.ilog2()).map(|exponent| 1 << exponent).filter(|larger| *larger > interval);
        let is_known = !automatic && criterion != Criterion::SizeClass && calls > 0.0;
        larger.filter(|_| is_known).find(|larger| taken(*larger) <= samples as f64)
    }
}

/// What limits the set of sampled blocks in a process, and what makes space.
fn why_set_is_full(bound: SetBound) -> String {
    match bound {
        SetBound::Size(blocks) => format!(
            "the set of sampled blocks in their process has space for {}, which its size and the interval decided when \
             it got its hooks. Use a larger -i",
            units::count(blocks as f64)
        ),
        SetBound::LiveMax(most) => {
            format!("the set of sampled blocks in their process was made for --live-max {most}. Raise --live-max")
        }
        SetBound::Limit(name) => format!(
            "the set of sampled blocks in their process could not be larger, because of the limit on {name}. Use a \
             larger -i, or raise that limit"
        ),
        SetBound::Largest => "no set of sampled blocks in a process is larger than theirs. Use a larger -i".into(),
    }
}

/// Remarks that the user must see next to the figures.
pub fn remarks(counters: &Counters, daemon: &DaemonCounters, remedies: &Remedies<'_>) -> Vec<String> {
    let fewer = remedies.fewer(counters, daemon);
    let mut remarks = of_samples(counters, daemon, remedies, &fewer);
    let of_ended = units::count(daemon.blocks_of_ended as f64);
    let unmaps_lost = format!(
        "unmappings were not reported, most likely because the events ring was full. Mappings that are gone were \
         looked up; error bars of in-use figures allow for the others. {fewer}"
    );
    let ends_found = format!(
        "process exits or execs were not reported, mostly because the events ring was full. They were found in the \
         kernel's list of processes, and their {of_ended} sampled blocks no longer count as in use. {fewer}"
    );
    // A number, the words before it, and those after it.
    let counted = [
        (counters.unmaps_lost, "", unmaps_lost),
        (daemon.ends_found, "", ends_found),
        (daemon.inline_incomplete, "exact totals are too low: ", INLINE_INCOMPLETE.to_owned()),
        (daemon.mappings_early, "", MAPPINGS_EARLY.to_owned()),
        (daemon.mappings_undecided, "", MAPPINGS_UNDECIDED.to_owned()),
        (daemon.lifecycle.lost, "up to ", LIFECYCLE_LOST.to_owned()),
        (daemon.mapping_calls_skipped, "up to ", MAPPING_CALLS_SKIPPED.to_owned()),
    ];
    let counted = counted.into_iter().filter(|(n, ..)| *n > 0);
    remarks.extend(counted.map(|(n, before, after)| format!("{before}{} {after}", units::count(n as f64))));
    remarks
}

/// What is said of samples whose frees are not seen.
const NOT_TRACKED: &str = "samples were not tracked";
const LEFT_OUT: &str = "In-use figures leave them out, and error bars allow for them";

/// Remarks on samples that were lost, lack a part, or were not tracked. `fewer`: what helps if they come too fast.
fn of_samples(counters: &Counters, daemon: &DaemonCounters, remedies: &Remedies<'_>, fewer: &str) -> Vec<String> {
    let mut remarks = Vec::new();
    let mut remark = |n: u64, of: u64, what: &str, why: &str| {
        if n > 0 {
            let what = format!("{} {what}", units::count(n as f64));
            remarks.push(units::with_share(&what, n as f64 / of.max(1) as f64, why));
        }
    };
    let (sampled, submitted) = (counters.sampled, counters.submitted);
    let lost = counters.lost_ring_full.saturating_sub(daemon.allocations_reconciled);
    let why = "the events ring was full. What they stand for is under [records lost], and error bars allow for it";
    remark(lost, sampled, "samples were lost", &format!("{why}. {fewer}"));
    let why = format!("the events ring was full. They are under [stack lost]. {fewer}");
    remark(daemon.allocations_reconciled, sampled, "samples are known only from the kernel's live map", &why);
    let why = format!("the live map was full. {LEFT_OUT}. Raise --live-max");
    remark(counters.untracked.saturating_sub(counters.set_full), submitted, NOT_TRACKED, &why);
    for (bound, samples) in remedies.sets_full {
        remark(*samples, submitted, NOT_TRACKED, &format!("{}. {LEFT_OUT}", why_set_is_full(*bound)));
    }
    let others = counters.set_full.saturating_sub(remedies.sets_full.values().sum());
    let why = format!("the set of sampled blocks in their process was full. {LEFT_OUT}. Use a larger -i");
    remark(others, submitted, NOT_TRACKED, &why);
    let why = format!("the stacks ring was full. {fewer}");
    remark(counters.stacks_lost + daemon.stacks_missing, submitted, "samples have only their caller as a stack", &why);
    let why = format!("the stacks ring was filling up. {fewer}");
    remark(daemon.stacks_shortened, submitted, "samples have only the innermost part of their stack", &why);
    let what = "calls were not counted";
    remark(counters.lost_no_thread_state, counters.hits(), what, "the kernel gave no thread state");
    remarks
}

/// What remarks say after one of the daemon's own counts.
const INLINE_INCOMPLETE: &str = "times, calls of a process with inline hooks were not counted, because it ended, \
                                 switched from probes, lost its hooks to another tool, or reported impossible counts; \
                                 --hook probe counts all";
const MAPPINGS_EARLY: &str = "sampled mappings do not count, because code of files that were not examined yet made \
                              them. Error bars do not allow for them";
const MAPPINGS_UNDECIDED: &str = "sampled mappings are under [records lost]: their stacks end inside a file with an \
                                  allocator, so it is not known whether the allocator made them for itself. Error \
                                  bars allow for both";
const LIFECYCLE_LOST: &str = "forks, execs and thread exits were not seen, because threads were preempted while \
                              handling others: exact totals may lack those threads' calls, and processes that such a \
                              fork started may be missing";
const MAPPING_CALLS_SKIPPED: &str = "system calls of the host were not seen, because threads were preempted while \
                                     handling others: if a target's mmap, munmap, mremap or brk is among them, what \
                                     it mapped is missing, or counts as in use until it maps there again";

/// The remark on how long threads of the targets waited; `None` if none did. `cpu_seconds`: CPU time of the targets,
/// which includes it, because threads spin while they wait.
pub fn waits(waited_ns: u64, cpu_seconds: Option<f64>) -> Option<String> {
    let seconds = waited_ns as f64 * 1e-9;
    let cpu_seconds = cpu_seconds.filter(|cpu| *cpu > 0.0);
    let share = cpu_seconds.map(|cpu| format!(", {} of their CPU time,", units::percent((seconds / cpu).min(1.0))));
    (waited_ns > 0).then(|| {
        format!(
            "the targets waited {} in total{} for heapbpf to read their samples, so that none is lost; --lossless=no \
             turns that off",
            units::seconds(seconds),
            share.unwrap_or_default()
        )
    })
}

/// Number of samples to expect with the interval that is suggested when there were none.
const WORTHWHILE_SAMPLES: u64 = 1000;
/// Memory from before the recording that is worth counting, bytes: more than the start of a small program takes.
const MUCH_OLDER: u64 = 1 << 20;

/// Why a recording has no samples, and what would help. `None` if there are some, if none were wanted, or if all were
/// lost, which other remarks report. `measured` tells what targets had in use before.
pub fn without_samples(
    counters: &Counters,
    sampling: &SamplingPlan,
    follow: bool,
    measured: &[Measured],
) -> Option<String> {
    if counters.sampled > counters.failed || sampling.interval == 0 {
        return None;
    }
    let (calls, bytes) = (exact_objects(counters), exact_bytes(counters));
    if calls == 0 {
        let children = if follow { "" } else { "; --no-follow leaves out its children" };
        let older = measured.iter().filter_map(|it| Some((it.at_attach.inuse?.bytes, it.key.tgid))).max();
        let advice = match older.filter(|(bytes, _)| *bytes >= MUCH_OLDER) {
            Some((bytes, pid)) => format!(
                "Process {pid} had up to {} in use before the recording: heapbpf census --pid {pid} counts it",
                units::bytes(bytes as f64)
            ),
            None => "It was idle, or has a heap of its own (Go, Java): heapbpf doctor --pid PID shows what is counted"
                .to_owned(),
        };
        return Some(format!("no samples: no target called a known allocation function. {advice}{children}"));
    }
    let trials = match sampling.criterion {
        Criterion::Bytes => bytes.max(1),
        Criterion::Allocations | Criterion::SizeClass => calls,
    };
    let expected = trials as f64 / sampling.interval as f64;
    // The power of two below, for a short option.
    let finer = 1_u64 << (trials / WORTHWHILE_SAMPLES).max(1).ilog2();
    let advice = if sampling.criterion == Criterion::SizeClass { String::new() } else { format!(" (-i {finer})") };
    Some(format!(
        "no samples: {} calls for {} were counted, where {} gives {expected:.2} samples on average. Use a smaller \
         interval{advice}, or record longer",
        units::count(calls as f64),
        units::bytes(bytes as f64),
        sampling.describe(),
    ))
}

/// The remark on rows that were merged because there were too many; `None` if there were none.
pub fn merged_rows(rows: u64) -> Option<String> {
    (rows > 0).then(|| {
        format!(
            "too many distinct stacks: {} with few samples are counted under [other stacks] of their process. Use a \
             larger -i, or raise --stacks-max",
            units::count(rows as f64)
        )
    })
}

/// The remark on samples whose frame-pointer chain (`--unwind fp`) does not reach the thread's entry. `None` if every
/// chain does, or if another unwinder was used.
pub fn broken_chains(profile: &Profile) -> Option<String> {
    if profile.header.unwind != "fp" {
        return None;
    }
    let all: u64 = profile.rows.iter().map(|row| row.alloc.samples).sum();
    let broken: u64 = profile.rows.iter().filter(|row| row.key.stack.cut.is_some()).map(|row| row.alloc.samples).sum();
    (broken > 0).then(|| {
        let share = 100.0 * broken as f64 / all as f64;
        format!(
            "{share:.1} % of the samples have broken stacks: some of their code was built without frame pointers; use --unwind auto"
        )
    })
}

#[cfg(test)]
#[path = "accounting_tests.rs"]
mod tests;
