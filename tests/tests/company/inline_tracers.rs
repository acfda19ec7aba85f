//! Other tracers of a program that is hooked inline. Whichever starts or stops first, the program's blocks and code
//! stay as they are, and each tool counts what it can see.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::doctor::clean;
use heapbpf_tests::environment::{heapbpf, skipped, tool_or_install, turn};
use heapbpf_tests::guardian::changed_bytes_of_libc;
use heapbpf_tests::inline::{Hook, is_hooked, recorder};
use heapbpf_tests::kernel::UprobeEvent;
use heapbpf_tests::others::{Beside, Bpftrace, libc_of};
use heapbpf_tests::output::{self, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::{Outcome, Recorder, Recording};
use heapbpf_tests::target::{Target, until, wait};
use heapbpf_tests::truth::Truth;

/// Another tool.
enum Tool {
    Bpftrace(PathBuf),
    /// A uprobe on the instruction that heapbpf probes in malloc.
    Uprobe(u64),
    Heapbpf(Hook),
}

/// Another tool at work.
enum Watching {
    Bpftrace(Bpftrace),
    Uprobe(UprobeEvent),
    Heapbpf(Recording),
}

/// What another tool saw.
enum Saw {
    Calls(u64),
    Recorded(Outcome),
}

impl Tool {
    fn start(&self, pid: u32, interval: u64) -> Watching {
        match self {
            Self::Bpftrace(tool) => Watching::Bpftrace(Bpftrace::start(tool, pid)),
            Self::Uprobe(offset) => {
                let event = UprobeEvent::open(Path::new(&libc_of(pid)), *offset, pid, 0);
                Watching::Uprobe(event.expect("it was possible before"))
            }
            Self::Heapbpf(hook) => Watching::Heapbpf(recorder(pid, *hook, interval).flag("-v").start()),
        }
    }
}

impl Watching {
    fn heapbpf(&mut self) -> Option<&mut Recording> {
        if let Self::Heapbpf(recording) = self { Some(recording) } else { None }
    }

    fn stop(self) -> Saw {
        match self {
            Self::Bpftrace(it) => Saw::Calls(it.stop()),
            Self::Uprobe(event) => Saw::Calls(event.hits()),
            Self::Heapbpf(recording) => Saw::Recorded(recording.stop()),
        }
    }
}

/// A step of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    OtherComes,
    OtherGoes,
    InlineComes,
    InlineGoes,
    Runs,
}

use Step::{InlineComes, InlineGoes, OtherComes, OtherGoes, Runs};

/// The other tool runs before, during and after the inline recording. Either stops first, while the program makes its
/// calls or before.
const ORDERS: [[Step; 5]; 7] = [
    [OtherComes, InlineComes, Runs, InlineGoes, OtherGoes],
    [OtherComes, InlineComes, Runs, OtherGoes, InlineGoes],
    [InlineComes, OtherComes, Runs, InlineGoes, OtherGoes],
    [InlineComes, OtherComes, Runs, OtherGoes, InlineGoes],
    [OtherComes, InlineComes, OtherGoes, Runs, InlineGoes],
    [InlineComes, OtherComes, InlineGoes, Runs, OtherGoes],
    [InlineComes, InlineGoes, OtherComes, Runs, OtherGoes],
];

/// Part of the message that reports another recording's inline hooks.
const SEES_NOTHING: &str = "another recording counts it from inside";

fn place(order: &[Step], step: Step) -> usize {
    order.iter().position(|it| *it == step).expect("each step is in each order")
}

/// Whether a tool is attached while the program makes its calls.
fn is_there(order: &[Step], comes: Step, goes: Step) -> bool {
    (place(order, comes)..place(order, goes)).contains(&place(order, Runs))
}

/// Carries out the steps. Returns the outcome of our recording, the other tool's result, and whether the program was
/// hooked inline right after our recording started.
fn go_through(order: &[Step], pid: u32, interval: u64, tool: &Tool, runs: &mut dyn FnMut()) -> (Outcome, Saw, bool) {
    let (mut ours, mut other) = (None, None);
    let (mut outcome, mut saw, mut was_hooked) = (None, None, false);
    for step in order {
        match step {
            OtherComes => other = Some(tool.start(pid, interval)),
            OtherGoes => {
                let before = Before::of(pid, ours.as_mut());
                saw = other.take().map(Watching::stop);
                before.sees_again(pid, ours.as_mut());
            }
            InlineComes => {
                ours = Some(recorder(pid, Hook::Inline, interval).flag("-v").start());
                was_hooked = is_hooked(pid);
            }
            InlineGoes => {
                let before = Before::of(pid, other.as_mut().and_then(Watching::heapbpf));
                outcome = ours.take().map(Recording::stop);
                before.sees_again(pid, other.as_mut().and_then(Watching::heapbpf));
            }
            Runs => runs(),
        }
    }
    (outcome.expect("it ended"), saw.expect("it ended"), was_hooked)
}

