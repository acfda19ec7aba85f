//! Tests of `process`.

use super::*;

#[test]
fn stat_with_a_hostile_name() {
    let rest = "S 1 2 3 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 7 0 12345 1 2 3";
    let stat = Stat::parse(&format!("42 (a) R 9 (b) {rest}"), 100).expect("parses");
    assert_eq!(stat.comm, "a) R 9 (b");
    assert_eq!((stat.parent_pid, stat.threads, stat.start_ns, stat.without_memory), (1, 7, 123_450_000_000, false));
    assert!(stat.had_children, "2 minor and 4 major faults of children");
    let zombie = Stat::parse(&format!("42 (z) {}", rest.replace('S', "Z")), 100).expect("parses");
    assert!(zombie.without_memory);
    assert_eq!(Stat::parse("42 (x) S 1", 100), None);
    assert_eq!(Stat::parse(")(", 100), None);
    assert_eq!(Stat::parse("", 100), None);
}

#[test]
fn a_process_without_faults_of_children_has_had_none() {
    let stat = |faults: &str| Stat::parse(&format!("42 (x) S 1 2 3 0 -1 4194560 {faults} 5 6 7 8 20 0 7 0 12345"), 100);
    assert!(!stat("7 0 7 0").expect("parses").had_children);
    assert!(stat("0 1 0 0").expect("parses").had_children && stat("0 0 0 1").expect("parses").had_children);
}

#[test]
fn descendants_are_the_tree_without_what_the_recording_brought() {
    // 10 has the children 11 and 12. 11 has the child 13. 12 is the shell that started heapbpf (20), and has a child
    // 14.
    let parents = HashMap::from([(1, 0), (10, 1), (11, 10), (12, 10), (13, 11), (14, 12), (20, 12), (21, 20), (30, 1)]);
    assert_eq!(descendants_among(&parents, &[10], 20), [11, 13, 14]);
    assert_eq!(descendants_among(&parents, &[11, 30], 20), [13]);
    assert_eq!(descendants_among(&parents, &[13], 20), [0; 0]);
    // Read while PIDs were reused: neither process is the other's ancestor.
    let circle = HashMap::from([(2, 3), (3, 2), (5, 9)]);
    assert_eq!(descendants_among(&circle, &[9], 20), [5]);
}

#[test]
fn status_of_a_contained_process() {
    assert_eq!(parse_status("Name:\tx\nUid:\t7\t8\t9\t9\nNSpid:\t500\t12\t1\n"), (Some(1), 8));
    assert_eq!(parse_status("Name:\tx\n"), (None, NO_USER));
}

#[test]
fn globs() {
    let matches = |pattern: &str, comm: &str| CommGlob::new(pattern).expect("compiles").matches(comm);
    assert!(matches("post*", "postgres") && !matches("post*", "apost"));
    assert!(matches("kworker/*", "kworker/0:1") && matches("a?c", "abc") && !matches("a?c", "ac"));
    assert!(matches("{nginx,sshd}", "sshd") && matches("[ab]x", "bx"));
    assert!(matches("a-name-longer-than-fifteen", "a-name-longer-t"), "the kernel truncates names");
    assert!(!matches("sh", "bash"));
    assert!(CommGlob::new("[a").is_err());
}

#[test]
fn heapbpf_itself() {
    if heapbpf_testing::is_emulated("/proc/self/stat is made up") {
        return;
    }
    let pid = std::process::id();
    let us = ProcessInfo::read(pid).expect("we are there");
    assert!(us.exe.starts_with('/') && !us.exe_deleted && us.threads >= 1 && !us.without_memory);
    assert!(all_pids().expect("lists").contains(&pid));
    assert!(threads(pid).expect("lists").contains(&pid));
    assert!(!Target::All.matches(&us), "the sampler never samples itself");
    assert!(matches!(select(&[Target::Pid(pid)]), Err(TargetError::Ourselves { .. })));
}

#[test]
fn processes_that_cannot_be_targets() {
    assert!(matches!(select(&[Target::Pid(u32::MAX)]), Err(TargetError::NoSuchProcess { .. })));
    let mut child = std::process::Command::new("true").spawn().expect("starts");
    let pid = child.id();
    while !Stat::read(pid).expect("not waited for").without_memory {
        std::thread::yield_now();
    }
    assert!(matches!(select(&[Target::Pid(pid)]), Err(TargetError::WithoutMemory { .. })));
    child.wait().expect("waits");

    let (sender, receiver) = std::sync::mpsc::channel();
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        // SAFETY: `gettid` takes no arguments and cannot fail.
        sender.send(unsafe { libc::gettid() } as u32).expect("receiver waits");
        let _ = wait.recv();
    });
    let tid = receiver.recv().expect("sent");
    let error = select(&[Target::Pid(tid)]);
    assert!(matches!(error, Err(TargetError::Thread { pid, .. }) if pid == std::process::id()), "{error:?}");
    drop(done);
    thread.join().expect("ends");
}

#[test]
fn selection_by_name_and_by_group() {
    let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("starts");
    let pid = child.id();
    // Between fork and exec it still has the name of this test program.
    while Stat::read(pid).expect("runs").comm != "sleep" {
        std::thread::yield_now();
    }
    let by_name =
        select(&[Target::Comm(CommGlob::new("slee?").expect("compiles")), Target::Pid(pid)]).expect("selects");
    let group = Cgroup { path: "/".into(), directory: "/".into(), id: 1 };
    let by_group = select(&[Target::Cgroup(group)]).expect("selects");
    child.kill().expect("kills");
    child.wait().expect("waits");
    assert_eq!(by_name.iter().filter(|process| process.pid == pid).count(), 1);
    let child = by_name.iter().find(|process| process.pid == pid).expect("selected");
    assert_eq!((&*child.comm, child.parent_pid), ("sleep", std::process::id()));
    assert!(by_group.iter().any(|process| process.pid == pid) || child.cgroup.is_empty());
}
