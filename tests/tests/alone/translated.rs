//! Programs that another program executes by translation. While one runs, heapbpf refuses links that serve every
//! process, which other tests need.

use std::process::Command;

use heapbpf_tests::environment::{skipped, tool_or_install, turn};
use heapbpf_tests::inline::mapped;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;

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
