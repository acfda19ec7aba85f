//! Process generations whose calls are counted inside them: exits, children, execs.

use std::ffi::OsStr;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::constant::numbers_of_snapshots;
use heapbpf_tests::doctor::doctor_text_of;
use heapbpf_tests::environment::turn;
use heapbpf_tests::inline::{Hook, counted_exactly, is_hooked, limit_addresses, mapped, recorder};
use heapbpf_tests::output::{self, Profile, Stats};
use heapbpf_tests::program::{program, program_with};
use heapbpf_tests::recorder::{Recorder, Recording};
use heapbpf_tests::target::{Target, until};
use heapbpf_tests::truth::Truth;

const HALF_MIB: u64 = 512 << 10;

/// Starts a recording that hooks the target inline.
fn inline(target: &Target, interval: u64) -> Recording {
    let recording = Recorder::of(target.pid(), interval).option("--hook", "inline").start();
    assert!(is_hooked(target.pid()), "it is hooked inline");
    recording
}

/// Records a program until it ends.
fn to_its_end(name: &str, arguments: &[&str], interval: u64) -> (Profile, Stats, Truth) {
    let mut target = Target::start(&program(name), arguments);
    let recording = inline(&target, interval);
    let truth = target.run();
    target.end();
    let (profile, stats) = recording.finish().results();
    (profile, stats, truth)
}

#[test]
fn inline_counts_are_exact_when_a_process_exits_or_is_killed() {
    let Some(_turn) = turn("inline_counts_are_exact_when_a_process_exits_or_is_killed") else { return };
    let ends: [(&str, &[&str]); 2] = [("mix", &["20000"]), ("endings", &["sigkill", "5000"])];
    for ((name, arguments), interval) in ends.into_iter().flat_map(|end| [(end, 1), (end, HALF_MIB)]) {
        let (profile, stats, truth) = to_its_end(name, arguments, interval);
        counted_exactly(&stats, &truth);
        checks::sites(&profile, &truth, interval, Compare::All);
        assert!(profile.processes.iter().all(|process| process.ended), "{:?}", profile.processes);
    }
}

/// The next ones are prepared while others are hooked, some of them together.
#[test]
fn many_named_processes_are_hooked_and_all_their_calls_are_counted() {
    const PROCESSES: usize = 36;
    let Some(_turn) = turn("many_named_processes_are_hooked_and_all_their_calls_are_counted") else { return };
    let mut targets: Vec<Target> = (0..PROCESSES).map(|_| Target::start(&program("mix"), ["2000"])).collect();
    let recorder = Recorder::of(targets[0].pid(), HALF_MIB).option("--hook", "inline").flag("--no-follow");
    let recording = targets[1..].iter().fold(recorder, |recorder, target| recorder.pid(target.pid())).start();
    assert!(targets.iter().all(|target| is_hooked(target.pid())), "{}", recording.said());
    let truths: Vec<Truth> = targets.iter_mut().map(Target::run).collect();
    let (profile, stats) = recording.stop().results();
    let all = |of: fn(&Truth) -> u64| truths.iter().map(of).sum::<u64>();
    let counted = (stats.exact_alloc_objects, stats.exact_alloc_bytes);
    assert_eq!(counted, (all(Truth::allocs), all(Truth::bytes)), "{stats:?}");
    for (target, truth) in targets.iter().zip(&truths) {
        let bytes = profile.process(target.pid()).figures.alloc_bytes.exact;
        assert_eq!(bytes, Some(truth.bytes() as f64), "process {}", target.pid());
    }
}

