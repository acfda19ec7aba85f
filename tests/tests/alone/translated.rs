//! Programs that another program executes by translation, or whose system calls somebody else sees. While one runs,
//! heapbpf refuses links that serve every process, which other tests need.

use std::path::Path;
use std::process::Command;

use heapbpf_tests::environment::{skipped, tool, tool_or_install, turn};
use heapbpf_tests::inline::mapped;
use heapbpf_tests::kernel::linux;
use heapbpf_tests::others::Beside;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, status, until};

/// valgrind executes its program's code by translation: a jump in the code would lead to memory that valgrind does not
/// know, and a breakpoint would end it.
#[test]
fn a_program_that_is_translated_is_left_alone() {
    let case = "a_program_that_is_translated_is_left_alone";
    let Some(_turn) = turn(case) else { return };
    let Some(valgrind) = tool_or_install("valgrind", "valgrind") else { return skipped(case, "no valgrind") };
    for hook in ["auto", "inline", "probe"] {
        let mut command = Command::new(&valgrind);
        command.args(["--quiet", "--tool=none"]).arg(program("mix")).arg("200");
        let mut target = Target::start_command(&mut command);
        let refused = Recorder::of(target.pid(), 1).option("--hook", hook).refused();
        assert!(refused.stderr.contains("valgrind executes its code by translation"), "{hook}: {}", refused.stderr);
        assert!(mapped(target.pid()).is_empty(), "{hook}");
        target.run();
        assert!(target.end().success(), "{hook}");
    }
}

/// Whether the return from a probed function is a system call.
fn returns_are_calls() -> bool {
    linux() >= (6, 11)
}

/// Starts strace with these options on a target.
fn trace(strace: &Path, target: &Target, options: &[&str]) -> Beside {
    let pid = target.pid();
    let tracer = Beside::start(Command::new(strace).args(["-f", "-p", &pid.to_string()]).args(options));
    let traced = Some(tracer.0.id().to_string());
    until("strace traces it", || status(pid, "TracerPid") == traced);
    tracer
}

/// The return from a probed function is a system call that strace and sandboxes do not know: `strace -c` would end with
/// SIGSEGV.
#[test]
fn a_program_whose_system_calls_a_tracer_sees_is_left_alone() {
    let case = "a_program_whose_system_calls_a_tracer_sees_is_left_alone";
    let Some(_turn) = turn(case) else { return };
    let Some(strace) = tool_or_install("strace", "strace") else { return skipped(case, "no strace") };
    if !returns_are_calls() {
        return skipped(case, "probed returns are no system calls before Linux 6.11");
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    for hook in ["auto", "inline", "probe"] {
        let mut target = Target::start(&program("mix"), ["200"]);
        let summary = dir.path().join(hook);
        let tracer = trace(&strace, &target, &["-c", "-o", summary.to_str().expect("a plain path")]);
        let refused = Recorder::of(target.pid(), 1).option("--hook", hook).refused();
        assert!(refused.stderr.contains("its tracer sees its system calls"), "{hook}: {}", refused.stderr);
        assert!(mapped(target.pid()).is_empty(), "{hook}");
        target.run();
        tracer.stop("strace");
        let counted = std::fs::read_to_string(&summary).expect("strace has written it");
        assert!(counted.contains("total"), "{hook}: {counted}");
        assert!(target.end().success(), "{hook}");
    }
}

/// Anybody may trace their own processes. That keeps nobody from recording the whole host.
#[test]
fn a_tracer_of_any_process_does_not_stop_a_recording_of_all() {
    let case = "a_tracer_of_any_process_does_not_stop_a_recording_of_all";
    let Some(_turn) = turn(case) else { return };
    let Some(strace) = tool_or_install("strace", "strace") else { return skipped(case, "no strace") };
    if !returns_are_calls() {
        return skipped(case, "probed returns are no system calls before Linux 6.11");
    }
    let mut target = Target::start(&program("mix"), ["200"]);
    let tracer = trace(&strace, &target, &["-o", "/dev/null"]);
    let outcome = Recorder::new().interval(1 << 20).flag("--all").option("--hook", "probe").start().stop();
    assert!(outcome.stderr.contains("a tracer sees the system calls of these processes"), "{}", outcome.stderr);
    target.run();
    tracer.stop("strace");
    assert!(target.end().success());
}

/// Turns on Syscall User Dispatch (prctl 59, 1), and lets all system calls through (0 in the byte that the kernel
/// reads). Wine does not: with probes, its programs would end with SIGSYS.
const DISPATCHES: &str = "
import ctypes
word, lets_through = ctypes.c_ulong, ctypes.c_ubyte(0)
print('READY with', flush=True)
print(ctypes.CDLL(None).prctl(59, word(1), word(0), word(0), ctypes.byref(lets_through)), flush=True)
input()
";

#[test]
fn a_program_that_handles_its_own_system_calls_gets_no_probes() {
    let case = "a_program_that_handles_its_own_system_calls_gets_no_probes";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = tool("python3") else { return skipped(case, "python3 is not installed") };
    let target = Target::start_command(Command::new(python).args(["-c", DISPATCHES]));
    if target.line() != "0" || !returns_are_calls() {
        return skipped(case, "no Syscall User Dispatch on this machine, or probed returns are no system calls");
    }
    let refused = Recorder::of(target.pid(), 1).option("--hook", "probe").refused();
    assert!(refused.stderr.contains("it handles its own system calls"), "{}", refused.stderr);
    assert!(target.end().success());
}
