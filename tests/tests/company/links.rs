//! Every kind of link gives the same exact numbers. Older kinds are forced here, so that they are tested on kernels
//! that would not choose them.

use std::process::Command;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{heapbpf, skipped, turn};
use heapbpf_tests::kernel;
use heapbpf_tests::program::{copy_of, program, program_with};
use heapbpf_tests::recorder::{Recorder, Recording};
use heapbpf_tests::refusing::{Linking, UPROBE_MULTI, UPROBE_SESSION, run_on};
use heapbpf_tests::target::{Target, until};
use serde_json::Value;

fn exact_with(link: &str, name: &str, arguments: &[&str]) {
    let case = format!("exact_with {link} links: {name}");
    let Some(_turn) = turn(&case) else { return };
    let mut target = Target::start(&program(name), arguments);
    let (outcome, truth) =
        Recorder::of(target.pid(), 1).option("--hook", "probe").option("--link", link).record(&mut target);
    if link == "session" && outcome.stderr.contains("no uprobe sessions") {
        skipped(&case, "this kernel has no uprobe sessions");
        return;
    }
    let (profile, stats) = outcome.results();
    checks::sites(&profile, &truth, 1, Compare::All);
    assert_eq!(stats.submitted, truth.allocs(), "{stats:?}");
    // reallocarray detects an overflow before it reaches the probe.
    assert!(stats.failed <= truth.failed, "{stats:?}");
    assert_eq!(stats.exact_alloc_bytes, truth.bytes(), "{stats:?}");
    assert_eq!(stats.lost(), 0, "{stats:?}");
}

#[test]
fn reallocs_and_aligned_allocations_are_exact_with_every_kind_of_link() {
    for link in ["multi", "perf"] {
        exact_with(link, "reallocs", &[]);
        exact_with(link, "aligned", &[]);
    }
}

/// When many processes of one library share its links, each is as exact as alone. A process that is not named does not
/// count, although its calls hit the probes.
#[test]
fn many_named_processes_share_links_and_others_do_not_count() {
    let Some(_turn) = turn("many_named_processes_share_links_and_others_do_not_count") else { return };
    let start = || Target::start(&program("mix"), ["500"]);
    let mut targets: Vec<Target> = (0..12).map(|_| start()).collect();
    let mut other = start();
    let recorder = Recorder::new().interval(1).option("--hook", "probe");
    let recorder = targets.iter().fold(recorder, |recorder, target| recorder.pid(target.pid()));
    let recording = recorder.start();
    other.run();
    let truths: Vec<_> = targets.iter_mut().map(|target| (target.pid(), target.run())).collect();
    let (profile, stats) = recording.stop().results();
    for (pid, truth) in &truths {
        checks::sites_of(&profile, *pid, truth, 1, Compare::All);
    }
    assert_eq!(stats.submitted, truths.iter().map(|(_, truth)| truth.allocs()).sum::<u64>(), "{stats:?}");
    assert!(profile.processes.iter().all(|process| process.pid != other.pid()), "{:?}", profile.processes);
    assert_eq!(stats.lost(), 0, "{stats:?}");
}

/// What doctor reports on a kernel with this kind of linking.
fn doctor_on(linking: Linking) -> Value {
    let mut command = Command::new(heapbpf());
    run_on(linking, &mut command).expect("the kernel has filters with listeners");
    let output = command.args(["doctor", "--json"]).output().expect("the binary runs");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// One of doctor's kernel checks.
fn check_of<'a>(found: &'a Value, name: &str) -> &'a Value {
    let checks = found["kernel"]["checks"].as_array().expect("a list");
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name}: {found}"))
}

/// If the kernel refuses a kind of link, the next kind is used. doctor has a line for it, and the figures are exact.
#[test]
fn a_kind_of_link_that_the_kernel_refuses() {
    let Some(_turn) = turn("a_kind_of_link_that_the_kernel_refuses") else { return };
    const CASES: [(&[u32], &[&str], &str); 2] = [
        (&[UPROBE_SESSION], &["session links"], "multi"),
        (&[UPROBE_SESSION, UPROBE_MULTI], &["session links", "multi links"], "perf"),
    ];
    for (refused, lines, next) in CASES {
        let linking = Linking { refused, ..Linking::default() };
        let found = doctor_on(linking);
        assert_eq!(found["kernel"]["link"], next, "{found}");
        let check = |name: &str| check_of(&found, name);
        for name in lines {
            let check = check(name);
            assert_eq!((&check["ok"], &check["needed"]), (&Value::Bool(false), &Value::Bool(false)), "{check}");
            assert!(check["detail"].as_str().is_some_and(|why| why.contains("cannot attach")), "{check}");
        }
        assert_eq!(check("probes")["detail"], format!("a recording would use {next} links"));

        let mut target = Target::start(&program("mix"), ["3000"]);
        let (profile, stats, truth) =
            Recorder::of(target.pid(), 1).option("--hook", "probe").on_kernel(linking).results_of(&mut target);
        checks::sites(&profile, &truth, 1, Compare::All);
        let malloc = stats.attach.iter().find(|probe| probe.function == "malloc").expect("it is hooked");
        assert_eq!(malloc.link, next, "{malloc:?}");
    }
}