/// With as few descriptors as here, eight processes get a place. The others are not prepared either, which would leave
/// our code mapped in them, and are listed as not counted.
#[test]
fn no_more_processes_are_prepared_than_get_a_place() {
    const NAME: &str = "few-places";
    let Some(_turn) = turn("no_more_processes_are_prepared_than_get_a_place") else { return };
    let mix = program_with("mix", NAME, &[]);
    let targets: Vec<Target> = (0..24).map(|_| Target::start(&mix, ["2000"])).collect();
    let words = ["setpriv", "--bounding-set=-sys_resource", "prlimit", "--nofile=600:600"].map(OsStr::new);
    let recorder = Recorder::new().interval(HALF_MIB).option("--comm", NAME).option("--hook", "inline");
    let recording = recorder.through(&words).start();
    let (mut hooked, mut others): (Vec<Target>, Vec<Target>) =
        targets.into_iter().partition(|target| is_hooked(target.pid()));
    let prepared = others.iter().filter(|target| !mapped(target.pid()).is_empty()).count();
    assert_eq!((hooked.len(), prepared), (8, 0), "{}", recording.said());
    let allocs: u64 = hooked.iter_mut().map(|target| target.run().allocs()).sum();
    others.iter_mut().for_each(|target| drop(target.run()));
    let (profile, stats) = recording.stop().results();
    assert_eq!(stats.exact_alloc_objects, allocs, "{stats:?}");
    for process in others.iter().map(|target| profile.process(target.pid())) {
        assert!(process.idle && process.hook.is_none(), "{process:?}");
    }
}

/// The set of sampled blocks in a process is as large as the interval demands, if the process has space for it. If
/// something is full, the note names it and the remedy.
#[test]
fn as_many_sampled_blocks_are_followed_as_live_max_says() {
    let Some(_turn) = turn("as_many_sampled_blocks_are_followed_as_live_max_says") else { return };
    const KEPT: u64 = 80_000;
    let arguments = ["100000".to_owned(), KEPT.to_string(), "32".to_owned()];
    // The process has little left of its address space limit.
    let (live_map, process) =
        ("the live map was full", "because of the limit on bytes of its address space (RLIMIT_AS)");
    for (live_max, little, full) in
        [("1048576", false, None), ("20000", false, Some(live_map)), ("1048576", true, Some(process))]
    {
        let mut target = Target::start(&program("peak"), &arguments);
        if little {
            limit_addresses(target.pid(), 26 << 20);
        }
        let recorder = Recorder::of(target.pid(), 1).option("--hook", "inline").option("--live-max", live_max);
        let (outcome, truth) = recorder.option("--unwind", "fp").option("--ring-bytes", "64MiB").record(&mut target);
        let (profile, stats) = outcome.results();
        assert_eq!((stats.lost(), stats.exact_alloc_bytes), (0, truth.bytes()), "{stats:?}");
        let in_use = profile.totals.inuse_objects.as_ref().expect("it is known");
        assert!(in_use.low <= Some(KEPT as f64) && in_use.high >= Some(KEPT as f64), "{in_use:?}");
        let remarks: Vec<&String> = profile.notes.iter().filter(|note| note.contains("were not tracked")).collect();
        match full {
            None => {
                assert_eq!((in_use.value(), stats.other["untracked"]), (KEPT as f64, 0), "{remarks:?}");
            }
            Some(full) => {
                assert!(remarks.first().is_some_and(|remark| remark.contains(full)), "{live_max}: {remarks:?}");
                let [untracked, inside] = ["untracked", "set_full"].map(|name| stats.other[name]);
                assert!(untracked > 10_000 && if little { inside == untracked } else { inside < untracked });
            }
        }
    }
}

/// Calls in progress when figures are taken are in none of them. Calls cut off by the process's end are lost, with
/// their bytes, so that the difference to the samples does not look like an error. The same holds with probes.
#[test]
fn inline_calls_that_the_end_cuts_off_are_lost_with_their_bytes() {
    let Some(_turn) = turn("inline_calls_that_the_end_cuts_off_are_lost_with_their_bytes") else { return };
    const THREADS: u64 = 8;
    for hook in [Hook::Inline, Hook::Probe] {
        let mut target = Target::start(&program("cut_off"), [THREADS.to_string()]);
        let pid = target.pid();
        let recording = recorder(pid, hook, 1).start();
        assert_eq!(is_hooked(pid), hook == Hook::Inline);
        let truth = target.run();
        assert_eq!(truth.abandoned, THREADS);
        recording.signal(libc::SIGUSR1);
        until("a snapshot", || numbers_of_snapshots(&recording.dir()).contains(&1));
        let meanwhile: Profile = output::read(&recording.dir().join("profile.0001.json"));
        target.end();
        let outcome = recording.finish();
        let (profile, stats) = outcome.results();
        let figures = |profile: &Profile| {
            let [bytes, objects] = [&profile.totals.alloc_bytes, &profile.totals.alloc_objects];
            (bytes.exact, bytes.value(), objects.exact, objects.value())
        };
        let (bytes, objects) = (truth.bytes() as f64, truth.allocs() as f64);
        assert_eq!(figures(&meanwhile), (Some(bytes), bytes, Some(objects), objects), "{hook:?}");
        let (all_bytes, all_objects) = (bytes + (THREADS * 5000) as f64, objects + THREADS as f64);
        // The lost bytes are known exactly, so totals include them.
        let all = (Some(all_bytes), all_bytes, Some(all_objects), all_objects);
        assert_eq!(figures(&profile), all, "{hook:?}: {stats:?}");
        assert_eq!((stats.lost["abandoned"], stats.lost()), (THREADS, THREADS), "{hook:?}: {stats:?}");
        assert_eq!(outcome.alarm(), None, "{hook:?}: {stats:?}");
    }
}

