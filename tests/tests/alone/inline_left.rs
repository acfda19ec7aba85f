//! A target continues after heapbpf is killed. The cleaner removes its hooks. If the cleaner was killed too, the next
//! heapbpf or `doctor --clean` does.

use std::collections::BTreeSet;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::descriptors::open_paths;
use heapbpf_tests::doctor::clean;
use heapbpf_tests::environment::{heapbpf, skipped, tool, turn};
use heapbpf_tests::guardian::{changed_bytes_of_libc, cleaners_of, guardians_of, kill, kill_all_of, signal};
use heapbpf_tests::inline::{counted_exactly, hooked_processes, is_hooked, mapped};
use heapbpf_tests::kernel::orphaned_links;
use heapbpf_tests::program::{copy_of, program};
use heapbpf_tests::recorder::{Recorder, Recording};
use heapbpf_tests::target::{Target, until};
use heapbpf_tests::torture::times;

fn inline(pid: u32, interval: u64) -> Recorder {
    Recorder::of(pid, interval).option("--hook", "inline").flag("--no-follow").flag("-v")
}

/// Starts a recording and, once the target is hooked, kills heapbpf and its cleaner.
fn left_hooked(pid: u32) {
    let recording: Recording = inline(pid, 4096).without_outputs().start();
    assert!(is_hooked(pid), "{}", recording.said());
    kill(cleaners_of(recording.pid()));
    drop(recording);
    assert!(is_hooked(pid), "it leaves its hooks");
}

/// Reading the list of a process's mappings takes long if there are many, so it is not read while the process is
/// stopped: the thread that stops a process does not read it.
#[test]
fn what_is_mapped_is_read_before_a_process_is_stopped() {
    let case = "inline_what_is_mapped_is_read_before_a_process_is_stopped";
    let Some(_turn) = turn(case) else { return };
    let Some(strace) = tool("strace") else { return skipped(case, "no strace (Debian: strace)") };
    let target = Target::start(&program("crowded"), ["code", "15000", "1000"]);
    let pid = target.pid();
    left_hooked(pid);
    let dir = tempfile::tempdir().expect("a temporary directory");
    let calls = dir.path().join("calls");
    let output = Command::new(strace)
        .args(["-f", "-e", "trace=openat,ptrace", "-o"])
        .arg(&calls)
        .arg(heapbpf())
        .args(["doctor", "--clean", "--pid", &pid.to_string()])
        // Each call waits for strace to get a processor, twice.
        .env("HEAPBPF_STOP_LIMIT_MS", "500")
        .output();
    assert!(output.expect("strace runs").status.success());
    assert!(!is_hooked(pid));
    let calls = std::fs::read_to_string(calls).expect("strace has written it");
    let threads = |call: &str| -> BTreeSet<String> {
        let lines = calls.lines().filter(|line| line.contains(call));
        lines.filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect()
    };
    let (readers, tracers) = (threads(&format!("\"/proc/{pid}/maps\"")), threads("PTRACE_SEIZE"));
    assert!(!readers.is_empty() && !tracers.is_empty(), "{readers:?} {tracers:?}");
    assert!(readers.is_disjoint(&tracers), "{readers:?} {tracers:?}");
}

#[test]
fn a_target_that_runs_is_counted_from_the_first_call_on() {
    let Some(_turn) = turn("inline_a_target_that_runs_is_counted_from_the_first_call_on") else { return };
    let mut target = Target::start(&program("checked"), ["4", "100"]);
    let recording = inline(target.pid(), 1).start();
    assert!(is_hooked(target.pid()), "{}", recording.said());
    target.go();
    target.step();
    let (profile, stats) = recording.stop().results();
    assert!(stats.hits > 0);
    assert_eq!((stats.unsampled, stats.lost()), (0, 0), "each call is a sample: {stats:?}");
    assert_eq!(stats.estimated_alloc_bytes, stats.exact_alloc_bytes as f64);
    assert_eq!(profile.totals.alloc_objects.value(), stats.exact_alloc_objects as f64);
}

