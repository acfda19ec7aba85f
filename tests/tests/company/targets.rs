//! What the options that name targets select: several at once, children, and processes that become targets while they
//! run.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use heapbpf_tests::cgroup::Cgroup;
use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::constant::Load;
use heapbpf_tests::environment::{skipped, turn};
use heapbpf_tests::held;
use heapbpf_tests::inline::is_hooked;
use heapbpf_tests::kernel;
use heapbpf_tests::others::{Beside, libc_of};
use heapbpf_tests::output::{Estimate, Profile};
use heapbpf_tests::program::{copy_of, program};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::scrape::get;
use heapbpf_tests::target::{Target, children_of, state_of, until};
use heapbpf_tests::truth::Truth;

#[test]
fn several_kinds_of_targets_are_added_up() {
    let case = "several_kinds_of_targets_are_added_up";
    let Some(_turn) = turn(case) else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let named = copy_of(&program("pairs"), dir.path(), "of-this-name");
    let other = program("pairs");
    let group = Cgroup::new();
    if group.is_none() {
        skipped(case, "no writable cgroup2 mount: without --cgroup");
    }
    let start = |file: &Path| Target::start(file, ["500"]);
    let (mut by_pid, mut by_comm, mut by_cgroup, mut by_none) =
        (start(&other), start(&named), start(&other), start(&other));
    let mut recorder = Recorder::of(by_pid.pid(), 1).option("--comm", "of-this-n*");
    if let Some(group) = &group {
        // A group below it belongs to it, too.
        group.take("below", by_cgroup.pid());
        recorder = recorder.option("--cgroup", &group.path().display().to_string());
    }
    let recording = recorder.start();
    by_none.run();
    let mut targets = vec![&mut by_pid, &mut by_comm];
    targets.extend(group.is_some().then_some(&mut by_cgroup));
    let truths: Vec<_> = targets.into_iter().map(|target| (target.pid(), target.run())).collect();
    let (profile, _) = recording.stop().results();
    for (pid, truth) in &truths {
        checks::sites_of(&profile, *pid, truth, 1, Compare::All);
    }
    assert!(!profile.has(by_none.pid()), "nothing selects it");
    for target in [by_pid, by_comm, by_cgroup] {
        target.end();
    }
}

/// A shell that starts a child with another name and then execs another program itself. Each step waits for a line
/// first.
struct Family {
    shell: Beside,
    stdin: ChildStdin,
    lines: BufReader<ChildStdout>,
}

impl Family {
    /// Starts the family from the shell at this path.
    fn start(shell: &Path) -> Self {
        let script = "read go; /bin/sh -c 'echo $$; read go; FREE_RUNNING=1 exec \"$0\" 500' \"$0\"; \
                      read go; FREE_RUNNING=1 exec \"$0\" 700";
        let mut command = Command::new(shell);
        command.args(["-c", script]).arg(program("pairs")).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = command.spawn().expect("a shell");
        let stdin = shell.stdin.take().expect("piped");
        let lines = BufReader::new(shell.stdout.take().expect("piped"));
        Self { shell: Beside(shell), stdin, lines }
    }

    fn go(&mut self) {
        self.stdin.write_all(b"go\n").expect("it waits");
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.lines.read_line(&mut line).expect("a pipe") > 0, "it ended");
        line
    }

    /// A program's report, with its process id.
    fn truth(&mut self) -> (u32, Truth) {
        let ready = self.line();
        let pid = ready.strip_prefix("READY ").unwrap_or_else(|| panic!("{ready}")).trim().parse().expect("a pid");
        (pid, serde_json::from_str(&self.line()).expect("a report"))
    }

    /// Lets the shell start the child and returns its process id.
    fn child(&mut self) -> u32 {
        self.go();
        self.line().trim().parse().expect("a pid")
    }
}

/// Checks what was recorded of the family. With `follows`: the child's program and the program that the shell became.
/// Otherwise: neither.
fn judge(profile: &Profile, follows: bool, truths: &[(u32, Truth)]) {
    assert!(profile.unread.is_none(), "too slow to tell: {:?}", profile.unread);
    for (pid, truth) in truths {
        if follows {
            checks::sites_of(profile, *pid, truth, 1, Compare::AtExit);
        } else {
            let seen = profile.processes.iter().find(|process| process.pid == *pid && process.comm == "pairs");
            assert!(seen.is_none(), "it has another name: {seen:?}");
        }
    }
}

