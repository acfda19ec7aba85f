//! Inline hooks and libraries whose malloc calls the next one: an allocation counts once, whichever file the daemon
//! examines first.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::inline::{counted_exactly, hooked_files, is_hooked};
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::{copy_of, library, program};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use heapbpf_tests::truth::Truth;

const WHY: &str = "it may call another allocator, whose calls would count too";
/// Links of one process cannot be on the wrapper.
const SHARED: &str = "needs probes that serve every process (--comm or --all with --hook probe)";

/// Libraries to preload, with the bytes that they add to each block: one calls the next malloc, one jumps to it, and one
/// puts a header before each block.
fn wrappers() -> [(PathBuf, u64); 3] {
    let of = |name, output, flag, header| (library(name, output, &[flag, "-fomit-frame-pointer", "-ldl"]), header);
    [
        of("interposer", "calls.so", "-fno-optimize-sibling-calls", 0),
        of("interposer", "jumps.so", "-foptimize-sibling-calls", 0),
        of("headers", "headers.so", "-fno-optimize-sibling-calls", 16),
    ]
}

/// What the next allocator is asked for.
fn inside(mut truth: Truth, header: u64) -> Truth {
    for site in &mut truth.sites {
        site.bytes += header * site.allocs;
        site.live_bytes += header * site.live_allocs;
        site.sizes.iter_mut().for_each(|[size, ..]| *size += header);
    }
    truth
}

/// Checks that each allocation is counted once. The process has probes on the allocator that the wrapper calls, and the
/// profile gives the reasons.
fn counts_once(profile: &Profile, stats: &Stats, truth: &Truth) {
    checks::sites(profile, truth, 1, Compare::All);
    assert_eq!(stats.lost(), 0, "{stats:?}");
    let hooked = &stats.hooks[stats.hooks.len() - 1];
    assert_eq!(hooked.hook, "probe", "{stats:?}");
    assert!(hooked.not_inline.as_ref().is_some_and(|why| why.contains(WHY)), "{stats:?}");
    assert!(profile.notes.iter().any(|note| note.contains(SHARED)), "{:?}", profile.notes);
}

#[test]
fn a_wrapper_keeps_a_running_process_on_probes() {
    let Some(_turn) = turn("inline_a_wrapper_keeps_a_running_process_on_probes") else { return };
    for (wrapper, header) in wrappers() {
        let mut command = Command::new(program("pairs"));
        let mut target = Target::start_command(command.args(["2000", "2", "100"]).env("LD_PRELOAD", &wrapper));
        let recording = Recorder::of(target.pid(), 1).option("--hook", "inline").start();
        assert!(!is_hooked(target.pid()), "neither file is");
        let truth = inside(target.run(), header);
        let (profile, stats) = recording.stop().results();
        counts_once(&profile, &stats, &truth);
        counted_exactly(&stats, &truth);
    }
}

#[test]
fn a_wrapper_keeps_a_command_on_probes() {
    let Some(_turn) = turn("inline_a_wrapper_keeps_a_command_on_probes") else { return };
    for (wrapper, header) in wrappers() {
        let recorder =
            Recorder::new().interval(1).option("--hook", "inline").variable("LD_PRELOAD", wrapper.as_os_str());
        let recorder = recorder.variable("FREE_RUNNING", "1".as_ref());
        let outcome = recorder.command(&program("pairs"), ["2000", "2", "100"]).start().finish();
        let truth = inside(Truth::in_output(&outcome.stdout), header);
        let (profile, stats) = outcome.results();
        counts_once(&profile, &stats, &truth);
    }
}

/// Probes that serve every process are on both files, and a call of one inside a call of the other does not count: each
/// call counts once, with the size that the program asked for.
#[test]
fn a_wrapper_is_probed_by_links_that_serve_every_process() {
    let Some(_turn) = turn("inline_a_wrapper_is_probed_by_links_that_serve_every_process") else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let wrapped = copy_of(&program("pairs"), dir.path(), "pairs-wrapped");
    for (wrapper, _) in wrappers() {
        let mut command = Command::new(&wrapped);
        let mut target = Target::start_command(command.args(["2000", "2", "100"]).env("LD_PRELOAD", &wrapper));
        let recorder = Recorder::new().option("--comm", "pairs-wrapped").option("--hook", "probe");
        let (profile, stats, truth) = recorder.interval(1).results_of(&mut target);
        checks::sites(&profile, &truth, 1, Compare::All);
        counted_exactly(&stats, &truth);
        let at_wrapper = stats.attach.iter().any(|probe| Path::new(&probe.file).file_name() == wrapper.file_name());
        assert!(at_wrapper && !profile.notes.iter().any(|note| note.contains(SHARED)), "{:?}", profile.notes);
    }
}

/// By then the C library's allocator is hooked inline. The wrapper's calls are counted there.
#[test]
fn a_wrapper_that_is_loaded_later_is_not_hooked() {
    let Some(_turn) = turn("inline_a_wrapper_that_is_loaded_later_is_not_hooked") else { return };
    for (wrapper, _) in wrappers().into_iter().filter(|(_, header)| *header == 0) {
        let mut target = Target::start(&program("newcomer"), [&wrapper]);
        let mut recording = Recorder::of(target.pid(), 1).option("--hook", "inline").start();
        target.go();
        target.step();
        recording.await_line(WHY, 0);
        std::thread::sleep(Duration::from_millis(500));
        assert!(hooked_files(target.pid()).iter().all(|path| path.contains("libc.so")) && is_hooked(target.pid()));
        let truth = target.run();
        let (profile, stats) = recording.stop().results();
        checks::sites(&profile, &truth, 1, Compare::All);
        checks::identity(&stats);
        assert_eq!(stats.lost(), 0, "{stats:?}");
        let is_reported =
            profile.notes.iter().any(|note| note.contains("which is counted from inside: it is not counted"));
        assert!(is_reported, "{:?}", profile.notes);
    }
}