/// Hooks are removed from a child that is not a target.
#[test]
fn inline_hooks_leave_children_that_are_no_targets() {
    let Some(_turn) = turn("inline_hooks_leave_children_that_are_no_targets") else { return };
    let mut target = Target::start(&program("family"), ["fork"]);
    let recording = Recorder::of(target.pid(), 1).option("--hook", "inline").flag("--no-follow").start();
    target.go();
    target.step();
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    checks::sites_of(&profile, target.pid(), &truth, 1, Compare::All);
    assert!(profile.processes.iter().all(|process| process.pid == target.pid()));
    assert_eq!(stats.exact_alloc_objects, truth.allocs() - truth.site("site_02").allocs, "{stats:?}");
}

/// Each thread leaves a block, and the next thread gets the slot of the last one, or its own.
#[test]
fn inline_threads_come_and_go() {
    let Some(_turn) = turn("inline_threads_come_and_go") else { return };
    for interval in [1, HALF_MIB] {
        let mut target = Target::start(&program("endings"), ["threads", "3000"]);
        let recording = inline(&target, interval);
        let truth = target.run();
        let (profile, stats) = recording.stop().results();
        checks::sites(&profile, &truth, interval, Compare::All);
        // The C library allocates for threads that it creates, and frees what it allocated for those that have ended.
        let of_libc = stats.exact_alloc_objects - truth.allocs();
        assert!(of_libc < 10, "{stats:?}");
        assert_eq!(stats.exact_alloc_bytes, truth.bytes() + 272 * of_libc, "{stats:?}");
        assert_eq!((stats.hits, stats.lost()), (stats.exact_alloc_objects, 0), "{stats:?}");
    }
}

/// A shell runs each command by vfork. Until its exec or exit, a child counts in its parent's memory, in the slot of
/// the parent's thread. The two are still counted separately.
#[test]
fn inline_calls_of_vfork_children_are_their_own() {
    let Some(_turn) = turn("inline_calls_of_vfork_children_are_their_own") else { return };
    for (follow, interval) in [(true, 1), (false, 1), (true, 16 << 10)] {
        let mut target = Target::start(&program("shelling"), ["40"]);
        let recorder = Recorder::of(target.pid(), interval).option("--hook", "inline");
        let recording = if follow { recorder } else { recorder.flag("--no-follow") }.start();
        target.go();
        let [calls, bytes, of_children, bytes_of_children] = target.sums();
        let (profile, _) = recording.stop().results();
        let what = format!("follow {follow}, interval {interval}: {:?}", profile.notes);
        let process = profile.process(target.pid());
        assert_eq!(checks::exact(process), (Some(bytes), Some(calls)), "{what}");
        let children = || profile.processes.iter().filter(|it| it.comm == "shelling" && it.pid != target.pid());
        let of_followed = if follow { [of_children, bytes_of_children] } else { [0; 2] };
        assert_eq!(checks::exact_of_all(children()), of_followed, "{what}");
        for process in children().chain([process]) {
            let figures = &process.figures;
            let difference = figures.alloc_bytes.value() - figures.alloc_bytes.exact.expect("counted");
            assert!(interval > 1 || difference.abs() < 0.5, "{what}: {difference} of {}", process.pid);
        }
        assert!(!profile.notes.join(" ").contains("do not trust"), "{what}");
    }
}