#[test]
fn children_of_processes_of_a_name_are_followed_unless_told_otherwise() {
    let Some(_turn) = turn("children_of_processes_of_a_name_are_followed_unless_told_otherwise") else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let shell = copy_of(Path::new("/bin/sh"), dir.path(), "heapbpf-parent");
    for (flag, follows) in [("--follow", true), ("--no-follow", false)] {
        let mut present = Family::start(&shell);
        let recording =
            Recorder::new().option("--comm", "heapbpf-par*").option("--hook", "probe").flag(flag).interval(1).start();
        let mut future = Family::start(&shell);
        let mut truths = Vec::new();
        for family in [&mut present, &mut future] {
            let child = family.child();
            family.go();
            let of_child = family.truth();
            assert_eq!(of_child.0, child);
            family.go();
            truths.extend([of_child, family.truth()]);
        }
        drop((present, future));
        let (profile, _) = recording.stop().results();
        assert!(profile.processes.iter().any(|process| process.comm == "heapbpf-parent"), "{:?}", profile.processes);
        judge(&profile, follows, &truths);
    }
}

/// The child leaves the cgroup before it calls an allocator.
#[test]
fn children_of_processes_of_a_cgroup_are_followed_unless_told_otherwise() {
    let case = "children_of_processes_of_a_cgroup_are_followed_unless_told_otherwise";
    let Some(_turn) = turn(case) else { return };
    let Some(group) = Cgroup::new() else { return skipped(case, "no writable cgroup2 mount") };
    let outside = group.path().parent().expect("the mount");
    for (flag, follows) in [("--follow", true), ("--no-follow", false)] {
        let mut family = Family::start(Path::new("/bin/sh"));
        group.take("", family.shell.0.id());
        let path = group.path().display().to_string();
        let recording =
            Recorder::new().option("--cgroup", &path).option("--hook", "probe").flag(flag).interval(1).start();
        let child = family.child();
        for pid in [child, family.shell.0.id()] {
            std::fs::write(outside.join("cgroup.procs"), pid.to_string()).expect("root may move processes");
        }
        family.go();
        let of_child = family.truth();
        family.go();
        let truths = [of_child, family.truth()];
        let (profile, _) = recording.stop().results();
        judge(&profile, follows, &truths);
    }
}

/// A running process is moved into the cgroup, without an exec, after heapbpf has found that its threads are not
/// targets.
#[test]
fn a_process_that_joins_the_cgroup_is_recorded_from_then_on() {
    let case = "a_process_that_joins_the_cgroup_is_recorded_from_then_on";
    let Some(_turn) = turn(case) else { return };
    let Some(group) = Cgroup::new() else { return skipped(case, "no writable cgroup2 mount") };
    let mut target = Load::SLOW.start();
    let recorder = Recorder::new().option("--cgroup", &group.path().display().to_string()).interval(1);
    let (recording, address) = recorder.serve();
    target.run();
    group.take("", target.pid());
    let pid = target.pid();
    let allocated = || get(address, "/metrics").metric_of("heapbpf_process_allocs_total", pid);
    until("allocations of the new member", || allocated().is_some_and(|allocations| allocations > 0.0));
    let (profile, _) = recording.stop().results();
    assert!(profile.process(pid).figures.alloc_objects.value() > 0.0);
    target.end();
}

const CHILDREN: usize = 100;
const ROUNDS: u64 = 50;

/// Arguments that make `brood` start this many children.
fn brood(mode: &str, children: usize) -> [String; 3] {
    [mode.to_owned(), children.to_string(), ROUNDS.to_string()]
}

/// Checks that the profile has every call of every short child.
fn every_child(profile: &Profile, truth: &Truth) {
    checks::sites(profile, truth, 1, Compare::All);
    let mut calls: BTreeMap<u32, f64> = BTreeMap::new();
    for stack in profile.stacks.iter().filter(|stack| matches!(stack.site(), Some("site_01" | "site_02"))) {
        *calls.entry(stack.pid).or_default() += stack.figures.alloc_objects.value();
    }
    let whole = calls.values().filter(|calls| **calls == ROUNDS as f64).count();
    assert_eq!((whole, calls.len()), (CHILDREN, CHILDREN), "of so many children every call was seen");
    let missed = profile.notes.iter().find(|note| note.contains("ended before"));
    assert!(missed.is_none(), "a gap that there was not: {missed:?}");
}

/// CPU time that each of these processes has used, ns, once they wait. Each has one thread.
fn used_by(waiting: &[u32]) -> Vec<u64> {
    until("children that wait", || waiting.iter().all(|pid| state_of(*pid) == Some('S')));
    let stat = |pid: u32| procfs::process::Process::new(pid.cast_signed()).and_then(|process| process.schedstat());
    waiting.iter().map(|pid| stat(*pid).expect("it runs").sum_exec_runtime).collect()
}