#[test]
fn whatever_kills_leave_the_target_is_right_and_the_next_recording_exact() {
    let Some(_turn) = turn("inline_whatever_kills_leave_the_target_is_right") else { return };
    let kills = times(8);
    let mut target = Target::start(&program("checked"), ["4", "2000"]);
    let pid = target.pid();
    let mut random = 88_172_645_463_325_252_u64;
    let (mut hooked, mut cleaned) = (0, 0);
    for _ in 0..kills {
        let mut command = Command::new(heapbpf());
        command.args(["--pid", &pid.to_string(), "-i", "512", "--hook", "inline", "--no-follow"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let before = mapped(pid);
        let mut daemon = command.spawn().expect("the binary under test runs");
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let ended = |daemon: &mut Child| daemon.try_wait().is_ok_and(|ended| ended.is_some());
        // Kill it at any moment, in the middle of hooking, or while it records.
        let phase = random >> 32 & 3;
        // On a busy machine hooking may be late, or the target gets probes. Then it is killed as well.
        let patience = Instant::now() + Duration::from_secs(4);
        let is_due = || match phase {
            0 => true,
            1 => mapped(pid) != before,
            _ => mapped(pid) != before && is_hooked(pid),
        };
        while !is_due() && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_micros(random % if phase == 0 { 1_500_000 } else { 60_000 }));
        assert!(!ended(&mut daemon), "heapbpf ended by itself");
        // Half of them leave their hooks to their cleaner. For the others, the cleaner is killed, too.
        let is_alone = random >> 40 & 1 == 0;
        if is_alone {
            kill(cleaners_of(daemon.id()));
        }
        let (had_hooks, has_cleaner) = (is_hooked(pid), !is_alone && !cleaners_of(daemon.id()).is_empty());
        daemon.kill().expect("it can be killed");
        daemon.wait().expect("it can be waited for");
        until("the end of the cleaner", || cleaners_of(daemon.id()).is_empty());
        if has_cleaner {
            assert!(!is_hooked(pid), "the cleaner has taken its hooks out");
            cleaned += u32::from(had_hooks);
        }
        hooked += u32::from(is_hooked(pid));
    }
    eprintln!("{kills} killed, of which {hooked} left hooks, and {cleaned} had theirs taken out by the cleaner");
    assert!(hooked > 0 && cleaned > 0, "{hooked} and {cleaned} of {kills} were killed while the target was hooked");
    target.go();
    target.step();
    let recording = inline(pid, 1).start();
    assert!(is_hooked(pid), "{}", recording.said());
    let truth = target.run();
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    checks::sites(&profile, &truth, 1, Compare::All);
    counted_exactly(&stats, &truth);
    assert_eq!(stats.unsampled, 0, "{stats:?}");
    assert!(!is_hooked(pid), "{}", outcome.stderr);
    assert!(target.end().success(), "its blocks are as they were");
}

#[test]
fn doctor_takes_out_what_was_left_and_nothing_else() {
    let Some(_turn) = turn("inline_doctor_takes_out_what_was_left_and_nothing_else") else { return };
    let mut target = Target::start(&program("checked"), ["4", "100"]);
    let pid = target.pid();
    let recording = inline(pid, 4096).start();
    let (said, status) = clean(pid);
    assert!(said.contains("in use") && status == Some(1), "{status:?}: {said}");
    assert!(is_hooked(pid), "it is another's: {said}");
    recording.stop();
    assert!(!is_hooked(pid));

    left_hooked(pid);
    let (said, status) = clean(pid);
    assert!(said.contains(&format!("process {pid} ")) && said.contains(": removed"), "{status:?}: {said}");
    assert!(!is_hooked(pid), "{said}");
    let (said, status) = clean(pid);
    assert!(said.contains("nothing") && status == Some(0), "{status:?}: {said}");
    target.go();
    target.step();
    target.run();
    assert!(target.end().success(), "its blocks are as they were");
}

/// A running heapbpf keeps open what it mapped into its targets. A former bug: the cleaner of another, killed heapbpf
/// took that for left open, closed it, and removed the hooks at its next scan. `doctor --clean` did the same. From then
/// on calls were missing, without a message.
#[test]
fn what_another_heapbpf_uses_stays_when_one_is_killed_and_when_all_is_cleaned() {
    let Some(_turn) = turn("inline_what_another_heapbpf_uses_stays") else { return };
    let mut target = Target::start(&program("checked"), ["4", "100"]);
    let other = Target::start(&program("checked"), ["4", "100"]);
    target.go();
    target.step();
    let recording = inline(target.pid(), 1).start();
    assert!(is_hooked(target.pid()), "{}", recording.said());
    let killed: Recording = inline(other.pid(), 4096).without_outputs().start();
    assert!(is_hooked(other.pid()), "{}", killed.said());
    let cleaners = cleaners_of(killed.pid());
    assert_eq!(cleaners.len(), 1);
    drop(killed);
    until("the end of the cleaner", || {
        cleaners.iter().all(|cleaner| !std::path::Path::new(&format!("/proc/{cleaner}")).exists())
    });
    assert_eq!([target.pid(), other.pid()].map(is_hooked), [true, false]);
    let output = Command::new(heapbpf()).args(["doctor", "--clean"]).output().expect("the binary under test runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let own = format!("process {} has inline hooks that are in use by a running heapbpf", target.pid());
    assert!(said.contains(&own) && !said.contains(&format!("process {} ", recording.pid())), "{said}");
    assert!(is_hooked(target.pid()));
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    checks::sites(&profile, &truth, 1, Compare::All);
    counted_exactly(&stats, &truth);
    assert!(target.end().success() && other.end().success(), "they come to no harm");
}

/// If something else removes the hooks of a recording, as a heapbpf did that did not check locks, the recording notices
/// and reports it.
#[test]
#[cfg(target_arch = "x86_64")]
fn hooks_that_somebody_else_takes_out_are_missed() {
    use heapbpf_inline::abi::STATE;
    use heapbpf_remote::{STOP_LIMIT, Target as Process};

    let Some(_turn) = turn("inline_hooks_that_somebody_else_takes_out_are_missed") else { return };
    let mut target = Target::start(&program("checked"), ["4", "100"]);
    let mut recording = inline(target.pid(), 4096).option("--every", "250ms").start();
    assert!(is_hooked(target.pid()), "{}", recording.said());
    target.go();
    until("they are taken out", || {
        let process = Process::look(target.pid()).expect("it may be stopped");
        let found = process.found();
        assert_eq!(found.len(), 1, "{found:?}");
        process.take_out(&found[0], &(STATE..u64::MAX), STOP_LIMIT).is_ok()
    });
    assert!(!is_hooked(target.pid()));
    recording.await_line("another tool removed its inline hooks", 0);
    target.step();
    let (profile, stats) = recording.stop().results();
    assert_eq!(stats.other["inline_incomplete"], 1, "{stats:?}");
    assert!(profile.notes.iter().any(|note| note.contains("lost its hooks to another tool")), "{:?}", profile.notes);
}

/// Mappings that only look like ours, or are another version's, stay as they are. For a process that they make look
/// hooked, a recording says why it is not hooked inline, and counts nothing that does not exist.
#[test]
fn what_only_looks_like_ours_is_not_touched() {
    let Some(_turn) = turn("inline_what_only_looks_like_ours_is_not_touched") else { return };
    for (argument, mappings) in [("", 1), ("hooked", 2)] {
        let target = Target::start(&program("pretender"), [argument]);
        let pid = target.pid();
        let before = mapped(pid);
        assert_eq!(before.len(), mappings);
        let (said, status) = clean(pid);
        assert!(said.contains("not touched") && said.contains("another version"), "{status:?}: {said}");
        assert_eq!((mapped(pid), status), (before.clone(), Some(1)));
        let outcome = inline(pid, 1).start().stop();
        let is_reported = |text: &str| text.contains("not touched") && text.contains("another version");
        assert_eq!(is_reported(&outcome.stderr), mappings == 2, "{}", outcome.stderr);
        assert_eq!(outcome.results().0.notes.iter().any(|note| is_reported(note)), mappings == 2);
        let after = mapped(pid);
        assert!(before.iter().all(|line| after.contains(line)), "{after:?}");
        assert!(target.end().success());
    }
}

/// The processes whose memory a heapbpf has open, as it has for what it prepares or hooks.
fn open_memories(heapbpf: u32) -> Vec<u32> {
    let paths = open_paths(heapbpf).into_iter();
    paths.filter_map(|path| path.to_str()?.strip_prefix("/proc/")?.strip_suffix("/mem")?.parse().ok()).collect()
}

/// Processes are killed once they have the hooks' code, but no jump leads there yet. What was prepared for them is let
/// go, and is not used for a process that gets the same process id.
#[test]
fn what_was_prepared_for_a_process_that_ended_is_let_go() {
    const NAME: &str = "ends-prepared";
    const LAST_PID: &str = "/proc/sys/kernel/ns_last_pid";
    let Some(_turn) = turn("inline_what_was_prepared_for_a_process_that_ended_is_let_go") else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = copy_of(&program("mix"), dir.path(), NAME);
    let recorder = Recorder::new().option("--comm", NAME).option("--hook", "inline").interval(4096);
    let recording = recorder.without_outputs().start();
    let (mut unhooked, mut reused, mut last) = (0, 0, 0);
    for _ in 0..20 {
        if last > 0 {
            // Not possible in every container.
            let _ = std::fs::write(LAST_PID, (last - 1).to_string());
        }
        let mut command = Command::new(&file);
        let mut child = command.arg("100").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("it runs");
        let pid = child.id();
        reused += u32::from(pid == last);
        last = pid;
        let begun = Instant::now();
        while mapped(pid).is_empty() && begun.elapsed() < Duration::from_secs(1) {}
        unhooked += u32::from(!mapped(pid).is_empty() && !is_hooked(pid));
        child.kill().expect("our own child");
        child.wait().expect("our own child");
    }
    println!("{unhooked} of 20 ended before they were hooked, {reused} had the process id of the one before");
    assert!(unhooked > 0, "each was hooked as soon as it had the code");
    // The next ones are hooked and come to no harm.
    let is_one_hooked = (0..20).any(|_| {
        let target = Target::start(&file, ["100"]);
        let was_hooked = is_hooked(target.pid());
        assert!(!was_hooked || open_memories(recording.pid()).contains(&target.pid()));
        assert!(target.end().success(), "it came to harm");
        was_hooked
    });
    assert!(is_one_hooked);
    until("nothing of ended processes is open", || open_memories(recording.pid()).is_empty());
    recording.stop();
}

/// The cleaner of a killed heapbpf removes the hooks from all processes: targets, and children that they have forked.
/// Until then it waits, with only the privileges that it will need. At the normal end of a recording it ends, too.
#[test]
fn the_cleaner_takes_out_all_hooks_of_a_killed_heapbpf() {
    let Some(_turn) = turn("inline_the_cleaner_takes_out_all_hooks_of_a_killed_heapbpf") else { return };
    let before = hooked_processes();
    let mut forking = Target::start(&program("forking"), [""; 0]);
    let mut checked = Target::start(&program("checked"), ["4", "100"]);
    let recorder = || inline(forking.pid(), 4096).pid(checked.pid()).without_outputs();
    let recording = recorder().start();
    let heapbpf = recording.pid();
    let cleaners = cleaners_of(heapbpf);
    let [cleaner] = cleaners[..] else { panic!("one cleaner: {cleaners:?}") };
    let status = std::fs::read_to_string(format!("/proc/{cleaner}/status")).expect("it runs");
    let (bpf, perfmon, raw_io) = (1_u64 << 39, 1_u64 << 38, 1_u64 << 17);
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapPrm:\t")).expect("a mask");
    assert_eq!(u64::from_str_radix(capabilities, 16).expect("a mask") & (bpf | perfmon | raw_io), 0, "{status}");
    assert!(status.contains("NoNewPrivs:\t1"), "{status}");
    for sent in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
        signal(sent, [cleaner]);
    }
    for pid in [forking.pid(), checked.pid()] {
        assert!(is_hooked(pid), "{}", recording.said());
    }
    kill([heapbpf]);
    drop(recording);
    until("the end of the cleaner", || cleaners_of(heapbpf).is_empty());
    assert!([forking.pid(), checked.pid()].iter().all(|pid| !is_hooked(*pid)));
    // Children that were forked at the last moment live for another moment.
    until("all processes to be without hooks", || hooked_processes().iter().all(|pid| before.contains(pid)));
    let recording = recorder().start();
    let heapbpf = recording.pid();
    assert!(is_hooked(checked.pid()), "{}", recording.said());
    recording.stop();
    assert_eq!(cleaners_of(heapbpf), Vec::<u32>::new(), "it ends before heapbpf does");
    forking.go();
    assert_eq!(forking.line(), "all children ended well");
    checked.go();
    checked.step();
    checked.run();
    assert!(forking.end().success() && checked.end().success(), "their blocks are as they were");
}

/// A recording with probes first removes hooks that were left, because otherwise it would see nothing. If another
/// running heapbpf hooks the process, the recording says so.
#[test]
fn a_recording_by_probes_takes_out_what_was_left_or_says_why_it_sees_nothing() {
    let Some(_turn) = turn("inline_a_recording_by_probes_takes_out_what_was_left") else { return };
    let probes = |pid: u32| Recorder::of(pid, 1).option("--hook", "probe").flag("--no-follow");
    let mut target = Target::start(&program("checked"), ["4", "2000"]);
    let pid = target.pid();
    let first = inline(pid, 4096).without_outputs().start();
    assert!(is_hooked(pid), "{}", first.said());
    const REASON: &str = "another recording counts it from inside";
    let is_reported = |text: &str| text.contains(REASON);
    // The inline recording is there already, or comes later.
    let second = probes(pid).start();
    assert!(is_reported(&second.said()), "{}", second.said());
    second.signal(libc::SIGINT);
    assert_eq!(second.ends().status.code(), Some(1), "nothing was recorded");
    first.stop();
    let mut third = probes(pid).start();
    let fourth = inline(pid, 4096).without_outputs().start();
    assert!(is_hooked(pid), "{}", fourth.said());
    third.await_line(REASON, 0);
    let notes = third.stop().results().0.notes;
    assert!(notes.iter().any(|note| is_reported(note)), "{notes:?}");
    // Now the inline recording is killed.
    kill(cleaners_of(fourth.pid()));
    drop(fourth);
    assert!(is_hooked(pid), "a killed heapbpf leaves its hooks");
    target.go();
    target.step();
    let recording = probes(pid).start();
    assert!(!is_hooked(pid), "it was taken out: {}", recording.said());
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    checks::sites(&profile, &truth, 1, Compare::All);
    counted_exactly(&stats, &truth);
    assert!(target.end().success(), "its blocks are as they were");
}

/// heapbpf, its guardian and its cleaner are killed at once. None of their links stays, and the target continues
/// correctly. The next recording is exact, or `doctor --clean` removes the hooks that were left.
#[test]
fn all_of_heapbpf_may_be_killed_at_once() {
    let Some(_turn) = turn("inline_all_of_heapbpf_may_be_killed_at_once") else { return };
    for (hook, by_doctor) in [("probe", false), ("inline", false), ("inline", true)] {
        let by_probes = hook == "probe";
        let mut target = Target::start(&program("checked"), ["4", "2000"]);
        let pid = target.pid();
        let orphans = orphaned_links();
        let recorder = if by_probes { Recorder::of(pid, 512).option("--hook", hook) } else { inline(pid, 512) };
        let recording = recorder.without_outputs().start();
        assert_ne!(is_hooked(pid), by_probes, "{}", recording.said());
        assert!(!guardians_of(recording.pid()).is_empty(), "{}", recording.said());
        kill_all_of(recording.pid());
        drop(recording);
        until("their links to go", || orphaned_links().is_subset(&orphans));
        until("a target without probes", || changed_bytes_of_libc(pid) == Some(0) || !by_probes);
        assert_ne!(is_hooked(pid), by_probes, "they leave the hooks");
        // Meanwhile the target's threads pass the hooked sites, where no BPF program runs any more.
        std::thread::sleep(Duration::from_millis(300));
        if by_doctor {
            let (said, status) = clean(pid);
            assert!(said.contains(": removed") && !is_hooked(pid), "{status:?}: {said}");
        }
        target.go();
        target.step();
        let recording = inline(pid, 1).start();
        let truth = target.run();
        let outcome = recording.stop();
        let (profile, stats) = outcome.results();
        checks::sites(&profile, &truth, 1, Compare::All);
        counted_exactly(&stats, &truth);
        assert!(!is_hooked(pid), "{}", outcome.stderr);
        assert!(target.end().success(), "its blocks are as they were");
    }
}
