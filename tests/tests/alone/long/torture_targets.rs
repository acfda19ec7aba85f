//! Targets in states that are hard for a profiler, each with both ways of hooking. Each test is a row of `cargo xtask
//! torture`, which repeats it. Here it is a short round.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use heapbpf_tests::environment::{tool_or_install, turn};
use heapbpf_tests::guardian::signal;
use heapbpf_tests::inline::{Hook, is_hooked, recorder};
use heapbpf_tests::kernel::orphaned_links;
use heapbpf_tests::others::{Beside, Bpftrace};
use heapbpf_tests::output::Stats;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, cpu_time, state_of, tracer_of, until, wait};
use heapbpf_tests::torture::{
    Unharmed, accounted, hooks, lasting, name_of, no_link_is_orphaned, not_run, nothing_stays_in, readable, seen,
    times, with_each_hook,
};

fn enduring(arguments: &[&str]) -> Target {
    Target::start(&program("enduring"), arguments)
}

/// Lets the program end by itself and checks that it computed correctly. Returns the program's report of what it did.
fn ends_well(mut target: Target) -> String {
    nothing_stays_in(target.pid());
    target.go();
    let reply = target.line();
    assert!(reply.starts_with("OK"), "{reply}");
    assert!(target.end().success(), "it came to harm");
    reply
}

/// Describes how a process was hooked, and why not as requested.
fn hooked_how(stats: &Stats) -> String {
    let how = |it: &heapbpf_tests::output::HookedProcess| match &it.not_inline {
        Some(why) => format!("by {}s, as {why}", it.hook),
        None => format!("as asked ({})", it.hook),
    };
    stats.hooks.first().map_or_else(|| "not hooked".to_owned(), how)
}

/// Removes digits (the tracer's pids) from a text, so that the reports of several rounds are equal.
fn without_numbers(text: &str) -> String {
    text.chars().filter(|c| !c.is_ascii_digit()).collect()
}

#[test]
fn under_strace() {
    let fault = "target under strace";
    let Some(_turn) = turn("torture_under_strace") else { return };
    let Some(strace) = tool_or_install("strace", "strace") else { return not_run(fault, "both", "no strace") };
    let start = || enduring(&["threads", "16"]);
    with_each_hook((fault, times(1)), start, ends_well, |hook, target| {
        for _ in 0..times(1) {
            let mut command = Command::new(&strace);
            let tracer = Beside::start(command.args(["-f", "-o", "/dev/null", "-p", &target.pid().to_string()]));
            until("strace traces it", || tracer_of(target.pid()) == tracer.0.id());
            let refused = recorder(target.pid(), hook, 1).refused();
            assert!(refused.stderr.contains("its tracer sees its system calls"), "{}", refused.stderr);
            assert_eq!(tracer_of(target.pid()), tracer.0.id(), "strace still traces it");
            tracer.stop("strace");
        }
        Some("refused; strace goes on".to_owned())
    });
}

/// gdb holds the target stopped while heapbpf attaches, lets it run, and stops it again while heapbpf detaches.
#[test]
fn under_gdb() {
    let fault = "target under gdb";
    let Some(_turn) = turn("torture_under_gdb") else { return };
    let Some(gdb) = tool_or_install("gdb", "gdb") else { return not_run(fault, "both", "no gdb") };
    let start = || enduring(&["threads", "16"]);
    with_each_hook((fault, times(1)), start, ends_well, |hook, target| {
        let pid = target.pid();
        let mut how = BTreeSet::new();
        for _ in 0..times(1) {
            let dir = tempfile::tempdir().expect("a temporary directory");
            let flag = |name: &str| dir.path().join(name);
            let wait_for = |name: &str| format!("shell while [ ! -e {} ]; do sleep 0.05; done", flag(name).display());
            let raise = |name: &str| std::fs::write(flag(name), "").expect("our own directory");
            let script = format!(
                "{}\ncontinue &\n{}\ninterrupt\n{}\ndetach\n",
                wait_for("run"),
                wait_for("stop"),
                wait_for("go")
            );
            std::fs::write(flag("script"), script).expect("our own directory");
            let mut command = Command::new(&gdb);
            command.args(["-q", "-nx", "-batch", "-p", &pid.to_string(), "-x"]).arg(flag("script"));
            let mut debugger = Beside::start(&mut command);
            until("gdb holds it", || state_of(pid) == Some('t'));
            let recording = recorder(pid, hook, 1).start();
            raise("run");
            until("it runs", || state_of(pid) != Some('t'));
            std::thread::sleep(lasting(1));
            raise("stop");
            let stats = accounted(&recording.stop());
            assert!(stats.hits > 0, "{stats:?}");
            how.insert(without_numbers(&hooked_how(&stats)));
            raise("go");
            wait(&mut debugger.0, "gdb");
            until("gdb is gone", || tracer_of(pid) == 0);
        }
        Some(format!("hooked {how:?}; gdb ends as it should"))
    });
}

