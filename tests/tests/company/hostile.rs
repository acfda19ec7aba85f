//! Malicious targets: they rewrite their own memory while heapbpf reads it, or flood it with events. heapbpf ends
//! normally, and what it reports about other processes stays exact.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use heapbpf_testing::Random;
use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{skipped, turn};
use heapbpf_tests::inline::{blob_of, is_hooked, mapped};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, mappings};
use heapbpf_tests::torture::readable;
use procfs::process::{MMPermissions, MemoryMap};

/// Addresses of the writable memory that inline hooks have in a process: its counts, and the control page. The name of
/// the adjacent code mapping says where it is.
fn writable(pid: u32) -> Vec<(u64, u64)> {
    let Some(blob) = mapped(pid).iter().find_map(blob_of) else { return Vec::new() };
    let is_writable = |map: &MemoryMap| map.perms.contains(MMPermissions::READ | MMPermissions::WRITE);
    let ours = mappings(pid).into_iter().filter(is_writable).map(|map| map.address);
    ours.filter(|(start, end)| *start >= blob.start && *end <= blob.end).collect()
}

/// The counts of inline hooks are the process's own memory. A process that fills them with noise spoils its own
/// figures, and perhaps itself. heapbpf ends normally, and another process's totals are exact.
#[test]
fn counts_that_are_rewritten_by_their_owner_harm_nobody_else() {
    let name = "counts_that_are_rewritten_by_their_owner_harm_nobody_else";
    let Some(_turn) = turn(name) else { return };
    if !cfg!(target_arch = "x86_64") {
        return skipped(name, "inline hooks are of x86-64");
    }
    let hostile = Target::start(&program("enduring"), ["threads", "4"]);
    let mut other = Target::start(&program("mix"), ["2000"]);
    let recorder = Recorder::of(other.pid(), 1).pid(hostile.pid()).option("--hook", "inline").flag("--no-follow");
    let recording = recorder.option("--every", "500ms").start();
    assert!(is_hooked(hostile.pid()), "nothing to rewrite");
    let memory = File::options().write(true).open(format!("/proc/{}/mem", hostile.pid())).expect("root may");
    let mut noise = Random(7);
    let mut written = 0_u64;
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end && std::fs::exists(format!("/proc/{}/maps", hostile.pid())).unwrap_or(false) {
        for (start, end) in writable(hostile.pid()) {
            for _ in 0..64 {
                let at = start + noise.next_u64() % (end - start - 8) / 8 * 8;
                written += u64::from(memory.write_at(&noise.next_u64().to_le_bytes(), at).is_ok());
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(written > 0, "nothing was rewritten");
    let truth = other.run();
    recording.signal(libc::SIGINT);
    let outcome = recording.ends();
    readable(&outcome.stderr);
    assert_eq!(outcome.status.code(), Some(0), "{}", outcome.stderr);
    let profile: heapbpf_tests::output::Profile = heapbpf_tests::output::read(&outcome.file("profile.json"));
    let stats: heapbpf_tests::output::Stats = heapbpf_tests::output::read(&outcome.file("stats.json"));
    checks::identity(&stats);
    let (bytes, objects) = checks::exact(profile.process(other.pid()));
    assert_eq!((objects, bytes), (Some(truth.allocs()), Some(truth.bytes())), "of the other process");
    checks::sites_of(&profile, other.pid(), &truth, 1, Compare::All);
    let liar = profile.process(hostile.pid());
    assert!(!liar.is_believed(), "it passes for honest: {liar:?}");
    let of_liar = checks::exact(liar).1.unwrap_or(u64::MAX);
    assert!(of_liar <= stats.other["sampled"], "more than the kernel saw of it counts: {of_liar} of {stats:?}");
    assert_eq!(stats.exact_alloc_objects, truth.allocs() + of_liar, "the totals have its lies");
    let stacks = profile.stacks.iter().filter(|stack| stack.pid == hostile.pid());
    let largest = stacks.map(|stack| stack.interval).max();
    assert!(largest.is_none_or(|largest| largest <= 64 << 20), "no recording has an interval of {largest:?}");
    println!("{written} words were rewritten");
    assert!(other.end().success(), "the other process came to harm");
}

/// Nor does a process pass for honest that empties its counts, as whoever removes the hooks does.
#[test]
#[cfg(target_arch = "x86_64")]
fn counts_that_are_emptied_by_their_owner_are_not_believed() {
    use std::mem::offset_of;

    use heapbpf_inline::abi::{STATE, Totals};
    use heapbpf_tests::inline::base;

    let Some(_turn) = turn("counts_that_are_emptied_by_their_owner_are_not_believed") else { return };
    let mut hostile = Target::start(&program("mix"), ["2000"]);
    let recorder = Recorder::of(hostile.pid(), 1).option("--hook", "inline").flag("--no-follow");
    let mut recording = recorder.option("--every", "250ms").start();
    hostile.run();
    let memory = File::options().write(true).open(format!("/proc/{}/mem", hostile.pid())).expect("root may");
    let at = base(hostile.pid()) + STATE + offset_of!(Totals, is_original) as u64;
    memory.write_all_at(&[0; 8], at).expect("it is mapped");
    recording.await_line("the counts in its memory are impossible", 0);
    assert!(is_hooked(hostile.pid()), "{}", recording.said());
    let outcome = recording.stop();
    let profile: heapbpf_tests::output::Profile = heapbpf_tests::output::read(&outcome.file("profile.json"));
    let stats: heapbpf_tests::output::Stats = heapbpf_tests::output::read(&outcome.file("stats.json"));
    let liar = profile.process(hostile.pid());
    assert!(!liar.is_believed(), "it passes for honest: {liar:?}");
    assert_eq!(stats.other["inline_incomplete"], 1, "{stats:?}");
    assert!(hostile.end().success(), "it came to harm");
}

/// Parsing a C++ name may take time that doubles with every two letters. The process that does it is ended and
/// restarted: later names are demangled.
#[test]
fn a_name_that_takes_for_ever_to_demangle_holds_nothing_up() {
    let Some(_turn) = turn("a_name_that_takes_for_ever_to_demangle_holds_nothing_up") else { return };
    let outcome = Recorder::new().interval(1).command(&program("misnamed"), [] as [&str; 0]).start().finish();
    readable(&outcome.stderr);
    assert!(outcome.stderr.contains("some take too long to demangle"), "{}", outcome.stderr);
    let (profile, _) = outcome.results();
    let samples = |is_meant: &dyn Fn(&str) -> bool| {
        let stacks = profile.stacks.iter();
        let meant = stacks.filter(|stack| stack.frames.iter().any(|it| it.function.as_deref().is_some_and(is_meant)));
        meant.map(|stack| stack.samples).sum::<u64>()
    };
    assert_eq!(samples(&|name| name == "named(unsigned long)"), 100, "demangled");
    assert_eq!(samples(&|name| name.starts_with("_Z1fIXdl")), 100, "as it is");
}
