//! Inline hooks come and go, with other tools' probes before, meanwhile and after, and nobody comes to harm. Each program
//! notices itself.

use std::process::{Command, Stdio};
use std::time::Duration;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{skipped, tool_or_install, turn};
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::{library, program};
use heapbpf_tests::recorder::{Recorder, Recording};
use heapbpf_tests::target::{Target, until, wait};

fn maps(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("the target runs")
}

fn is_hooked(pid: u32) -> bool {
    maps(pid).contains("/memfd:heapbpf-inline")
}

fn inline(pid: u32, interval: u64) -> Recorder {
    Recorder::of(pid, interval).option("--hook", "inline").flag("--no-follow")
}

/// Rounds of hooking and letting go: a few, or `HEAPBPF_TEST_CYCLES`.
fn cycles() -> u32 {
    std::env::var("HEAPBPF_TEST_CYCLES").ok().and_then(|cycles| cycles.parse().ok()).unwrap_or(6)
}

/// Eight threads that check all their blocks, under a signal each millisecond, with forks, exceptions and dlopen.
#[test]
fn a_program_that_checks_itself_is_hooked_again_and_again() {
    let Some(_turn) = turn("a_program_that_checks_itself_is_hooked_again_and_again") else { return };
    let plugin = library("plugin", "plugin30.so", &["-DPLUGIN=30"]);
    let mut target = Target::start(&program("unharmed"), [&plugin]);
    let pid = target.pid();
    let (mut hooked, mut left) = (0, 0);
    let mut cycle = |number: u32| {
        let interval = [1 << 20, 4096, 65536][number as usize % 3];
        let recording = inline(pid, interval).start();
        let was_hooked = is_hooked(pid);
        let (_, stats) = recording.stop().results();
        assert!(was_hooked || stats.hooks[0].not_inline.is_some(), "cycle {number}: {stats:?}");
        assert!(stats.hits > 0, "cycle {number}: {stats:?}");
        hooked += u32::from(was_hooked);
        left += u32::from(is_hooked(pid));
    };
    (0..cycles()).for_each(&mut cycle);
    // Something may stay for a while, without a jump that leads there, if a thread may come back to it. The next one takes it.
    for number in 0..10 {
        if is_hooked(pid) {
            cycle(number);
        }
    }
    assert!(!is_hooked(pid), "everything is taken out");
    target.go();
    println!("{hooked} of {} cycles hooked inline, {left} left something; {}", cycles(), target.line());
    assert!(hooked > 0);
    assert!(target.end().success());
}

/// A thread that makes calls for us in the middle of a restartable sequence begins it anew, as after any other interruption.
#[test]
fn restartable_sequences_are_restarted() {
    let case = "restartable_sequences_are_restarted";
    let Some(_turn) = turn(case) else { return };
    let mut target = Target::start(&program("restartable"), [""; 0]);
    let mut hooked = 0;
    for _ in 0..cycles() {
        let recording = inline(target.pid(), 65536).start();
        hooked += u32::from(is_hooked(target.pid()));
        recording.stop();
    }
    target.go();
    let line = target.line();
    assert!(target.end().success());
    if line == "no restartable sequences" {
        return skipped(case, "the C library registers no area for them");
    }
    println!("{hooked} of {} cycles hooked inline: {line}", cycles());
    assert!(hooked > 0);
    assert!(line.starts_with("0 lost of "), "{line}");
}

/// Children that are forked after sampled calls have everything that these need. The kernel optimizes some probes in a way that
/// children lack.
#[test]
fn children_of_a_hooked_process_allocate() {
    let Some(_turn) = turn("children_of_a_hooked_process_allocate") else { return };
    let mut target = Target::start(&program("sampled_forks"), [""; 0]);
    let recording = inline(target.pid(), 1).start();
    let was_hooked = is_hooked(target.pid());
    target.go();
    assert_eq!(target.line(), "20 of 20 children ended well", "hooked inline: {was_hooked}");
    let (_, stats) = recording.stop().results();
    assert_eq!(stats.hits, 500, "{stats:?}");
    assert!(target.end().success());
}

/// What comes and goes, in which order.
#[derive(Clone, Copy, Debug)]
enum Step {
    ProbesCome,
    ProbesGo,
    InlineComes,
    InlineGoes,
    Runs,
}