/// Checks what a recording with probes says about a process that another recording had hooked inline for a while: that
/// it has not seen everything, for which share of the time, and no figure that claims otherwise.
fn reports_what_was_hidden(profile: &Profile, pid: u32, estimate: f64) {
    let process = profile.process(pid);
    assert!(process.was_hidden() && process.coverage < 0.99, "{process:?}");
    for figures in [&process.figures, &profile.totals] {
        let bytes = &figures.alloc_bytes;
        assert_eq!((bytes.exact, bytes.low, bytes.high), (None, None, None), "{process:?}");
        assert_eq!((figures.alloc_objects.exact, bytes.value()), (None, estimate), "{process:?}");
    }
}

/// Probes see nothing of a process while another recording hooks it inline, whether from before they were attached or
/// later. The profile says so, and `doctor` does during that time. Memory in use counts from when the probes see frees
/// again.
#[test]
fn probes_tell_what_the_inline_hooks_of_others_hide() {
    let Some(_turn) = turn("inline_probes_tell_what_the_inline_hooks_of_others_hide") else { return };
    for is_there_first in [false, true] {
        let mut target = Target::start::<&str>(&program("phases"), []);
        let pid = target.pid();
        let probes = || recorder(pid, Hook::Probe, 1).flag("-v").start();
        let (mut by_probes, mut hooks) = (None::<Recording>, None);
        for phase in 0..4 {
            match phase {
                0 if is_there_first => hooks = Some(inline(&target, 1)),
                1 => {
                    by_probes = Some(probes());
                    hooks = hooks.or_else(|| Some(inline(&target, 1)));
                    let output = doctor_text_of(pid);
                    assert!(output.contains("! allocations: another recording counts it from inside"), "{output}");
                    assert!(!output.contains("Nothing would be missed"), "{output}");
                }
                2 => {
                    let by_probes = by_probes.as_mut().expect("it is there since phase 1");
                    // Hooking may take more than one attempt, so the line may have been written before.
                    let lines = by_probes.lines_by_now();
                    hooks.take().map(Recording::stop);
                    assert!(!is_hooked(pid));
                    by_probes.await_line("its calls are counted again", lines);
                }
                _ => {}
            }
            target.go();
            if phase < 3 {
                target.step();
            }
        }
        target.truth();
        let outcome = by_probes.expect("it was there").stop();
        let (profile, stats) = outcome.results();
        reports_what_was_hidden(&profile, pid, 10.0 * 30_000.0 + 2000.0);
        let process = profile.process(pid);
        assert!(process.inuse_since.is_some(), "{process:?}\n{}", outcome.stderr);
        let in_use = process.figures.inuse_bytes.as_ref().expect("its frees are followed");
        assert_eq!(in_use.value(), 10.0 * 30_000.0 + 2000.0, "only blocks since then: {process:?}");
        assert!(in_use.low.is_some(), "{process:?}");
        let missed = outcome.stdout.lines().find(|line| line.trim_start().starts_with("missed")).unwrap_or_default();
        assert!(missed.contains("while another recording counted it"), "{}", outcome.stdout);
        assert!(!outcome.stdout.contains("counted exactly"), "{}", outcome.stdout);
        assert_eq!((stats.hits, stats.lost()), (11, 0), "{stats:?}");
        assert!(target.end().success());
    }
}

/// Tests of the long set.
mod long {
    use super::*;

    /// More blocks than the smallest set holds, of more threads than have a slot of their own.
    #[test]
    fn blocks_of_thousands_of_threads_are_all_followed() {
        let Some(_turn) = turn("blocks_of_thousands_of_threads_are_all_followed") else { return };
        // More blocks than the smallest set holds. systemd lets a unit have 4,915 threads on many hosts.
        let threads = program_with("threads", "threads-4200", &["-DTHREADS=4200"]);
        let mut target = Target::start(&threads, ["0"]);
        let recorder = Recorder::of(target.pid(), 1).option("--hook", "inline").flag("--lossless");
        let recording = recorder.start();
        assert!(is_hooked(target.pid()), "{}", recording.said());
        let truth = target.run();
        assert!(truth.live_allocs() > 1 << 16, "{truth:?}");
        let (profile, stats) = recording.stop().results();
        counted_exactly(&stats, &truth);
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!(["untracked", "set_full"].map(|name| stats.other[name]), [0; 2], "{:?}", profile.notes);
    }
}
