//! A heapbpf that is killed leaves a target that goes on, and the next one, or `doctor --clean`, takes out what it left.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{heapbpf, turn};
use heapbpf_tests::inline::{counted_exactly, is_hooked, mapped};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::{Recorder, Recording};
use heapbpf_tests::target::{Target, until};

/// How many are killed, if not 20.
const KILLS: &str = "HEAPBPF_TEST_KILLS";

fn inline(pid: u32, interval: u64) -> Recorder {
    Recorder::of(pid, interval).option("--hook", "inline").flag("--no-follow").flag("-v")
}

/// Starts a recording and kills heapbpf once the target is hooked.
fn left_hooked(pid: u32) {
    let recording: Recording = inline(pid, 4096).without_outputs().start();
    assert!(is_hooked(pid), "{}", recording.said());
    drop(recording);
    assert!(is_hooked(pid), "a killed heapbpf leaves its hooks");
}

/// What `heapbpf doctor --clean` says of a process, and its exit status.
fn clean(pid: u32) -> (String, Option<i32>) {
    let output = Command::new(heapbpf()).args(["doctor", "--clean", "--pid", &pid.to_string()]).output();
    let output = output.expect("the binary under test runs");
    let said = [output.stdout, output.stderr].concat();
    (String::from_utf8_lossy(&said).into_owned(), output.status.code())
}

#[test]
fn a_target_that_runs_is_counted_from_the_first_call_on() {
    let Some(_turn) = turn("inline_a_target_that_runs_is_counted_from_the_first_call_on") else { return };
    let mut target = Target::start(&program("checked"), ["4", "100"]);
    let recording = inline(target.pid(), 1).start();
    assert!(is_hooked(target.pid()), "{}", recording.said());
    target.go();
    target.step();
    let (profile, stats) = recording.stop().results();
    assert!(stats.hits > 0);
    assert_eq!((stats.unsampled, stats.lost()), (0, 0), "each call is a sample: {stats:?}");
    assert_eq!(stats.estimated_alloc_bytes, stats.exact_alloc_bytes as f64);
    assert_eq!(profile.totals.alloc_objects.value(), stats.exact_alloc_objects as f64);
}

#[test]
fn whatever_kills_leave_the_target_is_right_and_the_next_recording_exact() {
    let Some(_turn) = turn("inline_whatever_kills_leave_the_target_is_right") else { return };
    let kills = std::env::var(KILLS).ok().and_then(|kills| kills.parse().ok()).unwrap_or(20);
    let mut target = Target::start(&program("checked"), ["4", "2000"]);
    let pid = target.pid();
    let mut random = 88_172_645_463_325_252_u64;
    let mut hooked = 0;
    for _ in 0..kills {
        let mut command = Command::new(heapbpf());
        command.args(["--pid", &pid.to_string(), "-i", "512", "--hook", "inline", "--no-follow"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let before = mapped(pid);
        let mut daemon = command.spawn().expect("the binary under test runs");
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let ended = |daemon: &mut Child| daemon.try_wait().is_ok_and(|ended| ended.is_some());
        // Anywhere, in the middle of hooking, or while it records.
        let phase = random >> 32 & 3;
        // On a busy machine it may be late, or probe: then it is killed as well.
        let patience = Instant::now() + Duration::from_secs(15);
        let is_due = || match phase {
            0 => true,
            1 => mapped(pid) != before,
            _ => mapped(pid) != before && is_hooked(pid),
        };
        while !is_due() && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_micros(random % if phase == 0 { 1_500_000 } else { 60_000 }));
        assert!(!ended(&mut daemon), "heapbpf ended by itself");
        daemon.kill().expect("it can be killed");
        daemon.wait().expect("it can be waited for");
        hooked += u32::from(is_hooked(pid));
    }
    eprintln!("{kills} killed, of which {hooked} left hooks");
    assert!(hooked > 0, "none of {kills} was killed while the target was hooked");
    target.go();
    target.step();
    let recording = inline(pid, 1).start();
    assert!(is_hooked(pid), "{}", recording.said());
    let truth = target.run();
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    checks::sites(&profile, &truth, 1, Compare::All);
    counted_exactly(&stats, &truth);
    assert_eq!(stats.unsampled, 0, "{stats:?}");
    assert_eq!(mapped(pid), [""; 0], "{}", outcome.stderr);
    assert!(target.end().success(), "its blocks are as they were");
}

#[test]
fn doctor_takes_out_what_was_left_and_nothing_else() {
    let Some(_turn) = turn("inline_doctor_takes_out_what_was_left_and_nothing_else") else { return };
    let mut target = Target::start(&program("checked"), ["4", "100"]);
    let pid = target.pid();
    let recording = inline(pid, 4096).start();
    let (said, status) = clean(pid);
    assert!(said.contains("in use") && status == Some(1), "{status:?}: {said}");
    assert!(is_hooked(pid), "it is another's: {said}");
    recording.stop();
    assert_eq!(mapped(pid), [""; 0]);

    left_hooked(pid);
    let (said, status) = clean(pid);
    assert!(said.contains(&format!("process {pid} ")) && said.contains("taken out"), "{status:?}: {said}");
    assert!(!is_hooked(pid), "{said}");
    until("its memory to be unmapped", || mapped(pid).is_empty() || clean(pid).1 == Some(0));
    assert_eq!(mapped(pid), [""; 0]);
    let (said, status) = clean(pid);
    assert!(said.contains("nothing") && status == Some(0), "{status:?}: {said}");
    target.go();
    target.step();
    target.run();
    assert!(target.end().success(), "its blocks are as they were");
}

#[test]
fn what_only_looks_like_ours_is_not_touched() {
    let Some(_turn) = turn("inline_what_only_looks_like_ours_is_not_touched") else { return };
    let target = Target::start(&program("pretender"), [""; 0]);
    let before = mapped(target.pid());
    assert_eq!(before.len(), 1);
    let (said, status) = clean(target.pid());
    assert!(said.contains("not touched") && said.contains("another version"), "{status:?}: {said}");
    assert_eq!((mapped(target.pid()), status), (before, Some(1)));
}
