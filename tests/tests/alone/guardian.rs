//! heapbpf may be killed at any moment. The kernel does not remove probes on behalf of a process with a pending
//! SIGKILL, so a helper process, the guardian, removes them.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::time::Duration;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{heapbpf, turn};
use heapbpf_tests::guardian::{
    changed_bytes_of_libc, cleaners_of, demanglers_of, guardians_of, leaks, signal, threads_of,
};
use heapbpf_tests::kernel::{links_of, links_that_stay};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, stat, status, until};
use heapbpf_tests::torture::times;

/// A killed heapbpf leaves no probe, no link and no process, and its target is not harmed. Most kills come while links
/// are made. Before there was a guardian, two of three of those left probes.
#[test]
fn killed_at_any_moment_no_probe_stays() {
    let Some(_turn) = turn("killed_at_any_moment_no_probe_stays") else { return };
    let mut target = Target::start(&program("forking"), [""; 0]);
    let target_pid = target.pid().to_string();
    until("a target without probes", || changed_bytes_of_libc(target.pid()) == Some(0));
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (mut threads, mut guarded) = (BTreeSet::new(), 0);
    let kills = times(8);
    for kill in 0..kills {
        let mut command = Command::new(heapbpf());
        let hook = if kill % 2 == 0 { "probe" } else { "auto" };
        command.args(["-i", "4KiB", "--hook", hook, "--pid", &target_pid]).current_dir(dir.path());
        let mut recording = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary runs");
        until("a link", || !links_of(recording.id()).is_empty());
        std::thread::sleep(Duration::from_millis(u64::from(kill * 37 % 200)));
        let guardians = guardians_of(recording.id());
        threads.extend(guardians.iter().copied().flat_map(threads_of).chain([recording.id()]));
        guarded += u32::from(!guardians.is_empty());
        recording.kill().expect("it runs");
        let links = guardians.iter().flat_map(|guardian| links_of(*guardian)).collect();
        recording.wait().expect("our child");
        until("the end of the guardian", || guardians_of(recording.id()).is_empty());
        assert_eq!(links_that_stay(&links), BTreeSet::new(), "kill {kill}");
        assert_eq!(leaks(&threads), Vec::<String>::new(), "kill {kill}");
        until("a target without probes", || changed_bytes_of_libc(target.pid()) == Some(0));
    }
    // A guardian that served a measurement of costs may have ended before that of the recording starts.
    assert!(2 * guarded > kills, "{guarded}");
    target.go();
    assert_eq!(target.line(), "all children ended well");
    assert!(target.end().success());
}

/// A field of a process's status.
fn status_of(pid: u32, name: &str) -> String {
    status(pid, name).expect("it runs")
}

/// The guardian ignores signals to all of heapbpf's processes. It is small, and has few privileges.
#[test]
fn the_guardian_is_small_and_may_do_little() {
    let Some(_turn) = turn("the_guardian_is_small_and_may_do_little") else { return };
    let mut target = Target::start(&program("mix"), ["2000"]);
    let recording = Recorder::of(target.pid(), 1).start();
    let heapbpf = recording.pid();
    let guardians = guardians_of(heapbpf);
    let [guardian] = guardians[..] else { panic!("one guardian: {guardians:?}") };
    for sent in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2] {
        signal(sent, [guardian]);
    }
    let memory = std::fs::read_to_string(format!("/proc/{guardian}/smaps_rollup")).expect("it runs");
    let own: u64 = memory
        .lines()
        .filter(|line| line.starts_with("Private_"))
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
        .sum();
    println!("{own} KiB of its own");
    // Nearly all of it is addresses that the loader wrote. An optimized build has a third of them.
    assert!(own < 4096, "{memory}");
    let (bpf, perfmon, sys_admin) = (1_u64 << 39, 1_u64 << 38, 1_u64 << 21);
    let capabilities = u64::from_str_radix(&status_of(guardian, "CapPrm"), 16).expect("a mask");
    assert_eq!(capabilities & !sys_admin, bpf | perfmon, "{capabilities:x}");
    assert_eq!((status_of(guardian, "Seccomp").as_str(), status_of(guardian, "NoNewPrivs").as_str()), ("2", "1"));
    let threads = threads_of(guardian);
    assert!(threads.len() > 1, "it closes links on several threads");
    let restricted = |thread: u32| ["CapPrm", "CapEff", "Seccomp", "NoNewPrivs"].map(|name| status_of(thread, name));
    // Each begins by restricting itself.
    until("restricted threads", || threads.iter().all(|thread| restricted(*thread) == restricted(guardian)));
    let mut held = links_of(guardian);
    assert!(held.is_subset(&links_of(heapbpf)) && !held.is_empty(), "{held:?}");
    assert_ne!(stat(guardian).pgrp, stat(heapbpf).pgrp);
    let truth = target.run();
    held.extend(links_of(guardian));
    let (profile, stats) = recording.stop().results();
    assert_eq!(guardians_of(heapbpf), Vec::<u32>::new(), "it ends before heapbpf does");
    assert_eq!(links_that_stay(&held), BTreeSet::new());
    checks::sites(&profile, &truth, 1, Compare::All);
    assert_eq!(stats.lost(), 0, "{stats:?}");
}