/// The system calls that the kernel makes for probes must pass every filter, and heapbpf must not make the target call
/// anything that a filter refuses.
#[test]
fn under_seccomp() {
    let fault = "target under seccomp";
    let Some(_turn) = turn("torture_under_seccomp") else { return };
    for hook in hooks() {
        for mode in ["strict", "kill", "trap", "errno"] {
            let before = orphaned_links();
            let mut how = BTreeSet::new();
            for _ in 0..times(1) {
                let mut target = enduring(&[mode, "30"]);
                let recording = recorder(target.pid(), hook, 1).start();
                target.go();
                assert_eq!(target.line(), "OK", "{mode}");
                let stats = accounted(&recording.stop());
                assert!(stats.hits > 6_000, "{mode}: {stats:?}");
                how.insert(without_numbers(&hooked_how(&stats)));
                nothing_stays_in(target.pid());
                assert!(target.end().success(), "{mode}: it came to harm");
            }
            no_link_is_orphaned(&before);
            let fault = format!("{fault} ({mode})");
            seen(&fault, name_of(hook), times(1), &format!("hooked {how:?}; target right"));
        }
    }
}

#[test]
fn stopped() {
    let Some(_turn) = turn("torture_stopped") else { return };
    with_each_hook(("target stopped (SIGSTOP)", times(2)), Unharmed::start, Unharmed::ends_well, |hook, target| {
        let pid = target.pid();
        let mut how = BTreeSet::new();
        for time in 0..times(2) {
            // The target is stopped when heapbpf attaches, when it detaches, or both.
            let (at_first, at_last) = [(true, true), (true, false), (false, true)][time as usize % 3];
            let stop_it = || {
                signal(libc::SIGSTOP, [pid]);
                until("it stops", || state_of(pid) == Some('T'));
            };
            if at_first {
                stop_it();
            }
            let recording = recorder(pid, hook, 4096).start();
            assert_eq!(state_of(pid) == Some('T'), at_first, "it is left as it was");
            signal(libc::SIGCONT, [pid]);
            std::thread::sleep(Duration::from_millis(300));
            if at_last {
                stop_it();
            }
            how.insert(without_numbers(&hooked_how(&accounted(&recording.stop()))));
            assert_eq!(state_of(pid) == Some('T'), at_last, "it is left as it was");
            signal(libc::SIGCONT, [pid]);
        }
        Some(format!("hooked {how:?}; stays stopped until told"))
    });
}

/// A zombie has no memory: it is refused. If a target becomes a zombie during a recording, the recording ends, or
/// heapbpf waits for the zombie to go.
#[test]
fn a_zombie() {
    let fault = "target a zombie";
    let Some(_turn) = turn("torture_a_zombie") else { return };
    for hook in hooks() {
        let before = orphaned_links();
        let mut said = BTreeSet::new();
        for _ in 0..times(1) {
            let target = Unharmed::start();
            let pid = target.pid();
            let recording = recorder(pid, hook, 4096).start();
            signal(libc::SIGKILL, [pid]);
            until("it is a zombie", || state_of(pid) == Some('Z'));
            // The zombie has not been waited for, and no code runs in it any more.
            let outcome = recording.finish();
            accounted(&outcome);
            let refused = recorder(pid, hook, 4096).refused();
            readable(&refused.stderr);
            assert!(!refused.status.success() && refused.stderr.contains(&pid.to_string()), "{}", refused.stderr);
            said.insert(without_numbers(refused.stderr.lines().next().unwrap_or_default()));
        }
        no_link_is_orphaned(&before);
        seen(fault, name_of(hook), times(1), &format!("the recording ends by itself; a new one is refused: {said:?}"));
    }
}

/// heapbpf attaches and detaches while a program execs itself again and again. It is selected by name, or by pid, when
/// it may be found before its C library is mapped.
#[test]
fn executing_in_a_loop() {
    let Some(_turn) = turn("torture_executing_in_a_loop") else { return };
    let start = || enduring(&["exec"]);
    with_each_hook(("target exec'ing in a loop", times(2)), start, ends_well, |hook, target| {
        let mut hits = [0, 0];
        for time in 0..times(2) {
            let recorder = match time % 2 {
                0 => Recorder::new().option("--comm", "enduring").interval(4096),
                _ => Recorder::of(target.pid(), 4096),
            };
            let recording = recorder.option("--hook", name_of(hook)).start();
            std::thread::sleep(Duration::from_millis(500));
            hits[time as usize % 2] += accounted(&recording.stop()).hits;
        }
        assert!(hits[0] > 0 && (hits[1] > 0 || times(2) < 2), "nothing was counted: {hits:?}");
        Some(format!("calls counted by its name and by its pid: {hits:?}"))
    });
}