/// The state before one of two recordings ends.
struct Before {
    had_hooks: bool,
    /// Number of lines that the other recording has written so far. Hooking may take more than one attempt, so they may
    /// already include the awaited line.
    lines: usize,
}

impl Before {
    fn of(pid: u32, left: Option<&mut Recording>) -> Self {
        Self { had_hooks: is_hooked(pid), lines: left.map_or(0, Recording::lines_by_now) }
    }

    /// Waits until the remaining recording has noticed that the other one's inline hooks are gone. It polls for that,
    /// and knows which blocks are in use only from then on.
    fn sees_again(self, pid: u32, left: Option<&mut Recording>) {
        if let Some(left) = left.filter(|_| self.had_hooks && !is_hooked(pid)) {
            left.await_line("its calls are counted again", self.lines);
        }
    }
}

/// Checks that no tool has left anything in the program.
fn is_as_it_was(pid: u32, what: &str) {
    assert!(!is_hooked(pid), "{what}: the original pages are back");
    // Another tool may be recording the whole host for a moment.
    until("the allocator's code is its file's", || changed_bytes_of_libc(pid) == Some(0));
}

/// Checks that every call is counted.
fn counts_all(outcome: &Outcome, truth: &Truth, what: &str) {
    let (profile, stats) = outcome.results();
    checks::sites(&profile, truth, 1, Compare::All);
    assert_eq!((stats.hits, stats.lost()), (truth.allocs(), 0), "{what}: {stats:?}");
}

/// Checks that nothing is counted, and that the profile says why.
fn reports_that_it_is_blind(outcome: &Outcome, what: &str) {
    let (_, stats) = outcome.results();
    assert_eq!(stats.hits, 0, "{what}: {stats:?}");
    let profile = std::fs::read_to_string(outcome.file("profile.json")).expect("it was read");
    assert!(profile.contains(SEES_NOTHING) && outcome.stderr.contains(SEES_NOTHING), "{what}: {}", outcome.stderr);
}

/// Checks the results of both tools after a run with this order of steps.
fn judge(order: &[Step], tool: &Tool, truth: &Truth, (ours, saw, was_hooked): &(Outcome, Saw, bool)) {
    let what = format!("{order:?}");
    let ours_is_there = is_there(order, InlineComes, InlineGoes);
    let other_is_there = is_there(order, OtherComes, OtherGoes);
    let other_is_hooked =
        matches!(tool, Tool::Heapbpf(Hook::Inline)) && place(order, OtherComes) < place(order, InlineComes);
    // The tool that hooked the program first sees everything while it is attached. The others see nothing during that
    // time.
    if ours_is_there && other_is_hooked && other_is_there {
        reports_that_it_is_blind(ours, &what);
    } else if ours_is_there {
        counts_all(ours, truth, &what);
    }
    let is_blind = ours_is_there && *was_hooked && !other_is_hooked;
    match saw {
        Saw::Calls(calls) if other_is_there => {
            assert_eq!(*calls, if is_blind { 0 } else { truth.allocs() }, "{what}");
        }
        Saw::Recorded(outcome) if other_is_there && is_blind => reports_that_it_is_blind(outcome, &what),
        Saw::Recorded(outcome) if other_is_there => counts_all(outcome, truth, &what),
        Saw::Calls(_) | Saw::Recorded(_) => {}
    }
}

/// How often an order is tried until the first tool has hooked the program. On a busy machine it may not stop in time.
const ATTEMPTS: u32 = 5;

/// Runs both tools on one program, first while its threads allocate, free and check their blocks, then while it only
/// makes a known number of calls.
fn side_by_side(case: &str, tool: &Tool, orders: impl IntoIterator<Item = [Step; 5]>) {
    for order in orders {
        let is_second =
            matches!(tool, Tool::Heapbpf(Hook::Inline)) && place(&order, OtherComes) < place(&order, InlineComes);
        for attempt in 1..=ATTEMPTS {
            let mut target = Target::start(&program("checked"), ["4", "2000"]);
            let pid = target.pid();
            go_through(&order, pid, 4096, tool, &mut || std::thread::sleep(Duration::from_millis(100)));
            is_as_it_was(pid, &format!("{order:?}"));
            target.go();
            target.step();
            let mut truth = None;
            let seen = go_through(&order, pid, 1, tool, &mut || truth = Some(target.run()));
            is_as_it_was(pid, &format!("{order:?}"));
            assert!(!is_hooked(pid), "{order:?}: {}", seen.0.stderr);
            assert!(target.end().success(), "{order:?}: its blocks are as they were");
            if !seen.2 && attempt < ATTEMPTS && !is_second {
                println!("{case}: not hooked, and begun again: {}", seen.0.stderr);
                continue;
            }
            judge(&order, tool, &truth.expect("it ran"), &seen);
            println!("{case}: {order:?}, hooked: {}", seen.2);
            break;
        }
    }
}

