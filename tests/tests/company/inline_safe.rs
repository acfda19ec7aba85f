//! Inline hooks do not touch what they must not touch, say why, and report how each process is hooked.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::doctor::{doctor, doctor_of};
use heapbpf_tests::environment::{skipped, turn};
use heapbpf_tests::inline::{Hook, begin, is_hooked, mapped, recorder};
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use heapbpf_tests::truth::Truth;

/// A program, and the id of its process that allocates.
struct Running {
    target: Target,
    pid: u32,
}

impl Running {
    fn in_mode(mode: &str) -> Self {
        let target = Target::start(&program("confined"), [mode, "3000"]);
        let pid = target.pid();
        Self { target, pid }
    }

    /// Records it with `--hook inline`, at interval 1.
    fn record(&mut self, options: &[&str]) -> (Profile, Stats, Truth) {
        let results = recorder(self.pid, Hook::Inline, 1).flags(options).results_of(&mut self.target);
        assert!(!is_hooked(self.pid), "the original pages are back");
        results
    }

    /// Records it, and checks that it was hooked inline and that figures are exact. On a busy machine stops may
    /// repeatedly take too long: then it tries with another one, from `again`.
    fn must_be_hooked(mut self, again: &dyn Fn() -> Self) {
        let (profile, stats, truth) = self.record(&[]);
        if stats.hooks[0].not_inline.as_deref().is_some_and(is_for_want_of_time) {
            return again().must_be_hooked(again);
        }
        let hooked = &stats.hooks[0];
        assert_eq!((hooked.pid, &*hooked.hook, &hooked.not_inline), (self.pid, "inline", &None), "{stats:?}");
        assert_eq!(profile.process(self.pid).hook.as_deref(), Some("inline"));
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!((stats.hits, stats.exact_alloc_objects), (truth.allocs(), truth.allocs()), "{stats:?}");
        assert!(self.target.end().success());
    }

    /// Records it, and checks that it has probes for this reason, that the reason is reported, and that figures are
    /// exact.
    fn must_be_refused(mut self, why: &str) {
        let (profile, stats, truth) = self.record(&[]);
        let probed = &stats.hooks[0];
        assert_eq!((probed.pid, &*probed.hook), (self.pid, "probe"), "{stats:?}");
        let reason = probed.not_inline.as_deref().unwrap_or_default();
        assert!(reason.contains(why), "{reason:?}");
        let process = profile.process(self.pid);
        assert_eq!((process.hook.as_deref(), process.not_inline.as_deref()), (Some("probe"), Some(reason)));
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!((stats.hits, stats.lost()), (truth.allocs(), 0), "{stats:?}");
        assert!(self.target.end().success());
    }
}

fn hooked_in_mode(mode: &str) {
    Running::in_mode(mode).must_be_hooked(&|| Running::in_mode(mode));
}

/// Whether a reason is temporary.
fn is_for_want_of_time(why: &str) -> bool {
    why.contains("did not stop in time") || why.contains("the time limit was reached")
}

/// What `doctor --json` reports about the first allocator of a process.
fn inline_audit(pid: u32) -> serde_json::Value {
    let (_, found) = doctor_of(pid);
    assert!(mapped(pid).is_empty(), "nothing is touched");
    found["inline"][0].clone()
}

#[test]
fn a_plain_process_is_hooked_and_every_output_says_so() {
    let Some(_turn) = turn("a_plain_process_is_hooked_and_every_output_says_so") else { return };
    let running = Running::in_mode("plain");
    let would = inline_audit(running.pid);
    assert_eq!(would["why_not"], serde_json::Value::Null, "{would}");
    assert!(would["functions"].as_u64().is_some_and(|functions| functions >= 8), "{would}");
    assert!(would["replaced_bytes"].as_u64().is_some_and(|bytes| bytes >= 4096), "{would}");
    running.must_be_hooked(&|| Running::in_mode("plain"));
}

#[test]
fn seccomp_filters_decide() {
    let Some(_turn) = turn("seccomp_filters_decide") else { return };
    Running::in_mode("kill").must_be_refused("its seccomp filter ends the process for mremap");
    hooked_in_mode("errno");
}

#[test]
fn code_that_another_tool_has_changed_is_left_alone() {
    let Some(_turn) = turn("code_that_another_tool_has_changed_is_left_alone") else { return };
    Running::in_mode("patched").must_be_refused("another tool has patched it in memory");
}