/// With probes, the links of a process without children serve it alone. Its first children are served only after their
/// fork was reported. The profile has the share of each child's CPU time in which it was counted, and all formats with
/// remarks have that of all children.
#[test]
fn children_that_were_forked_before_probes_served_them_are_told() {
    const ROUNDS: u64 = 200;
    let Some(_turn) = turn("children_that_were_forked_before_probes_served_them_are_told") else { return };
    let mut target = Target::start(&program("brood"), ["late", "4", &ROUNDS.to_string()]);
    let recorder = Recorder::of(target.pid(), 1).option("--hook", "probe");
    let mut recording = recorder.option("-o", "profile.otlp").option("-o", "profile.html").start();
    target.go();
    target.step();
    recording.await_more_links();
    let mut waiting = Vec::new();
    until("the first child ends", || {
        waiting = children_of(target.pid());
        waiting.retain(|pid| state_of(*pid) != Some('Z'));
        waiting.len() == 3
    });
    let before = used_by(&waiting);
    let truth = target.run();
    let after = used_by(&waiting);
    let outcome = recording.stop();
    let (profile, _) = outcome.results();
    let (counted, all) = (checks::site_sums(&profile, None)["site_01"].samples, truth.site("site_01").allocs);
    assert!((3 * ROUNDS..=all).contains(&counted), "three waited until they were served: {counted} of {all}");
    for ((pid, before), after) in waiting.into_iter().zip(before).zip(after) {
        let child = profile.process(pid);
        let calls = checks::site_sums(&profile, Some(pid))["site_01"].samples;
        assert_eq!(child.cpu_coverage.is_some(), child.coverage < 1.0, "{child:?}");
        let share = child.cpu_coverage.unwrap_or(1.0);
        // What it used before it waited was missed, unless links served it by then.
        let missed = before as f64 / after as f64;
        assert!(share > 1.0 - missed - 0.01 && (share < 1.0 || calls == 2 * ROUNDS), "{calls}, {missed}: {child:?}");
        assert!(calls > ROUNDS || share < 1.0 - missed / 10.0, "{calls}, {missed}: {child:?}");
    }
    let remark = |text: &str| profile.notes.iter().find(|note| note.contains(text));
    let is_there = profile.processes.len() == 5 || remark("ended before it could be counted").is_some();
    assert!(is_there, "the first child: {:?}", profile.notes);
    let late = remark("forked before probes served").unwrap_or_else(|| panic!("{:?}", profile.notes));
    for file in ["profile.json", "profile.pb.gz"] {
        let text = outcome.report_of(file, &["--details"]);
        assert!(text.split_whitespace().collect::<Vec<_>>().join(" ").contains(late), "{file}: {text}");
    }
    for file in ["profile.otlp", "profile.html"] {
        let text = std::fs::read(outcome.file(file)).expect("it was written");
        assert!(text.windows(late.len()).any(|part| part == late.as_bytes()), "{file}");
    }
}

/// Checks that the profile has every call of each short child that was forked. For each that replaced its program, it
/// must have every call or report the gap. Returns how many children are complete, and how many there are.
fn most_children(profile: &Profile, truth: &Truth) -> [usize; 2] {
    let replaced = "site_02";
    let (mut forked, mut of_forked) = (profile.clone(), truth.clone());
    forked.stacks.retain(|stack| stack.site() != Some(replaced));
    of_forked.sites.retain(|site| site.site != replaced);
    checks::sites(&forked, &of_forked, 1, Compare::All);
    let children = CHILDREN / 2;
    let mut found: BTreeMap<u32, [f64; 2]> = BTreeMap::new();
    for stack in profile.stacks.iter().filter(|stack| stack.site() == Some(replaced)) {
        let [calls, kept] = found.entry(stack.pid).or_default();
        *calls += stack.figures.alloc_objects.value();
        *kept += stack.figures.inuse_objects.as_ref().map_or(0.0, Estimate::value);
    }
    let exact = [ROUNDS as f64, (truth.site(replaced).live_allocs / children as u64) as f64];
    let whole = found.values().filter(|counted| **counted == exact).count();
    for (pid, counted) in found.iter().filter(|(_, counted)| **counted != exact) {
        assert!(counted[0] < exact[0] && held::is_reported(profile, Some(profile.process(*pid))), "{pid}: {counted:?}");
    }
    let are_all_there = found.len() == children;
    assert!(are_all_there || found.len() < children && held::is_reported(profile, None), "{:?}", profile.notes);
    [children + whole, CHILDREN]
}

/// With probes, all of every child is in the profile. With inline hooks, what is missing is reported.
fn children_of_a_recording(case: &str, record: impl Fn(&str) -> (Profile, Truth)) {
    let Some(_turn) = turn(case) else { return };
    let (profile, truth) = record("probe");
    every_child(&profile, &truth);
    held::most_are_whole(case, || {
        let (profile, truth) = record("auto");
        most_children(&profile, &truth)
    });
}

