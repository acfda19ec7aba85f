//! What a recording does by default, and to which processes: active processes are hooked, idle ones and bystanders are
//! left alone.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use heapbpf_tests::environment::turn;
use heapbpf_tests::inline::is_hooked;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::{Recorder, Recording};
use heapbpf_tests::target::{Target, cpu_time, until};

/// A script that allocates all the time.
const BUSY: &str = "while True: x = [bytearray(5000) for _ in range(2000)]";
/// A script that exits with 0 if a private mapping of a file, which is only read, equals the file.
const SAME: &str = "import hashlib, mmap, sys
f = open(sys.argv[1], 'rb')
m = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
sys.exit(hashlib.sha256(m).digest() != hashlib.sha256(f.read()).digest())";

/// A process that is killed when dropped.
struct Busy(Child);

impl Busy {
    fn start() -> Self {
        let mut command = Command::new("/usr/bin/python3");
        Self(command.args(["-c", BUSY]).stdin(Stdio::null()).spawn().expect("Python runs"))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Path of the C library that programs here use.
fn libc() -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("readable");
    let line = maps.lines().find(|line| line.ends_with("/libc.so.6")).expect("it is loaded");
    line.split_ascii_whitespace().last().expect("a path").into()
}

/// Whether a process that has nothing to do with a recording sees the C library's file unchanged.
fn is_as_its_file() -> bool {
    let status = Command::new("/usr/bin/python3").args(["-c", SAME]).arg(libc()).status();
    status.expect("Python runs").success()
}

#[test]
fn active_processes_are_counted_and_idle_ones_are_left_alone() {
    let Some(_turn) = turn("active_processes_are_counted_and_idle_ones_are_left_alone") else { return };
    let (busy, idle) = (Busy::start(), Target::start(&program("mix"), ["1000"]));
    let pid = busy.0.id();
    let recording = Recorder::new().flag("--all").interval(512 << 10).start();
    until("the busy process is hooked", || is_hooked(pid));
    let used = cpu_time(pid);
    until("it has allocated with its hooks", || cpu_time(pid) > used + Duration::from_millis(50));
    assert!(!is_hooked(idle.pid()), "it has done nothing");
    let (profile, _) = recording.stop().results();
    let process = profile.process(pid);
    assert_eq!(process.hook.as_deref(), Some("inline"), "{process:?}");
    assert!(process.cpu_coverage.is_some_and(|share| share > 0.0 && share < 1.0), "{process:?}");
    let listed = profile.process(idle.pid());
    assert!(listed.idle && listed.hook.is_none(), "{listed:?}");
    let told = |note: &String| note.contains("of the targets' CPU time was counted");
    assert!(profile.notes.iter().any(told), "{:?}", profile.notes);
    until("it is let go", || !is_hooked(pid));
}

/// The CPU time of a process that is not a target, and that ends, is in no share.
#[test]
fn the_share_of_a_named_process_is_its_own() {
    let Some(_turn) = turn("the_share_of_a_named_process_is_its_own") else { return };
    let (mut target, bystander) = (Target::start(&program("mix"), ["1000"]), Busy::start());
    let recording = Recorder::of(target.pid(), 1).option("--every", "100ms").start();
    target.run();
    let written = || std::fs::read_dir(recording.folder()).expect("its folder").count();
    let (used, had) = (cpu_time(bystander.0.id()), written());
    until("the bystander works", || cpu_time(bystander.0.id()) > used + Duration::from_millis(50));
    until("snapshots are written, for which CPU times are looked at", || written() > had + 2);
    drop(bystander);
    let (profile, _) = recording.stop().results();
    assert_eq!(profile.process(target.pid()).cpu_coverage, Some(1.0), "{:?}", profile.process(target.pid()));
    assert!(!profile.notes.iter().any(|note| note.contains("CPU time was counted")), "{:?}", profile.notes);
}

/// Breakpoints of links that serve every process are in every private mapping of a file. The last recording uses such
/// probes, which shows that the test would notice them.
#[test]
fn bystanders_see_files_as_they_are() {
    let Some(_turn) = turn("bystanders_see_files_as_they_are") else { return };
    let busy = Busy::start();
    let pid = busy.0.id().to_string();
    let begin = |options: &[&str]| -> Recording {
        let recorder =
            options.iter().fold(Recorder::new().interval(512 << 10), |recorder, option| recorder.flag(option));
        recorder.start()
    };
    let ways: [&[&str]; 3] = [&["--pid", &pid], &["--all"], &["--comm=python3"]];
    for way in ways {
        let recording = begin(way);
        until("the busy process is hooked", || is_hooked(busy.0.id()));
        assert!(is_as_its_file(), "{way:?}");
        recording.stop();
    }
    let recording = begin(&["--all", "--hook=probe"]);
    assert!(!is_as_its_file(), "links that serve every process are seen");
    recording.stop();
    assert!(is_as_its_file());
}
