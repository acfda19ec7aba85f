//! Tests of the statistics and of the remarks.

use heapbpf_kernel::lifecycle::Skipped;
use heapbpf_profile::testing;
use sampler_ebpf::abi::ProcessKey;

use super::*;
use crate::attaching::arenas::{AtAttach, InUse};
use crate::intake::counters::tests::counters;

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
        let stats = stats(counters, missing, &DaemonCounters::default(), 0.0, None, &[]);
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
fn waits_are_told_with_their_share_of_the_cpu_time() {
    let said = |cpu_seconds| waits(500_000_000, cpu_seconds).unwrap();
    assert!(said(Some(2.0)).starts_with("the targets waited 500 ms in total, 25 % of their CPU time, for heapbpf"));
    // Pauses are timed once, and CPU time is read at another moment.
    assert!(said(Some(0.4)).contains(", 100 % of their CPU time,"));
    assert!([None, Some(0.0)].map(said).iter().all(|said| said.contains("waited 500 ms in total for heapbpf")));
    assert_eq!(waits(0, Some(2.0)), None);
}

#[test]
fn each_count_of_the_daemon_is_told_in_its_own_words() {
    let sampling = by(Criterion::Bytes, 1);
    let remedies = Remedies { sampling: &sampling, can_wait: false, sets_full: &BTreeMap::new() };
    let told = |daemon: &DaemonCounters| remarks(&Counters::default(), daemon, &remedies);
    let zero = DaemonCounters::default;
    let lifecycle = Skipped { runs: 9, lost: 4 };
    for (daemon, begin, words) in [
        (DaemonCounters { ends_found: 2, blocks_of_ended: 30, ..zero() }, "2 process exits", "their 30 sampled blocks"),
        (DaemonCounters { inline_incomplete: 3, ..zero() }, "exact totals are too low: 3 times", "inline hooks"),
        (DaemonCounters { mappings_early: 1_200, ..zero() }, "1,200 sampled mappings do not", "do not allow for them"),
        (DaemonCounters { mappings_undecided: 7, ..zero() }, "7 sampled mappings are under", "allow for both"),
        (DaemonCounters { lifecycle, ..zero() }, "up to 4 forks, execs and thread exits", "preempted"),
        (DaemonCounters { mapping_calls_skipped: 5, ..zero() }, "up to 5 system calls of the host", "preempted"),
    ] {
        let said = told(&daemon);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with(begin) && said[0].contains(words), "{said:?}");
    }
    assert!(told(&zero()).is_empty());
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
        allocations.contains("one sample in 1,000 allocations gives 0.04 samples") && allocations.contains("(-i 1)")
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
    let cost = with_daemon_cost(Stats::default());
    assert!(cost.daemon_cpu_seconds > 0.0 && cost.daemon_peak_rss_bytes > 1 << 20, "{cost:?}");
}