/// The event is registered as perf and bcc do it, on the very instruction that heapbpf would probe.
#[test]
fn a_uprobe_event_counts_malloc() {
    let case = "inline_tracers_a_uprobe_event_counts_malloc";
    let Some(_turn) = turn(case) else { return };
    let target = Target::start(&program("checked"), ["1", "0"]);
    let offset = probed_in_malloc(target.pid());
    if let Err(error) = UprobeEvent::open(Path::new(&libc_of(target.pid())), offset, target.pid(), 0) {
        return skipped(case, &format!("no perf events of uprobes: {error}"));
    }
    side_by_side(case, &Tool::Uprobe(offset), [0, 5].map(|at| ORDERS[at]));
}

/// File offset of the instruction in malloc that heapbpf probes.
fn probed_in_malloc(pid: u32) -> u64 {
    let outcome = Recorder::of(pid, 4096).option("--hook", "probe").start().stop();
    let stats: Stats = output::read(&outcome.file("stats.json"));
    stats.attach.iter().find(|probe| probe.function == "malloc").expect("malloc is probed").offset
}

#[test]
fn a_second_heapbpf_hooks_inline() {
    let case = "inline_tracers_a_second_heapbpf_hooks_inline";
    let Some(_turn) = turn(case) else { return };
    side_by_side(case, &Tool::Heapbpf(Hook::Inline), [1, 4].map(|at| ORDERS[at]));
}

/// A user who asks for a process that a service records need not record it again. Nothing can be planned from what
/// another recording hides.
#[test]
fn a_service_that_hooks_the_process_is_pointed_to() {
    let case = "inline_tracers_a_service_that_hooks_the_process_is_pointed_to";
    let Some(_turn) = turn(case) else { return };
    let target = Target::start(&program("checked"), ["1", "0"]);
    let pid = target.pid();
    let (service, address) = Recorder::of(pid, 4096).option("--hook", "inline").serve();
    assert!(is_hooked(pid), "{}", service.said());
    let recording = Recorder::of(pid, 4096).start();
    recording.signal(libc::SIGINT);
    let outcome = recording.ends();
    // It says so at the start and at the end, where nothing else is shown.
    let pointer = format!("it is already being recorded: heapbpf top http://{address}");
    assert_eq!(outcome.stderr.lines().filter(|line| line.ends_with(&pointer)).count(), 2, "{}", outcome.stderr);
    assert_eq!(outcome.stderr.matches(SEES_NOTHING).count(), 1, "{}", outcome.stderr);
    assert!(outcome.status.code() == Some(1) && outcome.stdout.is_empty(), "{}", outcome.stdout);
    assert!(!outcome.file("profile.json").exists(), "no profile is written");
    let plan = Command::new(heapbpf()).args(["plan", "--pid", &pid.to_string()]).output().expect("it runs");
    let said = String::from_utf8_lossy(&plan.stderr);
    assert!(said.contains("another recording counts every target") && said.contains(&pointer), "{said}");
    assert!(plan.status.code() == Some(1) && plan.stdout.is_empty(), "{plan:?}");
    service.stop();
}

/// gdb with a breakpoint on malloc and another one after the program's calls, where it holds the program until the test
/// tells it to leave.
struct Debugger {
    gdb: Beside,
    dir: tempfile::TempDir,
}

impl Debugger {
    /// Attaches gdb and lets the program continue.
    fn attach(gdb: &Path, pid: u32) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = |name: &str| dir.path().join(name).display().to_string();
        let script = format!(
            "import gdb, os, time\n\
             class Hit(gdb.Breakpoint):\n    hits = 0\n    def stop(self):\n        Hit.hits += 1\n        return False\n\
             Hit('*(char *) __libc_malloc')\n\
             gdb.Breakpoint('report')\n\
             gdb.events.cont.connect(lambda event: open('{0}', 'w').close())\n\
             gdb.execute('continue')\n\
             open('{1}.new', 'w').write(str(Hit.hits))\n\
             os.rename('{1}.new', '{1}')\n\
             while not os.path.exists('{2}'): time.sleep(0.05)\n\
             gdb.execute('delete')\n\
             gdb.execute('detach')\n",
            path("ready"),
            path("hits"),
            path("leave"),
        );
        let file = dir.path().join("script.py");
        std::fs::write(&file, script).expect("our own directory");
        let mut command = Command::new(gdb);
        let gdb = Beside::start(command.args(["-q", "-nx", "-batch", "-p", &pid.to_string(), "-x"]).arg(file));
        until("gdb lets the program continue", || dir.path().join("ready").exists());
        Self { gdb, dir }
    }

    /// Waits until gdb holds the program. Returns how often its breakpoint on malloc was hit.
    fn hits(&self) -> u64 {
        let hits = self.dir.path().join("hits");
        until("the program has made its calls under gdb", || hits.exists());
        std::fs::read_to_string(hits).expect("gdb has written it").parse().expect("a number")
    }

    /// Makes gdb delete its breakpoints and detach.
    fn leave(mut self) {
        std::fs::write(self.dir.path().join("leave"), "").expect("our own directory");
        assert!(wait(&mut self.gdb.0, "gdb").success(), "gdb has left");
    }
}

