//! Processes that must be left alone are left alone, with the reason.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use heapbpf_remote::{Busy, Error, Refusal, STOP_LIMIT, Target};

use crate::program::{self, Program};

fn refusal(pid: u32) -> Refusal {
    Target::look(pid).expect_err("it must be refused")
}

#[test]
fn what_cannot_be_stopped_is_refused_with_the_reason() {
    let Some(_turn) = program::turn() else { return };
    assert!(matches!(refusal(std::process::id()), Refusal::Own));
    assert!(matches!(refusal(u32::MAX), Refusal::NoProcess(_)));
    assert!(matches!(refusal(4_194_304), Refusal::NoProcess(4_194_304)));
    assert!(matches!(refusal(2), Refusal::KernelThread), "process 2 is kthreadd");
    let program = Program::start("torture", &["2", "0"]);
    let thread = std::fs::read_dir(format!("/proc/{}/task", program.pid())).expect("it runs").flatten();
    let thread = thread.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(|tid| *tid != program.pid());
    let thread = thread.expect("it has several threads");
    assert!(matches!(refusal(thread), Refusal::Thread { process, .. } if process == program.pid()));
    let mut dead = Command::new("true").stdout(Stdio::null()).spawn().expect("it starts");
    while !matches!(Target::look(dead.id()), Err(Refusal::Ended)) {
        std::thread::sleep(Duration::from_millis(1));
    }
    dead.wait().expect("it can be waited for");
}

#[test]
fn a_process_stopped_by_job_control_stays_stopped() {
    let Some(_turn) = program::turn() else { return };
    let program = Program::start("torture", &["2", "0"]);
    let target = Target::look(program.pid()).expect("it runs");
    let plan = program::plan(&target, program.hooked);
    program.signal(libc::SIGSTOP);
    while program.state() != "T" {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(matches!(refusal(program.pid()), Refusal::JobControl));
    // The same if it is stopped by a signal after the examination. Its other thread may stop late.
    let error = loop {
        match target.hook(&plan, STOP_LIMIT) {
            Err(Error::Busy { why: Busy::Slow, .. }) => {}
            other => break other.expect_err("it is stopped"),
        }
    };
    // It may have been stopped on its way out of the call that wrote its first line.
    assert!(matches!(error, Error::Busy { why: Busy::JobControl | Busy::InCall, .. }), "{error}");
    // A released thread passes through the kernel on its way back to the signal stop.
    let late = Instant::now() + Duration::from_secs(5);
    while program.state() != "T" {
        assert!(Instant::now() < late, "it runs on: {}", program.state());
        std::thread::sleep(Duration::from_millis(1));
    }
    let until = Instant::now() + Duration::from_millis(100);
    while Instant::now() < until {
        assert_eq!(program.state(), "T");
    }
    program.signal(libc::SIGCONT);
    program::hook(program.pid(), program.hooked);
    program.finish();
}

#[test]
fn strict_seccomp_is_refused() {
    let Some(_turn) = program::turn() else { return };
    let mut program = Program::start("sandboxed", &["strict"]);
    assert_eq!(program.line(), "IN\n");
    assert!(matches!(refusal(program.pid()), Refusal::StrictSeccomp));
}

/// Filters that end the process for a call that we need, or ask another process about it, always or depending on its
/// arguments; and one that forbids leaving our signal frame. Each process runs on.
#[test]
fn a_seccomp_filter_that_may_end_the_process_is_refused() {
    let Some(_turn) = program::turn() else { return };
    for (mode, reason) in [
        ("kill", "ends the process for memfd_create"),
        ("kill_thread", "ends the process for memfd_create"),
        ("trap", "ends the process for memfd_create"),
        ("notify", "asks another process about memfd_create"),
        ("executable", "ends the process for mmap"),
        ("return", "refuses rt_sigreturn"),
    ] {
        let mut program = Program::start("sandboxed", &[mode]);
        assert_eq!(program.line(), "IN\n", "{mode}");
        let target = Target::look(program.pid()).expect("it runs");
        let plan = program::plan(&target, program.hooked);
        let error = loop {
            match target.hook(&plan, STOP_LIMIT) {
                Err(Error::Busy { .. }) => {}
                other => break other.expect_err(mode),
            }
        };
        assert!(matches!(error, Error::Refused(Refusal::Seccomp { .. })), "{mode}: {error:?}");
        assert!(error.to_string().starts_with(&format!("its seccomp filter {reason}: ")), "{mode}: {error}");
        program::assert_inert(program.pid());
        program.assert_runs();
        if mode != "return" {
            program.finish();
        }
    }
}

/// The process never sleeps, so a stop would show as a context switch.
#[test]
fn filters_that_cannot_be_read_are_refused_before_a_stop() {
    let Some(_turn) = program::turn() else { return };
    let mut program = Program::start("sandboxed", &["errno"]);
    assert_eq!(program.line(), "IN\n");
    let target = Target::look(program.pid()).expect("it runs");
    let plan = program::plan(&target, program.hooked);
    let waits = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", program.pid())).expect("it runs");
        status.lines().find(|line| line.starts_with("voluntary_ctxt_switches")).map(str::to_owned)
    };
    let before = waits();
    program::without_admin(|| {
        for _ in 0..5 {
            let error = target.map(&plan, STOP_LIMIT).expect_err("it is refused");
            assert!(matches!(error, Error::Refused(Refusal::UnknownSeccomp(_))), "{error}");
        }
    });
    assert!(before.is_some());
    assert_eq!(waits(), before);
    program.finish();
}

