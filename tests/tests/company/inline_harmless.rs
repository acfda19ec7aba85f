//! Inline hooks come and go, with other tools' probes before, during and after, and nothing is harmed. Each program
//! detects damage itself.

use std::process::Command;

use heapbpf_tests::cgroup::Cgroup;
use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{skipped, turn};
use heapbpf_tests::inline::{Hook, counted_exactly, is_hooked, is_probed, limit_addresses, mapped, recorder};
use heapbpf_tests::program::program;
use heapbpf_tests::target::{Target, memory_bytes, until};
use heapbpf_tests::torture::Limited;

/// Rounds of hooking and unhooking. The long set has more.
const ROUNDS: u32 = 3;

/// If heapbpf makes a thread run calls in the middle of a restartable sequence, the thread restarts the sequence, as
/// after any other interruption.
fn restarts(rounds: u32) {
    let case = "restartable_sequences_are_restarted";
    let Some(_turn) = turn(case) else { return };
    let mut target = Target::start(&program("restartable"), [""; 0]);
    let mut hooked = 0;
    for _ in 0..rounds {
        let recording = recorder(target.pid(), Hook::Inline, 65536).start();
        hooked += u32::from(is_hooked(target.pid()));
        recording.stop();
    }
    target.go();
    let line = target.line();
    assert!(target.end().success());
    if line == "no restartable sequences" {
        return skipped(case, "the C library registers no area for them");
    }
    println!("{hooked} of {rounds} rounds hooked inline: {line}");
    assert!(hooked > 0);
    assert!(line.starts_with("0 lost of "), "{line}");
}

/// Hook memory would count against the limits of these processes, or would be locked.
#[test]
fn a_process_with_little_left_or_locked_memory_is_probed() {
    let Some(_turn) = turn("a_process_with_little_left_or_locked_memory_is_probed") else { return };
    let limited = Target::start(&program("mix"), ["2000"]);
    limit_addresses(limited.pid(), 1536 << 10);
    let locking = Target::start(&program("locking"), ["2000"]);
    let executable = Target::start(&program("locking"), ["2000", "executable"]);
    let all = [(limited, "RLIMIT_AS"), (locking, "locks its memory"), (executable, "all its memory is executable")];
    for (target, why) in all {
        is_probed(target, why);
    }
}

/// Hook memory would count against these limits, too.
#[test]
fn a_process_with_few_mappings_left_is_probed() {
    /// With more, the program would make mappings for seconds.
    const MOST: u64 = 1 << 17;
    let case = "a_process_with_few_mappings_left_is_probed";
    let Some(_turn) = turn(case) else { return };
    let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").expect("the kernel tells it");
    let allowed: u64 = allowed.trim().parse().expect("a number");
    if allowed > MOST {
        return skipped(case, "vm.max_map_count is too large here");
    }
    // Two mappings for each page; a thirty-second of them is left.
    let pages = (allowed / 64 * 31).to_string();
    is_probed(Target::start(&program("crowded"), ["data", &pages, "1000"]), "mappings (vm.max_map_count)");
}

#[test]
fn a_process_with_little_memory_of_its_control_group_left_is_probed() {
    let case = "a_process_with_little_memory_of_its_control_group_left_is_probed";
    let Some(_turn) = turn(case) else { return };
    let Some(group) = Limited::new(&format!("heapbpf-limits-{}", std::process::id())) else {
        return skipped(case, "no memory cgroup can be made here");
    };
    let words = group.words();
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).arg(program("mix")).arg("2000");
    let target = Target::start_command(&mut command);
    // Enough for the program, but too little for what is mapped and as much again.
    group.leave_space(6 << 20);
    is_probed(target, "control group's memory");
}

