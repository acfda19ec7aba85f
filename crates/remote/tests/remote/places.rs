//! Processes in namespaces, in a chroot, of other users, and such that may not be dumped.

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use crate::program::{self, Program, compiled};

/// Hooks, counts and takes out.
fn round_trip(program: Program) {
    let pid = program.pid();
    program::hook(pid, program.hooked);
    std::thread::sleep(Duration::from_millis(20));
    assert!(program::counted(pid) > 0);
    while !program::take_out(pid).outcome {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(program::traces(pid), [""; 0]);
    program.finish();
}

#[test]
fn a_process_in_other_namespaces_and_another_root_is_hooked() {
    let _turn = program::turn();
    if !program::can_trace() {
        return;
    }
    let file = compiled("torture");
    let root = tempfile::tempdir().expect("a temporary folder can be made");
    // Linked with nothing else, so that the root needs no libraries.
    let source = format!("{}/tests/programs/torture.c", env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-w", "-static", "-pthread", "-o"]).arg(root.path().join("torture")).arg(source);
    assert!(cc.status().expect("a C compiler is installed").success());
    let folder = std::ffi::CString::new(root.path().to_str().expect("plain")).expect("plain");
    let mut command = Command::new("/torture");
    command.args(["2", "0"]);
    // SAFETY: system calls only.
    unsafe {
        command.pre_exec(move || {
            let flags = libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
            let is_done =
                libc::unshare(flags) == 0 && libc::chroot(folder.as_ptr()) == 0 && libc::chdir(c"/".as_ptr()) == 0;
            if is_done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
    round_trip(Program::run(&mut command));
    drop(file);
}

/// With all of its threads stopped, no page is touched that one of them would have to provide.
#[test]
fn a_process_that_serves_its_own_page_faults_does_not_stand_still() {
    let _turn = program::turn();
    if !program::can_trace() {
        return;
    }
    if !std::path::Path::new("/proc/sys/vm/unprivileged_userfaultfd").exists() {
        return heapbpf_testing::skipped("this kernel has no userfaultfd");
    }
    let program = Program::start("faults", &[]);
    let pid = program.pid();
    program::hook(pid, program.hooked);
    std::thread::sleep(Duration::from_millis(20));
    assert!(program::counted(pid) > 0);
    // What lies behind its stack may be more of it: the code stays mapped, without a jump to it.
    assert!(!program::take_out(pid).outcome && program::found(pid).replaced().next().is_none());
    program.finish();
}

/// What is opened for us is opened and closed while all threads are stopped, but for a high number.
#[test]
fn the_lowest_free_descriptor_is_the_processs_own() {
    let _turn = program::turn();
    if !program::can_trace() {
        return;
    }
    let program = Program::start("descriptors", &[]);
    for _ in 0..100 {
        program::hook(program.pid(), program.hooked);
        while !program::take_out(program.pid()).outcome {
            std::thread::sleep(Duration::from_millis(1));
        }
        program.assert_runs();
    }
    assert_eq!(program::traces(program.pid()), [""; 0]);
    program.finish();
}

#[test]
fn a_process_of_another_user_that_may_not_be_dumped_is_hooked() {
    let _turn = program::turn();
    if !program::can_trace() {
        return;
    }
    let file = compiled("torture");
    let folder = file.parent().expect("a folder");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder, open).expect("it is ours");
    // What may be run but not read cannot be dumped.
    let hidden = folder.join("hidden");
    std::fs::copy(&file, &hidden).expect("it can be copied");
    std::fs::set_permissions(&hidden, std::os::unix::fs::PermissionsExt::from_mode(0o711)).expect("it is ours");
    let mut command = Command::new(&hidden);
    command.args(["2", "0"]).uid(65534).gid(65534);
    round_trip(Program::run(&mut command));
}
