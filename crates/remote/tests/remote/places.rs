//! Processes in namespaces, in a chroot, of other users, and processes that may not be dumped.

use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use heapbpf_remote::{Error, STOP_LIMIT, Target};

use crate::program::{self, Program, compiled};

/// Hooks, counts and unhooks.
fn round_trip(program: Program) {
    let pid = program.pid();
    program::hook(pid, program.hooked);
    program::await_more_than(&program, 0);
    program::take_out(pid);
    program::assert_inert(pid);
    program.finish();
}

#[test]
fn a_process_in_other_namespaces_and_another_root_is_hooked() {
    let Some(_turn) = program::turn() else { return };
    let file = compiled("torture");
    let root = tempfile::tempdir().expect("a temporary directory can be made");
    // Linked statically, so that the new root needs no libraries.
    let source = format!("{}/tests/programs/torture.c", env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-w", "-static", "-pthread", "-o"]).arg(root.path().join("torture")).arg(source);
    assert!(cc.status().expect("a C compiler is installed").success());
    let dir = std::ffi::CString::new(root.path().to_str().expect("plain")).expect("plain");
    let mut command = Command::new("/torture");
    command.args(["2", "0"]);
    // SAFETY: only system calls.
    unsafe {
        command.pre_exec(move || {
            let flags = libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
            let is_done =
                libc::unshare(flags) == 0 && libc::chroot(dir.as_ptr()) == 0 && libc::chdir(c"/".as_ptr()) == 0;
            if is_done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
    round_trip(Program::run(&mut command));
    drop(file);
}

/// While all of its threads are stopped, no page is touched that one of them would have to provide.
#[test]
fn a_process_that_serves_its_own_page_faults_does_not_stand_still() {
    let Some(_turn) = program::turn() else { return };
    if !std::path::Path::new("/proc/sys/vm/unprivileged_userfaultfd").exists() {
        return heapbpf_testing::skipped("this kernel has no userfaultfd");
    }
    let program = Program::start("faults", &[]);
    let pid = program.pid();
    program::hook(pid, program.hooked);
    program::await_more_than(&program, 0);
    program::take_out(pid);
    program::assert_inert(pid);
    program.finish();
}

/// The copy contains the jumps as well.
#[test]
fn a_process_that_has_moved_its_text_keeps_the_code_that_it_jumps_to() {
    let Some(_turn) = program::turn() else { return };
    let mut program = Program::start("moved", &[]);
    program::hook(program.pid(), program.hooked);
    program.signal(libc::SIGUSR1);
    assert_eq!(program.line(), "MOVED\n");
    program::take_out(program.pid());
    std::thread::sleep(Duration::from_millis(20));
    program.finish();
}

/// The fiber sleeps in the mapped code, on no thread's stack, while that code is released, used again and released.
#[test]
fn a_fiber_that_sleeps_in_the_code_comes_back_to_it() {
    let Some(_turn) = program::turn() else { return };
    let mut program = Program::start("fiber", &[]);
    program::hook(program.pid(), program.hooked);
    assert_eq!(program.line(), "ASLEEP\n");
    for _ in 0..2 {
        program::take_out(program.pid());
        program::assert_inert(program.pid());
        program::hook(program.pid(), program.hooked);
    }
    program::take_out(program.pid());
    program.signal(libc::SIGUSR1);
    program.finish();
}

/// The writer may jump to the code that was there before.
#[test]
fn code_that_somebody_else_has_changed_stays_as_it_is() {
    let Some(_turn) = program::turn() else { return };
    let program = Program::start("torture", &["2", "0"]);
    let (pid, patched) = (program.pid(), program.hooked + 64);
    program::hook(pid, program.hooked);
    let memory = std::fs::File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).expect("it is ours");
    let mut before = [0; 1];
    memory.read_exact_at(&mut before, patched).expect("it is mapped");
    memory.write_all_at(&[!before[0]], patched).expect("by whoever may trace it");
    let take_out = || loop {
        let target = Target::look(pid).expect("it runs");
        match target.take_out(&program::found(pid), &program::EMPTIED, STOP_LIMIT) {
            Err(Error::Busy { .. }) => {}
            taken => break taken.map(drop),
        }
    };
    assert!(matches!(take_out(), Err(Error::Patched(at)) if at == patched));
    let mut after = [0; 1];
    memory.read_exact_at(&mut after, patched).expect("it is mapped");
    assert!(after[0] == !before[0] && program::found(pid).is_hooked(), "nothing was done");
    memory.write_all_at(&before, patched).expect("by whoever may trace it");
    take_out().expect("it is as it was hooked");
    program.finish();
}

/// The memfd is opened and closed while all threads are stopped, except for a high number.
#[test]
fn the_lowest_free_descriptor_is_the_processs_own() {
    let Some(_turn) = program::turn() else { return };
    let program = Program::start("descriptors", &[]);
    for _ in 0..100 {
        program::hook(program.pid(), program.hooked);
        program::take_out(program.pid());
        program.assert_runs();
    }
    program::assert_inert(program.pid());
    program.finish();
}

#[test]
fn a_process_of_another_user_that_may_not_be_dumped_is_hooked() {
    let Some(_turn) = program::turn() else { return };
    let file = compiled("torture");
    let dir = file.parent().expect("a directory");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(dir, open).expect("it is ours");
    // A program that may be run but not read cannot be dumped.
    let hidden = dir.join("hidden");
    std::fs::copy(&file, &hidden).expect("it can be copied");
    std::fs::set_permissions(&hidden, std::os::unix::fs::PermissionsExt::from_mode(0o711)).expect("it is ours");
    let mut command = Command::new(&hidden);
    command.args(["2", "0"]).uid(65534).gid(65534);
    round_trip(Program::run(&mut command));
}