/// None of its threads would finish a system call that heapbpf has it make, or leave the signal frame of one.
#[test]
fn a_process_that_is_frozen_while_it_is_hooked_loses_its_hooks_once_it_is_thawed() {
    let case = "a_process_that_is_frozen_while_it_is_hooked_loses_its_hooks_once_it_is_thawed";
    let Some(_turn) = turn(case) else { return };
    let Some(group) = Cgroup::new() else { return skipped(case, "no writable cgroup2 mount") };
    let file = |name: &str| group.path().join(name);
    if !file("cgroup.freeze").exists() {
        return skipped(case, "this kernel freezes no control groups");
    }
    let mut target = Target::start(&program("mix"), ["2000"]);
    group.take("", target.pid());
    let mut recording = recorder(target.pid(), Hook::Inline, 4096).flag("-v").start();
    assert!(is_hooked(target.pid()), "{}", recording.said());
    std::fs::write(file("cgroup.freeze"), "1").expect("our own group");
    until("the process is frozen", || {
        std::fs::read_to_string(file("cgroup.events")).is_ok_and(|events| events.contains("frozen 1"))
    });
    let before = recording.lines_by_now();
    recording.signal(libc::SIGINT);
    recording.await_line("its control group is frozen", before);
    assert!(is_hooked(target.pid()), "it was not touched");
    std::fs::write(file("cgroup.freeze"), "0").expect("our own group");
    recording.finish();
    assert!(!is_hooked(target.pid()), "the original pages are back");
    target.run();
    assert!(target.end().success(), "it came to harm");
}

/// Children that are forked after sampled calls have everything that those calls need. The kernel optimizes some probes
/// in a way that children lack.
#[test]
fn children_of_a_hooked_process_allocate() {
    let Some(_turn) = turn("children_of_a_hooked_process_allocate") else { return };
    let mut target = Target::start(&program("sampled_forks"), [""; 0]);
    let recording = recorder(target.pid(), Hook::Inline, 1).start();
    let was_hooked = is_hooked(target.pid());
    target.go();
    assert_eq!(target.line(), "20 of 20 children ended well", "hooked inline: {was_hooked}");
    let (_, stats) = recording.stop().results();
    assert_eq!(stats.hits, 500, "{stats:?}");
    assert!(target.end().success());
}

/// Private memory and locked memory of what heapbpf maps into a process, in kB.
fn taken(pid: u32) -> [u64; 2] {
    let ours: Vec<u64> = mapped(pid).iter().map(|map| map.address.0).collect();
    let (lowest, highest) = (ours.iter().min().copied().unwrap_or(1), ours.iter().max().copied().unwrap_or(0));
    ["Anonymous", "Locked"]
        .map(|field| memory_bytes(pid, field, |map| (lowest..=highest).contains(&map.address.0)) >> 10)
}

/// What heapbpf maps stays, and the next recording with the same settings reuses it.
#[test]
fn a_process_has_the_same_after_the_first_and_the_fifth_recording() {
    let Some(_turn) = turn("a_process_has_the_same_after_the_first_and_the_fifth_recording") else { return };
    let mut target = Target::start(&program("mix"), ["2000"]);
    let pid = target.pid();
    let record = |interval: u64| loop {
        let recording = recorder(pid, Hook::Inline, interval).start();
        let was_hooked = is_hooked(pid);
        recording.stop();
        assert!(!is_hooked(pid), "the original pages are back");
        if was_hooked {
            break (mapped(pid), taken(pid));
        }
    };
    // Mappings made for one interval serve all that need no more space.
    for interval in [4096, 1] {
        record(interval);
    }
    let first = record(4096);
    assert!(!first.0.is_empty() && first.1[0] > 0, "{first:?}");
    for interval in [1, 65536, 1 << 20] {
        record(interval);
    }
    let (mapped, [own_kib, locked_kib]) = record(4096);
    assert_eq!((mapped, locked_kib), (first.0, 0));
    // The kernel may keep its copy of the page with the breakpoints.
    assert!(own_kib <= first.1[0] + 4, "{own_kib} KiB, after the first {:?}", first.1);
    let (profile, stats, truth) = recorder(pid, Hook::Inline, 1).results_of(&mut target);
    if stats.hooks[0].hook == "inline" {
        checks::sites(&profile, &truth, 1, Compare::All);
        counted_exactly(&stats, &truth);
    }
    assert!(target.end().success());
}

#[test]
fn restartable_sequences_are_restarted() {
    restarts(ROUNDS);
}

/// Tests of the long set.
mod long {
    use super::*;

    #[test]
    fn restartable_sequences_are_restarted_many_times() {
        restarts(10 * ROUNDS);
    }
}
