//! A process that dies because of its inline hooks ends them in all processes. A crash that the process caused itself
//! ends none.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;

use heapbpf_tests::cgroup::Cgroup;
use heapbpf_tests::environment::{heapbpf, skipped, turn};
use heapbpf_tests::guardian::signal;
use heapbpf_tests::inline::{BLOB_CODE, Place, base, goes_on_at, is_hooked, mapped};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::{Recorder, Recording};
use heapbpf_tests::target::{Target, children_of, file_of, mappings, state_of, until};
use procfs::process::{MMPermissions, MemoryMap};
use tempfile::TempDir;

/// A breakpoint instruction.
const INT3: u8 = 0xcc;
/// Number of calls of a program.
const CALLS: u64 = 20000;

/// Address of the start of the C library's file in a process, and its path.
fn libc_of(pid: u32) -> (u64, String) {
    let all = mappings(pid);
    let first = all.iter().find(|map| file_of(map).contains("/libc.so")).expect("a C library");
    (first.address.0 - first.offset, file_of(first).to_owned())
}

/// Address of a breakpoint in a replaced page that the file does not have.
fn breakpoint_of_ours(pid: u32) -> u64 {
    let (base, (_, path)) = (base(pid), libc_of(pid));
    let (memory, file) = (File::open(format!("/proc/{pid}/mem")), File::open(path));
    let (memory, file) = (memory.expect("its memory"), file.expect("its C library"));
    let ours = mapped(pid).into_iter().map(|map| map.address);
    let replaced = ours.filter(|(at, _)| !(base..base + (1 << 30)).contains(at));
    let offset = file_offset(pid);
    replaced
        .flat_map(|(at, end)| at..end)
        .find(|at| {
            let [mut now, mut before] = [[0], [0]];
            let is_read =
                memory.read_exact_at(&mut now, *at).is_ok() && file.read_exact_at(&mut before, offset(*at)).is_ok();
            is_read && now == [INT3] && before != [INT3]
        })
        .expect("what is left of a function's first instructions is breakpoints")
}

/// Maps an address of the C library's code to its offset in the file, using one of its mappings.
fn file_offset(pid: u32) -> impl Fn(u64) -> u64 {
    let is_text = |map: &MemoryMap| map.perms.contains(MMPermissions::EXECUTE) && file_of(map).contains("/libc.so");
    let text = mappings(pid).into_iter().find(is_text).expect("code");
    move |address| address.wrapping_sub(text.address.0.wrapping_sub(text.offset))
}

/// Address of the same C library function in another process.
fn in_process(pid: u32, function: u64) -> u64 {
    let (own, path) = libc_of(std::process::id());
    let (its, other) = libc_of(pid);
    assert_eq!(path, other, "one C library");
    function - own + its
}