/// heapbpf also holds its links itself, so it continues without the guardian and says so.
#[test]
fn a_recording_goes_on_without_its_guardian() {
    let Some(_turn) = turn("a_recording_goes_on_without_its_guardian") else { return };
    for link in ["session", "multi", "perf"] {
        let mut target = Target::start(&program("mix"), ["2000"]);
        let recording = Recorder::of(target.pid(), 1).option("--hook", "probe").option("--link", link).start();
        let guardians = guardians_of(recording.pid());
        let [guardian] = guardians[..] else { panic!("one guardian: {guardians:?}") };
        signal(libc::SIGKILL, [guardian]);
        let truth = target.run();
        let outcome = recording.stop();
        assert!(outcome.stderr.contains("(heapbpf-guardian) is gone"), "{}", outcome.stderr);
        let (profile, stats) = outcome.results();
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!((stats.submitted, stats.lost()), (truth.allocs(), 0), "{stats:?}");
    }
}

/// A helper is stopped (SIGSTOP). It is continued when heapbpf needs it, and heapbpf ends normally.
#[test]
fn a_stopped_helper_keeps_heapbpf_from_nothing() {
    let Some(_turn) = turn("a_stopped_helper_keeps_heapbpf_from_nothing") else { return };
    type Helper = fn(u32) -> Vec<u32>;
    for (hook, helper) in [("probe", guardians_of as Helper), ("inline", cleaners_of), ("probe", demanglers_of)] {
        let mut target = Target::start(&program("mix"), ["2000"]);
        let recording = Recorder::of(target.pid(), 1).option("--hook", hook).start();
        let heapbpf = recording.pid();
        let stopped = helper(heapbpf);
        assert_eq!(stopped.len(), 1, "{}", recording.said());
        signal(libc::SIGSTOP, stopped.iter().copied());
        let truth = target.run();
        let (profile, stats) = recording.stop().results();
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!(stats.lost(), 0, "{stats:?}");
        assert_eq!(helper(heapbpf), Vec::<u32>::new(), "it ends before heapbpf does");
    }
}

/// A crash leaves one line that names it and contains nothing of the target, and leaves no probes. The target continues
/// correctly.
#[test]
fn a_crash_leaves_a_report_and_no_probes() {
    use std::os::unix::process::ExitStatusExt as _;
    let Some(_turn) = turn("a_crash_leaves_a_report_and_no_probes") else { return };
    for (signal, name) in [(libc::SIGSEGV, "SIGSEGV"), (libc::SIGBUS, "SIGBUS"), (libc::SIGABRT, "SIGABRT")] {
        let mut target = Target::start(&program("mix"), ["2000"]);
        let recording = Recorder::of(target.pid(), 1).option("--hook", "probe").start();
        let heapbpf = recording.pid();
        let held = links_of(heapbpf);
        assert!(!held.is_empty());
        recording.signal(signal);
        let outcome = recording.ends();
        assert_eq!(outcome.status.signal(), Some(signal), "{}", outcome.stderr);
        let reports: Vec<&str> = outcome.stderr.lines().filter(|line| line.contains("please report it")).collect();
        let [report] = reports[..] else { panic!("one report: {}", outcome.stderr) };
        assert!(report.contains("an error inside heapbpf") && report.contains(name), "{report}");
        until("the end of the guardian", || guardians_of(heapbpf).is_empty());
        assert_eq!(links_that_stay(&held), BTreeSet::new());
        assert_eq!(outcome.files(), Vec::<String>::new(), "nothing is half there, and no core");
        target.run();
        assert_eq!(changed_bytes_of_libc(target.pid()), Some(0));
        assert!(target.end().success(), "it came to harm");
    }
}
