//! What heapbpf itself uses: it is small with default options, and rings grow without loss where a recording needs it.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::guardian::threads_of;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::{Recorder, Recording};
use heapbpf_tests::target::{Target, memory_bytes, status, status_bytes, until};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Anonymous memory, which is what heapbpf has allocated. It leaves out the rings, which may have grown, and heapbpf's
/// own file: how much of that is mapped depends on the page cache.
const ANONYMOUS: &str = "Anonymous";

/// Waits until heapbpf has at most this much memory. Another thread frees what symbolization used.
fn has_at_most(recording: &Recording, most: u64) {
    let mut least = u64::MAX;
    until("little memory", || {
        least = least.min(memory_bytes(recording.pid(), ANONYMOUS, |_| true));
        println!("{:.1} MiB", least as f64 / MIB as f64);
        least <= most
    });
}

/// A recording of one process with default options needs little memory, also after symbolization.
#[test]
fn a_recording_of_one_process_is_small() {
    let Some(_turn) = turn("a_recording_of_one_process_is_small") else { return };
    let mut target = Target::start(&program("mix"), ["20000"]);
    let recording = Recorder::new().pid(target.pid()).start();
    target.run();
    has_at_most(&recording, 16 * MIB);
    let snapshot = recording.dir().join("profile.0001.json");
    recording.signal(libc::SIGUSR1);
    until("a snapshot", || snapshot.exists());
    has_at_most(&recording, 16 * MIB);
    let (_, stats) = recording.stop().results();
    assert_eq!(stats.lost(), 0, "{stats:?}");
}

/// Named stacks share their frames: 4,096 stacks of more than 30 frames each need little memory.
#[test]
fn names_of_many_stacks_take_little() {
    let Some(_turn) = turn("names_of_many_stacks_take_little") else { return };
    // Blocks of 8 MiB, so that nearly every one is sampled, on 2^12 stacks, 20 calls further down.
    let mut target = Target::start(&program("many_stacks"), ["12", "8388608", "20"]);
    let recording = Recorder::new().pid(target.pid()).start();
    target.run();
    let snapshot = recording.dir().join("profile.0001.json");
    recording.signal(libc::SIGUSR1);
    until("a snapshot", || snapshot.exists());
    has_at_most(&recording, 30 * MIB);
    let (profile, stats) = recording.stop().results();
    // Small rings have no space for so many copies in a few milliseconds: some samples have only their innermost
    // frames, or only their caller. If heapbpf gets no processor meanwhile, even some records have no space.
    let deep = profile.stacks.iter().filter(|stack| stack.has("leaf") && stack.frames.len() > 30).count() as u64;
    let incomplete = stats.other["stacks_lost"] + stats.other["stacks_shortened"] + stats.lost();
    assert!(deep > 2048 && deep + incomplete > 4000, "{deep} stacks, {incomplete} incomplete");
}

/// 20,000 samples a second: six in ten blocks of 1,000 bytes. All memory counts, at its peak, before the samples are
/// named at the end.
#[test]
fn many_samples_fit_into_80_mib() {
    let Some(_turn) = turn("many_samples_fit_into_80_mib") else { return };
    let mut target = Target::start(&program("growing"), ["96000", "32000"]);
    let recording = Recorder::of(target.pid(), KIB).start();
    target.run();
    let peak = status_bytes(recording.pid(), "VmHWM").expect("it runs");
    let (_, stats) = recording.stop().results();
    assert_eq!((stats.lost(), stats.other["stacks_lost"]), (0, 0), "{stats:?}");
    assert!(stats.submitted > 55_000 && peak <= 80 * MIB, "{peak}: {stats:?}");
}

/// heapbpf is stopped while a burst fills part of its first rings. When it continues, it makes them larger. Otherwise
/// the second burst, during which it is stopped as well, would not fit.
#[test]
fn rings_grow_before_anything_is_lost() {
    let Some(_turn) = turn("rings_grow_before_anything_is_lost") else { return };
    let mut target = Target::start(&program("bursts"), ["750", "5000"]);
    let recording = Recorder::of(target.pid(), 512 * KIB).flag("-vv").start();
    let burst = |target: &mut Target| {
        recording.signal(libc::SIGSTOP);
        // Each thread stops only once it gets a processor.
        let is_stopped = |tid: u32| status(tid, "State").is_none_or(|state| state.starts_with('T'));
        until("stopped threads", || threads_of(recording.pid()).into_iter().all(is_stopped));
        target.go();
        target.step();
        recording.signal(libc::SIGCONT);
    };
    burst(&mut target);
    let mut grown = Vec::new();
    while grown.len() < 2 {
        grown.extend(Some(recording.next_line()).filter(|line| line.contains("heapbpf: the ring ")));
    }
    grown.sort();
    assert!(grown[0].contains("EVENTS has 2097152 bytes instead of 524288"), "{grown:?}");
    assert!(grown[1].contains("STACKS has 67108864 bytes instead of 16777216"), "{grown:?}");
    burst(&mut target);
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    checks::sites(&profile, &truth, 512 * KIB, Compare::All);
    assert_eq!((stats.lost(), stats.other["stacks_lost"]), (0, 0), "{stats:?}");
    assert!(stats.submitted > 5700, "{stats:?}");
    assert!(profile.stacks.iter().all(|stack| stack.complete), "all stacks are whole");
}

/// When probes serve every process, heapbpf runs a copy of its C library's code instead of the file's, which has the
/// probes. Otherwise each of its own allocations would trap, which took a quarter of its time on a busy host.
#[test]
fn its_own_allocations_do_not_trap_at_probes_of_the_host() {
    let Some(_turn) = turn("its_own_allocations_do_not_trap") else { return };
    for (options, leaves) in [(&["--comm", "mix"][..], true), (&["--no-follow"], false)] {
        let mut target = Target::start(&program("mix"), ["2000"]);
        let recorder = if leaves { Recorder::new() } else { Recorder::of(target.pid(), 1 << 19) };
        let recorder = match options {
            [name, value] => recorder.option(name, value),
            flags => recorder.flag(flags[0]),
        };
        let recording = recorder.start();
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", recording.pid())).expect("it runs");
        let has_code_of = |file: &str| maps.lines().any(|line| line.contains(" r-xp ") && line.contains(file));
        assert_eq!((has_code_of("heapbpf-libc"), has_code_of("/libc.so.6")), (leaves, !leaves), "{maps}");
        let truth = target.run();
        let (_, stats) = recording.stop().results();
        assert_eq!(stats.hits, truth.allocs() + truth.failed, "{stats:?}");
    }
}
