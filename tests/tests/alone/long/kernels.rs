//! What works on this kernel: small tests, which `cargo xtask vm` runs on other kernels in an emulator. Each prints a
//! line about its feature (`kernel: feature: value`), which goes into the tables of docs/kernels.md.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::OnceLock;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{Turn, skipped, turn};
use heapbpf_tests::inline::{self, Hook};
use heapbpf_tests::kernel;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::{Recorder, Recording};
use heapbpf_tests::target::{Target, until};
use heapbpf_tests::torture::{Doomed, was_killed};
use serde_json::Value;

/// All figures equal the program's own report.
const EXACT: &str = "exact";
/// The kernel does not support it.
const NO: &str = "no";
/// The programs that the tests run.
const PROGRAMS: [&str; 5] = ["mix", "threads", "pairs", "family", "preempted"];

fn report(feature: &str, value: &str) {
    println!("\nkernel: {feature}: {value}");
}

/// doctor's report about the kernel. doctor runs only once, because it loads every program, which takes long in an
/// emulator.
fn doctor() -> &'static Value {
    static FOUND: OnceLock<Value> = OnceLock::new();
    FOUND.get_or_init(|| heapbpf_tests::doctor::doctor(&[]).1)
}

/// Whether one of doctor's checks says that a feature works.
fn works(found: &Value, name: &str) -> bool {
    let checks = found["kernel"]["checks"].as_array().expect("a list");
    checks.iter().any(|check| check["name"] == name && check["ok"] == true)
}

/// Waits for a turn, if this kernel supports recording.
fn usable(case: &str) -> Option<(Turn, &'static Value)> {
    let turn = turn(case)?;
    let found = doctor();
    found["kernel"]["link"].is_string().then_some((turn, found))
}

/// Builds the programs and prints their paths, for `cargo xtask vm`.
#[test]
fn the_programs_are_built() {
    for name in PROGRAMS {
        println!("\nprogram: {}", program(name).display());
    }
}

/// If the kernel does not support recording, one sentence says what it lacks.
#[test]
fn a_kernel_that_is_too_old_is_named() {
    let Some(_turn) = turn("a_kernel_that_is_too_old_is_named") else { return };
    let found = doctor();
    if let Some(link) = found["kernel"]["link"].as_str() {
        return report("links of a recording", link);
    }
    let mut target = Target::start(&program("mix"), ["100"]);
    let refused = Recorder::of(target.pid(), 1).refused();
    target.run();
    let said: Vec<&str> = refused.stderr.lines().collect();
    assert_ne!(refused.status.code(), Some(0));
    assert_eq!(said.len(), 1, "{}", refused.stderr);
    assert!(said[0].contains("is too old") && said[0].contains("Linux 5.17"), "{}", said[0]);
    report("links of a recording", NO);
}

/// Records a program from READY to its report.
fn exact_with(name: &str, arguments: &[&str], options: &[[&str; 2]]) {
    let mut target = Target::start(&program(name), arguments);
    let recorder = Recorder::of(target.pid(), 1);
    let (profile, stats, truth) =
        options.iter().fold(recorder, |it, [name, value]| it.option(name, value)).results_of(&mut target);
    checks::sites(&profile, &truth, 1, Compare::All);
    assert_eq!((stats.submitted, stats.lost()), (truth.allocs(), 0), "{stats:?}");
    assert_eq!(stats.exact_alloc_bytes, truth.bytes(), "{stats:?}");
}

#[test]
fn one_process_with_every_kind_of_link() {
    let Some((_turn, found)) = usable("one_process_with_every_kind_of_link") else { return };
    for (link, check) in [("session", "session links"), ("multi", "multi links"), ("perf", "perf links")] {
        if works(found, check) {
            exact_with("mix", &["400"], &[["--hook", "probe"], ["--link", link]]);
        }
        report(&format!("`--pid`, {link} links"), if works(found, check) { EXACT } else { NO });
    }
    assert!(works(found, "perf links"), "every kernel has these: {found}");
    report("links to one process see all threads", if works(found, "links to one process") { "yes" } else { NO });
}

#[test]
fn threads() {
    let Some(_usable) = usable("threads") else { return };
    exact_with("threads", &["128"], &[]);
    report("threads", EXACT);
}

/// Since Linux 7.0 the BPF programs at a thread's end may be preempted by another thread that ends, for which the
/// kernel then skips them.
#[test]
fn threads_that_end_while_others_do() {
    let Some(_usable) = usable("threads_that_end_while_others_do") else { return };
    for hook in [Hook::Probe, Hook::Inline].repeat(4) {
        // With twice as many threads, a slow emulated machine took 19 to 27 ms to stop for inline hooks, which is too
        // long.
        let start = || Target::start(&program("preempted"), ["20"]);
        let (mut target, recording) = inline::begin(&start, hook, "", 1, &[]);
        let truth = target.run();
        let skipped = kernel::runs_skipped(recording.pid());
        let (profile, stats) = recording.stop().results();
        println!("{hook:?}: the kernel skipped {skipped:?}");
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!((stats.submitted, stats.lost()), (truth.allocs(), 0), "{hook:?}: {stats:?}");
        assert_eq!(stats.exact_alloc_bytes, truth.bytes(), "{hook:?}: {stats:?}");
    }
    report("threads that end while others do", EXACT);
}

