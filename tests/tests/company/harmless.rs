//! What a recording must never do to a target: end it, or change what it computes. Each program detects damage itself.

use std::process::{Command, Stdio};

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::doctor::doctor_of;
use heapbpf_tests::environment::{libc_file, skipped, tool_or_install, turn};
use heapbpf_tests::guardian::changed_bytes_of_libc;
use heapbpf_tests::kernel::holders_of_links_to;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, until, wait};
use heapbpf_tests::truth::Truth;
use serde_json::Value;

/// Whether this is x86-64. If not, reports that `case` is skipped.
fn is_x86_64(case: &str) -> bool {
    let is = std::env::consts::ARCH == "x86_64";
    if !is {
        skipped(case, "its program is in x86-64 assembly");
    }
    is
}

/// The kernel may turn a probed five-byte no-op into a call, which writes below the stack pointer, where a function may
/// keep data.
#[test]
fn data_below_the_stack_pointer_stay_as_they_are() {
    let case = "data_below_the_stack_pointer_stay_as_they_are";
    let Some(_turn) = turn(case) else { return };
    if !is_x86_64(case) {
        return;
    }
    let red_zone = program("redzone");
    let allocator = format!("{}:zone_take(size=arg0)->ret,free=zone_give(arg0)", red_zone.display());
    for (link, interval) in [("session", 1), ("session", 1000), ("multi", 1), ("perf", 1)] {
        let mut target = Target::start(&red_zone, ["2000"]);
        let recorder = Recorder::of(target.pid(), interval).option("--alloc", &allocator).option("--link", link);
        let (profile, stats, truth) = recorder.option("--hook", "probe").results_of(&mut target);
        checks::sites(&profile, &truth, interval, Compare::All);
        for probe in stats.attach.iter().filter(|probe| probe.function.starts_with("zone_")) {
            assert_ne!(probe.kind, "optimized", "{link}: {probe:?}");
        }
    }
}

/// Linux 6.18 turns a probed five-byte no-op, and later kernels one of ten bytes, into a call into a page that children
/// forked later do not have. So heapbpf probes no such no-op.
#[test]
fn children_live_though_their_allocator_begins_with_no_ops() {
    let case = "children_live_though_their_allocator_begins_with_no_ops";
    let Some(_turn) = turn(case) else { return };
    if !is_x86_64(case) {
        return;
    }
    let forking = program("forking_no_ops");
    for kind in ["plain", "long"] {
        let allocator = format!("{}:{kind}_take(size=arg0)->ret,free={kind}_give(arg0)", forking.display());
        let mut target = Target::start(&forking, [kind]);
        let recording = Recorder::of(target.pid(), 1).option("--alloc", &allocator).flag("--no-follow").start();
        target.go();
        assert_eq!(target.line(), "20 of 20 children ended well", "{kind}");
        let (_, stats) = recording.stop().results();
        let probes: Vec<_> = stats.attach.iter().filter(|probe| probe.function.starts_with(kind)).collect();
        assert_eq!(probes.len(), 2, "{stats:?}");
        assert!(probes.iter().all(|probe| probe.kind != "optimized"), "{probes:?}");
        assert!(stats.hits >= 200, "{stats:?}");
        assert!(target.end().success());
    }
}

/// Fibers yield between an allocator's entry and its return. The kernel uses the stack pointer to decide which calls
/// have returned, so a return probe there would end the program: the return sites are probed instead. Where they cannot
/// be read, session links allow a return probe, for one call at a time. Without them, such a function is not hooked.
#[test]
fn stacks_may_be_switched_inside_an_allocator() {
    let ways = [
        ("inside", "session", "context"),
        ("wander", "perf", "hand"),
        ("jumps", "session", "context"),
        ("jumps", "perf", "hand"),
    ];
    switched_inside("stacks_may_be_switched_inside_an_allocator", ways);
}

