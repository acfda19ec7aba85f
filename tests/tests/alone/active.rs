//! What a recording does by default, and to which processes: active processes are hooked, idle ones and bystanders are
//! left alone.

use std::ffi::OsStr;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use heapbpf_tests::checks;
use heapbpf_tests::environment::{libc_file, skipped, tool_or_install, turn};
use heapbpf_tests::inline::{hooked_processes, is_hooked};
use heapbpf_tests::others::Beside;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Lines, Target, cpu_time, until};

/// A script that allocates all the time.
const BUSY: &str = "while True: x = [bytearray(5000) for _ in range(2000)]";
/// A script that exits with 0 if a private mapping of a file, which is only read, equals the file.
const SAME: &str = "import hashlib, mmap, sys
f = open(sys.argv[1], 'rb')
m = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
sys.exit(hashlib.sha256(m).digest() != hashlib.sha256(f.read()).digest())";

/// A script that allocates for 0.2 s of CPU time for each line.
const AT_TIMES: &str = "import sys, time
for line in sys.stdin:
    end = time.process_time() + 0.2
    while time.process_time() < end: x = [bytearray(5000) for _ in range(200)]
    print('done', flush=True)";

/// A process that is active when it is told to be. Killed when dropped.
struct Worker {
    child: Beside,
    lines: Lines,
}

impl Worker {
    fn start() -> Self {
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-c", AT_TIMES]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("Python runs");
        let lines = Lines::of(child.stdout.take().expect("piped"));
        Self { child: Beside(child), lines }
    }

    fn work(&mut self) {
        self.child.0.stdin.as_mut().expect("piped").write_all(b"go\n").expect("it runs");
        assert_eq!(self.lines.next().as_deref(), Some("done"));
    }

    fn is_hooked(&self) -> bool {
        is_hooked(self.child.0.id())
    }

    /// Works until it is hooked.
    fn work_until_hooked(&mut self) {
        until("that an active process is hooked", || {
            self.work();
            self.is_hooked()
        });
    }
}

/// A process that is always active.
fn busy() -> Beside {
    Beside::start(Command::new("/usr/bin/python3").args(["-c", BUSY]))
}

/// Whether a process that has nothing to do with a recording sees the C library's file unchanged. It does not have the
/// name of a target.
fn is_as_its_file() -> bool {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let bystander = dir.path().join("bystander");
    std::os::unix::fs::symlink("/usr/bin/python3", &bystander).expect("a link");
    let status = Command::new(bystander).args(["-c", SAME]).arg(libc_file().expect("a C library")).status();
    status.expect("Python runs").success()
}

#[test]
fn active_processes_are_counted_and_idle_ones_are_left_alone() {
    let Some(_turn) = turn("active_processes_are_counted_and_idle_ones_are_left_alone") else { return };
    let (busy, idle) = (busy(), Target::start(&program("mix"), ["1000"]));
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
    let is_reported = |note: &String| note.contains("of the targets' CPU time was counted");
    assert!(profile.notes.iter().any(is_reported), "{:?}", profile.notes);
    until("it is let go", || !is_hooked(pid));
}

#[test]
fn idle_processes_make_way_for_busy_ones() {
    let Some(_turn) = turn("idle_processes_make_way_for_busy_ones") else { return };
    make_way(Recorder::new().flag("--all"));
}

/// What a command begins with that has as few descriptors as eight hooked processes need.
const FEW_DESCRIPTORS: [&str; 4] = ["setpriv", "--bounding-set=-sys_resource", "prlimit", "--nofile=600:600"];