/// As above, with the system calls of `--mmap`. There are only two BPF programs at the entry and the exit of a call,
/// and threads of many priorities can hold up both at once. What is missing then is reported.
#[test]
fn mappings_that_threads_make_while_others_do() {
    let Some(_usable) = usable("mappings_that_threads_make_while_others_do") else { return };
    for _ in 0..8 {
        let mut target = Target::start(&program("preempted"), ["100", "maps"]);
        let recording = Recorder::of(target.pid(), 1).flag("--mmap").option("--hook", "probe").start();
        let truth = target.run();
        println!("the kernel skipped {:?}", kernel::runs_skipped(recording.pid()));
        let (profile, stats) = recording.stop().results();
        let (missing, reported) = (truth.allocs() - stats.submitted, stats.other["mapping_calls_skipped"]);
        assert!(missing <= reported, "{missing} calls are missing: {stats:?}");
        let is_said = profile.notes.iter().any(|note| note.contains("system calls of the host were not seen"));
        assert_eq!(is_said, reported > 0, "{:?}", profile.notes);
        if (reported, stats.other["system_calls_lost"]) == (0, 0) {
            checks::sites(&profile, &truth, 1, Compare::All);
        }
        println!("{missing} of {} calls are missing, {reported} are reported", truth.allocs());
    }
    report("mappings that threads make while others do", "exact, or reported");
}

/// Follows family.c into its second process.
fn family(mode: &str) {
    let mut target = Target::start(&program("family"), [mode]);
    // Children that are counted inside need no more links.
    let mut recording = Recorder::of(target.pid(), 1).option("--hook", "probe").start();
    target.go();
    if mode == "fork" {
        target.step();
        recording.await_more_links();
    }
    let truth = target.run();
    let (profile, _) = recording.stop().results();
    if mode == "fork" {
        for pid in truth.sites.iter().map(|site| site.pid) {
            checks::sites_of(&profile, pid, &truth, 1, Compare::All);
        }
    } else {
        checks::sites(&profile, &truth, 1, Compare::Allocated);
    }
}

#[test]
fn forks() {
    let Some(_usable) = usable("forks") else { return };
    family("fork");
    report("fork", EXACT);
}

#[test]
fn execs() {
    let Some(_usable) = usable("execs") else { return };
    family("exec");
    report("exec", EXACT);
}

/// A recording of the whole host has the target's calls, among others.
#[test]
fn the_whole_host() {
    let Some(_usable) = usable("the_whole_host") else { return };
    let mut target = Target::start(&program("mix"), ["400"]);
    // By default a process is counted only once it is active.
    let (profile, _, truth) =
        Recorder::new().interval(1).flag("--all").option("--hook", "probe").results_of(&mut target);
    checks::sites_of(&profile, target.pid(), &truth, 1, Compare::All);
    report("`--all`", EXACT);
}

/// A command that heapbpf starts is recorded from its first call.
#[test]
fn a_command() {
    let Some(_usable) = usable("a_command") else { return };
    let recording = Recorder::new().interval(1).command(&program("mix"), ["400"]).start();
    assert!(recording.line().starts_with("READY "));
    let answer = recording.line();
    let truth = serde_json::from_str(&answer).unwrap_or_else(|error| panic!("not a report: {error}: {answer}"));
    let (profile, _) = recording.finish().results();
    checks::sites(&profile, &truth, 1, Compare::Allocated);
    report("`-- COMMAND`", EXACT);
}

#[test]
fn inline_hooks() {
    let Some(_usable) = usable("inline_hooks") else { return };
    for (name, arguments) in [("mix", "400"), ("threads", "128")] {
        let (profile, stats, truth) = inline::record(&program(name), &[arguments], Hook::Inline, 1, &[]);
        checks::sites(&profile, &truth, 1, Compare::All);
        inline::counted_exactly(&stats, &truth);
    }
    report("`--hook inline`", EXACT);
}

/// `--mmap` needs BPF programs at system calls.
#[test]
fn mappings() {
    let Some((_turn, found)) = usable("mappings") else { return };
    assert!(works(found, "system calls"), "{found}");
    let mut target = Target::start(&program("mix"), ["400"]);
    let (profile, _, truth) =
        Recorder::of(target.pid(), 1).flag("--mmap").option("--hook", "probe").results_of(&mut target);
    checks::sites(&profile, &truth, 1, Compare::All);
    report("`--mmap`", EXACT);
}