/// A second heapbpf, with probes, that comes before, meanwhile and after, and goes before and after. The one with inline hooks
/// sees every call if it is there while the program runs; the other one sees what happens while the first is not there.
#[test]
fn probes_of_others_come_and_go_in_any_order() {
    use Step::*;
    let Some(_turn) = turn("probes_of_others_come_and_go_in_any_order") else { return };
    for (link, order) in [
        ("session", [ProbesCome, InlineComes, Runs, InlineGoes, ProbesGo]),
        ("perf", [InlineComes, ProbesCome, Runs, ProbesGo, InlineGoes]),
        ("session", [ProbesCome, InlineComes, InlineGoes, Runs, ProbesGo]),
        ("perf", [InlineComes, ProbesCome, InlineGoes, Runs, ProbesGo]),
    ] {
        let mut target = Target::start(&program("mix"), ["5000"]);
        let pid = target.pid();
        let (mut probes, mut hooks): (Option<Recording>, Option<Recording>) = (None, None);
        let (mut by_probes, mut by_hooks) = (None, None);
        let (mut was_hooked, mut truth) = (false, None);
        for step in order {
            match step {
                ProbesCome => {
                    probes = Some(Recorder::of(pid, 1).flag("--no-follow").option("--link", link).start());
                }
                ProbesGo => by_probes = probes.take().map(|recording| recording.stop().results()),
                InlineComes => {
                    hooks = Some(inline(pid, 1).start());
                    was_hooked = is_hooked(pid);
                }
                InlineGoes => {
                    by_hooks = hooks.take().map(|recording| recording.stop().results());
                    if probes.is_some() {
                        // The other recording notices that it sees the process again, and follows blocks from then on.
                        std::thread::sleep(Duration::from_secs(2));
                    }
                }
                Runs => truth = Some(target.run()),
            }
        }
        let what = format!("{link}, {order:?}");
        let truth = truth.expect("it ran");
        let exact = |(profile, stats): (Profile, Stats)| {
            checks::sites(&profile, &truth, 1, Compare::All);
            assert_eq!((stats.hits, stats.lost()), (truth.allocs() + truth.failed, 0), "{what}: {stats:?}");
        };
        let runs = order.iter().position(|step| matches!(step, Runs)).expect("it runs");
        let inline_was_there = order[runs..].iter().any(|step| matches!(step, InlineGoes));
        let (probes, hooks) = (by_probes.expect("it ended"), by_hooks.expect("it ended"));
        if inline_was_there {
            exact(hooks);
            assert!(!was_hooked || probes.1.hits == 0, "{what}: its page is not the file's: {:?}", probes.1);
        } else {
            exact(probes);
        }
        assert!(!is_hooked(pid), "{what}");
        assert!(target.end().success(), "{what}");
    }
}

/// gdb attaches to a hooked process, stops it in malloc, and lets it go. The hooks stay, and count every call.
#[test]
fn a_debugger_stops_a_hooked_process_in_malloc() {
    let case = "a_debugger_stops_a_hooked_process_in_malloc";
    let Some(_turn) = turn(case) else { return };
    let Some(gdb) = tool_or_install("gdb", "gdb") else { return skipped(case, "no gdb (Debian: gdb)") };
    let mut target = Target::start(&program("mix"), ["50"]);
    let pid = target.pid();
    let recording = inline(pid, 1).start();
    let was_hooked = is_hooked(pid);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (ready, hits) = (folder.path().join("ready"), folder.path().join("hits"));
    let script = format!(
        "import gdb\n\
         class Hit(gdb.Breakpoint):\n    hits = 0\n    def stop(self):\n        Hit.hits += 1\n        return Hit.hits == 20\n\
         hit = Hit('*(char *) __libc_malloc')\n\
         gdb.events.cont.connect(lambda event: open('{}', 'w').close())\n\
         gdb.execute('continue')\n\
         hit.delete()\n\
         gdb.execute('detach')\n\
         open('{}', 'w').write(str(Hit.hits))\n",
        ready.display(),
        hits.display(),
    );
    let python = folder.path().join("script.py");
    std::fs::write(&python, script).expect("our own folder");
    let mut debugger = Command::new(gdb)
        .args(["-q", "-nx", "-batch", "-p", &pid.to_string(), "-x"])
        .arg(&python)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("gdb starts");
    until("gdb lets the program continue", || ready.exists());
    let truth = target.run();
    wait(&mut debugger, "gdb");
    let (profile, stats) = recording.stop().results();
    let hits: u64 = std::fs::read_to_string(hits).expect("gdb has written it").parse().expect("a number");
    assert_eq!(hits, 20, "the breakpoint was hit");
    checks::sites(&profile, &truth, 1, Compare::All);
    assert_eq!(stats.hits, truth.allocs() + truth.failed, "hooked inline: {was_hooked}; {stats:?}");
    assert!(!is_hooked(pid));
    assert!(target.end().success());
}