/// Of named processes that run already, no more are prepared than there are places, so none is refused for want of
/// descriptors.
#[test]
fn named_processes_without_a_place_are_not_refused() {
    let Some(_turn) = turn("named_processes_without_a_place_are_not_refused") else { return };
    let targets: Vec<Target> = (0..48).map(|_| Target::start(&program("mix"), ["1000"])).collect();
    let recording = Recorder::new().option("--comm", "mix").through(&FEW_DESCRIPTORS.map(OsStr::new)).start();
    let hooked = targets.iter().filter(|target| is_hooked(target.pid())).count();
    assert_eq!(hooked, 8, "{}", recording.said());
    let (profile, _) = recording.stop().results();
    let refused: Vec<_> = profile.processes.iter().filter(|process| process.not_inline.is_some()).collect();
    assert!(refused.is_empty(), "{refused:?}");
}

/// Eight processes are hooked at a time. Once one of them has been idle for ten seconds, it is let go when another one
/// is busy, and hooked again when it is active itself.
fn make_way(recorder: Recorder) {
    let words = FEW_DESCRIPTORS.map(OsStr::new);
    let mut workers: Vec<Worker> = (0..10).map(|_| Worker::start()).collect();
    let recording = recorder.interval(64 << 10).through(&words).start();
    workers.iter_mut().for_each(Worker::work);
    until("all places are taken", || hooked_processes().len() >= 8);
    let had: Vec<u32> = workers.iter().filter(|worker| worker.is_hooked()).map(|worker| worker.child.0.id()).collect();
    assert!(had.len() <= 8, "{had:?}");
    let waiting = workers.iter_mut().find(|worker| !had.contains(&worker.child.0.id())).expect("there are ten");
    waiting.work_until_hooked();
    // Other processes of this host may have places, too.
    let gone = workers.iter_mut().find(|worker| had.contains(&worker.child.0.id()) && !worker.is_hooked());
    let gone = gone.map(|gone| {
        gone.work_until_hooked();
        gone.work();
        gone.child.0.id()
    });
    let outcome = recording.stop();
    let (profile, _) = outcome.results();
    let Some(pid) = gone else { return println!("another process of this host was let go, or one ended") };
    let is_reported = |note: &String| note.contains("an idle process was let go so that a busy one could be counted");
    assert!(profile.notes.iter().any(is_reported), "{:?}", profile.notes);
    let process = profile.process(pid);
    assert_eq!(process.hook.as_deref(), Some("inline"), "{process:?}");
    assert!(process.coverage < 1.0 && process.inuse_since.is_some(), "{process:?}");
    let allocated = &process.figures.alloc_bytes;
    assert!(checks::z(allocated).abs() < 5.0, "its counts and its samples are of the same calls: {allocated:?}");
}

/// The CPU time of a process that is not a target, and that ends, is in no share.
#[test]
fn the_share_of_a_named_process_is_its_own() {
    let Some(_turn) = turn("the_share_of_a_named_process_is_its_own") else { return };
    let (mut target, bystander) = (Target::start(&program("mix"), ["1000"]), busy());
    let recording = Recorder::of(target.pid(), 1).option("--every", "100ms").start();
    target.run();
    let written = || std::fs::read_dir(recording.dir()).expect("its directory").count();
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
    let busy = busy();
    let pid = busy.0.id().to_string();
    let begin = |options: &[&str]| Recorder::new().interval(512 << 10).flags(options).start();
    let ways: [&[&str]; 3] = [&["--pid", &pid], &["--all"], &["--comm=python3"]];
    let valgrind = tool_or_install("valgrind", "valgrind");
    if valgrind.is_none() {
        skipped("bystanders_see_files_as_they_are", "no valgrind");
    }
    for way in ways {
        let recording = begin(way);
        until("the busy process is hooked", || is_hooked(busy.0.id()));
        assert!(is_as_its_file(), "{way:?}");
        // A breakpoint in the code that it translates would end it.
        if let Some(valgrind) = &valgrind {
            let status = Command::new(valgrind).args(["-q", "--tool=none", "/bin/true"]).status();
            assert!(status.expect("it runs").success(), "{way:?}");
        }
        recording.stop();
    }
    let recording = begin(&["--all", "--hook=probe"]);
    assert!(!is_as_its_file(), "links that serve every process are seen");
    recording.stop();
    assert!(is_as_its_file());
}