/// A ring of one page while the daemon is stopped: each lost record is counted.
#[test]
fn losses() {
    let Some(_usable) = usable("losses") else { return };
    let mut target = Target::start(&program("pairs"), ["2000", "2", "100"]);
    let recording = Recorder::of(target.pid(), 1).option("--ring-bytes", "4096").start();
    recording.signal(libc::SIGSTOP);
    let truth = target.run();
    recording.signal(libc::SIGCONT);
    let (profile, stats) = recording.stop().results();
    assert!(stats.lost() > 1000, "a page cannot hold them: {stats:?}");
    assert_eq!((stats.hits, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()), "{stats:?}");
    assert_eq!(profile.totals.inuse_objects.as_ref().map(|figure| figure.value()), Some(0.0));
    report("losses", "counted");
}

/// The kernel kills heapbpf, its guardian and its cleaner at the same moment: by running out of memory, if the mount
/// has a controller for it. The target's calls still work, and the next recording has all of them.
#[test]
fn killed_with_all_its_helpers() {
    let Some(_usable) = usable("killed_with_all_its_helpers") else { return };
    for hook in [Hook::Probe, Hook::Inline] {
        let Some(group) = Doomed::new(&format!("heapbpf-killed-{}", std::process::id())) else {
            return skipped("killed_with_all_its_helpers", "no cgroup2 whose processes can be killed at once");
        };
        let mut target = Target::start(&program("threads"), ["128"]);
        let words = group.words();
        let killed = inline::recorder(target.pid(), hook, 1).through(&words.each_ref().map(OsStr::new)).start();
        assert!(group.processes().len() >= 2, "heapbpf has helpers");
        assert_eq!(inline::is_hooked(target.pid()), hook == Hook::Inline);
        let how = group.kill_all();
        assert!(was_killed(killed), "it was not killed");
        until("an empty group", || group.processes().is_empty());
        group.recover();
        let (profile, _, truth) = inline::recorder(target.pid(), hook, 1).results_of(&mut target);
        checks::sites(&profile, &truth, 1, Compare::All);
        println!("{hook:?}: killed by {how}");
    }
    report("killed with all its helpers, the next one is", EXACT);
}

/// Number of instructions that the verifier followed for each BPF program of a recording. The limit is a million.
#[test]
fn the_verifier_is_far_from_its_limit() {
    let Some((_turn, found)) = usable("the_verifier_is_far_from_its_limit") else { return };
    let mut most = BTreeMap::new();
    let mut note = |recording: Recording, prefix: &str| {
        for (name, count) in kernel::verified_instructions(recording.pid()) {
            let known = most.entry(format!("{prefix}{name}")).or_insert(0);
            *known = count.max(*known);
        }
        recording.stop();
    };
    let target = Target::start(&program("mix"), ["100"]);
    for link in ["session", "multi", "perf"] {
        if works(found, &format!("{link} links")) {
            let recorder = Recorder::of(target.pid(), 1).option("--link", link).option("--stack-bytes", "1MiB");
            note(recorder.flag("--mmap").option("--hook", "probe").start(), &format!("{link}: "));
        }
    }
    note(inline::recorder(target.pid(), Hook::Inline, 1).start(), "inline: ");
    for (name, count) in &most {
        println!("\nverified: {name}: {count}");
        assert!(*count < 900_000, "{name}: {count}");
    }
}

/// How x86-64 code accesses a per-CPU private stack: `add r9, gs:[…]` (`emit_priv_frame_ptr` in the kernel).
const PRIVATE_STACK: [u8; 5] = [0x65, 0x4c, 0x03, 0x0c, 0x25];

/// Since Linux 6.13 the kernel gives BPF programs at probes a private stack per CPU, although a program at a uprobe may
/// be preempted by another thread that runs the same program. Then both write to the same stack, and the kernel follows
/// invalid pointers. (At tracepoints, a preempted program does not run a second time on the same CPU.)
#[test]
fn no_program_shares_its_stack() {
    let Some((_turn, found)) = usable("no_program_shares_its_stack") else { return };
    let target = Target::start(&program("mix"), ["100"]);
    let kinds = ["session", "multi", "perf"].into_iter().filter(|kind| works(found, &format!("{kind} links")));
    let probed = || Recorder::of(target.pid(), 1).option("--hook", "probe").flag("--mmap");
    let probes = kinds.map(|kind| probed().option("--link", kind));
    // Programs that select targets by a rule need more stack.
    let by_rule = Recorder::new().interval(1 << 20).option("--comm", "mix").option("--hook", "inline");
    for recorder in probes.chain([inline::recorder(target.pid(), Hook::Inline, 1), by_rule]) {
        let recording = recorder.start();
        let programs = kernel::machine_code_at_probes(recording.pid());
        recording.stop();
        assert!(!programs.is_empty());
        for (name, code) in programs {
            assert!(!code.is_empty(), "{name}: the kernel shows no code of programs to a process without CAP_SYSLOG");
            assert!(!code.windows(PRIVATE_STACK.len()).any(|at| at == PRIVATE_STACK), "{name} has a stack of its own");
        }
    }
    report("a stack that no other thread uses", "yes");
}