fn heapbpf_with(state: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(heapbpf());
    let output = command.env("STATE_DIRECTORY", state).args(arguments).output().expect("it runs");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Two programs that are hooked inline, one of which is about to die.
struct Case {
    state: TempDir,
    victim: Target,
    bystander: Target,
    recording: Recording,
}

impl Case {
    fn begin() -> Self {
        let state = tempfile::tempdir().expect("a temporary directory");
        let [victim, bystander] = [(); 2].map(|()| Target::start(&program("pairs"), [CALLS.to_string()]));
        let recording = start(state.path(), &[victim.pid(), bystander.pid()]);
        assert!(is_hooked(victim.pid()) && is_hooked(bystander.pid()), "{}", recording.said());
        Self { state, victim, bystander, recording }
    }

    /// Makes the victim die of its hooks at `place`, and checks the consequences: it dies of `signal`, reported as
    /// `cause`.
    fn trips(self, place: &Place, signal: i32, cause: &str) {
        let Self { state, victim, mut bystander, recording } = self;
        let pid = victim.pid();
        goes_on_at(pid, place);
        assert_eq!(victim.end().signal(), Some(signal), "it dies as it should");
        let line = format!("process {pid} (pairs) died of {cause}");
        let rest = ": inline hooks are removed from all processes; 1 other is no longer counted, and no process gets inline hooks from now on";
        let warning = std::iter::repeat_with(|| recording.next_line()).find(|said| said.contains("died of"));
        assert!(warning.as_ref().is_some_and(|said| said.contains(&line) && said.contains(rest)), "{warning:?}");
        assert!(!is_hooked(bystander.pid()), "the other one has no hooks any more");
        // The bystander continues correctly and is no longer counted.
        assert_eq!(bystander.run().allocs(), CALLS);
        let outcome = recording.stop();
        let (profile, stats) = outcome.results();
        let notes = profile.notes.join("\n");
        assert!(notes.contains(&line) && notes.contains(rest), "{notes}");
        assert!(stats.exact_alloc_objects < CALLS, "{stats:?}");
        assert!(!outcome.stderr.contains("the counts in its memory are impossible"), "{}", outcome.stderr);

        let state = state.path();
        let again = Target::start(&program("pairs"), ["500"]);
        let recording = start(state, &[again.pid()]);
        assert!(mapped(again.pid()).is_empty());
        assert!(recording.said().contains("it died of inline hooks before: "), "{}", recording.said());
        recording.stop();
        let diagnosis = heapbpf_with(state, &["doctor"]);
        // doctor wraps long paths.
        let words = diagnosis.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("pairs died of "), "doctor lists it: {diagnosis}");
        let forgotten = heapbpf_with(state, &["doctor", "--forget-crashes"]);
        assert_eq!(forgotten, "forgot 1 program that crashed under inline hooks\n");
        let recording = start(state, &[again.pid()]);
        assert!(is_hooked(again.pid()), "{}", recording.said());
        recording.stop();
    }

    /// Makes the victim die by itself, and checks that nothing follows from it.
    fn does_not_trip(self, dies: impl FnOnce(u32), signal: i32) {
        let Self { state, victim, mut bystander, recording } = self;
        dies(victim.pid());
        assert_eq!(victim.end().signal(), Some(signal), "it dies as it should");
        let truth = bystander.run();
        let outcome = recording.stop();
        assert!(!outcome.stderr.contains("died of"), "{}", outcome.stderr);
        let (profile, stats) = outcome.results();
        assert!(stats.exact_alloc_objects >= truth.allocs(), "it was counted to its end: {stats:?}");
        assert!(!profile.notes.iter().any(|note| note.contains("died of")), "{:?}", profile.notes);
        assert_eq!(std::fs::read_dir(state.path()).expect("our own directory").count(), 0, "nothing is remembered");
    }
}

fn recorder(state: &Path, pids: &[u32]) -> Recorder {
    let recorder = pids.iter().fold(Recorder::new().interval(4096), |recorder, pid| recorder.pid(*pid));
    recorder.option("--hook", "inline").variable("STATE_DIRECTORY", OsStr::new(state))
}

fn start(state: &Path, pids: &[u32]) -> Recording {
    recorder(state, pids).flag("--no-follow").start()
}

/// Makes a process die of its hooks while another one is at rest. That one keeps its hooks until it goes on, and
/// nothing waits for it. `rests` makes a process rest, or go on.
fn one_is_at_rest(rests: impl Fn(u32, bool)) {
    let state = tempfile::tempdir().expect("a temporary directory");
    let [victim, bystander, resting] = [(); 3].map(|()| Target::start(&program("pairs"), [CALLS.to_string()]));
    let pids = [&victim, &bystander, &resting].map(Target::pid);
    let recording = start(state.path(), &pids);
    assert!(pids.iter().all(|pid| is_hooked(*pid)), "{}", recording.said());
    rests(resting.pid(), true);
    goes_on_at(victim.pid(), &Place::at(base(victim.pid()) + BLOB_CODE));
    assert_eq!(victim.end().signal(), Some(libc::SIGSEGV), "it dies as it should");
    let warning = std::iter::repeat_with(|| recording.next_line()).find(|said| said.contains("died of"));
    let warning = warning.expect("it is said");
    for part in ["; 2 others are no longer counted", "; 1 process is frozen or stopped, and loses its hooks once"] {
        assert!(warning.contains(part), "{warning}");
    }
    assert!(!is_hooked(bystander.pid()) && is_hooked(resting.pid()), "only the one at rest has its hooks");
    rests(resting.pid(), false);
    until("it goes on and loses its hooks", || !is_hooked(resting.pid()));
    for mut target in [bystander, resting] {
        assert_eq!(target.run().allocs(), CALLS);
        assert!(target.end().success(), "it came to harm");
    }
    recording.stop();
}