/// Starts a program whose threads have ended, and which makes its calls next.
fn quiet(calls: u64) -> Target {
    let mut target = Target::start(&program("checked"), ["4", &calls.to_string()]);
    target.go();
    target.step();
    target
}

/// Probes count what gdb traces, next to its breakpoint. Once gdb is gone, inline hooks are possible.
#[test]
fn a_debugger_with_a_breakpoint_that_came_before_refuses_inline_hooks() {
    let case = "inline_tracers_a_debugger_came_before";
    let Some(_turn) = turn(case) else { return };
    let Some(gdb) = tool_or_install("gdb", "gdb") else { return skipped(case, "no gdb (Debian: gdb)") };
    let mut target = quiet(300);
    let pid = target.pid();
    let debugger = Debugger::attach(&gdb, pid);
    let recording = recorder(pid, Hook::Inline, 1).start();
    assert!(!is_hooked(pid), "two tracers cannot stop it: {}", recording.said());
    target.go();
    // glibc's malloc has one instruction that can be probed: a breakpoint there is not hit (allocators.md).
    println!("{case}: its breakpoint was hit {} times", debugger.hits());
    debugger.leave();
    let truth = target.truth();
    let outcome = recording.stop();
    counts_all(&outcome, &truth, "probes beside a breakpoint");
    let hooked = &outcome.results().1.hooks[0];
    let why = hooked.not_inline.as_deref().unwrap_or_default();
    assert!(hooked.hook == "probe" && why.contains("it is traced by"), "{hooked:?}");
    is_as_it_was(pid, case);
    let recording = recorder(pid, Hook::Inline, 4096).start();
    println!("{case}: hooked when gdb had gone: {}", is_hooked(pid));
    recording.stop();
    is_as_it_was(pid, case);
    assert!(target.end().success());
}

/// gdb attaches while the program is hooked, and is still attached when the recording ends: the hooks stay, which is
/// reported, and can be removed once gdb is gone.
#[test]
fn hooks_stay_in_a_program_as_long_as_a_debugger_is_there() {
    let case = "inline_tracers_a_debugger_stays";
    let Some(_turn) = turn(case) else { return };
    let Some(gdb) = tool_or_install("gdb", "gdb") else { return skipped(case, "no gdb (Debian: gdb)") };
    let (mut target, recording) = heapbpf_tests::inline::begin(&|| quiet(300), Hook::Inline, "libc", 1, &[]);
    let pid = target.pid();
    let debugger = Debugger::attach(&gdb, pid);
    target.go();
    assert_eq!(debugger.hits(), 300, "its breakpoint in a replaced page is hit");
    let outcome = recording.stop();
    assert!(is_hooked(pid), "nobody can stop it meanwhile");
    assert!(outcome.stderr.contains("keeps its inline hooks"), "it is told: {}", outcome.stderr);
    debugger.leave();
    let truth = target.truth();
    counts_all(&outcome, &truth, "inline hooks beside a breakpoint");
    let (said, status) = clean(pid);
    assert_eq!(status, Some(0), "{said}");
    is_as_it_was(pid, case);
    assert!(!is_hooked(pid));
    assert!(target.end().success());
}

/// Tests of the long set.
mod long {
    use super::*;

    #[test]
    fn bpftrace_counts_malloc() {
        let case = "inline_tracers_bpftrace_counts_malloc";
        let Some(_turn) = turn(case) else { return };
        let Some(tool) = Bpftrace::tool() else { return skipped(case, "no bpftrace (Debian: bpftrace)") };
        side_by_side(case, &Tool::Bpftrace(tool), ORDERS);
    }

    #[test]
    fn a_uprobe_event_and_a_second_heapbpf_in_every_order() {
        let case = "inline_tracers_in_every_order";
        let Some(_turn) = turn(case) else { return };
        let target = Target::start(&program("checked"), ["1", "0"]);
        let offset = probed_in_malloc(target.pid());
        if UprobeEvent::open(Path::new(&libc_of(target.pid())), offset, target.pid(), 0).is_ok() {
            side_by_side(case, &Tool::Uprobe(offset), ORDERS);
        }
        for hook in [Hook::Inline, Hook::Probe] {
            side_by_side(case, &Tool::Heapbpf(hook), ORDERS);
        }
    }
}
