//! A busy Python program whose objects are counted by inline hooks keeps computing correctly, whichever of heapbpf's
//! processes is killed.

use std::process::Command;
use std::time::Duration;

use heapbpf_tests::doctor::clean;
use heapbpf_tests::environment::{skipped, tool, turn};
use heapbpf_tests::guardian::{cleaners_of, kill, kill_all_of};
use heapbpf_tests::inline::is_hooked;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, until};

/// Variable that sets the number of recordings, 12 by default.
const CYCLES: &str = "HEAPBPF_TEST_CYCLES";

/// Threads that create and drop objects of all small sizes and compare their contents, with forks, until standard input
/// ends.
const SCRIPT: &str = r#"
import os, random, sys, threading
failed, done, rounds = [], threading.Event(), [0] * 4
def run(number):
    source, kept = random.Random(number), {}
    while not done.is_set():
        for _ in range(200):
            key = source.randrange(400)
            if key in kept:
                text, size = kept.pop(key)
                if text != chr(97 + key % 26) * size: failed.append(key)
            size = source.randrange(1, 700)
            kept[key] = (chr(97 + key % 26) * size, size)
            value = [float(key), (key, size), {key: size}]
            if value[1][0] + value[2][key] != key + size: failed.append(key)
        rounds[number] += 1
        if rounds[number] % 500 == 0 and number == 0:
            child = os.fork()
            if child == 0: os._exit(sum(len(str(i)) for i in range(1000)) != 2890)
            if os.waitpid(child, 0)[1] != 0: failed.append("child")
threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
print("READY", os.getpid(), flush=True)
sys.stdin.read()
done.set()
for thread in threads: thread.join()
sys.exit(bool(failed) or min(rounds) == 0)
"#;

/// How a recording ends.
#[derive(Clone, Copy, Debug)]
enum End {
    Stop,
    Killed,
    AllKilled,
}

fn recorder(pid: u32) -> Recorder {
    Recorder::of(pid, 1 << 16).option("--hook", "inline").flag("-v")
}

#[test]
fn a_busy_python_stays_right_whoever_is_killed() {
    let case = "a_busy_python_stays_right_whoever_is_killed";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = tool("python3") else { return skipped(case, "python3 is not installed") };
    let cycles = std::env::var(CYCLES).ok().and_then(|cycles| cycles.parse().ok()).unwrap_or(12);
    let target = Target::start_command(Command::new(python).args(["-c", SCRIPT]));
    let pid = target.pid();
    let mut hooked = 0;
    for cycle in 0..cycles {
        let end = [End::Stop, End::Killed, End::AllKilled][cycle % 3];
        let recording = match end {
            End::Stop => recorder(pid).start(),
            End::Killed | End::AllKilled => recorder(pid).without_outputs().start(),
        };
        // If the target does not stop in time, heapbpf tries again. Until then probes count.
        hooked += usize::from(is_hooked(pid));
        std::thread::sleep(Duration::from_millis(300));
        match end {
            End::Stop => {
                let was_hooked = is_hooked(pid);
                let (profile, _) = recording.stop().results();
                let left_out = profile.notes.iter().find(|note| note.contains("own heap"));
                assert!(left_out.is_none() || !was_hooked, "its objects are counted: {left_out:?}");
            }
            End::Killed => {
                let heapbpf = recording.pid();
                kill([heapbpf]);
                drop(recording);
                until("the end of the cleaner", || cleaners_of(heapbpf).is_empty());
                assert!(!is_hooked(pid), "the cleaner has taken the hooks out");
            }
            End::AllKilled => {
                kill_all_of(recording.pid());
                drop(recording);
            }
        }
        // The target continues with whatever is left in it.
        std::thread::sleep(Duration::from_millis(200));
        assert!(std::fs::metadata(format!("/proc/{pid}/maps")).is_ok(), "{end:?}");
    }
    println!("{case}: {hooked} of {cycles} recordings hooked it inline");
    assert!(hooked * 2 > cycles, "{hooked} of {cycles}");
    until("what is left to be taken out", || {
        clean(pid);
        !is_hooked(pid)
    });
    std::thread::sleep(Duration::from_millis(200));
    assert!(target.end().success(), "an object was not as it had been made");
}