#[test]
fn a_frozen_process_loses_its_hooks_once_it_is_thawed_after_another_one_died() {
    let case = "a_frozen_process_loses_its_hooks_once_it_is_thawed_after_another_one_died";
    let Some(_turn) = turn(case) else { return };
    let Some(group) = Cgroup::new() else { return skipped(case, "no writable cgroup2 mount") };
    let freeze = group.path().join("cgroup.freeze");
    if !freeze.exists() {
        return skipped(case, "this kernel freezes no control groups");
    }
    one_is_at_rest(|pid, rests| {
        if rests {
            group.take("", pid);
        }
        std::fs::write(&freeze, if rests { "1" } else { "0" }).expect("our own group");
    });
}

#[test]
fn a_stopped_process_loses_its_hooks_once_it_is_continued_after_another_one_died() {
    let Some(_turn) = turn("a_stopped_process_loses_its_hooks_once_it_is_continued_after_another_one_died") else {
        return;
    };
    one_is_at_rest(|pid, rests| {
        signal(if rests { libc::SIGSTOP } else { libc::SIGCONT }, [pid]);
        until("it stops or goes on", || (state_of(pid) == Some('T')) == rests);
    });
}

#[test]
fn a_fault_in_code_of_ours_ends_all_inline_hooks() {
    let Some(_turn) = turn("a_fault_in_code_of_ours_ends_all_inline_hooks") else { return };
    let case = Case::begin();
    let ip = base(case.victim.pid()) + BLOB_CODE;
    case.trips(&Place::at(ip), libc::SIGSEGV, "SIGSEGV in the code of inline hooks (offset 0x3");
}

#[test]
fn a_breakpoint_in_a_replaced_page_ends_all_inline_hooks() {
    let Some(_turn) = turn("a_breakpoint_in_a_replaced_page_ends_all_inline_hooks") else { return };
    let case = Case::begin();
    let pid = case.victim.pid();
    let (ip, (_, libc)) = (breakpoint_of_ours(pid), libc_of(pid));
    let cause = format!("SIGTRAP in a page of {libc} that inline hooks had replaced (offset ");
    case.trips(&Place::at(ip), libc::SIGTRAP, &cause);
}

/// A child has its parent's hooks, and they were made in the parent.
#[test]
fn a_forked_child_that_dies_of_its_hooks_ends_all_of_them() {
    let Some(_turn) = turn("a_forked_child_that_dies_of_its_hooks_ends_all_of_them") else { return };
    let state = tempfile::tempdir().expect("a temporary directory");
    let mut parent = Target::start(&program("brood"), ["master", "1", "50"]);
    let mut bystander = Target::start(&program("pairs"), [CALLS.to_string()]);
    let both = [parent.pid(), bystander.pid()];
    let recording = recorder(state.path(), &both).start();
    assert!(both.iter().all(|pid| is_hooked(*pid)), "{}", recording.said());
    parent.go();
    parent.step();
    let [child] = children_of(parent.pid())[..] else { panic!("one child") };
    assert!(is_hooked(child), "it has the hooks of its parent");
    goes_on_at(child, &Place::at(base(child) + BLOB_CODE));
    let line = format!("process {child} (brood) died of SIGSEGV in the code of inline hooks");
    let warning = std::iter::repeat_with(|| recording.next_line()).find(|said| said.contains("died of"));
    let is_reported = |said: &String| said.contains(&line) && said.contains("2 others are no longer counted");
    assert!(warning.as_ref().is_some_and(is_reported), "{warning:?}");
    assert!(both.iter().all(|pid| !is_hooked(*pid)), "nobody has hooks any more");
    assert_eq!(bystander.run().allocs(), CALLS);
    let (profile, _) = recording.stop().results();
    assert!(profile.notes.iter().any(is_reported), "{:?}", profile.notes);
}

#[test]
fn a_program_that_corrupts_its_heap_ends_itself_alone() {
    let Some(_turn) = turn("a_program_that_corrupts_its_heap_ends_itself_alone") else { return };
    let free = libc::free as *const () as u64;
    for (argument, signal) in [(16, libc::SIGSEGV), (u64::MAX, libc::SIGABRT)] {
        let dies = |pid| goes_on_at(pid, &Place { argument: Some(argument), ..Place::at(in_process(pid, free)) });
        Case::begin().does_not_trip(dies, signal);
    }
}

#[test]
fn a_signal_that_somebody_sends_is_no_fault_of_hooks() {
    let Some(_turn) = turn("a_signal_that_somebody_sends_is_no_fault_of_hooks") else { return };
    let dies = |pid| goes_on_at(pid, &Place { sent: libc::SIGSEGV, ..Place::at(base(pid) + BLOB_CODE) });
    Case::begin().does_not_trip(dies, libc::SIGSEGV);
}