/// The process may not make memory executable, and may not be dumped.
#[test]
fn confined_processes_are_hooked() {
    let Some(_turn) = turn("confined_processes_are_hooked") else { return };
    hooked_in_mode("undumpable");
    // SAFETY: no pointers.
    if unsafe { libc::prctl(66, 0, 0, 0, 0) } < 0 {
        return skipped("confined_processes_are_hooked", "this kernel does not know PR_SET_MDWE");
    }
    hooked_in_mode("sealed");
}

/// Options that inline hooks cannot support are refused before anything is touched. What they can do without frees,
/// they do.
#[test]
fn other_options_work_or_are_refused_before_anything_is_touched() {
    let Some(_turn) = turn("other_options_work_or_are_refused_before_anything_is_touched") else { return };
    let mut running = Running::in_mode("plain");
    let recorder = recorder(running.pid, Hook::Inline, 4096).option("--criterion", "size-class");
    recorder.refused().check(2, &["leave --criterion size-class out"]);
    assert!(mapped(running.pid).is_empty(), "it was touched");
    let (profile, stats, truth) = running.record(&["--no-live"]);
    let is_late = stats.hooks[0].not_inline.as_deref().is_some_and(is_for_want_of_time);
    assert!(stats.hooks[0].hook == "inline" || is_late, "{stats:?}");
    checks::sites(&profile, &truth, 1, Compare::Allocated);
    assert!(running.target.end().success());
}

/// Pages that a program seals stay until its end. The jumps are removed nevertheless, and a later recording does not
/// wait for the pages.
#[test]
fn what_is_sealed_stays_and_does_not_count() {
    let case = "what_is_sealed_stays_and_does_not_count";
    let Some(_turn) = turn(case) else { return };
    let start = || Target::start(&program("sealing"), [""; 0]);
    let (mut target, recording) = begin(&start, Hook::Inline, "libc", 4096, &[]);
    let pid = target.pid();
    target.go();
    let line = target.line();
    if line != "sealed" {
        return skipped(case, &line);
    }
    let outcome = recording.stop();
    assert!(outcome.stderr.contains("(without hooks) until it ends"), "{}", outcome.stderr);
    assert!(!mapped(pid).is_empty(), "nobody can take it out");
    let again = recorder(pid, Hook::Inline, 4096).start().stop();
    let (_, stats) = again.results();
    let reason = stats.hooks[0].not_inline.as_deref().unwrap_or_default();
    assert!(reason.contains("are sealed"), "{reason:?}, {}", again.stderr);
    let warnings = again.stderr.matches("keeps copies of its allocator's pages").count();
    assert!(warnings <= 2, "it is not tried again and again: {}", again.stderr);
    assert!(target.end().success());
}

/// If the user asked for probes and they slow the target down, the line that says so has what inline hooks would take.
#[test]
fn what_inline_hooks_would_cost_is_said_once() {
    let case = "what_inline_hooks_would_cost_is_said_once";
    let Some(_turn) = turn(case) else { return };
    if std::env::consts::ARCH != "x86_64" {
        return skipped(case, "inline hooks are x86-64 code");
    }
    // The line needs measured costs, which may be there already. On a busy machine measuring may fail.
    let are_known = |options: &[&str]| doctor(options).1["costs"]["inline_pair_ns"].is_number();
    assert!(are_known(&[]) || (0..5).any(|_| are_known(&["--measure"])), "what inline hooks cost can be measured");
    // After the first step, it does nothing but call malloc and free for three seconds.
    let mut target = Target::start(&program("calming"), ["1", "100", "3000", "0"]);
    let recording = Recorder::of(target.pid(), 512 << 10).flag("--no-follow").option("--hook", "probe").start();
    target.go();
    target.step();
    target.go();
    target.step();
    target.run();
    let (profile, stats) = recording.stop().results();
    let is_reported = |note: &&String| note.contains("; without --hook probe, inline hooks would take ");
    let reported: Vec<_> = profile.notes.iter().filter(is_reported).collect();
    assert_eq!(reported.len(), 1, "{:?} {stats:?}", profile.notes);
    assert!(reported[0].contains("slower: probes take "), "{reported:?}");
    assert_eq!(stats.hooks[0].hook, "probe");
}