#[test]
fn every_short_child_of_a_command_is_counted_from_its_first_call() {
    children_of_a_recording("every_short_child_of_a_command_is_counted_from_its_first_call", |hook| {
        let recorder = Recorder::new().interval(1).option("--hook", hook).variable("FREE_RUNNING", OsStr::new("1"));
        let outcome = recorder.command(&program("brood"), brood("short", CHILDREN)).start().finish();
        (outcome.results().0, Truth::in_output(&outcome.stdout))
    });
}

/// The process has already had a child before the recording.
#[test]
fn every_short_child_of_a_process_is_counted_from_its_first_call() {
    children_of_a_recording("every_short_child_of_a_process_is_counted_from_its_first_call", |hook| {
        let mut target = Target::start(&program("brood"), brood("short", CHILDREN));
        let (profile, _, truth) = Recorder::of(target.pid(), 1).option("--hook", hook).results_of(&mut target);
        target.end();
        (profile, truth)
    });
}

/// The children of a named process are already running. They and their own children are targets unless `--no-follow` is
/// given.
#[test]
fn children_that_run_already_are_targets() {
    let Some(_turn) = turn("children_that_run_already_are_targets") else { return };
    let running = 5;
    for follows in [true, false] {
        let mut target = Target::start(&program("brood"), brood("master", running));
        target.go();
        target.step();
        let flag = if follows { "--follow" } else { "--no-follow" };
        let recording = Recorder::of(target.pid(), 1).flag(flag).start();
        let mut truth = target.run();
        let (profile, _) = recording.stop().results();
        if !follows {
            truth.sites.retain(|site| site.site == "site_00");
        }
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!(profile.processes.len(), if follows { 1 + 2 * running } else { 1 }, "{:?}", profile.processes);
        target.end();
    }
}

/// The kernel binds links of one process to its first thread, which has ended by then.
#[test]
fn a_program_that_another_thread_executes_is_followed() {
    let Some(_turn) = turn("a_program_that_another_thread_executes_is_followed") else { return };
    for flag in ["--follow", "--no-follow"] {
        let mut target = Target::start(&program("family"), ["exec from another thread", "step"]);
        let mut recording = Recorder::of(target.pid(), 1).flag(flag).start();
        target.go();
        target.step();
        recording.await_more_links();
        // Inline hooks have their links before anything leads to them.
        let (heapbpf, pid) = (recording.pid(), target.pid());
        let is_probed = || kernel::links_to(heapbpf, Path::new(&libc_of(pid))) > 0;
        until("hooks in the second program", || {
            is_hooked(pid) || is_probed() || !kernel::reports_files_of_links(heapbpf)
        });
        let truth = target.run();
        let (profile, _) = recording.stop().results();
        checks::sites(&profile, &truth, 1, Compare::Allocated);
        let sums = checks::site_sums(&profile, None);
        assert_eq!(sums["site_00"].figures[3], 0.0, "gone with its program: {:?}", sums["site_00"]);
        assert_eq!(sums["site_02"].figures[3], truth.site("site_02").live_allocs as f64, "the second program's");
    }
}

/// Examining a large file takes seconds of CPU time on its own thread, so only files of targets are examined.
#[test]
fn large_files_of_other_programs_are_not_examined() {
    let case = "large_files_of_other_programs_are_not_examined";
    let Some(_turn) = turn(case) else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let large = |name: &str| {
        let copy = copy_of(&program("growing"), dir.path(), name);
        // Zeros after the last section change only the file's size. truncate(1) does it for the reason given at
        // `copy_file`.
        assert!(Command::new("truncate").arg("--size=16M").arg(&copy).status().is_ok_and(|status| status.success()));
        copy
    };
    let examines = |daemon: u32| {
        let tasks = std::fs::read_dir(format!("/proc/{daemon}/task")).expect("it runs").flatten();
        tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok()).any(|comm| comm == "examine\n")
    };
    let target = Target::start(&program("growing"), ["1000", "1000"]);
    let of_target = Recorder::of(target.pid(), 4096).flag("-vv").without_outputs().start();
    let by_name = Recorder::new().option("--comm", "other").interval(4096).without_outputs().start();
    let _other = Target::start(&large("other"), ["1000", "1000"]);
    until("who records it by its name examines it", || examines(by_name.pid()));
    // By then the recording of the other target has seen the program as well.
    std::thread::sleep(Duration::from_secs(1));
    let is_examined = examines(of_target.pid());
    by_name.stop();
    let said = of_target.stop().stderr;
    assert!(!is_examined, "an unrelated program was examined: {said}");
}