/// A signal handler switches fibers, so any function may be left for another stack. An allocator of the program's own,
/// which is probed, must not have its return address replaced: that ended the program by SIGILL within seconds. All its
/// calls are counted, by default and with probes.
#[test]
fn a_signal_handler_may_switch_stacks_inside_a_programs_own_allocator() {
    let case = "a_signal_handler_may_switch_stacks_inside_a_programs_own_allocator";
    let Some(_turn) = turn(case) else { return };
    if !is_x86_64(case) {
        return;
    }
    let alarmed = program("alarmed");
    let allocator = format!("{}:take_block(size=arg0)->ret,free=give_block(arg0)", alarmed.display());
    for hook in ["auto", "probe"] {
        let mut target = Target::start(&alarmed, ["20000"]);
        let recorder = Recorder::of(target.pid(), 4096).option("--alloc", &allocator).option("--hook", hook);
        let (_, stats, truth) = recorder.results_of(&mut target);
        checks::identity(&stats);
        assert_eq!(stats.hits, truth.allocs(), "{hook}: {stats:?}");
        assert!(target.end().success(), "{hook}: nothing was done to it");
    }
}

/// Runs the test in these ways: what the fibers do, the kind of links, and the kind of switches.
fn switched_inside<'a>(case: &str, ways: impl IntoIterator<Item = (&'a str, &'a str, &'a str)>) {
    let Some(_turn) = turn(case) else { return };
    if !is_x86_64(case) {
        return;
    }
    let switching = program("switching");
    for (mode, link, kind) in ways {
        let function = if mode == "jumps" { "fiber_jump" } else { "fiber_take" };
        let allocator = format!("{}:{function}(size=arg0)->ret,free=fiber_give(arg0)", switching.display());
        let mut target = Target::start(&switching, [mode, kind, "6000"]);
        let recorder = Recorder::of(target.pid(), 4096).option("--alloc", &allocator).option("--link", link);
        let (profile, stats, truth) = recorder.option("--hook", "probe").results_of(&mut target);
        let what = format!("{mode}, {kind}, {link}: {stats:?}");
        if mode == "jumps" && link != "session" {
            let is_reported = |note: &&String| note.contains(function) && note.contains("it needs Linux 6.13");
            assert_eq!(profile.notes.iter().filter(is_reported).count(), 1, "{:?} {what}", profile.notes);
            continue;
        }
        checks::identity(&stats);
        assert_eq!(stats.hits, truth.allocs(), "{what}");
        // With many calls in flight at once, a sampled one may be lost, which is counted.
        assert!(stats.submitted > 10 * stats.lost(), "{what}");
    }
}

/// Fibers yield between their calls, so a return probe on every call of malloc sees them on one stack after another.
#[test]
fn stacks_may_be_switched_between_calls() {
    let case = "stacks_may_be_switched_between_calls";
    let Some(_turn) = turn(case) else { return };
    if !is_x86_64(case) {
        return;
    }
    for (link, kind) in [("session", "hand"), ("multi", "context"), ("multi", "hand"), ("perf", "hand")] {
        let mut target = Target::start(&program("switching"), ["around", kind, "50000"]);
        let (profile, stats, truth) =
            Recorder::of(target.pid(), 4096).option("--hook", "probe").option("--link", link).results_of(&mut target);
        checks::sites(&profile, &truth, 4096, Compare::All);
        assert_eq!((stats.exact_alloc_objects, stats.lost()), (truth.allocs(), 0), "{link}, {kind}: {stats:?}");
    }
}