/// On a kernel whose links to one process miss threads, heapbpf links every process and filters in its BPF programs.
/// All threads of two named processes are exact, a call counts once, and a third process does not count. doctor says
/// so.
#[test]
fn links_to_one_process_that_miss_its_threads() {
    let Some(_turn) = turn("links_to_one_process_that_miss_its_threads") else { return };
    let name = "links to one process";
    let whole = doctor_on(Linking { refused: &[UPROBE_SESSION], ..Linking::default() });
    assert_eq!(check_of(&whole, name)["ok"], true, "this kernel is right: {whole}");
    let linking = Linking { refused: &[UPROBE_SESSION], misses_threads: true };
    let found = doctor_on(linking);
    let check = check_of(&found, name);
    assert_eq!((&check["ok"], &check["needed"]), (&Value::Bool(false), &Value::Bool(false)), "{check}");
    assert!(check["detail"].as_str().is_some_and(|why| why.contains("first thread only")), "{check}");

    let mut targets = [(); 2].map(|()| Target::start(&program("threads"), ["640"]));
    let mut other = Target::start(&program("mix"), ["500"]);
    let recorder = Recorder::of(targets[0].pid(), 1).pid(targets[1].pid()).on_kernel(linking);
    let recording = recorder.option("--hook", "probe").start();
    other.run();
    let truths = targets.each_mut().map(|target| (target.pid(), target.run()));
    let (profile, stats) = recording.stop().results();
    for (pid, truth) in &truths {
        checks::sites_of(&profile, *pid, truth, 1, Compare::All);
    }
    assert_eq!(stats.submitted, truths.iter().map(|(_, truth)| truth.allocs()).sum::<u64>(), "{stats:?}");
    assert!(profile.processes.iter().all(|process| process.pid != other.pid()), "{:?}", profile.processes);
}

/// The kernel keeps probes at their offsets in a file, even if the file is overwritten. Builds of a program are copied
/// over each other while its file has links that serve every process. Each build runs correctly and has its own exact
/// figures.
#[test]
fn each_build_that_is_copied_over_a_probed_file_is_right_and_exact() {
    let case = "each_build_that_is_copied_over_a_probed_file_is_right_and_exact";
    let Some(_turn) = turn(case) else { return };
    let build = |alignment: u32| {
        let flags = ["-static", &format!("-falign-functions={alignment}"), "-lm"];
        program_with("mix", &format!("build-{alignment}"), &flags)
    };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = copy_of(&build(16), dir.path(), "heapbpf-builds");
    let mut recording =
        Recorder::new().option("--comm", "heapbpf-builds").option("--hook", "probe").interval(1).start();
    if !kernel::reports_files_of_links(recording.pid()) {
        recording.stop().results();
        return skipped(case, "this kernel does not tell which files links are on");
    }
    let run = |recording: &mut Recording| {
        let mut target = Target::start(&file, ["100"]);
        recording.await_links_of(&file);
        let truth = target.run();
        let pid = target.pid();
        assert!(target.end().success());
        (pid, truth)
    };
    let mut all = vec![run(&mut recording)];
    for alignment in [1024, 4096, 2048] {
        std::fs::copy(build(alignment), &file).expect("nobody runs it");
        until("no link is on the file", || kernel::links_to(recording.pid(), &file) == 0);
        all.push(run(&mut recording));
    }
    let (profile, _) = recording.stop().results();
    for (pid, truth) in &all {
        let exact = (Some(truth.bytes()), Some(truth.allocs()));
        assert_eq!(checks::exact(profile.process(*pid)), exact, "{:?}", profile.processes);
    }
    // The other builds' files no longer exist.
    let (pid, truth) = all.last().expect("there are four");
    checks::sites_of(&profile, *pid, truth, 1, Compare::Allocated);
}