/// Number of threads of the target: some hundreds, or `HEAPBPF_TORTURE_THREADS`.
fn threads() -> String {
    std::env::var("HEAPBPF_TORTURE_THREADS").unwrap_or_else(|_| "300".into())
}

#[test]
fn many_threads() {
    let Some(_turn) = turn("torture_many_threads") else { return };
    let fault = format!("target with {} threads", threads());
    let start = || enduring(&["threads", &threads()]);
    with_each_hook((fault.as_str(), times(1)), start, ends_well, |hook, target| {
        let mut how = BTreeSet::new();
        for _ in 0..times(1) {
            let recording = recorder(target.pid(), hook, 512).start();
            std::thread::sleep(lasting(1));
            let outcome = recording.stop();
            readable(&outcome.stderr);
            let stats = accounted(&outcome);
            assert!(stats.hits > 0, "{stats:?}");
            how.insert(without_numbers(&hooked_how(&stats)));
        }
        Some(format!("hooked {how:?}"))
    });
}

/// What a second recording of a target costs it: CPU time of a malloc and free pair, the minimum of some rounds. Both
/// recordings count every call.
#[test]
fn recorded_twice() {
    const PAIRS: u64 = 300_000;
    let Some(_turn) = turn("torture_recorded_twice") else { return };
    let mut least = [f64::INFINITY; 3];
    for _ in 0..times(2) {
        for (count, least) in least.iter_mut().enumerate() {
            let mut target = Target::start(&program("pairs"), [&PAIRS.to_string(), "1", "100"]);
            let start = |_| recorder(target.pid(), Hook::Probe, 512 << 10).start();
            let recordings: Vec<_> = (0..count).map(start).collect();
            let before = cpu_time(target.pid());
            let truth = target.run();
            let took = cpu_time(target.pid()).saturating_sub(before).as_nanos() as f64 / PAIRS as f64;
            *least = least.min(took);
            for recording in recordings {
                let stats = accounted(&recording.stop());
                assert_eq!(stats.exact_alloc_objects, truth.allocs(), "{stats:?}");
            }
            assert!(target.end().success(), "it came to harm");
        }
    }
    let [none, one, two] = least;
    let what = format!(
        "both exact; a pair of malloc and free took {none:.0} ns without, {one:.0} ns with one, {two:.0} ns with two recordings"
    );
    seen("two recordings of one target", "probe", times(2), &what);
}

/// Two heapbpfs (one of them with probes), bpftrace and perf attach and detach one after another.
#[test]
fn with_other_tracers() {
    let fault = "two heapbpfs, bpftrace and perf at once";
    let Some(_turn) = turn("torture_with_other_tracers") else { return };
    let bpftrace = Bpftrace::tool();
    let perf = tool_or_install("perf", "linux-perf");
    if bpftrace.is_none() || perf.is_none() {
        not_run(fault, "both", "the part with bpftrace or with perf: it is not here");
    }
    with_each_hook((fault, times(1)), Unharmed::start, Unharmed::ends_well, |hook, target| {
        let pid = target.pid();
        let (mut both, mut counts) = (0, [0_u64; 3]);
        for time in 0..times(1) {
            let dir = tempfile::tempdir().expect("a temporary directory");
            let trace = || bpftrace.as_deref().map(|tool| Bpftrace::start(tool, pid));
            let mut by_bpftrace = if time % 2 == 0 { trace() } else { None };
            let by_perf = perf.as_deref().map(|perf| {
                let mut command = Command::new(perf);
                command.args(["record", "-q", "-e", "cpu-clock", "-g", "-p", &pid.to_string(), "-o"]);
                Beside::start(command.arg(dir.path().join("perf.data")))
            });
            let first = recorder(pid, Hook::Probe, 4096).start();
            let second = recorder(pid, hook, 65536).start();
            both += u32::from(is_hooked(pid) == (hook == Hook::Inline));
            if by_bpftrace.is_none() {
                by_bpftrace = trace();
            }
            std::thread::sleep(lasting(1));
            counts[0] += accounted(&first.stop()).hits;
            counts[1] += accounted(&second.stop()).hits;
            if let Some(by_perf) = by_perf {
                by_perf.stop("perf");
                let data = dir.path().join("perf.data").metadata().map_or(0, |file| file.len());
                assert!(data > 0, "perf recorded nothing");
            }
            counts[2] += by_bpftrace.map_or(0, Bpftrace::stop);
        }
        assert!(counts[1] > 0, "{counts:?}");
        Some(format!("hooked as asked {both} times; calls counted by the first, the second and bpftrace: {counts:?}"))
    });
}
