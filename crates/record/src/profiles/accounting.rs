//! The accounting of a recording: turns counters into the `--stats` output and into remarks for the user.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use heapbpf_attach::inline::SetBound;
use heapbpf_audit::{AttachEntry, FileAudit, Hook};
use heapbpf_probes::Runtime;
use heapbpf_profile::model::{Criterion, Process, Profile};
use heapbpf_profile::units;
use heapbpf_statistics::plan::LARGEST_INTERVAL;
use sampler_ebpf::abi::Counters;

use crate::intake::counters::{DaemonCounters, exact_bytes, exact_objects};
use crate::plan::SamplingPlan;
use crate::profiles::snapshot::Measured;
use crate::stats::{Attachment, Stats};

/// Maximum number of names in a remark.
const MOST_NAMES: usize = 3;

/// CPU time and memory used by this process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DaemonCost {
    /// User plus system time, in seconds.
    pub cpu_seconds: f64,
    /// Peak resident memory, in bytes.
    pub peak_rss_bytes: u64,
}

/// Reads the CPU time and memory that this process has used so far.
pub fn daemon_cost() -> DaemonCost {
    // SAFETY: `rusage` consists of integers only, so all zeros is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a valid, writable `rusage` for the duration of the call.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) } != 0 {
        return DaemonCost::default();
    }
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    // VmHWM rather than ru_maxrss: ru_maxrss survives an exec, so it would report the peak of the program that started
    // us.
    let high_water = std::fs::read_to_string("/proc/self/status").ok().and_then(|status| {
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    DaemonCost {
        cpu_seconds: seconds(usage.ru_utime) + seconds(usage.ru_stime),
        peak_rss_bytes: high_water.unwrap_or(usage.ru_maxrss.unsigned_abs()) * 1024,
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
        let Some(resident) = process.resident.filter(|_| process.hook != Some(Hook::GoRuntime)) else { continue };
        // Memory that is not divided into parts may not be counted.
        let parts = [resident.heap_bytes, resident.jit_code_bytes, resident.other_bytes, resident.undivided_bytes];
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
pub fn names_of<S: Borrow<str> + Ord>(names: &BTreeSet<S>) -> String {
    let others = if names.len() > MOST_NAMES { ", …" } else { "" };
    names.iter().take(MOST_NAMES).map(S::borrow).collect::<Vec<&str>>().join(", ") + others
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

/// Builds the accounting from counters. Of the samples that the BPF programs sent, those that are `missing` do not
/// count as submitted.
pub fn stats(
    counters: &Counters,
    missing: Missing,
    daemon: &DaemonCounters,
    cost: DaemonCost,
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
    let other = [
        ("sampled", counters.sampled),
        ("untracked", counters.untracked),
        ("set_full", counters.set_full),
        ("unsampled_failed", counters.unsampled_failed),
        ("frees_lost", counters.frees_lost),
        ("frees_no_thread_state", counters.frees_no_thread_state),
        ("mappings_lost", counters.mappings_lost),
        ("unmaps_lost", counters.unmaps_lost),
        ("system_calls_lost", counters.system_calls_lost),
        ("removals_refused", counters.removals_refused),
        ("frees_reconciled", daemon.frees_reconciled),
        ("allocations_reconciled", daemon.allocations_reconciled),
        ("mappings_reconciled", daemon.mappings_reconciled),
        ("mappings_of_allocators", daemon.mappings_of_allocators),
        ("mappings_early", daemon.mappings_early),
        ("mappings_undecided", daemon.mappings_undecided),
        ("stacks_lost", counters.stacks_lost),
        ("stacks_missing", daemon.stacks_missing),
        ("stacks_shortened", daemon.stacks_shortened),
        ("stacks_unwound", daemon.stacks_unwound),
        ("stacks_repeated", daemon.stacks_repeated),
        ("stacks_complete", daemon.stacks_complete),
        ("stacks_put_together", daemon.stacks_merged),
        ("process_events_lost", counters.process_events_lost),
        ("host_events_lost", daemon.host_events_lost),
        ("errors", daemon.errors),
        ("ends_found", daemon.ends_found),
        ("blocks_of_ended", daemon.blocks_of_ended),
        ("inline_incomplete", daemon.inline_incomplete),
        ("modules", daemon.modules),
        ("modules_open", daemon.modules_open),
        ("lifecycle_runs_skipped", daemon.lifecycle.runs),
        ("lifecycle_runs_lost", daemon.lifecycle.lost),
        ("mapping_calls_skipped", daemon.mapping_calls_skipped),
        ("waited_ns", daemon.waited_ns),
        ("stale_replaced", counters.stale_replaced),
        ("records_unknown", daemon.records_unknown),
        ("threads", counters.threads),
    ];
    let named =
        |list: &[(&str, u64)]| list.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect::<BTreeMap<_, _>>();
    Stats {
        hits: counters.hits(),
        unsampled: counters.unsampled,
        submitted: counters.submitted.saturating_sub(missing.samples),
        failed: counters.failed,
        lost: named(&lost),
        reentrant: counters.reentrant,
        frees_seen: counters.frees_seen,
        frees_matched: counters.frees_matched,
        exact_alloc_bytes: exact_bytes(counters),
        exact_alloc_objects: exact_objects(counters),
        estimated_alloc_bytes,
        probe_seconds,
        probe_costs: None,
        targets_cpu_seconds: None,
        daemon_cpu_seconds: cost.cpu_seconds,
        daemon_peak_rss_bytes: cost.peak_rss_bytes,
        hooks: Vec::new(),
        attach: attachments(audits),
        other: named(&other),
    }
}

fn attachments(audits: &[Arc<FileAudit>]) -> Vec<Attachment> {
    let attachment = |entry: &AttachEntry| Attachment {
        file: entry.file.clone(),
        function: entry.function.clone(),
        offset: entry.offset,
        kind: entry.kind.to_string(),
        link: entry.link.to_string(),
        reason: entry.reason.clone(),
    };
    audits.iter().flat_map(|file| &file.attach).map(attachment).collect()
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
    if counters.unmaps_lost > 0 {
        remarks.push(format!(
            "{} unmappings were not reported, most likely because the events ring was full. Mappings that are gone \
             were looked up; error bars of in-use figures allow for the others. {fewer}",
            units::count(counters.unmaps_lost as f64)
        ));
    }
    if daemon.ends_found > 0 {
        remarks.push(format!(
            "{} process exits or execs were not reported, mostly because the events ring was full. They were found in \
             the kernel's list of processes, and their {} sampled blocks no longer count as in use. {fewer}",
            units::count(daemon.ends_found as f64),
            units::count(daemon.blocks_of_ended as f64)
        ));
    }
    remarks.extend(of_daemon(daemon));
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

/// Remarks on the daemon's own counts.
fn of_daemon(daemon: &DaemonCounters) -> Vec<String> {
    let mut remarks = Vec::new();
    if daemon.waited_ns > 0 {
        remarks.push(format!(
            "the targets waited {} in total for heapbpf to read their samples, so that none is lost; --lossless=no turns that off",
            units::seconds(daemon.waited_ns as f64 * 1e-9)
        ));
    }
    if daemon.inline_incomplete > 0 {
        remarks.push(format!(
            "exact totals are too low: {} times, calls of a process with inline hooks were not counted, because it ended, \
             switched from probes, lost its hooks to another tool, or reported impossible counts; --hook probe counts all",
            units::count(daemon.inline_incomplete as f64)
        ));
    }
    if daemon.mappings_early > 0 {
        remarks.push(format!(
            "{} sampled mappings do not count, because code of files that were not examined yet made them. Error bars do \
             not allow for them",
            units::count(daemon.mappings_early as f64)
        ));
    }
    if daemon.mappings_undecided > 0 {
        remarks.push(format!(
            "{} sampled mappings are under [records lost]: their stacks end inside a file with an allocator, so it is \
             not known whether the allocator made them for itself. Error bars allow for both",
            units::count(daemon.mappings_undecided as f64)
        ));
    }
    if daemon.lifecycle.lost > 0 {
        remarks.push(format!(
            "up to {} forks, execs and thread exits were not seen, because threads were preempted while handling others: \
             exact totals may lack those threads' calls, and processes that such a fork started may be missing",
            units::count(daemon.lifecycle.lost as f64)
        ));
    }
    if daemon.mapping_calls_skipped > 0 {
        remarks.push(format!(
            "up to {} system calls of the host were not seen, because threads were preempted while handling others: if a target's \
             mmap, munmap, mremap or brk is among them, what it mapped is missing, or counts as in use until it maps there again",
            units::count(daemon.mapping_calls_skipped as f64)
        ));
    }
    remarks
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
mod tests {
    use sampler_ebpf::abi::ProcessKey;

    use super::*;
    use crate::attaching::arenas::{AtAttach, InUse};

    #[test]
    fn heaps_of_runtimes_are_named_once_with_who_has_them() {
        let process = |pid: u32, comm: &str, missing: Vec<heapbpf_audit::Missing>| Process {
            pid,
            comm: comm.into(),
            missing,
            ..Process::default()
        };
        let java = || vec![Runtime::Java.missing()];
        let processes = [
            process(1, "java", java()),
            process(2, "kafka", java()),
            process(3, "sh", vec![heapbpf_audit::Missing::new("a", "b")]),
        ];
        let remarks = runtimes(processes.iter());
        assert_eq!(remarks.len(), 1, "{remarks:?}");
        assert!(remarks[0].starts_with("Java's own heap is not included (java, kafka, 2 processes): "), "{remarks:?}");
        assert!(runtimes(processes[2..].iter()).is_empty());
        assert!(runtimes(processes[..1].iter())[0].starts_with("Java's own heap is not included (java): "));
        assert_eq!(early_objects(&processes), None);
        let late = process(4, "python3", vec![heapbpf_audit::Missing::early_objects(700_000_000)]);
        assert!(early_objects(&[late]).is_some_and(|remark| remark.ends_with("(python3)")));
    }
    use heapbpf_profile::testing;

    use crate::intake::counters::tests::counters;

    #[test]
    fn the_share_of_memory_is_of_what_hooked_processes_have_in_heaps() {
        let mut profile = testing::whole_host();
        // 300 of 303 MiB of the process that is hooked, and nothing of 612 MiB of those that are not.
        let expected =
            format!("{} of the targets' anonymous memory is in heaps that are counted", units::percent(300.0 / 915.0));
        assert_eq!(memory_share(&profile), Some(expected));
        profile.idle.clear();
        assert!(memory_share(&profile).is_some_and(|text| text.starts_with("99")));
        profile.processes.clear();
        assert_eq!(memory_share(&profile), None);
    }

    #[test]
    fn broken_chains_are_said_of_frame_pointers_alone() {
        let mut profile = testing::small();
        profile.header.unwind = "auto".into();
        assert_eq!(broken_chains(&profile), None);
        profile.header.unwind = "fp".into();
        let whole = |profile: &mut Profile, whole: bool| {
            for row in &mut profile.rows {
                let cut = (!whole).then(|| "frame pointers end here".into());
                row.key.stack = heapbpf_profile::model::Stack { cut, ..(*row.key.stack).clone() }.into();
            }
        };
        whole(&mut profile, true);
        assert_eq!(broken_chains(&profile), None);
        whole(&mut profile, false);
        assert!(broken_chains(&profile).is_some_and(|text| text.starts_with("100.0 % of the samples")));
    }

    #[test]
    fn both_sides_of_the_identity_come_from_different_counters() {
        let of = |counters: &Counters, missing| {
            let stats = stats(counters, missing, &DaemonCounters::default(), DaemonCost::default(), 0.0, None, &[]);
            (stats.hits, stats.accounted())
        };
        assert_eq!(of(&counters(), Missing::default()), (100, 100));
        assert_eq!(of(&Counters { submitted: 5, ..counters() }, Missing::default()), (100, 99));
        assert_eq!(of(&Counters { unsampled: 89, ..counters() }, Missing::default()), (100, 99));
        assert_eq!(of(&Counters { reentrant: 3, ..counters() }, Missing::default()), (99, 100));
        assert_eq!(of(&Counters { lost_undecided: 1, ..counters() }, Missing::default()), (100, 101));
        // The BPF programs sent six samples.
        assert_eq!(of(&counters(), Missing::of(6, 6, 0, false)), (100, 100));
        assert_eq!(of(&counters(), Missing::of(6, 4, 2, false)), (100, 100), "two belong to a later moment");
        assert_eq!(of(&counters(), Missing::of(6, 4, 1, false)), (100, 99), "one never arrived");
        assert_eq!(of(&counters(), Missing::of(6, 4, 0, true)), (100, 100), "two could not be read in time");
    }

    fn by(criterion: Criterion, interval: u64) -> SamplingPlan {
        SamplingPlan { interval, criterion, automatic: false, classes: None, live: true, mappings: false }
    }

    #[test]
    fn losses_are_said_with_their_share_and_a_remedy() {
        let (sampling, sets_full) = (by(Criterion::Bytes, 1), BTreeMap::new());
        let remedies = Remedies { sampling: &sampling, can_wait: true, sets_full: &sets_full };
        let remarks = remarks(&counters(), &DaemonCounters::default(), &remedies);
        assert_eq!(remarks.len(), 1);
        let remedy = "Use -i 4096 or larger, or --lossless (targets with inline hooks then wait)";
        assert!(remarks[0].starts_with("2 samples were lost") && remarks[0].ends_with(remedy), "{remarks:?}");
    }

    /// 165,000 calls of 4 bytes, of which a quarter has a whole stack. Probes cannot wait, and half as many samples as
    /// were whole leave space for bursts.
    #[test]
    fn where_stacks_are_lost_an_interval_is_advised() {
        let counters = Counters {
            calls: 165_000,
            sampled: 165_000,
            sampled_bytes: 660_000,
            submitted: 165_000,
            stacks_lost: 100_000,
            ..Counters::default()
        };
        let daemon = DaemonCounters { stacks_shortened: 20_000, ..DaemonCounters::default() };
        let said = |sampling: &SamplingPlan| {
            remarks(&counters, &daemon, &Remedies { sampling, can_wait: false, sets_full: &BTreeMap::new() })
        };
        let expected = [
            "100,000 samples have only their caller as a stack (60.61 %): the stacks ring was full. Use -i 32 or larger",
            "20,000 samples have only the innermost part of their stack (12.12 %): the stacks ring was filling up. Use -i \
             32 or larger",
        ];
        assert_eq!(said(&by(Criterion::Bytes, 1)), expected);
        for (sampling, advice) in [
            (by(Criterion::Allocations, 1), "Use -i 8 or larger"),
            (by(Criterion::SizeClass, 1), "Use a larger -i"),
            (SamplingPlan { automatic: true, ..by(Criterion::Bytes, 1) }, "Use a larger -i"),
            (by(Criterion::Bytes, LARGEST_INTERVAL), "Use a larger -i"),
        ] {
            assert!(said(&sampling).iter().all(|remark| remark.ends_with(advice)), "{:?}", said(&sampling));
        }
    }

    #[test]
    fn mappings_of_unexamined_code_are_told() {
        let said = of_daemon(&DaemonCounters { mappings_early: 1_200, ..DaemonCounters::default() });
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with("1,200 sampled mappings do not count") && said[0].ends_with("not allow for them"));
        assert!(of_daemon(&DaemonCounters::default()).is_empty());
    }

    #[test]
    fn of_full_sets_the_limit_is_named() {
        let counters = Counters { submitted: 100, untracked: 20, set_full: 14, ..Counters::default() };
        let bounds = [SetBound::Size(65_536), SetBound::LiveMax(100), SetBound::Limit("bytes of x"), SetBound::Largest];
        let sets_full = bounds.into_iter().zip([4, 1, 5, 2]).collect();
        let sampling = by(Criterion::Bytes, 1);
        let remedies = Remedies { sampling: &sampling, can_wait: false, sets_full: &sets_full };
        let said = remarks(&counters, &DaemonCounters::default(), &remedies);
        let expected = [
            ("6 ", "the live map was full"),
            ("4 ", "space for 65,536"),
            ("1 ", "made for --live-max 100"),
            ("5 ", "the limit on bytes of x"),
            ("2 ", "no set of sampled blocks in a process is larger"),
            ("2 ", "was full"),
        ];
        assert_eq!(said.len(), expected.len(), "{said:?}");
        for (remark, (number, why)) in said.iter().zip(expected) {
            assert!(remark.starts_with(number) && remark.contains(why), "{remark}");
        }
    }

    #[test]
    fn a_recording_without_samples_says_why_and_what_would_help() {
        let bytes = by(Criterion::Bytes, 512 << 10);
        let idle = without_samples(&Counters::default(), &bytes, true, &[]).unwrap();
        assert!(idle.contains("idle") && idle.contains("doctor") && !idle.contains("--no-follow"), "{idle}");
        assert!(without_samples(&Counters::default(), &bytes, false, &[]).unwrap().contains("--no-follow"));
        let few = Counters { calls: 40, unsampled: 40, unsampled_bytes: 52_429, ..Counters::default() };
        assert_eq!(
            without_samples(&few, &bytes, true, &[]).unwrap(),
            "no samples: 40 calls for 51.2 KiB were counted, where one sample per 512 KiB gives 0.10 samples on average. \
             Use a smaller interval (-i 32), or record longer"
        );
        let allocations = without_samples(&few, &by(Criterion::Allocations, 1000), true, &[]).unwrap();
        assert!(
            allocations.contains("one sample in 1,000 allocations gives 0.04 samples")
                && allocations.contains("(-i 1)")
        );
        assert_eq!(without_samples(&few, &by(Criterion::Bytes, 0), true, &[]), None, "none were wanted");
        let sampled = Counters { calls: 41, sampled: 1, submitted: 1, ..few };
        assert_eq!(without_samples(&sampled, &bytes, true, &[]), None);
    }

    #[test]
    fn of_an_idle_process_with_older_memory_the_census_is_named() {
        let had = |tgid, bytes: Option<u64>| Measured {
            process: 0,
            key: ProcessKey { tgid, ..ProcessKey::default() },
            blocks: Vec::new(),
            share: 1.0,
            at_attach: AtAttach { inuse: bytes.map(|bytes| InUse { blocks: 1, bytes }), ..AtAttach::default() },
        };
        let said = |measured: &[Measured]| {
            without_samples(&Counters::default(), &by(Criterion::Bytes, 512 << 10), true, measured).unwrap()
        };
        assert_eq!(
            said(&[had(1, None), had(2, Some(64 << 20)), had(3, Some(2 << 20))]),
            "no samples: no target called a known allocation function. Process 2 had up to 64.0 MiB in use before the \
             recording: heapbpf census --pid 2 counts it"
        );
        for unknown in [had(1, None), had(2, Some(MUCH_OLDER - 1))] {
            assert!(said(&[unknown]).contains("heapbpf doctor"));
        }
    }

    #[test]
    fn the_daemon_knows_what_it_uses() {
        let cost = daemon_cost();
        assert!(cost.cpu_seconds >= 0.0 && cost.peak_rss_bytes > 1 << 20, "{cost:?}");
    }
}