/// A debugger's breakpoint that is already set remains a breakpoint: heapbpf probes another instruction, if the
/// function has one.
#[test]
fn a_debuggers_breakpoint_is_hit_while_we_are_attached() {
    let case = "a_debuggers_breakpoint_is_hit_while_we_are_attached";
    let Some(_turn) = turn(case) else { return };
    if !is_x86_64(case) {
        return;
    }
    let Some(gdb) = tool_or_install("gdb", "gdb") else { return skipped(case, "no gdb (Debian: gdb)") };
    let Some(libc) = libc_file() else { return skipped(case, "no libc.so.6") };
    // Use a private copy of the file: if any process has a probe at this place of the file, the kernel takes a
    // breakpoint there for a probe. Another recording on this host may have one.
    let dir = tempfile::tempdir().expect("a temporary directory");
    let own_libc = dir.path().join("libc.so.6");
    std::fs::copy(libc, &own_libc).expect("our own directory");
    let mut command = Command::new(program("mix"));
    let mut target = Target::start_command(command.arg("50").env("LD_LIBRARY_PATH", dir.path()));
    // Find the instruction that would be probed.
    let (_, found) = doctor_of(target.pid());
    let attach = found["attach"].as_array().expect("a list");
    let reason_of = |entry: &Value| entry["reason"].as_str().expect("a text").to_owned();
    let probe = attach.iter().find(|entry| entry["function"] == "free").expect("it is hooked");
    let before = reason_of(probe);
    let place = before.split_whitespace().next().expect("an offset");
    let (ready, hits) = (dir.path().join("ready"), dir.path().join("hits"));
    let script = format!(
        "import gdb\n\
         gdb.execute('set breakpoint always-inserted on')\n\
         class Hit(gdb.Breakpoint):\n    hits = 0\n    def stop(self):\n        Hit.hits += 1\n        return False\n\
         Hit('*((char *) __libc_free {place})')\n\
         gdb.events.cont.connect(lambda event: open('{}', 'w').close())\n\
         gdb.execute('continue')\n\
         open('{}', 'w').write(str(Hit.hits))\n",
        ready.display(),
        hits.display(),
    );
    let python = dir.path().join("script.py");
    std::fs::write(&python, script).expect("our own directory");
    let mut debugger = Command::new(gdb)
        .args(["-q", "-nx", "-batch", "-p", &target.pid().to_string(), "-x"])
        .arg(&python)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("gdb starts");
    until("gdb lets the program continue", || ready.exists());
    // gdb inserts its breakpoints only after it has said so.
    until("the breakpoint is there", || changed_bytes_of_libc(target.pid()) > Some(0));
    let (profile, stats, truth) = Recorder::of(target.pid(), 1).results_of(&mut target);
    // A recording of the whole host, or by name, would have links here as well.
    let others = holders_of_links_to(&own_libc);
    target.end();
    wait(&mut debugger, "gdb");
    checks::sites(&profile, &truth, 1, Compare::All);
    let free = stats.attach.iter().find(|probe| probe.function == "free").expect("it is hooked");
    assert_ne!(free.reason, before);
    let hits: u64 = std::fs::read_to_string(hits).expect("gdb has written it").parse().expect("a number");
    if hits == 0 && !others.is_empty() {
        return skipped(
            case,
            &format!("processes {others:?} record the whole host, with a probe where the breakpoint is"),
        );
    }
    assert!(hits > 0, "the breakpoint was not hit");
}

/// Tests of the long set.
mod long {
    use super::*;

    #[test]
    fn stacks_may_be_switched_inside_an_allocator_in_every_way() {
        let links = [("session", "hand"), ("session", "context"), ("multi", "context"), ("perf", "hand")];
        let ways = ["inside", "wander", "jumps"].map(|mode| links.map(|(link, kind)| (mode, link, kind)));
        switched_inside("stacks_may_be_switched_inside_an_allocator_in_every_way", ways.concat());
    }

    /// The same with processes that have their own links, from one recording or two. The kernel runs a session of one
    /// process in the calls of the others too, up to replacing their return addresses, in many calls at a time.
    #[test]
    fn stacks_may_be_switched_inside_an_allocator_beside_another_process() {
        let case = "stacks_may_be_switched_inside_an_allocator_beside_another_process";
        let Some(_turn) = turn(case) else { return };
        if !is_x86_64(case) {
            return;
        }
        let switching = program("switching");
        for (mode, function) in [("inside", "fiber_take"), ("jumps", "fiber_jump")] {
            let allocator = format!("{}:{function}(size=arg0)->ret,free=fiber_give(arg0)", switching.display());
            for recordings in [1, 2] {
                let start = || Target::start(&switching, [mode, "hand", "6000"]);
                let mut targets = [start(), start()];
                let [first, second] = targets.each_ref().map(Target::pid);
                let of = |pid: u32| {
                    let recorder = Recorder::of(pid, 4096).option("--alloc", &allocator).option("--link", "session");
                    recorder.option("--hook", "probe").flag("--no-follow")
                };
                let recordings: Vec<_> = match recordings {
                    1 => vec![of(first).pid(second).start()],
                    _ => vec![of(first).start(), of(second).start()],
                };
                let truths = targets.each_mut().map(Target::run);
                let outcomes = recordings.into_iter().map(|recording| recording.stop().results());
                let stats: Vec<_> = outcomes.map(|(_, stats)| stats).collect();
                stats.iter().for_each(checks::identity);
                let counted: u64 = stats.iter().map(|stats| stats.hits).sum();
                assert_eq!(counted, truths.iter().map(Truth::allocs).sum::<u64>(), "{mode}: {stats:?}");
                assert!(targets.into_iter().all(|target| target.end().success()));
            }
        }
    }
}
