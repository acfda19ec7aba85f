//! Programs that another program executes by translation, or whose system calls it sees. While one runs, heapbpf refuses
//! links that serve every process, which other tests need.

use std::process::Command;

use heapbpf_tests::environment::{skipped, tool_or_install, turn};
use heapbpf_tests::inline::mapped;
use heapbpf_tests::others::Beside;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, until};

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

/// The return from a probed function is a system call that strace and sandboxes do not know: `strace -c` would end with
/// SIGSEGV.
#[test]
fn a_program_whose_system_calls_a_tracer_sees_is_left_alone() {
    let case = "a_program_whose_system_calls_a_tracer_sees_is_left_alone";
    let Some(_turn) = turn(case) else { return };
    let Some(strace) = tool_or_install("strace", "strace") else { return skipped(case, "no strace") };
    let dir = tempfile::tempdir().expect("a temporary directory");
    for hook in ["auto", "inline", "probe"] {
        let mut target = Target::start(&program("mix"), ["200"]);
        let (pid, summary) = (target.pid().to_string(), dir.path().join(hook));
        let mut command = Command::new(&strace);
        let tracer = Beside::start(command.args(["-f", "-c", "-p", &pid, "-o"]).arg(&summary));
        let traced = format!("TracerPid:\t{}\n", tracer.0.id());
        let status = || std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
        until("strace traces it", || status().contains(&traced));
        let refused = Recorder::of(target.pid(), 1).option("--hook", hook).refused();
        assert!(refused.stderr.contains("strace traces it, and would see"), "{hook}: {}", refused.stderr);
        assert!(mapped(target.pid()).is_empty(), "{hook}");
        target.run();
        tracer.stop("strace");
        let counted = std::fs::read_to_string(&summary).expect("strace has written it");
        assert!(counted.contains("total"), "{hook}: {counted}");
        assert!(target.end().success(), "{hook}");
    }
}