/// A call for us would get SIGSYS, too. Whoever asks the kernel about that must not change it.
#[test]
fn a_thread_that_handles_its_own_system_calls_goes_on_doing_so() {
    let Some(_turn) = program::turn() else { return };
    let mut program = Program::start("sandboxed", &["dispatch"]);
    if program.line() != "IN\n" {
        return heapbpf_testing::skipped("this kernel has no Syscall User Dispatch");
    }
    let target = Target::look(program.pid()).expect("it runs");
    let plan = program::plan(&target, program.hooked);
    let mapped = loop {
        match target.map(&plan, STOP_LIMIT) {
            Err(Error::Busy { why: Busy::Slow | Busy::InCall, .. }) => {}
            mapped => break mapped,
        }
    };
    // Before Linux 6.4, the kernel does not tell.
    let is_spared = matches!(mapped, Ok(_) | Err(Error::Busy { why: Busy::NoThread | Busy::Late, .. }));
    assert!(is_spared, "{mapped:?}");
    program.signal(libc::SIGUSR1);
    assert_eq!(program.line(), "", "its next call was let through");
}

/// A program of 32-bit instructions, without a C library.
#[test]
fn a_32_bit_program_is_refused() {
    let Some(_turn) = program::turn() else { return };
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let (source, file) = (dir.path().join("narrow.c"), dir.path().join("narrow"));
    std::fs::write(&source, "void _start(void) { for (;;) __asm__ volatile(\"pause\"); }").expect("it is ours");
    let mut cc = Command::new("cc");
    cc.args(["-m32", "-nostdlib", "-static", "-fno-pic", "-o"]).arg(&file).arg(&source).stderr(Stdio::null());
    if !cc.status().expect("a C compiler is installed").success() {
        return heapbpf_testing::skipped("the C compiler makes no 32-bit programs");
    }
    let Ok(mut child) = Command::new(&file).spawn() else {
        return heapbpf_testing::skipped("this kernel runs no 32-bit programs");
    };
    let refused = refusal(child.id());
    child.kill().and_then(|()| child.wait()).expect("it can be ended");
    assert!(matches!(refused, Refusal::NotNative), "{refused}");
}

#[test]
fn a_process_whose_memory_another_shares_is_refused() {
    let Some(_turn) = program::turn() else { return };
    let sibling = libc::CLONE_PARENT.to_string();
    for arguments in [&["0"][..], &["300"], &["0", &sibling]] {
        let program = Program::start("sharing", arguments);
        let refused = refusal(program.pid());
        assert!(matches!(refused, Refusal::SharedMemory(other) if other != program.pid()), "{arguments:?}: {refused}");
        program.finish();
    }
}

