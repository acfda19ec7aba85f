//! The kernel does not return from a request to a process that heapbpf stops: the helper that stops it is ended, and
//! the process continues.

use std::process::{Command, Stdio};

use heapbpf_tests::environment::{skipped, tool_or_install, turn};
use heapbpf_tests::guardian::cleaners_of;
use heapbpf_tests::inline::is_hooked;
use heapbpf_tests::program::{copy_of, library, program};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, tracer_of, until, wait};

/// strace delays each ptrace request of the helper that stops a process by ten seconds, starting with a request at
/// which the first threads are already stopped.
const LATE: &str = "inject=ptrace:delay_enter=10000000:when=14+";

#[test]
fn who_stops_a_process_for_too_long_is_ended_and_the_process_goes_on() {
    let case = "who_stops_a_process_for_too_long_is_ended_and_the_process_goes_on";
    let Some(_turn) = turn(case) else { return };
    let Some(strace) = tool_or_install("strace", "strace") else { return skipped(case, "no strace (Debian: strace)") };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = copy_of(&program("unharmed"), dir.path(), "standstill");
    let recorder = Recorder::new().option("--comm", "standstill").option("--hook", "inline").interval(4096);
    let mut recording = recorder.flag("--no-follow").start();
    let [cleaner] = cleaners_of(recording.pid())[..] else { panic!("one cleaner") };
    let mut command = Command::new(strace);
    command.args(["-f", "-o", "/dev/null", "-e", "trace=ptrace", "-e", LATE, "-p", &cleaner.to_string()]);
    let mut tracer = command.stderr(Stdio::null()).spawn().expect("strace runs");
    until("strace traces the cleaner", || tracer_of(cleaner) == tracer.id());

    let plugin = library("plugin", "plugin30.so", &["-DPLUGIN=30"]);
    // It mostly sleeps while heapbpf waits.
    let mut target = Target::start(&path, [plugin.as_os_str(), "20000".as_ref()]);
    let line = loop {
        let line = recording.next_line();
        if line.contains("did not return within") {
            break line;
        }
    };
    println!("{line}");
    assert!(!is_hooked(target.pid()) && tracer_of(target.pid()) == 0, "{line}");
    tracer.kill().expect("it runs");
    wait(&mut tracer, "strace");
    recording.await_more_links();
    // The target checks all its memory.
    target.go();
    println!("{}", target.line());
    let (_, stats) = recording.stop().results();
    let reason = stats.hooks.iter().find_map(|hook| hook.not_inline.clone());
    assert!(reason.is_some_and(|reason| reason.contains("did not return within")), "{stats:?}");
    assert!(target.end().success());
}
