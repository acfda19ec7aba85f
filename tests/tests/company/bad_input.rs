//! Bad input gives one clear sentence and the documented exit status. Nothing is attached or half-written.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::descriptors::open_paths;
use heapbpf_tests::environment::{heapbpf, skipped, tool, turn};
use heapbpf_tests::inline::is_hooked;
use heapbpf_tests::program::{copy_file, program, program_without_libc};
use heapbpf_tests::recorder::{Recorder, Refused};
use heapbpf_tests::target::{Target, children_of, until};

/// Checks that nothing was written into the directory.
fn nothing_written(refused: &Refused) {
    let left: Vec<_> = std::fs::read_dir(refused.dir.path()).expect("our own directory").flatten().collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

/// The pid of a process that has exited and was waited for, so it is unused.
fn nobody() -> u32 {
    let mut child = Command::new("/bin/true").spawn().expect("/bin/true");
    let pid = child.id();
    child.wait().expect("our own child");
    pid
}

#[test]
fn one_of_two_pids_is_nobody() {
    let Some(_turn) = turn("one_of_two_pids_is_nobody") else { return };
    let target = Target::start(&program("pairs"), ["10"]);
    let pid = nobody();
    let refused = Recorder::of(target.pid(), 4096).pid(pid).refused();
    refused.check(1, &[&pid.to_string()]);
    nothing_written(&refused);
}

#[test]
fn an_output_file_that_exists() {
    let Some(_turn) = turn("an_output_file_that_exists") else { return };
    let target = Target::start(&program("pairs"), ["10"]);
    let recorder = Recorder::of(target.pid(), 4096);
    let file = recorder.dir().join("profile.pb.gz");
    std::fs::write(&file, "an earlier one").expect("our own directory");
    let refused = recorder.refused();
    refused.check(1, &["--force"]);
    assert_eq!(std::fs::read_to_string(&file).expect("still there"), "an earlier one");
    assert_eq!(std::fs::read_dir(refused.dir.path()).expect("our own directory").count(), 1);
}

#[test]
fn a_target_without_an_allocator() {
    let Some(_turn) = turn("a_target_without_an_allocator") else { return };
    let arguments: [&str; 0] = [];
    let target = Target::start(&program_without_libc("nolibc"), arguments);
    let refused = Recorder::of(target.pid(), 4096).refused();
    refused.check(1, &["allocator"]);
    nothing_written(&refused);
    assert!(target.end().success(), "the target is as it was");
}

/// A target that cannot be hooked is reported, and does not affect the others.
#[test]
fn one_of_two_targets_without_an_allocator() {
    let Some(_turn) = turn("one_of_two_targets_without_an_allocator") else { return };
    let nolibc = Target::start(&program_without_libc("nolibc"), Vec::<String>::new());
    let mut mix = Target::start(&program("mix"), ["500"]);
    let recording = Recorder::of(nolibc.pid(), 1).pid(mix.pid()).start();
    let truth = mix.run();
    let (profile, _) = recording.stop().results();
    checks::sites(&profile, &truth, 1, Compare::All);
    let remark = format!("process {} (nolibc) has no allocator", nolibc.pid());
    assert!(profile.notes.iter().any(|note| note.contains(&remark)), "{:?}", profile.notes);
}

/// A process that exits after it was listed and before it is hooked causes no error and does not affect the others.
#[test]
fn a_target_that_vanishes_before_it_is_hooked() {
    let Some(_turn) = turn("a_target_that_vanishes_before_it_is_hooked") else { return };
    let vanishes = || {
        let (victims_pid, killer) = victim();
        let mut mix = Target::start(&program("mix"), ["1000"]);
        let recording = Recorder::of(mix.pid(), 1).pid(victims_pid).start();
        let is_in_time = killer.join().expect("it does not fail");
        let truth = mix.run();
        let (profile, _) = recording.stop().results();
        checks::sites(&profile, &truth, 1, Compare::All);
        let is_listed = profile.processes.iter().any(|process| process.pid == victims_pid);
        assert!(!is_listed || !is_in_time, "{:?}", profile.notes);
        is_in_time
    };
    assert!((0..ATTEMPTS).any(|_| vanishes()), "it always ended too late");
}

/// The reason given is that the only target ended, not that it has no allocator.
#[test]
fn the_only_target_vanishes_before_it_is_hooked() {
    let Some(_turn) = turn("the_only_target_vanishes_before_it_is_hooked") else { return };
    let vanishes = || {
        let (pid, killer) = victim();
        let refused = Recorder::of(pid, 1).refused();
        let is_in_time = killer.join().expect("it does not fail");
        if is_in_time {
            refused.check(1, &[&format!("process {pid} (mix) ended before heapbpf was attached to it")]);
            nothing_written(&refused);
        }
        is_in_time
    };
    assert!((0..ATTEMPTS).any(|_| vanishes()), "it always ended too late");
}

/// Number of attempts to end a process before it is hooked. On a busy machine, whoever ends it may run too late.
const ATTEMPTS: u32 = 5;

/// Starts a process that ends after heapbpf has listed its targets and before it attaches to them. The thread that ends
/// it returns whether it was in time.
fn victim() -> (u32, JoinHandle<bool>) {
    let mut victim = Command::new(program("mix"));
    victim.arg("1").stdin(Stdio::piped()).stdout(Stdio::null());
    let mut victim = victim.spawn().expect("the program runs");
    let pid = victim.id();
    let killer = std::thread::spawn(move || {
        // Targets are listed before anything is loaded, and hooked only after everything is loaded.
        until("heapbpf makes maps", || our_heapbpf(pid).is_some_and(has_maps));
        let is_in_time = !is_hooked(pid);
        victim.kill().expect("our own child");
        victim.wait().expect("our own child");
        is_in_time
    });
    (pid, killer)
}

/// The heapbpf process that this test started for this target. Other tests have their own.
fn our_heapbpf(target: u32) -> Option<u32> {
    let is_ours = |pid: &u32| {
        let words = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.contains("heapbpf\0") && words.split('\0').any(|word| word == target.to_string())
    };
    children_of(std::process::id()).into_iter().find(is_ours)
}

fn has_maps(pid: u32) -> bool {
    open_paths(pid).iter().any(|path| path.to_string_lossy().contains("bpf-map"))
}

#[test]
fn a_command_that_does_not_exist() {
    let Some(_turn) = turn("a_command_that_does_not_exist") else { return };
    let nothing: [&str; 0] = [];
    let refused = Recorder::new().command("/no/such/command".as_ref(), nothing).refused();
    refused.check(127, &["/no/such/command"]);
    let refused = Recorder::new().command("/etc/passwd".as_ref(), nothing).refused();
    refused.check(126, &["/etc/passwd", "cannot be executed"]);
    nothing_written(&refused);
}

/// The recording fails after the command was started and held.
#[test]
fn a_command_does_not_run_if_its_recording_fails() {
    let Some(_turn) = turn("a_command_does_not_run_if_its_recording_fails") else { return };
    for _ in 0..2 {
        let recorder = Recorder::new().option("--alloc", "libc.so.6:no_such_one(size=arg0)->ret,free=free(arg0)");
        let refused = recorder.command("/usr/bin/touch".as_ref(), ["ran"]).refused();
        refused.check(2, &["no_such_one"]);
        // The command shares standard output, which therefore ends only when the command does.
        nothing_written(&refused);
    }
}

/// An ordinary user gets a message that names what is missing and what to do.
#[test]
fn without_the_capabilities() {
    let case = "without_the_capabilities";
    let Some(_turn) = turn(case) else { return };
    let Some(setpriv) = tool("setpriv") else { return skipped(case, "no setpriv (Debian: util-linux)") };
    let user: [&OsStr; 4] =
        [setpriv.as_ref(), "--reuid=65534".as_ref(), "--regid=65534".as_ref(), "--clear-groups".as_ref()];
    // The user `nobody` must be able to reach the binary and the directory.
    let dir = tempfile::tempdir().expect("a temporary directory");
    let everybody = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(dir.path(), everybody.clone()).expect("our own directory");
    let binary = dir.path().join("heapbpf");
    copy_file(heapbpf(), &binary);
    std::fs::set_permissions(&binary, everybody.clone()).expect("our own copy");
    let mut sleeper = Command::new(setpriv.clone());
    sleeper.args(&user[1..]).args(["sleep", "1000"]).stdin(Stdio::null());
    let mut sleeper = sleeper.spawn().expect("setpriv runs");

    for target in [sleeper.id(), std::process::id()] {
        let output = Command::new(&setpriv)
            .args(&user[1..])
            .arg(&binary)
            .args(["--pid", &target.to_string(), "-o", "profile.json"])
            .current_dir(dir.path())
            .output()
            .expect("setpriv runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        let named = ["CAP_BPF", "CAP_PERFMON", "CAP_SYS_ADMIN"].iter().any(|name| said.contains(name));
        assert!(named, "the missing capability is not named: {said}");
        assert!(said.contains("sudo") || said.contains("root"), "what to do is not said: {said}");
        assert!(!dir.path().join("profile.json").exists());
    }
    sleeper.kill().expect("our own child");
    sleeper.wait().expect("our own child");
}

/// A file size limit is reported like a full disk, and ends nothing by a signal.
#[test]
fn files_may_not_be_as_large_as_a_profile() {
    let Some(_turn) = turn("files_may_not_be_as_large_as_a_profile") else { return };
    let mut target = Target::start(&program("mix"), ["2000"]);
    let words = ["prlimit", "--fsize=2048"].map(OsStr::new);
    let recording = Recorder::of(target.pid(), 1).through(&words).start();
    target.run();
    recording.signal(libc::SIGINT);
    let outcome = recording.ends();
    assert_eq!(outcome.status.code(), Some(1), "{:?}: {}", outcome.status, outcome.stderr);
    assert!(outcome.stderr.contains("File too large"), "{}", outcome.stderr);
    assert!(target.end().success(), "it came to harm");
}

/// Too few file descriptors get one sentence, with the limit and what to do. If only the soft limit is too low, it is
/// raised.
#[test]
fn too_few_file_descriptors() {
    let Some(_turn) = turn("too_few_file_descriptors") else { return };
    let mut target = Target::start(&program("pairs"), ["100"]);
    // A process that may raise hard limits as well (CAP_SYS_RESOURCE) needs no advice.
    let pid = target.pid();
    let limited = |limits: &str| {
        let words =
            ["setpriv", "--bounding-set=-sys_resource", "prlimit", &format!("--nofile={limits}")].map(OsString::from);
        Recorder::of(pid, 1).option("--hook", "probe").through(&words.each_ref().map(|word| &**word))
    };
    for limit in ["16", "64", "255"] {
        let refused = limited(&format!("{limit}:{limit}")).refused();
        refused.check(1, &[&format!("heapbpf may open {limit} files, and needs at least 256")]);
        assert!(
            refused.stderr.contains("ulimit -Hn") && refused.stderr.trim_end().lines().count() == 1,
            "{}",
            refused.stderr
        );
        nothing_written(&refused);
    }
    let (profile, _, truth) = limited("16:4096").results_of(&mut target);
    checks::sites(&profile, &truth, 1, Compare::All);
    // The required minimum is enough for a small process.
    let recording = limited("256:256").start();
    recording.stop().results();
    assert!(target.end().success(), "it came to harm");
}