/// The other process would get another number for its next descriptor while ours is open.
#[test]
fn a_process_whose_descriptors_another_has_is_refused() {
    let Some(_turn) = program::turn() else { return };
    let flags = (libc::CLONE_VM | libc::CLONE_FILES).to_string();
    let program = Program::start("sharing", &["0", &flags]);
    let target = Target::look(program.pid()).expect("it can be looked at");
    let plan = program::plan(&target, program.hooked);
    let error = target.map(&plan, STOP_LIMIT).expect_err("it is refused");
    let is_other = |other: u32| other != program.pid();
    assert!(matches!(error, Error::Refused(Refusal::SharedFiles(other)) if is_other(other)), "{error}");
    program.finish();
}

#[test]
fn a_traced_process_is_refused() {
    let Some(_turn) = program::turn() else { return };
    let program = Program::start("torture", &["1", "0"]);
    let pid = program.pid().cast_signed();
    // SAFETY: a request without pointers. The end of this thread detaches it.
    unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) };
    assert!(matches!(refusal(program.pid()), Refusal::Traced(tracer) if tracer == std::process::id()));
}

#[test]
fn a_plan_for_a_process_that_has_changed_touches_nothing() {
    let Some(_turn) = program::turn() else { return };
    let program = Program::start("torture", &["2", "0"]);
    let target = Target::look(program.pid()).expect("it runs");
    let plan = program::plan(&target, program.hooked);
    program::hook(program.pid(), program.hooked);
    let error = target.hook(&plan, STOP_LIMIT).expect_err("its page is another one now");
    assert!(matches!(error, Error::Busy { why: Busy::Changed, .. }), "{error}");
    program.finish();
}

/// A call of an abandoned attempt may come late, and take addresses that the next attempt saw as free.
#[test]
fn a_plan_for_addresses_that_were_taken_since_may_be_made_anew() {
    let Some(_turn) = program::turn() else { return };
    let (program, target, plan) = loop {
        let program = Program::start("torture", &["2", "0"]);
        let target = Target::look(program.pid()).expect("it runs");
        let plan = program::plan(&target, program.hooked);
        match target.map(&plan, STOP_LIMIT) {
            Ok(_) => break (program, target, plan),
            // What it leaves may be where the plan maps.
            Err(Error::Busy { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    };
    let before = program::traces(program.pid());
    let error = loop {
        match target.map(&plan, STOP_LIMIT) {
            Err(Error::Busy { why: Busy::Slow | Busy::Late | Busy::NoThread | Busy::InCall, .. }) => {
                program::take_out(program.pid());
            }
            other => break other.expect_err("there is no space any more"),
        }
    };
    assert!(matches!(error, Error::Busy { why: Busy::Changed, .. }), "{error}");
    assert_eq!(program::traces(program.pid()), before, "what is there was not touched");
    program::take_out(program.pid());
    program::assert_inert(program.pid());
    program.finish();
}

#[test]
fn what_a_limit_leaves_is_harmless_and_can_be_taken_out() {
    let Some(_turn) = program::turn() else { return };
    let program = Program::start("torture", &["8", "0"]);
    for limit in [0, 50, 100, 200, 300, 400, 600] {
        let target = Target::look(program.pid()).expect("it runs");
        let plan = program::plan(&target, program.hooked);
        match target.hook(&plan, Duration::from_micros(limit)) {
            Ok(_) => assert!(limit > 0),
            // It may still be on its way out of the call that wrote its first line, or make a call of the last attempt.
            Err(Error::Busy { why, .. }) if !matches!(why, Busy::JobControl | Busy::NotNow | Busy::NoThread) => {}
            Err(error) => panic!("{error}"),
        }
        program::take_out(program.pid());
        program::assert_inert(program.pid());
    }
    program.finish();
}
